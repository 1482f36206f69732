/* test_engine_policy.c - the hooks of a policy: order, refusals, errors, idleness, eviction by tag, and swapping
 * policies while the engine runs. */
#include "engine_fixture.h"
#include <unistd.h>

static int32_t tok[64];

static lr_request *submit(lr_engine *e, int n, int salt, int max, int priority)
{
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    lr_error err;
    for (int i = 0; i < n; i++) tok[i] = 3 + (i * 3 + salt * 17) % 40;
    p.max_tokens = max;
    p.priority = priority;
    p.tag = (uint64_t)salt;
    if (lr_request_new(e, fx_seq(e, tok, n), &p, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static void assert_right(lr_request *r)
{
    int32_t want[128];
    const lr_req_info *i = lr_request_info(r);
    assert_int_equal(i->state, LR_REQ_DONE);
    memcpy(want, lr_seq_tokens(i->seq), (size_t)i->n_prompt * sizeof *want);
    int n = fx_reference(fx_next, NULL, want, i->n_prompt, i->n_generated);
    assert_int_equal(lr_seq_len(i->seq), i->n_prompt + n);
    assert_memory_equal(lr_seq_tokens(i->seq), want, lr_seq_len(i->seq) * sizeof *want);
}

/* ---- most urgent first ---- */

static int by_priority(void *user, lr_step *s)
{
    for (int i = 0; i < lr_step_n_running(s); i++) {
        if (lr_step_running(s, i)) lr_step_run(s, lr_step_running(s, i), 0);
    }
    while (lr_step_slots(s) > 0 && lr_step_budget(s) > 0) {
        lr_request *best = NULL;
        for (int i = 0; i < lr_step_n_waiting(s); i++) {
            lr_request *r = lr_step_waiting(s, i);
            if (r && (!best || lr_request_info(r)->priority > lr_request_info(best)->priority)) best = r;
        }
        if (!best || lr_step_run(s, best, 0) == 0) break;
    }
    return 0;
}

static void note_end(void *user, lr_request *r)
{
    int *order = user;
    order[++order[0]] = (int)lr_request_info(r)->tag;
}

static void test_order(void **state)
{
    int order[8] = {0};
    lr_policy p = {.name = "priority", .user = order, .schedule = by_priority, .finish = note_end};
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.max_seqs = 1;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    assert_string_equal(lr_engine_policy_name(e), "fcfs");
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    assert_string_equal(lr_engine_policy_name(e), "priority");
    static const int prio[] = {1, 5, 3, 9, 2};
    lr_request *r[5];
    for (int i = 0; i < 5; i++) r[i] = submit(e, 10 + i, i, 4, prio[i]);
    lr_request_set_priority(r[0], 7);
    fx_run(e);
    static const int want[] = {3, 0, 1, 2, 4};
    assert_int_equal(order[0], 5);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(order[1 + i], want[i]);
        assert_right(r[i]);
    }
    lr_engine_free(e);
}

/* ---- what can't be had is refused ---- */

typedef struct probe {
    lr_request *ended, *foreign, *first, *second;
    int step;
} probe;

static int probing(void *user, lr_step *s)
{
    probe *p = user;
    lr_error err;
    if (p->step++ == 0) {
        assert_int_equal(lr_step_run(s, p->ended, 1), 0);
        assert_non_null(lr_step_refusal(s));
        assert_int_equal(lr_step_run(s, p->foreign, 1), 0);
        assert_int_equal(lr_step_preempt(s, p->foreign, LR_PREEMPT_SWAP), LR_ESTATE);
        assert_int_equal(lr_step_preempt(s, p->first, LR_PREEMPT_SWAP), LR_ESTATE); /* it waits */
        assert_int_equal(lr_step_run(s, p->first, 1 << 30), 8);                     /* the budget */
        assert_null(lr_step_refusal(s));
        assert_int_equal(lr_step_budget(s), 0);
        assert_int_equal(lr_step_run(s, p->second, 1), 0);
        assert_int_equal(lr_step_preempt(s, p->first, LR_PREEMPT_RECOMPUTE), 0);
        assert_int_equal(lr_step_budget(s), 8);
        assert_int_equal(lr_step_run(s, p->first, 1), 0); /* not again in this step */
        assert_int_equal(lr_step_run(s, p->second, 5), 5);
        assert_int_equal(lr_step_granted(s, p->second), 5);
        assert_int_equal(lr_step_run(s, p->second, 5), 3);
        assert_null(lr_step_waiting(s, -1));
        assert_null(lr_step_waiting(s, 99));
        assert_null(lr_step_running(s, 99));
        lr_seq *q = lr_request_info(p->second)->seq, *out;
        assert_int_equal(lr_seq_append(q, tok, 1, &err), LR_ESTATE);
        assert_int_equal(lr_seq_truncate(q, 1, &err), LR_ESTATE);
        assert_int_equal(lr_seq_fork(q, &out, &err), LR_ESTATE);
        assert_int_equal(lr_engine_step(lr_step_engine(s), &err), LR_ESTATE);
        assert_int_equal(lr_engine_set_policy(lr_step_engine(s), NULL, &err), LR_ESTATE);
        lr_engine_free(lr_step_engine(s)); /* does nothing in here */
        return 0;
    }
    return lr_step_default(s);
}

static void test_refusals(void **state)
{
    probe pr = {0};
    lr_policy p = {.name = "probe", .user = &pr, .schedule = probing};
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.max_batch_tokens = 8;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0), *f = fx_engine(&cfg, fx_next, NULL, 256, 0);
    pr.ended = submit(e, 5, 1, 1, 0);
    fx_run(e);
    pr.foreign = submit(f, 5, 1, 1, 0);
    pr.first = submit(e, 30, 2, 3, 0);
    pr.second = submit(e, 30, 3, 3, 0);
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    assert_int_equal(lr_engine_step(e, &err), 8);
    fx_check(e);
    fx_run(e);
    assert_right(pr.first);
    assert_right(pr.second);
    assert_true(lr_engine_metrics(e)->policy_refused >= 5);
    lr_engine_free(e);
    lr_engine_free(f);
}

/* ---- hooks that refuse, fail, or do nothing ---- */

static int no_odd_tags(void *user, lr_request *r, lr_error *err)
{
    if (lr_request_info(r)->tag % 2 == 0) return 0;
    if (lr_request_info(r)->tag == 1) lr_fail(err, LR_ELIMIT, "odd tag %d", 1);
    return 1;
}

static int fails(void *user, lr_step *s) { return -1; }
static int does_nothing(void *user, lr_step *s) { return 0; }
static int stops_at_third(void *user, lr_request *r, int32_t t) { return lr_request_info(r)->n_generated >= 3; }

static void test_admit_and_token(void **state)
{
    lr_policy p = {.name = "picky", .admit = no_odd_tags, .token = stops_at_third};
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    lr_error err;
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    lr_req_params q = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    q.tag = 1;
    lr_seq *s = fx_seq(e, (int32_t[]){5, 6, 7}, 3);
    assert_int_equal(lr_request_new(e, s, &q, &r, &err), LR_ELIMIT);
    assert_string_equal(err.text, "odd tag 1");
    q.tag = 3;
    assert_int_equal(lr_request_new(e, s, &q, &r, &err), LR_EFULL);
    q.tag = 4;
    assert_int_equal(lr_request_new(e, s, &q, &r, &err), 0);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->n_generated, 3);
    assert_int_equal(lr_request_info(r)->finish, LR_FINISH_STOP);
    assert_int_equal(lr_engine_metrics(e)->refused, 2);
    fx_check(e);
    lr_engine_free(e);
}

static void test_failing_and_lazy(void **state)
{
    lr_policy p = {.name = "fails", .schedule = fails}, lazy = {.name = "lazy", .schedule = does_nothing};
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    lr_error err;
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    lr_request *r = submit(e, 20, 1, 5, 0);
    assert_int_equal(fx_run(e), 5);
    assert_right(r);
    assert_int_equal(lr_engine_metrics(e)->policy_failed, 5);
    assert_int_equal(lr_engine_set_policy(e, &lazy, &err), 0);
    r = submit(e, 20, 2, 5, 0);
    assert_int_equal(fx_run(e), 5 * 9); /* after 8 idle steps the default has one */
    assert_right(r);
    lr_engine_free(e);
}

/* ---- eviction by tag ---- */

static double keep_tag_7(void *user, const lr_kv_leaf *leaf) { return leaf->tag == 7 ? 1 : 0; }

static int cached_of(lr_engine *e, const int32_t *t, int n)
{
    lr_seq *s = fx_seq(e, t, n);
    int c = (int)lr_seq_peek_cached(s);
    lr_seq_free(s);
    return c;
}

static void test_evict(void **state)
{
    for (int with = 0; with < 2; with++) {
        lr_policy p = {.name = "keep", .evict = keep_tag_7};
        lr_engine_config cfg = lr_engine_defaults();
        lr_error err;
        cfg.block_size = 4;
        cfg.kv_blocks[0] = 24;
        lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
        if (with) assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
        int32_t mine[32];
        for (int i = 0; i < 32; i++) mine[i] = 3 + i;
        lr_seq *s = fx_seq(e, mine, 32);
        lr_seq_set_tag(s, 7); /* this one waits for a tool */
        fx_gen(e, s, 1);
        fx_run(e);
        for (int i = 0; i < 6; i++) {
            lr_request *r = submit(e, 40, i + 20, 2, 0);
            fx_run(e);
            assert_right(r);
            if (i % 2) lr_seq_free(lr_request_info(r)->seq);
        }
        lr_seq_free(s);
        assert_int_equal(cached_of(e, mine, 32), with ? 32 : 0);
        fx_check(e);
        lr_engine_free(e);
    }
}

/* ---- who gives way ---- */

static int oldest_swaps(void *user, lr_step *s, lr_request *req, int group, int need)
{
    for (int i = 0; i < lr_step_n_running(s); i++) {
        lr_request *r = lr_step_running(s, i);
        if (!r || r == req) continue;
        ++*(int *)user;
        return lr_step_preempt(s, r, LR_PREEMPT_SWAP);
    }
    return 0;
}

static void test_preempt_hook(void **state)
{
    int calls = 0;
    lr_policy p = {.name = "oldest", .user = &calls, .preempt = oldest_swaps};
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.block_size = 2;
    cfg.kv_blocks[0] = 40;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    lr_request *r[4];
    for (int i = 0; i < 4; i++) r[i] = submit(e, 12, i, 30, 0);
    while (lr_engine_busy(e)) {
        lr_engine_step(e, &err);
        fx_check(e);
    }
    for (int i = 0; i < 4; i++) assert_right(r[i]);
    assert_true(calls > 0 && lr_engine_metrics(e)->preempt_swap >= (uint64_t)calls);
    assert_true(lr_engine_metrics(e)->swap_in > 0);
    lr_engine_free(e);
}

/* ---- a pinned sequence whose start fails keeps no more than it was counted with ---- */

static int waiting_first(void *user, lr_step *s)
{
    for (int i = 0; i < lr_step_n_waiting(s); i++) {
        if (lr_step_waiting(s, i)) lr_step_run(s, lr_step_waiting(s, i), 0);
    }
    for (int i = 0; i < lr_step_n_running(s); i++) {
        if (lr_step_running(s, i)) lr_step_run(s, lr_step_running(s, i), 0);
    }
    return 0;
}

static void test_pinned_and_refused(void **state)
{
    lr_policy p = {.name = "eager", .schedule = waiting_first};
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.block_size = 2;
    cfg.kv_blocks[0] = 20;
    cfg.max_pinned = 20;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    int32_t t[20];
    for (int i = 0; i < 20; i++) t[i] = 3 + i;
    lr_seq *s = fx_seq(e, t, 16), *pinned = fx_seq(e, t, 20);
    fx_gen(e, s, 1);
    fx_run(e);
    lr_seq_free(s); /* 8 blocks are cached */
    lr_request *r = submit(e, 22, 9, 17, 0);
    lr_engine_step(e, &err);
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    assert_int_equal(lr_seq_pin(pinned, true, &err), 0);
    fx_gen(e, pinned, 2);
    while (lr_engine_busy(e)) {
        lr_engine_step(e, &err);
        fx_check(e);
    }
    assert_right(r);
    lr_engine_free(e);
}

/* ---- swapped while it runs ---- */

static int n_freed;
static void count_free(void *user) { n_freed++; }

static void test_hot_swap(void **state)
{
    const lr_policy all[] = {{.name = "a", .schedule = by_priority, .free = count_free},
                             {.name = "b", .schedule = fails, .free = count_free},
                             {.name = "c", .evict = keep_tag_7, .free = count_free}};
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    int steps = 0;
    cfg.block_size = 3;
    cfg.kv_blocks[0] = 60;
    cfg.max_batch_tokens = 20;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    lr_request *r[20];
    for (int i = 0; i < 20; i++) r[i] = submit(e, 10 + i, i, 10, i % 3);
    while (lr_engine_busy(e)) {
        assert_int_equal(lr_engine_set_policy(e, steps % 4 == 3 ? NULL : &all[steps % 4], &err), 0);
        lr_engine_step(e, &err);
        fx_check(e);
        steps++;
    }
    for (int i = 0; i < 20; i++) assert_right(r[i]);
    lr_engine_free(e);
    assert_int_equal(n_freed, steps - steps / 4);
}

/* ---- the time of hooks ---- */

static double ticks;
static int hook_calls[6];

static void tick(int hook)
{
    hook_calls[hook]++;
    ticks += 1 + hook;
}

static double tick_now(void *user) { return ticks; }

static int timed_admit(void *user, lr_request *r, lr_error *err)
{
    tick(0);
    return 0;
}

static int timed_schedule(void *user, lr_step *s)
{
    tick(1);
    return lr_step_default(s); /* hooks inside of it are part of it */
}

static int timed_preempt(void *user, lr_step *s, lr_request *r, int group, int need)
{
    tick(2);
    return lr_step_default_preempt(s, r);
}

static double timed_evict(void *user, const lr_kv_leaf *leaf)
{
    tick(3);
    return 0;
}

static int timed_token(void *user, lr_request *r, int32_t token)
{
    tick(4);
    return 0;
}

static void timed_finish(void *user, lr_request *r) { tick(5); }

/* Nothing but hooks moves the clock: the metric must hold all of it. */
static void test_hook_time(void **state)
{
    const lr_policy p = {.name = "timed",
                         .admit = timed_admit,
                         .schedule = timed_schedule,
                         .preempt = timed_preempt,
                         .evict = timed_evict,
                         .token = timed_token,
                         .finish = timed_finish};
    lr_engine_config cfg = lr_engine_defaults();
    char path[] = "/tmp/llmrun-hooks-XXXXXX", line[1024];
    lr_error err;
    int fd = mkstemp(path), spans = 0;
    assert_true(fd >= 0);
    close(fd);
    cfg.now = tick_now;
    cfg.block_size = 4;
    cfg.kv_blocks[0] = 13;
    ticks = 1;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    assert_int_equal(lr_engine_trace(e, path, &err), 0);
    for (int i = 0; i < 5; i++) submit(e, 20, i, 6, 0);
    fx_run(e);
    assert_int_equal(lr_engine_trace(e, NULL, &err), 0);
    const lr_metrics *m = lr_engine_metrics(e);
    assert_true(m->preempt_recompute > 0);
    assert_true(m->hook.sum == ticks - 1);
    for (int i = 0; i < 6; i++) assert_true(hook_calls[i] > 0);
    static const char *const names[] = {"admit", "schedule", "token", "finish"};
    FILE *f = fopen(path, "r");
    while (fgets(line, sizeof line, f)) {
        for (int i = 0; i < 4; i++) {
            char want[64];
            snprintf(want, sizeof want, "\"tid\":1,\"name\":\"%s\",\"ts\":", names[i]);
            if (strstr(line, want)) spans |= 1 << i;
        }
    }
    fclose(f);
    remove(path);
    assert_int_equal(spans, 15);
    lr_engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_admit_and_token),
        cmocka_unit_test(test_failing_and_lazy),
        cmocka_unit_test(test_evict),
        cmocka_unit_test(test_preempt_hook),
        cmocka_unit_test(test_pinned_and_refused),
        cmocka_unit_test(test_hot_swap),
        cmocka_unit_test(test_hook_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
