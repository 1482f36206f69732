#!/usr/bin/env python3
"""One measurement of OpenVINO GenAI, for scripts/compare speed.

It reads the GGUF file and converts it; files with types or architectures that it doesn't know are refused by it. Its
scheduler runs without a prefix cache. A prompt's time is that of generating one token behind it; a step's time is what
each further token adds.
"""
import importlib.metadata
import json
import os
import random
import statistics
import time

import arguments


def main():
    a = arguments.parser(__doc__).parse_args()

    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = max(512, a.prefill)
    scheduler.cache_size = 1
    pipe = genai.LLMPipeline(a.model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=a.threads)
    rng = random.Random(1)

    def generate(n, rows, new):
        """Seconds for `new` tokens of each of `rows` prompts of n tokens."""
        ids = np.array([[rng.randrange(100, 20000) for _ in range(n)] for _ in range(rows)], dtype=np.int64)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        pipe.generate(inputs, config)
        return time.perf_counter() - start

    about = {"model": os.path.basename(a.model), "threads": a.threads,
             "peer": "openvino-genai " + importlib.metadata.version("openvino-genai")}

    def rate(n, rows):
        one = generate(n, rows, 1)
        return rows * a.decode / max(1e-9, generate(n, rows, 1 + a.decode) - one)

    if a.batch:
        generate(32, a.batch, 2)
        print(json.dumps({**about, "batch": a.batch, "decode_tps": round(rate(32, a.batch), 2)}))
        return
    generate(a.prefill, 1, 2)  # warm up
    prefill, decode = [], []
    for _ in range(a.reps):
        prefill.append(a.prefill / generate(a.prefill, 1, 1))
        decode.append(rate(max(1, a.context - a.decode // 2), 1))
    print(json.dumps({**about, "prefill_tps": round(statistics.median(prefill), 2),
                      "decode_tps": round(statistics.median(decode), 2)}))


if __name__ == "__main__":
    main()
