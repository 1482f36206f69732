// cuda_runtime.cpp - the emulated CUDA runtime: memory, streams, events, captured graphs, launches.
//
// Environment: EMU_DEVICES=n (0: no device; -1: no driver; default 1), EMU_MEMORY=bytes of a device (default 4 GiB),
// EMU_LAZY=1: work on a stream waits until somebody synchronizes, so that a forgotten synchronization shows.
// EMU_LEDGER=file: what is in use (emu_ledger.h), shared by all processes that name it. Memory starts as 0xff bytes
// (NaN). One host thread. Stream 0 runs everything at once.
#include "cuda_emu_int.h"
#include "emu_ledger.h"
#include <deque>
#include <map>
#include <set>
#include <stdlib.h>
#include <vector>

typedef std::function<void()> work;
struct CUgraph_st {
    std::vector<work> nodes;
};
struct CUgraphExec_st {
    std::vector<work> nodes;
};
struct CUstream_st {
    std::deque<work> queue;
    uint64_t done = 0, queued = 0;
    CUgraph_st *capture = nullptr;
    bool origin = false; // where the capture began
};
struct CUevent_st {
    CUstream_st *s = nullptr;
    uint64_t at = 0;
    CUgraph_st *capture = nullptr;
};

namespace
{
struct allocation {
    size_t size;
    int device;
};
cudaError_t sticky;
int cur_dev;
std::set<CUstream_st *> streams;
std::map<const char *, allocation> allocs;
std::map<const void *, size_t> max_dyn;
std::set<void *> pinned;

int n_devices()
{
    const char *e = getenv("EMU_DEVICES");
    int n = e ? atoi(e) : 1;
    return n < EMU_DEVICES_MAX ? n : EMU_DEVICES_MAX;
}
size_t device_memory()
{
    const char *e = getenv("EMU_MEMORY");
    return e ? (size_t)strtoull(e, nullptr, 0) : (size_t)4 << 30;
}
cudaError_t ready_device()
{
    if (n_devices() < 0) return cudaErrorInsufficientDriver;
    return n_devices() == 0 ? cudaErrorNoDevice : cudaSuccess;
}
void drain(CUstream_st *s, uint64_t upto)
{
    while (s && s->done < upto) {
        work f = std::move(s->queue.front());
        s->queue.pop_front();
        s->done++;
        f();
    }
}
void drain_all()
{
    for (auto *s : streams) drain(s, s->queued);
}
bool capturing()
{
    for (auto *s : streams)
        if (s->capture) return true;
    return false;
}
void submit(CUstream_st *s, work f)
{
    static const bool lazy = getenv("EMU_LAZY") != nullptr;
    if (!s) {
        drain_all();
        f();
    } else if (s->capture) {
        s->capture->nodes.push_back(std::move(f));
    } else if (!lazy) {
        f();
    } else {
        s->queue.push_back(std::move(f));
        s->queued++;
    }
}
// The allocation that p lies in, or null.
const char *owner(const void *p)
{
    auto i = allocs.upper_bound((const char *)p);
    if (i == allocs.begin()) return nullptr;
    --i;
    return (const char *)p < i->first + i->second.size ? i->first : nullptr;
}
bool inside(const void *p, size_t n)
{
    const char *base = owner(p);
    return !base || (size_t)((const char *)p - base) + n <= allocs[base].size;
}
cudaError_t check_copy(const void *d, const void *s, size_t n, cudaMemcpyKind k)
{
    if (n == 0) return sticky;
    bool dd = owner(d), ds = owner(s);
    bool ok = k == cudaMemcpyDefault || (k == cudaMemcpyHostToDevice && dd && !ds) ||
              (k == cudaMemcpyDeviceToHost && !dd && ds) || (k == cudaMemcpyDeviceToDevice && dd && ds) ||
              (k == cudaMemcpyHostToHost && !dd && !ds);
    return ok && inside(d, n) && inside(s, n) ? sticky : cudaErrorInvalidValue;
}
} // namespace

cudaError_t emu_launch(const void *kernel, dim3 g, dim3 b, size_t smem, cudaStream_t s, std::function<void()> fn)
{
    if (sticky) return sticky;
    if (cudaError_t e = ready_device()) return e;
    size_t t = (size_t)b.x * b.y * b.z;
    auto allowed = max_dyn.find(kernel);
    if (!t || t > 1024 || b.z > 64 || !g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535 ||
        smem > (allowed == max_dyn.end() ? 48 * 1024 : allowed->second))
        return cudaErrorInvalidConfiguration;
    submit(s, [=] {
        if (!sticky && !emu_run_grid(g, b, smem, fn)) sticky = cudaErrorLaunchFailure;
    });
    return sticky;
}

cudaError_t emu_allow_shared(const void *kernel, size_t bytes)
{
    if (bytes > 227 * 1024) return cudaErrorInvalidValue;
    max_dyn[kernel] = bytes;
    return cudaSuccess;
}

extern "C" {
// Tests only: forget a failed launch.
void emu_reset(void)
{
    sticky = cudaSuccess;
    emu_last_error[0] = 0;
}

// ---- errors, devices ----

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorLaunchFailure:
        return emu_last_error;
    default:
        return "emulated CUDA error";
    }
}
const char *cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : cudaGetErrorString(e); }
cudaError_t cudaGetLastError(void) { return sticky; } // launch failures stay, as on the device
cudaError_t cudaPeekAtLastError(void) { return sticky; }
cudaError_t cudaDriverGetVersion(int *v)
{
    *v = n_devices() < 0 ? 0 : 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n) // an error leaves the count alone
{
    cudaError_t e = ready_device();
    if (!e) *n = n_devices();
    return e;
}
cudaError_t cudaSetDevice(int d)
{
    if (cudaError_t e = ready_device()) return e;
    if (d < 0 || d >= n_devices()) return cudaErrorInvalidDevice;
    cur_dev = d;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d)
{
    *d = cur_dev;
    return ready_device();
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)
{
    if (cudaError_t e = ready_device()) return e;
    if (d < 0 || d >= n_devices()) return cudaErrorInvalidDevice;
    *p = {};
    strcpy(p->name, "emulated device");
    p->totalGlobalMem = device_memory();
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->major = 9;
    p->multiProcessorCount = 4;
    p->memoryBusWidth = 64;
    p->l2CacheSize = 1 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int d)
{
    struct cudaDeviceProp p;
    if (cudaError_t e = cudaGetDeviceProperties(&p, d)) return e;
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock:
        *v = p.maxThreadsPerBlock;
        break;
    case cudaDevAttrMultiProcessorCount:
        *v = p.multiProcessorCount;
        break;
    case cudaDevAttrMemoryClockRate:
        *v = 1000000;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *v = p.memoryBusWidth;
        break;
    case cudaDevAttrL2CacheSize:
        *v = p.l2CacheSize;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *v = p.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *v = p.minor;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *v = (int)p.sharedMemPerBlockOptin;
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void)
{
    if (capturing()) return cudaErrorStreamCaptureUnsupported;
    drain_all();
    return sticky;
}
cudaError_t cudaDeviceReset(void) { return cudaDeviceSynchronize(); }

// ---- memory ----

cudaError_t cudaMemGetInfo(size_t *avail, size_t *total)
{
    if (cudaError_t e = ready_device()) return e;
    *total = device_memory();
    size_t used = emu_ledger_used(cur_dev);
    *avail = *total > used ? *total - used : 0;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **p, size_t n)
{
    *p = nullptr;
    if (cudaError_t e = ready_device()) return e;
    if (capturing()) return cudaErrorStreamCaptureUnsupported;
    if (!emu_ledger_take(cur_dev, n, device_memory())) return cudaErrorMemoryAllocation;
    if (posix_memalign(p, 256, n ? n : 1)) {
        emu_ledger_give(cur_dev, n);
        return cudaErrorMemoryAllocation;
    }
    memset(*p, 0xff, n);
    allocs[(char *)*p] = {n, cur_dev};
    return cudaSuccess;
}
cudaError_t cudaFree(void *p)
{
    drain_all();
    if (!p) return cudaSuccess;
    auto i = allocs.find((char *)p);
    if (i == allocs.end()) return cudaErrorInvalidValue;
    emu_ledger_give(i->second.device, i->second.size);
    allocs.erase(i);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **p, size_t n)
{
    *p = nullptr;
    if (cudaError_t e = ready_device()) return e;
    if (!emu_ledger_take(-1, 0, 0)) return cudaErrorMemoryAllocation;
    *p = malloc(n ? n : 1);
    pinned.insert(*p);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return cudaMallocHost(p, n); }
cudaError_t cudaFreeHost(void *p)
{
    if (!p) return cudaSuccess;
    if (!pinned.erase(p)) return cudaErrorInvalidValue;
    emu_ledger_give(-1, 0);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *, size_t, unsigned) { return ready_device(); }
cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind k)
{
    if (capturing()) return cudaErrorStreamCaptureUnsupported;
    drain_all();
    cudaError_t e = check_copy(d, s, n, k);
    if (!e && n) memmove(d, s, n);
    return e;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t st)
{
    cudaError_t e = check_copy(d, s, n, k);
    if (!e && n) submit(st, [=] { memmove(d, s, n); });
    return e;
}
cudaError_t cudaMemcpy2DAsync(void *d, size_t dpitch, const void *s, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind k, cudaStream_t st)
{
    if (width > dpitch || width > spitch) return cudaErrorInvalidValue;
    if (!width || !height) return sticky;
    cudaError_t e = check_copy(d, s, width, k);
    if (!inside(d, (height - 1) * dpitch + width) || !inside(s, (height - 1) * spitch + width))
        return cudaErrorInvalidValue;
    if (!e)
        submit(st, [=] {
            for (size_t i = 0; i < height; i++) memmove((char *)d + i * dpitch, (const char *)s + i * spitch, width);
        });
    return e;
}
cudaError_t cudaMemset(void *d, int v, size_t n)
{
    drain_all();
    if (!owner(d) || !inside(d, n)) return cudaErrorInvalidValue;
    memset(d, v, n);
    return sticky;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st)
{
    if (!owner(d) || !inside(d, n)) return cudaErrorInvalidValue;
    submit(st, [=] { memset(d, v, n); });
    return sticky;
}

// ---- streams and events ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    if (cudaError_t e = ready_device()) return e;
    if (!emu_ledger_take(-1, 0, 0)) return cudaErrorMemoryAllocation;
    *s = new CUstream_st;
    streams.insert(*s);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    if (!streams.erase(s)) return cudaErrorInvalidResourceHandle;
    drain(s, s->queued);
    emu_ledger_give(-1, 0);
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    if (!s) return cudaDeviceSynchronize();
    if (s->capture) return cudaErrorStreamCaptureUnsupported;
    drain(s, s->queued);
    return sticky;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { return s && s->done < s->queued ? cudaErrorNotReady : sticky; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    if (cudaError_t failed = ready_device()) return failed;
    if (!emu_ledger_take(-1, 0, 0)) return cudaErrorMemoryAllocation;
    *e = new CUevent_st;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    if (!e) return cudaErrorInvalidResourceHandle;
    emu_ledger_give(-1, 0);
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    e->s = s;
    e->at = s ? s->queued : 0;
    e->capture = s ? s->capture : nullptr;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    if (e->capture) return cudaErrorStreamCaptureUnsupported;
    drain(e->s, e->at);
    return sticky;
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return e->s && e->s->done < e->at ? cudaErrorNotReady : sticky; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    if (e->capture) { // the stream joins the capture that the event belongs to
        if (s && (!s->capture || s->capture == e->capture)) {
            s->capture = e->capture;
            return cudaSuccess;
        }
        return cudaErrorStreamCaptureUnsupported;
    }
    CUevent_st x = *e;
    submit(s, [=] { drain(x.s, x.at); });
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t)
{
    *ms = 0;
    return cudaSuccess;
}

// ---- graphs: the submitted work, kept in order ----

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
    if (!s || s->capture) return cudaErrorStreamCaptureUnsupported;
    s->capture = new CUgraph_st;
    s->origin = true;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    *g = nullptr;
    if (!s || !s->capture || !s->origin) return cudaErrorStreamCaptureInvalidated;
    *g = s->capture;
    s->origin = false;
    for (auto *x : streams)
        if (x->capture == *g) x->capture = nullptr;
    return sticky;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *st)
{
    *st = s && s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long)
{
    if (!emu_ledger_take(-1, 0, 0)) return cudaErrorMemoryAllocation;
    *x = new CUgraphExec_st{g->nodes};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s)
{
    if (s && s->capture) return cudaErrorStreamCaptureUnsupported;
    for (auto &f : x->nodes) submit(s, f);
    return sticky;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    delete g;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x)
{
    if (!x) return cudaErrorInvalidValue;
    emu_ledger_give(-1, 0);
    delete x;
    return cudaSuccess;
}
} // extern "C"

void emu_submit(cudaStream_t s, std::function<void()> f) { submit(s, std::move(f)); }
