#!/usr/bin/env python3
"""Quantizes a GGUF file with llama.cpp (through llama-cpp-python): IN OUT TYPE. For scripts/compare quantize."""
import ctypes
import os
import sys

import llama_cpp as L


def main(source, target, kind):
    log = []

    @L.llama_log_callback
    def on_log(level, text, user):
        log.append(text.decode("utf-8", "replace"))

    L.llama_log_set(on_log, ctypes.c_void_p(0))
    L.llama_backend_init()
    name = {"F32": "LLAMA_FTYPE_ALL_F32"}.get(kind, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if not hasattr(L, name):
        sys.exit(f"llama.cpp has no type {kind}")
    p = L.llama_model_quantize_default_params()
    p.ftype = getattr(L, name)
    p.nthread = len(os.sched_getaffinity(0))
    if L.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(p)):
        sys.exit("llama.cpp can't quantize: " + "".join(log[-3:]).strip())


if __name__ == "__main__":
    main(*sys.argv[1:4])
