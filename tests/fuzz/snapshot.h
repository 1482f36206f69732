/* snapshot.h - any bytes as a saved sequence: what the fuzz target and the replay of its corpus
 * (tests/unit/test_snapshot_corpus.c) do. The first byte says how the engine is set up, the rest is the file, whose
 * checksum is put right unless that byte says otherwise, so that what lies behind it is reached.
 */
#ifndef LR_TESTS_FUZZ_SNAPSHOT_H
#define LR_TESTS_FUZZ_SNAPSHOT_H
#define _GNU_SOURCE
#include "engine/snapshot.c" /* for its checksum; its functions take the place of the library's */
#undef MAGIC
#undef VERSION
#include "../unit/engine_fixture.h"
#include <sys/mman.h>

enum { SNAPSHOT_RAW = 1, SNAPSHOT_WINDOW = 2, SNAPSHOT_BLOCK = 4, SNAPSHOT_SMALL = 32 };

static lr_engine *snapshot_engine(int flags)
{
    static const int sizes[] = {1, 2, 3, 4, 5, 7, 8, 16};
    lr_engine_config cfg = lr_engine_defaults();
    int window = flags & SNAPSHOT_WINDOW ? 7 : 0;
    cfg.block_size = sizes[flags / SNAPSHOT_BLOCK % 8];
    cfg.kv_blocks[0] = flags & SNAPSHOT_SMALL ? 6 : 128;
    cfg.kv_blocks[1] = window ? cfg.kv_blocks[0] : 0;
    return fx_engine(&cfg, fx_next, NULL, 256, window);
}

/* What is restored can be saved, restored again, and computed on. */
static void snapshot_use(lr_engine *e, lr_seq *s, const char *path)
{
    lr_error err;
    lr_seq *again = NULL;
    fx_check(e);
    assert_int_equal(lr_seq_save(s, path, &err), 0);
    assert_int_equal(lr_seq_restore(e, path, NULL, &again, &err), 0);
    assert_int_equal(lr_seq_len(again), lr_seq_len(s));
    assert_memory_equal(lr_seq_tokens(again), lr_seq_tokens(s), lr_seq_len(s) * sizeof(int32_t));
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    p.max_tokens = 3;
    if (lr_seq_len(s) > 0 && lr_request_new(e, s, &p, &r, &err) == 0) {
        fx_run(e);
        lr_request_free(r);
    }
    fx_check(e);
    lr_seq_free(again);
}

static void snapshot_try(const uint8_t *data, size_t size)
{
    static char path[64];
    if (!path[0]) {
        snprintf(path, sizeof path, "/tmp/llmrun-fuzz-XXXXXX");
        int fd = mkstemp(path);
        assert_true(fd >= 0);
        close(fd);
    }
    if (size < 1) return;
    size_t n = size - 1;
    char *copy = malloc(n + 1);
    memcpy(copy, data + 1, n);
    if (!(data[0] & SNAPSHOT_RAW) && n >= 8) {
        uint64_t check = sum_of(copy, n - 8);
        memcpy(copy + n - 8, &check, 8);
    }
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(copy, 1, n, f), n);
    fclose(f);
    free(copy);
    lr_engine *e = snapshot_engine(data[0]);
    lr_error err = {0};
    lr_seq *s = NULL;
    int rc = lr_seq_restore(e, path, NULL, &s, &err);
    if (rc)
        assert_true(rc < 0 && rc == err.code && err.text[0] && !s);
    else
        snapshot_use(e, s, path);
    lr_seq_free(s);
    fx_check(e);
    lr_engine_free(e);
    unlink(path);
}

#endif
