#!/usr/bin/env python3
"""One measurement of llguidance or xgrammar for scripts/compare grammars: compiling JSON schemas, and token masks along
texts that obey them. Reads what tests/bench/grammar_masks.lua --out wrote, and prints the same JSON line as it does.

    grammars.py ENGINE FILE [--runs N]

Each mask and each compilation is timed by itself, with the wall clock, at the engine's own call from Python, on one
thread. xgrammar imports PyTorch and Transformers, of whose parts nothing is used here: without them, empty modules
stand for them, and masks are NumPy arrays.
"""
import argparse
import importlib.metadata
import json
import math
import sys
import time
import types

import numpy as np


def statistics(values):
    values = sorted(values)
    at = lambda q: round(values[max(0, math.ceil(q * len(values)) - 1)], 2)
    return {"median": at(0.5), "p99": at(0.99), "max": at(1)}


class LLGuidance:
    def __init__(self, pieces, eog):
        import llguidance
        import llguidance.numpy
        self.fill = llguidance.numpy.fill_next_token_bitmask
        self.module, self.version = llguidance, "llguidance " + llguidance.__version__
        eos, special = eog[0], [i for i, p in enumerate(pieces) if not p]

        class Vocabulary:
            eos_token_id, bos_token_id, special_token_ids = eos, None, special
            tokens = [p or f"<special {i}>".encode() for i, p in enumerate(pieces)]

            def __call__(self, text):
                return list(text if isinstance(text, bytes) else text.encode())

        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), n_vocab=len(pieces))
        self.bits = llguidance.numpy.allocate_token_bitmask(1, len(pieces))

    def compile(self, schema):
        text = self.module.LLMatcher.grammar_from_json_schema(schema)
        return self.module.LLMatcher(self.tokenizer, text)

    def matcher(self, compiled):
        if compiled.get_error():
            raise RuntimeError(compiled.get_error())
        return compiled.deep_copy()

    def mask(self, matcher):
        self.fill(matcher, self.bits, 0)

    def accept(self, matcher, token):
        return matcher.consume_token(token)


def stand_ins():
    try:
        import torch, transformers  # noqa: F401
    except ImportError:
        import tvm_ffi  # noqa: F401  (looks for torch when it is loaded)
        torch, transformers = types.ModuleType("torch"), types.ModuleType("transformers")
        torch.Tensor = torch.dtype = torch.device = torch.LongTensor = torch.FloatTensor = object
        torch.int32, torch.float32, torch.tensor = "int32", "float32", lambda value, dtype=None: value
        transformers.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast = transformers.LogitsProcessor = object
        sys.modules["torch"], sys.modules["transformers"] = torch, transformers


class XGrammar:
    def __init__(self, pieces, eog):
        stand_ins()
        import xgrammar
        self.module, self.version = xgrammar, "xgrammar " + importlib.metadata.version("xgrammar")
        info = xgrammar.TokenizerInfo(pieces, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=eog)
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bits = np.zeros((1, (len(pieces) + 31) // 32), dtype=np.int32)

    def compile(self, schema):
        # its default white space is boundless; this is the one space of the texts
        return self.compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=False)

    def matcher(self, compiled):
        return self.module.GrammarMatcher(compiled)

    def mask(self, matcher):
        matcher.fill_next_token_bitmask(self.bits)

    def accept(self, matcher, token):
        return matcher.accept_token(token)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("engine", choices=["llguidance", "xgrammar"])
    ap.add_argument("file")
    ap.add_argument("--runs", type=int, default=5)
    a = ap.parse_args()
    with open(a.file, encoding="utf-8") as f:
        data = json.load(f)
    pieces = [bytes.fromhex(p) for p in data["pieces"]]
    engine = {"llguidance": LLGuidance, "xgrammar": XGrammar}[a.engine](pieces, data["eog"])
    clock = time.perf_counter
    compile_ms, first, again = [], [], []
    for case in data["cases"]:
        here = []
        for _ in range(a.runs):
            start = clock()
            compiled = engine.compile(case["schema"])
            here.append((clock() - start) * 1e3)
        compile_ms.append(statistics(here)["median"])
        for times in (first, again):
            m = engine.matcher(compiled)
            for token in case["ids"]:
                start = clock()
                engine.mask(m)
                times.append((clock() - start) * 1e6)
                # (where llguidance sees only one text, its mask holds only the token that its tokenizer would take)
                if not engine.accept(m, token):
                    sys.exit(f"{a.engine}: {case['name']}: its text is not allowed")
    print(json.dumps({"engine": engine.version, "vocab": len(pieces), "masks": len(first), "compile_ms": statistics(compile_ms),
                      "first_us": statistics(first), "again_us": statistics(again)}))


main()
