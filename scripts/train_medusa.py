"""Trains Medusa heads on hidden rows that scripts/train_medusa.lua wrote.

Usage: train_medusa.py MODEL.gguf ROWS OUT.safetensors HEADS EPOCHS

A head is x + silu(W x + b) in front of the model's own matrix, which stays as it is and isn't stored again. Losses are
taken over the tokens that occur in the texts: that is a tenth of a vocabulary, and as much less work.
"""
import sys
import time

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

BATCH = 512


def matrix(path):
    """The model's matrix from hidden rows to logits, and its width."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    t = tensors.get("output.weight") or tensors["token_embd.weight"]
    return np.ascontiguousarray(gguf.dequantize(t.data, t.tensor_type).astype(np.float32))


def texts(path, width):
    data, at, out = open(path, "rb").read(), 0, []
    while at + 4 <= len(data):
        n = int(np.frombuffer(data, "<i4", 1, at)[0])
        if at + 4 + 4 * n + 4 * n * width > len(data):
            break
        ids = np.frombuffer(data, "<i4", n, at + 4)
        rows = np.frombuffer(data, "<f4", n * width, at + 4 + 4 * n).reshape(n, width)
        at += 4 + 4 * n + 4 * n * width
        out.append((ids, rows))
    return out


def pairs(some, head):
    """Rows, and the tokens that head `head` is to guess: the model's own one has the next token."""
    x = [rows[: len(ids) - 2 - head] for ids, rows in some if len(ids) > 2 + head]
    y = [ids[2 + head:] for ids, rows in some if len(ids) > 2 + head]
    return torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y).astype(np.int64))


def main(model, rows, out, heads, epochs):
    torch.manual_seed(1)
    full = matrix(model)
    width = full.shape[1]
    all_texts = texts(rows, width)
    known = np.unique(np.concatenate([ids for ids, _ in all_texts]))
    place = np.zeros(full.shape[0], np.int64)
    place[known] = np.arange(len(known))
    w = torch.from_numpy(full[known])
    held = max(1, len(all_texts) // 20)
    result = {}
    print(f"{sum(len(i) for i, _ in all_texts)} tokens of {len(known)} kinds in {len(all_texts)} texts")
    for head in range(heads):
        x, y = pairs(all_texts[held:], head)
        xt, yt = pairs(all_texts[:held], head)
        y, yt = torch.from_numpy(place)[y], torch.from_numpy(place)[yt]
        linear = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        optimizer = torch.optim.AdamW(linear.parameters(), lr=2e-3, weight_decay=0.01)
        steps = epochs * (len(x) // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
        done, begin, loss_sum = 0, time.time(), 0.0
        for _ in range(epochs):
            order = torch.randperm(len(x))
            for i in range(0, len(x) - BATCH + 1, BATCH):
                at = order[i : i + BATCH]
                h = x[at] + torch.nn.functional.silu(linear(x[at]))
                loss = torch.nn.functional.cross_entropy(h @ w.T, y[at])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                done += 1
                loss_sum = loss.item() if done == 1 else 0.95 * loss_sum + 0.05 * loss.item()
                print(f"\rhead {head}: step {done} of {steps}, loss {loss_sum:.3f}, {time.time() - begin:.0f} s ", end="")
        with torch.no_grad():
            guess = (xt + torch.nn.functional.silu(linear(xt))) @ w.T
            best = guess.topk(4).indices
            first = (best[:, 0] == yt).float().mean().item()
            four = (best == yt[:, None]).any(1).float().mean().item()
        print(f"\nhead {head}: of {len(yt)} tokens held out, right {first:.3f}, among the best four {four:.3f}")
        result[f"{head}.0.linear.weight"] = linear.weight.detach().to(torch.float16).contiguous()
        result[f"{head}.0.linear.bias"] = linear.bias.detach().to(torch.float32).contiguous()
    save_file(result, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
