#!/usr/bin/env python3
"""One measurement of llama.cpp (through llama-cpp-python's low-level calls), for scripts/compare speed.

Only evaluation is timed: llama_decode up to the logits. A prompt of --prefill random tokens in one batch
(n_batch = n_ubatch = its length), then --decode greedy single-token steps whose context is centred on --context. With
--batch N instead: N sequences of 32 tokens, then --decode steps of one token each. Prints one JSON line with the
fields of `llmrun bench --json`: model, prefill_tps, decode_tps, threads; and peer, system, buffers (where llama.cpp put
the weights: CPU_REPACK and AMX mean its fast paths are on).
"""
import ctypes
import json
import os
import random
import statistics
import sys
import time

import arguments


def main():
    ap = arguments.parser(__doc__)
    ap.add_argument("--no-flash", action="store_true", help="without flash attention")
    a = ap.parse_args()

    import llama_cpp as L

    log = []

    @L.llama_log_callback
    def on_log(level, text, user):
        log.append(text.decode("utf-8", "replace"))

    L.llama_log_set(on_log, ctypes.c_void_p(0))
    L.llama_backend_init()
    mp = L.llama_model_default_params()
    mp.n_gpu_layers = 0
    model = L.llama_model_load_from_file(a.model.encode(), mp)
    if not model:
        sys.exit(f"llama.py: llama.cpp can't load {a.model}: {''.join(log[-3:]).strip()}")
    cp = L.llama_context_default_params()
    cp.n_ctx = a.prefill + a.context + a.decode + 64
    cp.n_batch = cp.n_ubatch = max(a.prefill, a.context)
    if a.batch:
        cp.n_ctx = (32 + a.decode + 8) * a.batch
        cp.n_seq_max = a.batch
        cp.n_batch = cp.n_ubatch = max(512, a.batch)
        cp.kv_unified = False
    cp.n_threads = cp.n_threads_batch = a.threads
    cp.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_DISABLED if a.no_flash else L.LLAMA_FLASH_ATTN_TYPE_ENABLED
    ctx = L.llama_init_from_model(model, cp)
    if not ctx:
        sys.exit("llama.py: llama.cpp can't make a context: " + "".join(log[-3:]).strip())
    memory = L.llama_get_memory(ctx)
    vocab = L.llama_model_get_vocab(model)
    n_vocab = L.llama_vocab_n_tokens(vocab)
    greedy = L.llama_sampler_init_greedy()
    rng = random.Random(1)

    def evaluate(tokens):
        """Runs the tokens, the last one's logits ready; the seconds it took."""
        array = (L.llama_token * len(tokens))(*tokens)
        batch = L.llama_batch_get_one(array, len(tokens))
        start = time.perf_counter()
        rc = L.llama_decode(ctx, batch)
        L.llama_get_logits_ith(ctx, -1)
        seconds = time.perf_counter() - start
        if rc != 0:
            sys.exit(f"llama.py: llama_decode failed with {rc}")
        return seconds

    def prompt(n):
        return [rng.randrange(n_vocab) for _ in range(n)]

    def together():
        """Tokens a second of a.batch sequences, a token each a step."""
        batch = L.llama_batch_init(max(512, a.batch), 0, 1)

        def add(token, pos, seq, wanted):
            i = batch.n_tokens
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, wanted
            batch.seq_id[i][0] = seq
            batch.n_tokens = i + 1

        def run():
            if L.llama_decode(ctx, batch) != 0:
                sys.exit("compare: llama_decode failed")
            batch.n_tokens = 0

        batch.n_tokens = 0
        for seq in range(a.batch):
            for pos, token in enumerate(prompt(32)):
                add(token, pos, seq, 0)
                if batch.n_tokens == 512:
                    run()
        if batch.n_tokens:
            run()
        seconds = 0.0
        for step in range(a.decode + 1):
            for seq, token in enumerate(prompt(a.batch)):
                add(token, 32 + step, seq, 1)
            start = time.perf_counter()
            run()
            L.llama_get_logits_ith(ctx, a.batch - 1)
            if step > 0:  # the first warms up
                seconds += time.perf_counter() - start
        return a.batch * a.decode / seconds

    if a.batch:
        print(json.dumps({"model": os.path.basename(a.model), "threads": a.threads, "batch": a.batch,
                          "decode_tps": round(together(), 2), "peer": "llama-cpp-python " + L.__version__}))
        return
    L.llama_memory_clear(memory, True)
    evaluate(prompt(a.prefill))  # warm up: first touch of weights, KV and scratch
    prefill, decode = [], []
    for _ in range(a.reps):
        L.llama_memory_clear(memory, True)
        prefill.append(a.prefill / evaluate(prompt(a.prefill)))
        L.llama_memory_clear(memory, True)
        evaluate(prompt(max(1, a.context - a.decode // 2)))
        seconds = 0.0
        for _ in range(a.decode):
            token = L.llama_sampler_sample(greedy, ctx, -1)
            seconds += evaluate([token])
        decode.append(a.decode / seconds)
    buffers = sorted({line.strip().split("=", 1)[0].split(":")[-1].strip() + " " + line.split("=")[-1].strip()
                      for line in log if "model buffer size" in line})
    print(json.dumps({
        "model": os.path.basename(a.model), "threads": a.threads,
        "prefill_tps": round(statistics.median(prefill), 2), "decode_tps": round(statistics.median(decode), 2),
        "peer": "llama-cpp-python " + L.__version__,
        "system": L.llama_print_system_info().decode().strip(), "buffers": buffers}))


if __name__ == "__main__":
    main()
