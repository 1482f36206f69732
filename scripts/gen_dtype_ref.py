#!/usr/bin/env python3
"""Writes tests/data/gguf/dtype.bin and encode.bin: golden data for lr_dtype_to_f32 and lr_dtype_from_f32.

Blocks of random bytes and their values as the `gguf` Python package (gguf.quants, NumPy) dequantizes them. Needs
`pip install gguf`. Little-endian; the file is "LRDT" and then records of
    u32 type, u32 number of values, u32 number of bytes, the bytes, the values as f32.
Of each type, half of the blocks are raw random bytes (infinite and NaN scales among them); the other half have every
half-precision scale replaced by one of ordinary size.

encode.bin is "LRDE", u32 number of values, the values as f32, and then, for each type that the package can write,
    u32 type, u32 number of bytes, the bytes.
"""
import struct

import usage

if __name__ == "__main__":
    FOLDER, = usage.arguments("[FOLDER]")

import numpy as np  # noqa: E402
from gguf import quants  # noqa: E402
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

# type -> offsets of half-precision scales in the block
SCALES = {
    T.F32: [], T.F16: [], T.BF16: [], T.MXFP4: [],
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.IQ4_NL: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_XS: [0],
}


# types that the package writes; it has no way back to super-blocks
WRITTEN = [T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4]


def encode(path):
    rng = np.random.default_rng(20261)
    n = 512
    x = np.concatenate([
        rng.normal(0, 0.02, n), rng.standard_t(3, n), np.round(rng.normal(0, 3, n)), rng.normal(5, 0.1, n),
        np.where(rng.random(n) < 0.9, 0, rng.normal(0, 1, n)), np.zeros(64), rng.normal(0, 1e-6, 64), [-1.0] * 64,
    ]).astype("<f4")
    with open(path, "wb") as f:
        f.write(b"LRDE" + struct.pack("<I", x.size) + x.tobytes())
        for t in WRITTEN:
            raw = np.ascontiguousarray(quants.quantize(x.reshape(1, -1), t)).view(np.uint8).reshape(-1)
            f.write(struct.pack("<II", int(t), raw.size) + raw.tobytes())


def main(path):
    rng = np.random.default_rng(20260)
    with open(path, "wb") as f:
        f.write(b"LRDT")
        for t, scales in SCALES.items():
            block, size = GGML_QUANT_SIZES[t]
            n = 256 if block == 1 else 16 if block == 32 else 4
            raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
            for at in scales:
                d = rng.normal(0, 0.02, n // 2).astype(np.float16)
                raw[n // 2 :, at : at + 2] = d.view(np.uint8).reshape(-1, 2)
            if t == T.MXFP4:
                raw[: n // 2, 0] = [0, 1, 2, 3, 126, 127, 254, 255]
            with np.errstate(all="ignore"):
                values = np.ascontiguousarray(quants.dequantize(raw.reshape(-1), t), dtype="<f4").reshape(-1)
            assert values.size == n * block
            f.write(struct.pack("<III", int(t), values.size, raw.size))
            f.write(raw.tobytes())
            f.write(values.tobytes())


if __name__ == "__main__":
    folder = FOLDER or "tests/data/gguf"
    main(folder + "/dtype.bin")
    encode(folder + "/encode.bin")
