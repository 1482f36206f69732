#!/usr/bin/env python3
"""Writes tests/data/sample/ref.json: what sampler stages make of rows of logits, worked out from their definitions.

Plain Python, doubles, whole distributions: a token's entry is its logit or None (it can't be drawn). No code is shared
with src/sample. Definitions: penalties arXiv:1909.05858 and OpenAI's API; top-p 1904.09751; typical 2202.00666; min-p
2407.01082; top-n-sigma 2411.07641; mirostat 2007.14966; XTC and DRY as their author published them; dynamic temperature
and adaptive-p as llama.cpp defines them. Random numbers: two rounds of splitmix64's finalizer over seed, position and
stream, as sample.h says.

The file is { "single": [case], "runs": [case], "thinking": [case], "watermark": [case] }. A single case has the logits, the context, the stages (as
llm.sampler takes them) and the distribution that comes out, best first. A run has a row of logits a step; each step
says the distribution and the token that is drawn from it, with which the state goes on. A "thinking" case has what a model
wants to say, id by id, and what comes out under a budget; a "watermark" case a row, the token before it, and the
distribution (examples/watermark.lua: arXiv:2301.10226 with half of the vocabulary green).
"""
import json
import math
import random

import usage

V = 24
MASK = (1 << 64) - 1


def uniform(seed, position, stream):
    z = seed ^ (0x9E3779B97F4A7C15 * (position + 1) & MASK) ^ (0xD1B54A32D192ED03 * (stream + 1) & MASK)
    for _ in range(2):
        z = z + 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


def live(x):
    return [i for i in range(len(x)) if x[i] is not None]


def softmax(x):
    ids = live(x)
    top = max(x[i] for i in ids)
    e = {i: math.exp(x[i] - top) for i in ids}
    total = math.fsum(e.values())
    return {i: v / total for i, v in e.items()}


def ranked(x):
    """Ids, best first; the lower id first on ties."""
    return sorted(live(x), key=lambda i: (-x[i], i))


def keep(x, ids):
    ids = set(ids)
    return [x[i] if i in ids else None for i in range(len(x))]


# ---- stages: f(x, context, settings) -> x ----

def logit_bias(x, c, bias):
    return [None if v is None else v + bias.get(i, 0) for i, v in enumerate(x)]


def penalties(x, c, repetition=1, presence=0, frequency=0, window=0):
    seen = c["prompt"] + c["generated"]
    if window:
        seen = seen[-window:]
    out = list(x)
    for i in set(seen):
        if out[i] is not None:
            out[i] = out[i] / repetition if out[i] > 0 else out[i] * repetition
    for i in set(c["generated"]):
        if out[i] is not None:
            out[i] -= presence + frequency * c["generated"].count(i)
    return out


def temperature(x, c, t):
    if t <= 0:
        return keep(x, ranked(x)[:1])
    return [None if v is None else v / t for v in x]


def dynamic_temperature(x, c, temperature=1, range=0.5, exponent=1):
    t = temperature
    if range > 0:
        p = softmax(x)
        if len(p) <= 1:
            return x
        h = -math.fsum(q * math.log(q) for q in p.values() if q > 0)
        low = max(0, temperature - range)
        t = low + (temperature + range - low) * (h / math.log(len(p))) ** exponent
    return globals()["temperature"](x, c, t)


def top_k(x, c, k):
    return keep(x, ranked(x)[:k]) if k > 0 else x


def top_p(x, c, limit):
    if limit >= 1:
        return x
    p, total, ids = softmax(x), 0.0, []
    for i in ranked(x):
        ids.append(i)
        total += p[i]
        if total >= limit:
            break
    return keep(x, ids)


def min_p(x, c, part):
    p = softmax(x)
    best = max(p.values())
    return keep(x, [i for i in p if p[i] >= part * best])


def typical(x, c, limit):
    p = softmax(x)
    h = -math.fsum(q * math.log(q) for q in p.values())
    total, ids = 0.0, []
    for i in sorted(ranked(x), key=lambda i: abs(-math.log(p[i]) - h)):
        ids.append(i)
        total += p[i]
        if total >= limit:
            break
    return keep(x, ids)


def top_n_sigma(x, c, n):
    values = [x[i] for i in live(x)]
    mean = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    return keep(x, [i for i in live(x) if x[i] >= max(values) - n * sigma])


def allow(x, c, ids):
    return keep(x, ids)


def ban(x, c, ids):
    return keep(x, [i for i in live(x) if i not in ids])


def min_tokens(x, c, n, ids):
    return ban(x, c, ids) if len(c["generated"]) < n else x


def xtc(x, c, probability=0.5, threshold=0.1):
    if probability <= 0 or threshold > 0.5 or uniform(c["seed"], position(c), 2) > probability:
        return x
    p = softmax(x)
    above = [i for i in ranked(x) if p[i] >= threshold]
    return ban(x, c, above[:-1]) if len(above) >= 2 else x


def history(c, window):
    tokens = c["prompt"] + c["generated"]
    return tokens[-window:] if window else tokens


def dry(x, c, multiplier=0.8, base=1.75, allowed_length=2, window=0, breakers=()):
    tokens, longest = history(c, window), {}
    for i in range(1, len(tokens)):
        m = 0
        while m < i and tokens[i - 1 - m] == tokens[len(tokens) - 1 - m] and tokens[i - 1 - m] not in breakers:
            m += 1
        if m > 0:
            longest[tokens[i]] = max(m, longest.get(tokens[i], 0))
    out = list(x)
    for i, m in longest.items():
        if m >= allowed_length and out[i] is not None:
            out[i] -= multiplier * base ** (m - allowed_length)
    return out


def no_repeat_ngram(x, c, n=3, window=0):
    tokens = history(c, window)
    if n < 1 or len(tokens) < n:
        return x
    tail = tokens[len(tokens) - n + 1:]
    seen = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return ban(x, c, [g[-1] for g in seen if list(g[:-1]) == tail])


def position(c):
    return len(c["prompt"]) + len(c["generated"])


STAGES = dict(logit_bias=logit_bias, penalties=penalties, temperature=temperature,
              dynamic_temperature=dynamic_temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical=typical,
              top_n_sigma=top_n_sigma, allow=allow, ban=ban, min_tokens=min_tokens, xtc=xtc, dry=dry,
              no_repeat_ngram=no_repeat_ngram)


# ---- stages that learn ----

class Mirostat:
    def __init__(self, version=2, tau=5, eta=0.1, m=100):
        self.version, self.tau, self.eta, self.m, self.mu = version, tau, eta, m, 2 * tau

    def apply(self, x):
        order, p = ranked(x), softmax(x)
        if self.version == 2:
            ids = [i for i in order if -math.log2(p[i]) <= self.mu]
            return keep(x, ids or order[:1])
        best = order[:self.m]
        if len(best) < 2:
            return x
        t = [math.log((i + 2) / (i + 1)) for i in range(len(best) - 1)]
        b = [math.log(p[best[i]] / p[best[i + 1]]) for i in range(len(best) - 1)]
        s = sum(u * v for u, v in zip(t, b)) / sum(u * u for u in t)
        e = s - 1
        k = (e * 2**self.mu / (1 - len(x) ** -e)) ** (1 / s)
        self.dense = k >= len(x)
        return keep(x, order[:max(1, int(min(k, len(x))))])

    def took(self, before, after, token):
        self.mu -= self.eta * (-math.log2(softmax(after)[token]) - self.tau)


class AdaptiveP:
    def __init__(self, target=0.5, decay=0.9):
        self.target, self.decay = target, decay
        self.sum, self.weight = target / (1 - decay), 1 / (1 - decay)

    def apply(self, x):
        goal = min(1.0, max(0.0, 2 * self.target - self.sum / self.weight))
        p = softmax(x)
        out = []
        for i in range(len(x)):
            d = abs(p.get(i, 0) - goal) / 0.3
            out.append(None if x[i] is None else 5 - 10 * d * d / (1 + d))
        return out

    def took(self, before, after, token):
        self.sum = softmax(before)[token] + self.decay * self.sum
        self.weight = 1 + self.decay * self.weight


LEARN = dict(mirostat=Mirostat, adaptive_p=AdaptiveP)


# ---- cases ----

def f32(v):
    """Rounded so that a float holds it without loss that matters."""
    return round(v * 64) / 64


def row(rng, scale=3.0):
    while True:
        x = [f32(rng.gauss(0, scale)) for _ in range(V)]
        if len(set(x)) == V:
            return x


def lua(name, args, kw):
    """The stage as llm.sampler takes it: a list of its place values, and its settings."""
    return {"name": name, "args": list(args), "settings": kw}


def settings_of(name, args, kw):
    args = [{int(k): v for k, v in a.items()} if isinstance(a, dict) else a for a in args]
    return args, kw


def distribution(x):
    p = softmax(x)
    return [[i, p[i]] for i in sorted(p, key=lambda i: (-p[i], -x[i], i)) if p[i] > 0]


def single(rng, name, stages, prompt=None, generated=None, seed=None, scale=3.0):
    c = {"prompt": prompt or [], "generated": generated or [], "seed": rng.randrange(1 << 40) if seed is None else seed}
    logits = row(rng, scale)
    x = list(logits)
    for stage, args, kw in stages:
        x = STAGES[stage](x, c, *args, **kw)
    out = []
    for stage, args, kw in stages:
        if args and isinstance(args[0], dict):
            args = [[[i, b] for i, b in sorted(args[0].items())]]
        out.append(lua(stage, args, kw))
    return {"name": name, "logits": logits, "context": c, "stages": out, "expect": distribution(x)}


def run(rng, name, stage, kw, steps, before=(), scale=3.0):
    seed, learner, rows = rng.randrange(1 << 40), LEARN[stage](**kw), []
    for n in range(steps):
        logits = row(rng, scale)
        x = list(logits)
        c = {"prompt": [0], "generated": [0] * n, "seed": seed}
        for s, args, k in before:
            x = STAGES[s](x, c, *args, **k)
        after = learner.apply(x)
        p, order = softmax(after), ranked(after)
        u, total, token = uniform(seed, 1 + n, 0), 0.0, None
        # a row that nothing narrowed is drawn from in the order of ids
        dense = not before and (stage == "adaptive_p" or getattr(learner, "dense", False))
        for i in sorted(order) if dense else order:
            token, total = i, total + p[i]
            if total > u:
                break
        rows.append({"logits": logits, "expect": distribution(after), "token": token})
        learner.took(x, after, token)
    return {"name": name, "seed": seed, "rows": rows,
            "stages": [lua(s, a, k) for s, a, k in before] + [lua(stage, [], kw)]}


# ---- thinking budget: what is said, as a function of all that was said before ----

def holds(tokens, at, marker):
    return tokens[at - len(marker):at] == marker and at >= len(marker)


def thoughts_since(prompt, said, start, stop):
    """Where the thoughts that are open now began in prompt + said, not before the end of the prompt; None: closed."""
    tokens, since = prompt + said, None
    for at in range(1, len(tokens) + 1):
        if since is not None and holds(tokens, at, stop) and at - len(stop) >= 0:
            since = None
        elif since is None and holds(tokens, at, start):
            since = at
    return None if since is None else max(since, len(prompt))


def thinking(rng, budget, start, stop, message, opened):
    prompt = [rng.choice([5, 6, 7]) for _ in range(4)] + (start if opened else [])
    wishes = []
    while len(wishes) < 40:
        wishes += rng.choice([[5], [6], [7], [5, 6], start, stop, start])
    wishes, said, forced = wishes[:40], [], message + stop
    for wish in wishes:
        since = thoughts_since(prompt, said, start, stop)
        over = None if since is None else len(prompt) + len(said) - since - budget
        said.append(wish if over is None or over < 0 else forced[over])
    return {"budget": budget, "start": start, "stop": stop, "message": message, "prompt": prompt, "wishes": wishes,
            "said": said}


# ---- watermark ----

def green(secret, before, token):
    word = (before * 2654435761 ^ token * 2246822519 ^ secret) % 2**32
    word = (word ^ word // 2**15) * 739982445 % 2**32
    word = (word ^ word // 2**12) * 695872825 % 2**32
    return (word ^ word // 2**15) % 2 == 1


def watermark(rng, top_k):
    logits, last = row(rng), rng.randrange(V)
    x = STAGES["top_k"](logits, {}, top_k)
    marked = [v if v is None or not green(0x5EED, last, i) else v + 3.0 for i, v in enumerate(x)]
    return {"logits": logits, "last": last, "top_k": top_k, "expect": distribution(marked)}


def main(path):
    rng = random.Random(2026)
    cases = []

    def add(name, *stages, **kw):
        cases.append(single(rng, name, [(s[0], s[1] if len(s) > 1 else [], s[2] if len(s) > 2 else {}) for s in stages],
                            **kw))

    some = [rng.randrange(V) for _ in range(20)]
    loop = [5, 6, 7, 8, 1, 2, 5, 6, 7, 9, 3, 5, 6, 7]
    for t in (0, 0.3, 0.7, 1.9):
        add(f"temperature {t}", ("temperature", [t]))
    for k in (1, 5, 23, 24, 100, 0):
        add(f"top_k {k}", ("top_k", [k]))
    for p in (0.01, 0.5, 0.9, 0.999, 1):
        add(f"top_p {p}", ("top_p", [p]))
        add(f"top_p {p} after top_k", ("top_k", [12]), ("top_p", [p]))
        add(f"typical {p}", ("typical", [p]))
    for p in (0.05, 0.3, 1):
        add(f"min_p {p}", ("min_p", [p]))
    for n in (0.5, 1, 2):
        add(f"top_n_sigma {n}", ("top_n_sigma", [n]))
        add(f"top_n_sigma {n} after top_k", ("top_k", [9]), ("top_n_sigma", [n]))
    add("bias", ("logit_bias", [{3: 2.5, 4: -1.25, 7: 0.5}]))
    add("allow", ("allow", [[2, 9, 9, 20]]))
    add("ban", ("ban", [[2, 9, 20]]), ("top_k", [10]))
    add("ban after top_k", ("top_k", [10]), ("ban", [list(range(0, V, 2))]))
    add("min_tokens in force", ("min_tokens", [3, [1, 2]]), generated=[4, 5])
    add("min_tokens over", ("min_tokens", [3, [1, 2]]), generated=[4, 5, 6])
    for kw in (dict(repetition=1.3), dict(presence=0.7), dict(frequency=0.4), dict(repetition=0.8, window=5),
               dict(repetition=1.5, presence=0.25, frequency=0.125)):
        add(f"penalties {kw}", ("penalties", [], kw), prompt=some[:8], generated=some[8:])
        add(f"penalties {kw} after top_k", ("top_k", [12]), ("penalties", [], kw), prompt=some[:8], generated=some[8:])
    for kw in (dict(), dict(temperature=0.8, range=0.8, exponent=2), dict(temperature=0.5, range=1, exponent=0.5),
               dict(temperature=0.7, range=0)):
        add(f"dynamic {kw}", ("dynamic_temperature", [], kw))
        add(f"dynamic {kw} after min_p", ("min_p", [0.1]), ("dynamic_temperature", [], kw), scale=1.5)
    add("dynamic of one token", ("top_k", [1]), ("dynamic_temperature", [], {}))
    for kw in (dict(probability=1), dict(probability=1, threshold=0.02), dict(probability=0.5, threshold=0.05),
               dict(probability=0), dict(probability=1, threshold=0.6), dict(probability=1, threshold=0)):
        for seed in (1, 2, 3, 4):
            add(f"xtc {kw} {seed}", ("xtc", [], kw), seed=seed, scale=1.2, generated=some[:seed])
            add(f"xtc {kw} {seed} after top_k", ("top_k", [8]), ("xtc", [], kw), seed=seed, scale=1.2)
    for kw in (dict(), dict(multiplier=2, base=3, allowed_length=1), dict(allowed_length=3), dict(allowed_length=4),
               dict(window=7), dict(window=10), dict(breakers=[6]), dict(breakers=[7]), dict(breakers=[1, 20]),
               dict(multiplier=0), dict(base=1)):
        kw = dict(dict(breakers=[]), **kw)
        add(f"dry {kw}", ("dry", [], kw), prompt=loop[:5], generated=loop[5:])
        add(f"dry {kw} after top_k", ("top_k", [16]), ("dry", [], kw), prompt=loop)
        add(f"dry of a run {kw}", ("dry", [], kw), prompt=[4] * 9, generated=[4, 4])
    add("dry without a history", ("dry", [], dict(breakers=[])))
    for kw in (dict(n=1), dict(n=2), dict(n=3), dict(n=4), dict(n=5), dict(n=3, window=8), dict(n=0)):
        add(f"no_repeat {kw}", ("no_repeat_ngram", [], kw), prompt=loop[:4], generated=loop[4:])
        add(f"no_repeat {kw} after top_k", ("top_k", [20]), ("no_repeat_ngram", [], kw), prompt=loop)
    add("a long chain", ("penalties", [], dict(repetition=1.2)), ("dry", [], dict(breakers=[])), ("temperature", [0.9]),
        ("min_p", [0.01]), ("top_k", [15]), ("top_p", [0.97]), ("xtc", [], dict(probability=1, threshold=0.2)),
        prompt=loop, generated=some)

    runs = []
    for version in (1, 2):
        for tau, eta in ((5, 0.1), (2, 0.1), (1, 0.3), (0.2, 1.0)):
            kw = dict(version=version, tau=tau, eta=eta)
            runs.append(run(rng, f"mirostat {version} tau {tau} eta {eta}", "mirostat", kw, 20))
        runs.append(run(rng, f"mirostat {version} behind a temperature and top_k", "mirostat",
                        dict(version=version, tau=1.5, eta=0.2), 20, [("temperature", [1.3], {}), ("top_k", [14], {})]))
    runs.append(run(rng, "mirostat 1 with a short estimate", "mirostat", dict(version=1, tau=2, eta=0.1, m=5), 20))
    for target, decay in ((0.5, 0.9), (0.2, 0.9), (0.8, 0.5), (0.05, 0)):
        runs.append(run(rng, f"adaptive_p {target} {decay}", "adaptive_p", dict(target=target, decay=decay), 20))
        runs.append(run(rng, f"adaptive_p {target} {decay} behind min_p", "adaptive_p",
                        dict(target=target, decay=decay), 20, [("min_p", [0.05], {})]))
    cases.append(single(rng, "greedy", [("temperature", [0], {})]))
    cases[-1]["stages"][0] = lua("greedy", [], {})
    cases.append(single(rng, "greedy behind a bias", [("logit_bias", [{5: 9.0}], {}), ("temperature", [0], {})]))
    cases[-1]["stages"][1] = lua("greedy", [], {})
    thoughts = [thinking(rng, budget, start, stop, message, opened) for budget in (0, 1, 3, 9)
                for start, stop in (([1], [2]), ([1, 3], [2, 4])) for message in ([], [6, 5, 7]) for opened in (0, 1)]
    marks = [watermark(rng, k) for k in (4, 8, 8, 16, 24)]
    with open(path, "w", encoding="utf-8") as f:
        text = json.dumps({"single": cases, "runs": runs, "thinking": thoughts, "watermark": marks}, separators=(",", ":"))
        json.dump(json.loads(text, parse_float=lambda s: float(f"{float(s):.7g}")), f, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    main(usage.arguments("[FILE]")[0] or "tests/data/sample/ref.json")
