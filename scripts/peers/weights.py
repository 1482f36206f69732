#!/usr/bin/env python3
"""Writes a GGUF file's model as a folder of Hugging Face's format in bfloat16, for peers that read no GGUF file.

weights.py MODEL.gguf FOLDER [--int8]; run with a Python that has transformers, torch and gguf. The weights are those that the
file holds, taken out of their blocks: no accuracy is won or lost but bfloat16's. The chat template goes with them. --int8
rounds the matrices of the layers to 8 bits, one scale a row, in the form of compressed-tensors; activations are to be rounded
to 8 bits a token when it runs.
"""
import argparse
import json
import os
import sys

import safetensors.torch
import torch
import transformers

QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}}}}


def to_int8(folder):
    """The folder's matrices of layers as 8-bit integers and scales."""
    path = os.path.join(folder, "model.safetensors")
    tensors = {}
    for name, t in safetensors.torch.load_file(path).items():
        if ".layers." in name and t.dim() == 2:
            scale = (t.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8)
            tensors[name] = (t.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name + "_scale"] = scale
        else:
            tensors[name] = t
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    config["quantization_config"] = QUANTIZATION
    with open(path, "w", encoding="utf-8") as f:
        json.dump(config, f, indent=2)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    ap.add_argument("model")
    ap.add_argument("folder")
    ap.add_argument("--int8", action="store_true", help="8-bit matrices instead of bfloat16 ones")
    a = ap.parse_args()
    folder, file = os.path.split(os.path.abspath(a.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    model.hf_quantizer = None  # what was loaded is plain bfloat16 by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(a.folder)
    tokenizer.save_pretrained(a.folder)
    if a.int8:
        to_int8(a.folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M weights, {len(tokenizer)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
