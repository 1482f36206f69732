#!/usr/bin/env python3
"""One measurement of ik_llama.cpp (through ik-llama-cpp-python's low-level calls), for scripts/compare speed.

As llama.py, with the weights repacked at run time and flash attention on. The package's own build is taken: it has
kernels for several CPUs and picks at run time.
"""
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time

import arguments


def main():
    a = arguments.parser(__doc__).parse_args()

    import ik_llama_cpp._ctypes_api as L

    L.llama_backend_init()
    mp = L.llama_model_default_params()
    mp.n_gpu_layers = 0
    mp.repack_tensors = True
    mp.use_mmap = False
    mp.flash_attn = True
    model = L.llama_model_load_from_file(a.model.encode(), mp)
    if not model:
        sys.exit(f"ik_llama.cpp can't load {a.model}")
    cp = L.llama_context_default_params()
    cp.n_ctx = (32 + a.decode + 8) * a.batch if a.batch else a.prefill + a.context + a.decode + 64
    cp.n_batch = cp.n_ubatch = max(512, a.batch) if a.batch else max(a.prefill, a.context)
    cp.n_seq_max = max(1, a.batch)
    cp.n_threads = cp.n_threads_batch = a.threads
    cp.flash_attn = True
    ctx = L.llama_init_from_model(model, cp)
    if not ctx:
        sys.exit("ik_llama.cpp can't make a context")
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    rng = random.Random(1)
    batch = L.llama_batch_init(max(512, a.prefill, a.context, a.batch), 0, 1)
    batch.n_tokens = 0

    def add(token, pos, seq, wanted):
        i = batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, wanted
        batch.seq_id[i][0] = seq
        batch.n_tokens = i + 1

    def run():
        """Runs the batch, the last one's logits ready; the seconds it took."""
        last = batch.n_tokens - 1
        start = time.perf_counter()
        rc = L.llama_decode(ctx, batch)
        if batch.logits[last]:
            L.llama_get_logits_ith(ctx, last)
        seconds = time.perf_counter() - start
        if rc != 0:
            sys.exit(f"ik_llama.cpp: llama_decode failed with {rc}")
        batch.n_tokens = 0
        return seconds

    def prompt(n):
        return [rng.randrange(n_vocab) for _ in range(n)]

    def fill(n):
        L.llama_kv_cache_clear(ctx)
        for pos, token in enumerate(prompt(n)):
            add(token, pos, 0, pos == n - 1)
        return run()

    about = {"model": os.path.basename(a.model), "threads": a.threads,
             "peer": "ik-llama-cpp-python " + importlib.metadata.version("ik-llama-cpp-python")}
    if a.batch:
        for seq in range(a.batch):
            for pos, token in enumerate(prompt(32)):
                add(token, pos, seq, False)
                if batch.n_tokens == 512:
                    run()
        if batch.n_tokens:
            run()
        seconds = 0.0
        for step in range(a.decode + 1):
            for seq, token in enumerate(prompt(a.batch)):
                add(token, 32 + step, seq, True)
            took = run()
            seconds += took if step > 0 else 0  # the first warms up
        print(json.dumps({**about, "batch": a.batch, "decode_tps": round(a.batch * a.decode / seconds, 2)}))
        return
    fill(a.prefill)  # warm up
    prefill, decode = [], []
    for _ in range(a.reps):
        prefill.append(a.prefill / fill(a.prefill))
        begin = max(1, a.context - a.decode // 2)
        fill(begin)
        seconds = 0.0
        for step, token in enumerate(prompt(a.decode)):
            add(token, begin + step, 0, True)
            seconds += run()
        decode.append(a.decode / seconds)
    print(json.dumps({**about, "prefill_tps": round(statistics.median(prefill), 2),
                      "decode_tps": round(statistics.median(decode), 2)}))


if __name__ == "__main__":
    main()
