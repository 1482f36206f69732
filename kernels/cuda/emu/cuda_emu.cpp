// cuda_emu.cpp - the emulated device: fibers and their scheduler, barriers, warp collectives, shared memory.
//
// Build this file without -fsanitize=thread (it is the "hardware"); EMU_TSAN and EMU_ASAN add the sanitizers' hooks.
// What TSan needs, each found by a wrong result: fibers are switched to without a happens-before edge; what orders
// threads (block_sync) lies in memory of the block, else a block is ordered behind the one before it; shared memory is
// there before the fibers; dead fibers are destroyed after the grid, else their ids are used again and two blocks taken
// for one; nothing here touches the fibers' data through memcpy or memset, which TSan intercepts. A shuffle orders no
// memory, __syncwarp does.
#include "cuda_emu_int.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <utility>
#include <vector>
#ifdef EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMU_TSAN
extern "C" {
void *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void *);
void *__tsan_get_current_fiber();
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_set_fiber_name(void *, const char *);
void __tsan_acquire(void *);
void __tsan_release(void *);
}
#define ACQ(p) __tsan_acquire(p)
#define REL(p) __tsan_release(p)
#else
#define ACQ(p) ((void)(p))
#define REL(p) ((void)(p))
#endif

emu_thread *emu_cur;
dim3 emu_bid, emu_bdim, emu_gdim;
char emu_last_error[512];

namespace
{
enum { RUN, BAR, COLL, DONE };
enum { FORWARD, REVERSE, RANDOM };
const size_t STACK = 128 << 10;

struct warp_t {
    int epoch;
    unsigned alive, wait;
};
struct block_sync {
    char bar[2], done, warp[32][2];
};
block_sync *sync_of;
unsigned n_thr, n_done, n_bar;
emu_thread threads[1024];
warp_t warps[32];
emu_thread *ready[2048]; // a ring: fibers push to it
unsigned rq_head, rq_tail;
int bar_epoch, bar_kind, bar_result;
[[maybe_unused]] char grid_sync, fence_sync;
std::vector<std::pair<const void *, void *>> shared_vars;
void *dyn_smem;
size_t static_bytes, arena_used;
char *arena;
void *main_sp;
[[maybe_unused]] void *main_tsan;
[[maybe_unused]] const void *main_stack;
[[maybe_unused]] size_t main_stack_sz;
bool in_kernel, aborted;
const std::function<void()> *body;
int order = -1;
uint64_t rng;

uint32_t rnd()
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)(rng >> 32);
}

void init()
{
    if (order >= 0) return;
    const char *o = getenv("EMU_ORDER"), *s = getenv("EMU_SEED");
    order = !o ? FORWARD : !strcmp(o, "rev") ? REVERSE : !strcmp(o, "rand") ? RANDOM : FORWARD;
    rng = 0x9E3779B97F4A7C15ull * (s ? strtoull(s, nullptr, 0) + 1 : 1);
}
} // namespace

// ---- fibers ----

extern "C" void emu_swap(void **save, void *load);
#if defined(__x86_64__)
asm(".text\n.globl emu_swap\n.type emu_swap,@function\nemu_swap:\n"
    "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
    "movq %rsp,(%rdi); movq %rsi,%rsp\n"
    "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret\n"
    ".section .note.GNU-stack,\"\",@progbits\n.text\n");
#else
#error "the emulation's stack switch is written for x86-64 only"
#endif

static void to_scheduler([[maybe_unused]] bool dying)
{
    emu_thread *t = emu_cur;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(dying ? nullptr : &t->asan_fake, main_stack, main_stack_sz);
#endif
#ifdef EMU_TSAN
    __tsan_switch_to_fiber(main_tsan, 1);
#endif
    emu_swap(&t->sp, main_sp);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(t->asan_fake, nullptr, nullptr);
#endif
}

static void to_fiber(emu_thread *t)
{
    emu_cur = t;
#ifdef EMU_ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, t->stack, STACK);
#endif
#ifdef EMU_TSAN
    __tsan_switch_to_fiber(t->tsan, 1);
#endif
    emu_swap(&main_sp, t->sp);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    emu_cur = nullptr;
}

void emu_fail(const char *fmt, ...)
{
    char m[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(m, sizeof m, fmt, ap);
    va_end(ap);
    if (!emu_cur)
        snprintf(emu_last_error, sizeof emu_last_error, "%s", m);
    else
        snprintf(emu_last_error, sizeof emu_last_error, "block (%u,%u,%u) thread (%u,%u,%u): %s", emu_bid.x, emu_bid.y,
                 emu_bid.z, emu_cur->tid.x, emu_cur->tid.y, emu_cur->tid.z, m);
    if (!getenv("EMU_QUIET")) fprintf(stderr, "cuda_emu: %s\n", emu_last_error);
    if (!in_kernel || !emu_cur) abort();
    aborted = true;
    to_scheduler(true);
    abort();
}

static void make_ready(emu_thread *t)
{
    t->state = RUN;
    ready[rq_tail++ & 2047] = t;
}

static emu_thread *next_ready()
{
    if (order == RANDOM) std::swap(ready[(rq_head + rnd() % (rq_tail - rq_head)) & 2047], ready[(rq_tail - 1) & 2047]);
    return order == FORWARD ? ready[rq_head++ & 2047] : ready[--rq_tail & 2047];
}

// ---- barriers ----

static void bar_check()
{
    if (!n_bar || n_bar + n_done < n_thr) return;
    emu_thread *first = nullptr;
    int count = 0;
    for (emu_thread *t = threads; t < threads + n_thr; t++) {
        if (t->state != BAR) continue;
        if (!first) first = t;
        if (t->site != first->site || strcmp(t->file, first->file))
            emu_fail("divergent __syncthreads: thread %u waits at %s:%d, thread %u at %s:%d", first->lin, first->file,
                     first->line, t->lin, t->file, t->line);
        count += t->arg;
    }
    if (n_done) // stricter than the hardware, which leaves them out
        emu_fail("__syncthreads at %s:%d: %u of %u threads have already left the kernel", first->file, first->line,
                 n_done, n_thr);
    bar_result = bar_kind == 1 ? count : bar_kind == 2 ? count == (int)n_bar : count != 0;
    n_bar = 0;
    bar_epoch++;
    for (emu_thread *t = threads; t < threads + n_thr; t++)
        if (t->state == BAR) make_ready(t);
}

// Every textual barrier has a site of its own, so that two different ones cannot pair up.
int emu_syncthreads(int kind, int pred, const char *file, int line, int site)
{
    emu_thread *t = emu_cur;
    t->state = BAR;
    t->file = file;
    t->line = line;
    t->site = site;
    t->arg = pred;
    bar_kind = kind;
    n_bar++;
    char *s = &sync_of->bar[bar_epoch & 1];
    REL(s);
    bar_check();
    to_scheduler(false);
    ACQ(s);
    return bar_result;
}

void emu_fence()
{
    ACQ(&fence_sync);
    REL(&fence_sync);
}

// ---- warp collectives ----

static void copy(void *d, const void *s, size_t n) // not memcpy: see the top
{
    for (volatile char *a = (char *)d; n; n--) *a++ = *((const char *&)s)++;
}

float emu_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;
    if (mag >= 0x7c00) return emu_bits<float>(sign | 0x7f800000u | (mag & 0x3ff) << 13);
    if (mag >= 0x400) return emu_bits<float>(sign | ((mag << 13) + (112u << 23)));
    return emu_bits<float>(sign | emu_bits<uint32_t>((float)mag * 0x1p-24f));
}

uint16_t emu_f32_to_f16(float f)
{
    uint32_t u = emu_bits<uint32_t>(f), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
    if (mag > 0x7f800000) return 0x7fff; // as the device: one NaN
    if (mag >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (mag < 0x38800000) return (uint16_t)(sign | (emu_bits<uint32_t>(emu_bits<float>(mag) + 0.5f) - 0x3f000000));
    mag += 0xfff + (mag >> 13 & 1);
    return (uint16_t)(sign | (mag - (112u << 23)) >> 13);
}

static float half_of(int op, uint32_t w, int high)
{
    uint16_t h = (uint16_t)(high ? w >> 16 : w);
    return op == EMU_MMA_F16 ? emu_f16_to_f32(h) : emu_bits<float>((uint32_t)h << 16);
}

// m16n8k16 by the PTX ISA's fragment layouts; products are added in ascending k (a device may round otherwise)
static void run_mma(emu_thread **L, int op)
{
    float A[16][16], B[16][8];
    for (int l = 0; l < 32; l++) {
        const emu_mma_in *in = (const emu_mma_in *)L[l]->in;
        int g = l >> 2, q = l & 3;
        for (int i = 0; i < 8; i++)
            A[g + (i >> 1 & 1) * 8][q * 2 + (i & 1) + (i >> 2) * 8] = half_of(op, in->a[i >> 1], i & 1);
        for (int i = 0; i < 4; i++) B[q * 2 + (i & 1) + (i >> 1) * 8][g] = half_of(op, in->b[i >> 1], i & 1);
    }
    float C[16][8];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            C[(l >> 2) + (i >> 1) * 8][(l & 3) * 2 + (i & 1)] = ((const emu_mma_in *)L[l]->in)->c[i];
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int c = 0; c < 8; c++) C[r][c] += A[r][k] * B[k][c];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) ((float *)L[l]->out)[i] = C[(l >> 2) + (i >> 1) * 8][(l & 3) * 2 + (i & 1)];
}

static uint32_t from_matrix(emu_thread **L, int matrix, int lane, bool transposed)
{
    if (!transposed) return ((const uint32_t *)L[matrix * 8 + lane / 4]->in)[lane % 4];
    const uint16_t *low = (const uint16_t *)L[matrix * 8 + lane % 4 * 2]->in,
                   *high = (const uint16_t *)L[matrix * 8 + lane % 4 * 2 + 1]->in;
    return low[lane / 4] | (uint32_t)high[lane / 4] << 16;
}

static unsigned reduce(emu_thread **L, unsigned act, int op, bool is_signed)
{
    unsigned r = 0;
    bool first = true;
    for (int k = 0; k < 32; k++) {
        if (!(act >> k & 1)) continue;
        unsigned v = *(const unsigned *)L[k]->in;
        bool less = is_signed ? (int)v < (int)r : v < r;
        if (op == EMU_BALLOT)
            r |= v << k;
        else if (op == EMU_REDADD)
            r += v;
        else if (first || less == (op == EMU_REDMIN))
            r = v;
        first = false;
    }
    return r;
}

static void run_collective(emu_thread **L, unsigned act)
{
    int op = L[__builtin_ctz(act)]->op;
    bool whole = op == EMU_MMA_F16 || op == EMU_MMA_BF16 || op == EMU_LDMATRIX || op == EMU_LDMATRIX_T;
    if (whole && act != ~0u) emu_fail("tensor core operation with inactive lanes (mask %08x)", act);
    if (op == EMU_MMA_F16 || op == EMU_MMA_BF16) {
        run_mma(L, op);
        return;
    }
    for (int l = 0; l < 32; l++) {
        if (!(act >> l & 1)) continue;
        emu_thread *t = L[l];
        int src = l, w = t->width, base = l & ~(w - 1);
        switch (op) {
        case EMU_SYNCWARP:
            break;
        case EMU_SHFL:
            src = base + (t->arg & (w - 1));
            break;
        case EMU_SHFL_UP:
            src = l - t->arg < base ? l : l - t->arg;
            break;
        case EMU_SHFL_DOWN:
            src = l + t->arg >= base + w ? l : l + t->arg;
            break;
        case EMU_SHFL_XOR:
            src = (l ^ t->arg) >= base + w ? l : l ^ t->arg;
            break;
        case EMU_MATCH:
            *(unsigned *)t->out = 0;
            for (int j = 0; j < 32; j++)
                if (act >> j & 1 && *(const int *)L[j]->in == *(const int *)t->in) *(unsigned *)t->out |= 1u << j;
            break;
        case EMU_LDMATRIX:
        case EMU_LDMATRIX_T:
            for (int j = 0; j < 4; j++) ((uint32_t *)t->out)[j] = from_matrix(L, j, l, op == EMU_LDMATRIX_T);
            break;
        default:
            *(unsigned *)t->out = reduce(L, act, op, t->arg);
        }
        if (op > EMU_SHFL_XOR) continue;
        if (act >> src & 1)
            copy(t->out, L[src]->in, t->isz);
        else // undefined in CUDA
            for (size_t i = 0; i < t->osz; i++) ((volatile unsigned char *)t->out)[i] = 0xff;
    }
}

static void coll_check(unsigned warp)
{
    unsigned alive = warps[warp].alive, &wait = warps[warp].wait;
    emu_thread *L[32] = {};
    for (unsigned l = 0; l < 32 && warp * 32 + l < n_thr; l++) L[l] = &threads[warp * 32 + l];
    for (unsigned left = wait; left;) {
        emu_thread *f = L[__builtin_ctz(left)];
        unsigned act = f->mask & alive;
        if (act & ~wait) { // somebody is still to come
            left &= ~(1u << f->lane);
            continue;
        }
        for (unsigned a = act; a; a &= a - 1) {
            emu_thread *t = L[__builtin_ctz(a)];
            if (t->mask != f->mask || t->op != f->op || t->isz != f->isz || t->line != f->line)
                emu_fail("divergent warp operation: lane %u at %s:%d (mask %08x), lane %u at %s:%d (mask %08x)",
                         f->lane, f->file, f->line, f->mask, t->lane, t->file, t->line, t->mask);
        }
        run_collective(L, act);
        warps[warp].epoch++;
        for (unsigned a = act; a; a &= a - 1) make_ready(L[__builtin_ctz(a)]);
        left &= ~act;
        wait &= ~act;
    }
}

void emu_collective(int op, unsigned mask, int arg, int width, const void *in, size_t isz, void *out, size_t osz,
                    const char *file, int line)
{
    emu_thread *t = emu_cur;
    if (!(mask >> t->lane & 1))
        emu_fail("%s:%d: the mask %08x does not name the calling lane %u", file, line, mask, t->lane);
    t->state = COLL;
    t->op = op;
    t->mask = mask;
    t->arg = arg;
    t->width = width;
    t->in = in;
    t->isz = isz;
    t->out = out;
    t->osz = osz;
    t->file = file;
    t->line = line;
    char *s = &sync_of->warp[t->warp][warps[t->warp].epoch & 1];
    if (op == EMU_SYNCWARP) REL(s);
    warp_t &w = warps[t->warp];
    w.wait |= 1u << t->lane;
    if (!(mask & w.alive & ~w.wait)) coll_check(t->warp); // the last one named in the mask
    to_scheduler(false);
    if (op == EMU_SYNCWARP) ACQ(s);
}

// ---- cp.async ----

void emu_copy_later(void *dst, const void *src)
{
    emu_thread *t = emu_cur;
    if (t->n_pend == 64) emu_fail("more than 64 cp.async in flight in one thread");
    t->pend[t->n_pend++] = {dst, src, t->group};
}

void emu_copy_commit() { emu_cur->group++; }

// Takes the next copy that is not in the newest n groups off the queue.
bool emu_copy_due(int n, emu_copy *c)
{
    emu_thread *t = emu_cur;
    for (int i = 0; i < t->n_pend; i++) {
        if (t->pend[i].group >= t->group - n) continue;
        c->dst = t->pend[i].dst;
        c->src = t->pend[i].src;
        t->pend[i] = t->pend[--t->n_pend];
        return true;
    }
    return false;
}

// ---- shared memory ----

static void *shared_alloc(size_t n)
{
    void *p;
#ifdef EMU_ASAN // an exact block each, with a redzone right behind it
    if (posix_memalign(&p, 16, n)) abort();
#else // malloc counts as a write for TSan, so it must precede the fibers
    p = arena + arena_used;
    arena_used += (n + 31) & ~(size_t)15;
#endif
    for (size_t i = 0; i < n; i++) ((volatile unsigned char *)p)[i] = 0xff; // starts undefined: NaN
    return p;
}

[[maybe_unused]] static void shared_free([[maybe_unused]] void *p)
{
#ifdef EMU_ASAN
    free(p);
#endif
}

void *emu_shared(const void *key, size_t bytes)
{
    for (auto &v : shared_vars)
        if (v.first == key) return v.second;
    static_bytes += bytes;
    if (shared_vars.size() == 64) emu_fail("more than 64 shared variables");
    if (static_bytes > 48 * 1024) emu_fail("static shared memory over 48 KiB");
    shared_vars.push_back({key, shared_alloc(bytes)});
    return shared_vars.back().second;
}

void *emu_dyn_shared()
{
    if (!dyn_smem) emu_fail("the kernel uses dynamic shared memory and was launched with 0 bytes");
    return dyn_smem;
}

// ---- blocks and grids ----

static void fiber_main()
{
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_sz);
#endif
    (*body)();
    emu_thread *t = emu_cur;
    if (t->n_pend) emu_fail("the kernel ends with %d cp.async never waited for", t->n_pend);
    t->state = DONE;
    n_done++;
    warps[t->warp].alive &= ~(1u << t->lane);
    REL(&sync_of->done);
    REL(&grid_sync);
    coll_check(t->warp);
    bar_check();
    to_scheduler(true);
    abort();
}

static void *stack_of([[maybe_unused]] unsigned i)
{
#ifdef EMU_TSAN
    return malloc(STACK);
#else
    static void *pool[1024];
    if (!pool[i]) {
        char *p = (char *)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE)) abort();
        pool[i] = p + 4096;
    }
    return pool[i];
#endif
}

#ifdef EMU_TSAN
static std::vector<void *> dead;
static void bury()
{
    for (void *f : dead) __tsan_destroy_fiber(f);
    dead.clear();
}
// Frees as a context that has seen the whole block, but leaves the next block unordered.
static void end_block()
{
    void *me = __tsan_get_current_fiber(), *reaper = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(reaper, 1);
    if (aborted)
        for (unsigned i = 0; i < n_thr; i++) {
            __tsan_switch_to_fiber(threads[i].tsan, 1);
            REL(&sync_of->done);
            REL(&grid_sync);
            __tsan_switch_to_fiber(reaper, 1);
        }
    ACQ(&sync_of->done);
    for (unsigned i = 0; i < n_thr; i++) free(threads[i].stack);
    free(arena);
    __tsan_switch_to_fiber(me, 1);
    for (unsigned i = 0; i < n_thr; i++) dead.push_back(threads[i].tsan);
    dead.push_back(reaper);
    if (dead.size() > 6000) bury();
}
#else
static void end_block()
{
    for (auto &v : shared_vars) shared_free(v.second);
    if (dyn_smem) shared_free(dyn_smem);
    free(arena);
}
#endif

static void begin_thread(unsigned i)
{
    emu_thread *t = &threads[i];
    t->lin = i;
    t->lane = i & 31;
    t->warp = i >> 5;
    t->n_pend = t->group = 0;
    t->asan_fake = nullptr;
    if (!t->lane) warps[t->warp] = {0, 0, 0};
    warps[t->warp].alive |= 1u << t->lane;
    t->tid = {i % emu_bdim.x, i / emu_bdim.x % emu_bdim.y, i / (emu_bdim.x * emu_bdim.y)};
    t->stack = stack_of(i);
    void **sp = (void **)((uintptr_t)((char *)t->stack + STACK) & ~(uintptr_t)15);
    *--sp = nullptr;
    *--sp = (void *)fiber_main;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    t->sp = sp;
#ifdef EMU_TSAN
    t->tsan = __tsan_create_fiber(0);
    char nm[64];
    snprintf(nm, sizeof nm, "block(%u,%u,%u) thread(%u,%u,%u)", emu_bid.x, emu_bid.y, emu_bid.z, t->tid.x, t->tid.y,
             t->tid.z);
    __tsan_set_fiber_name(t->tsan, nm);
#endif
    make_ready(t);
}

static void deadlock()
{
    emu_thread *a = nullptr, *b = nullptr;
    for (emu_thread *t = threads; t < threads + n_thr; t++) {
        if (t->state == BAR && !b)
            b = t;
        else if (t->state == COLL && !a)
            a = t;
    }
    snprintf(emu_last_error, sizeof emu_last_error,
             "block (%u,%u,%u): deadlock: thread %d waits in a warp operation at %s:%d (mask %08x), thread %d at "
             "__syncthreads %s:%d",
             emu_bid.x, emu_bid.y, emu_bid.z, a ? (int)a->lin : -1, a ? a->file : "-", a ? a->line : 0, a ? a->mask : 0,
             b ? (int)b->lin : -1, b ? b->file : "-", b ? b->line : 0);
    if (!getenv("EMU_QUIET")) fprintf(stderr, "cuda_emu: %s\n", emu_last_error);
    aborted = true;
}

static void run_block(size_t smem)
{
    n_thr = emu_bdim.x * emu_bdim.y * emu_bdim.z;
    n_done = n_bar = 0;
    aborted = false;
    rq_head = rq_tail = 0;
    shared_vars.clear();
    shared_vars.reserve(64);
    static_bytes = 0;
    arena = (char *)malloc(smem + (64 << 10));
    sync_of = (block_sync *)arena;
    arena_used = (sizeof(block_sync) + 15) & ~(size_t)15;
    dyn_smem = smem ? shared_alloc(smem) : nullptr;
    for (unsigned i = 0; i < n_thr; i++) begin_thread(i);
    while (!aborted && n_done < n_thr) {
        if (rq_head == rq_tail)
            deadlock();
        else
            to_fiber(next_ready());
    }
    end_block();
}

bool emu_run_grid(dim3 g, dim3 b, size_t smem, const std::function<void()> &fn)
{
    init();
    emu_gdim = g;
    emu_bdim = b;
    body = &fn;
    in_kernel = true;
#ifdef EMU_TSAN
    main_tsan = __tsan_get_current_fiber();
#endif
    size_t n = (size_t)g.x * g.y * g.z;
    std::vector<uint32_t> ids(n);
    for (size_t i = 0; i < n; i++) ids[i] = (uint32_t)(order == REVERSE ? n - 1 - i : i);
    if (order == RANDOM)
        for (size_t i = n; i > 1; i--) std::swap(ids[i - 1], ids[rnd() % i]);
    for (uint32_t i : ids) {
        emu_bid = dim3(i % g.x, i / g.x % g.y, i / (g.x * g.y));
        run_block(smem);
        if (aborted) break;
    }
    ACQ(&grid_sync);
    in_kernel = false;
#ifdef EMU_TSAN
    bury();
#endif
    return !aborted;
}
