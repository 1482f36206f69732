"""Trains heads on hidden rows that scripts/train_heads.lua wrote.

Usage: train_heads.py MODEL.gguf ROWS medusa OUT.safetensors EPOCHS HEADS
       train_heads.py MODEL.gguf ROWS eagle OUT_FOLDER EPOCHS VOCABULARY

Medusa: a head is x + silu(W x + b) in front of the model's own matrix, which stays as it is and isn't stored again.
EAGLE: one decoder layer over fc(embedding of the next token, hidden row), trained to say the next hidden row and the
token that comes of it. Its vocabulary is the tokens that occur most, so that a pass reads few of the model's rows.
Losses are taken over the tokens that occur in the texts: that is a tenth of a vocabulary, and as much less work.
"""
import json
import os
import sys
import time

import usage

MODEL, ROWS, KIND, OUT, EPOCHS, SIZE = usage.arguments("MODEL.gguf ROWS KIND OUT EPOCHS SIZE")

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

BATCH = 512


def matrix(path, *names):
    """The first of these matrices that the model has."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    t = next(tensors[name] for name in names if name in tensors)
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


def medusa(model, all_texts, out, epochs, heads):
    full = matrix(model, "output.weight", "token_embd.weight")
    width = full.shape[1]
    known = np.unique(np.concatenate([ids for ids, _ in all_texts]))
    place = np.zeros(full.shape[0], np.int64)
    place[known] = np.arange(len(known))
    w = torch.from_numpy(full[known])
    held = max(1, len(all_texts) // 20)
    result = {}
    for head in range(heads):
        x, y = pairs(all_texts[held:], head)
        xt, yt = pairs(all_texts[:held], head)
        y, yt = torch.from_numpy(place)[y], torch.from_numpy(place)[yt]
        linear = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        optimizer = torch.optim.AdamW(linear.parameters(), lr=2e-3, weight_decay=0.01)
        steps = epochs * max(1, len(x) // BATCH)
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



def rotate(x, base):
    """Positions into (batch, heads, length, dim): halves of a head are the pairs."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / base ** (torch.arange(half) / half)[None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rms(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Eagle(torch.nn.Module):
    """Features (batch, length, width) and the embeddings of the tokens behind them -> the next features."""

    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        linear = lambda n, k, bias=False: torch.nn.Linear(k, n, bias=bias)
        self.fc = linear(width, 2 * width, True)
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(kv_heads * self.dim, width), linear(kv_heads * self.dim, width)
        self.gate, self.up, self.down = linear(inner, width), linear(inner, width), linear(width, inner)
        self.norm = torch.nn.Parameter(torch.ones(width))
        for small in (self.o, self.down):
            torch.nn.init.zeros_(small.weight)

    def forward(self, features, embedded):
        x = self.fc(torch.cat((embedded, features), -1))
        split = lambda y, n: y.unflatten(-1, (n, self.dim)).transpose(1, 2)
        q, k = rotate(split(self.q(x), self.heads), 10000.0), rotate(split(self.k(x), self.kv_heads), 10000.0)
        v = split(self.v(x), self.kv_heads)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = rms(x, self.norm)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

    def tensors(self):
        names = {"fc.weight": self.fc.weight, "fc.bias": self.fc.bias,
                 "layers.0.post_attention_layernorm.weight": self.norm}
        for name in ("q", "k", "v", "o"):
            names[f"layers.0.self_attn.{name}_proj.weight"] = getattr(self, name).weight
        for name in ("gate", "up", "down"):
            names[f"layers.0.mlp.{name}_proj.weight"] = getattr(self, name).weight
        return {n: t.detach().to(torch.float16 if t.dim() > 1 else torch.float32).contiguous() for n, t in names.items()}


def padded(some, place):
    """Texts as one batch: features, tokens, and for each row whether it has a token two places on."""
    length = max(len(ids) for ids, _ in some)
    width = some[0][1].shape[1]
    rows = np.zeros((len(some), length, width), np.float32)
    ids = np.zeros((len(some), length), np.int64)
    good = np.zeros((len(some), length), bool)
    for i, (t, r) in enumerate(some):
        rows[i, : len(t)], ids[i, : len(t)] = r, t
        good[i, : max(0, len(t) - 2)] = place[t[2:]] >= 0
    return torch.from_numpy(rows), torch.from_numpy(ids), torch.from_numpy(good)


def eagle(model, all_texts, out, epochs, vocabulary):
    head, table = matrix(model, "output.weight", "token_embd.weight"), torch.from_numpy(matrix(model, "token_embd.weight"))
    width = head.shape[1]
    counts = np.bincount(np.concatenate([ids for ids, _ in all_texts]), minlength=head.shape[0])
    known = np.sort(np.argsort(-counts, kind="stable")[: min(vocabulary, int((counts > 0).sum()))])
    place = np.full(head.shape[0], -1, np.int64)
    place[known] = np.arange(len(known))
    w, to = torch.from_numpy(head[known]), torch.from_numpy(place)
    held = max(1, len(all_texts) // 20)
    texts_left = [t for t in all_texts[held:] if len(t[0]) > 2]
    heads = max(1, width // 64)
    net = Eagle(width, heads, heads // 3 if heads % 3 == 0 else heads, width * 8 // 3 // 64 * 64)
    scale = float(np.concatenate([r for _, r in all_texts[:64]]).std())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    per = 4
    fast = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    steps = epochs * max(1, len(texts_left) // per)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps + 1, pct_start=0.1)
    done, begin, mean = 0, time.time(), 0.0
    print(f"{len(known)} tokens in the vocabulary, {len(texts_left)} texts to learn from")

    def losses(rows, ids, good, features):
        """Of one pass: how far from the features that came, and from the model's own chances of the next token."""
        guess = net(features, table[ids[:, 1:]]).float()
        want = rows[:, 1:]
        seen = good[:, :-1]
        near = torch.nn.functional.smooth_l1_loss(guess[seen] / scale, want[seen] / scale)
        chances = torch.softmax((want[seen] @ w.T).float(), -1)
        tokens = -(chances * torch.log_softmax((guess[seen] @ w.T).float(), -1)).sum(-1).mean()
        return guess, near + tokens

    for _ in range(epochs):
        order = np.random.default_rng(done).permutation(len(texts_left))
        for i in range(0, max(1, len(order) - per + 1), per):
            rows, ids, good = padded([texts_left[j] for j in order[i : i + per]], place)
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):  # where that is several times as fast
                guess, loss = losses(rows, ids, good, rows[:, :-1])
                # what it says itself in place of the features: that is what drafts go on from
                again = torch.cat((rows[:, :1], guess[:, :-1].detach().float()), 1)
                loss = loss + 0.5 * losses(rows, ids, good, again)[1]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            mean = loss.item() if done == 1 else 0.95 * mean + 0.05 * loss.item()
            print(f"\rstep {done} of {steps}, loss {mean:.3f}, {time.time() - begin:.0f} s ", end="", flush=True)
    with torch.no_grad():
        rows, ids, good = padded([t for t in all_texts[:held] if len(t[0]) > 2], place)
        guess, _ = losses(rows, ids, good, rows[:, :-1])
        again, _ = losses(rows, ids, good, torch.cat((rows[:, :1], guess[:, :-1]), 1))
        seen = torch.zeros_like(good)
        seen[:, :-2] = ids[:, 2:] > 0
        seen = seen[:, :-1]
        right = lambda g: (torch.from_numpy(known)[(g @ w.T).argmax(-1)][:, :-1] == ids[:, 2:])[seen[:, :-1]].float().mean()
        print(f"\nof the tokens held out, right {right(guess):.3f}; behind one of its own rows {right(again):.3f}")
    os.makedirs(out, exist_ok=True)
    result = net.tensors()
    result["lm_head.weight"] = w.to(torch.float16).contiguous()
    result["d2t"] = torch.from_numpy(known - np.arange(len(known)))
    save_file(result, os.path.join(out, "model.safetensors"))
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLMEagle"], "hidden_size": width, "num_attention_heads": net.heads,
                   "num_key_value_heads": net.kv_heads, "head_dim": net.dim, "num_hidden_layers": 1,
                   "intermediate_size": net.gate.out_features, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                   "vocab_size": head.shape[0], "draft_vocab_size": len(known)}, f, indent=1)
        f.write("\n")


def main(model, rows, kind, out, epochs, size):
    torch.manual_seed(1)
    width = matrix(model, "token_embd.weight").shape[1]
    all_texts = texts(rows, width)
    np.random.default_rng(1).shuffle(all_texts)  # those written first are the short ones
    print(f"{sum(len(i) for i, _ in all_texts)} tokens in {len(all_texts)} texts")
    if len(all_texts) < 2:
        sys.exit("too few texts to learn from")
    (medusa if kind == "medusa" else eagle)(model, all_texts, out, epochs, size)


if __name__ == "__main__":
    main(MODEL, ROWS, KIND, OUT, int(EPOCHS), int(SIZE))
