#!/usr/bin/env python3
"""Medians and ratios of what scripts/compare serve measured: serve_table.py RESULTS THREADS OUT JSON PEER=ABOUT...

RESULTS has lines "side model concurrency {json}". Appends JSON lines to OUT; prints them, or a table if JSON is empty.
A ratio above 1: llmrun is faster. Cells in which a peer is ahead are named below the table.
"""
import json
import statistics
import sys

KEYS = ("output_rate", "ttft_mean_ms", "ttft_ms", "ttft_p99_ms", "tpot_ms", "peak_mb")
SHOWN = KEYS[:5]


def read(path):
    runs = {}
    with open(path, encoding="utf-8") as f:
        for line in f:
            side, model, size, text = line.split(" ", 3)
            r = json.loads(text)
            if r["failed"]:
                sys.exit(f"{side}: {r['failed']} requests failed on {model}")
            ttft = r["ttft_ms"]
            values = {"output_rate": r["output_rate"], "ttft_mean_ms": ttft["mean"], "ttft_ms": ttft["median"],
                      "ttft_p99_ms": ttft["p99"], "tpot_ms": r["tpot_ms"]["median"], "peak_mb": r["peak_mb"]}
            runs.setdefault((model, int(size)), {}).setdefault(side, []).append(values)
    return runs


def ratio(key, mine, theirs):
    if not mine or not theirs:
        return 0.0
    return mine / theirs if key == "output_rate" else theirs / mine


def rows_of(runs, threads, about):
    for (model, size), sides in runs.items():
        if "llmrun" not in sides:
            continue
        middle = {s: {k: statistics.median(v[k] for v in list_) for k in KEYS} for s, list_ in sides.items()}
        yield {"mode": "serve", "model": model, "concurrency": size, "threads": threads, "peers": about,
               "runs": len(sides["llmrun"]), "sides": {
                   s: {k: round(v, 2) for k, v in m.items()} |
                      ({} if s == "llmrun" else
                       {"ratio": {k: round(ratio(k, middle["llmrun"][k], m[k]), 3) for k in KEYS}})
                   for s, m in middle.items()}}


def main():
    path, threads, out, as_json = sys.argv[1:5]
    about = dict(a.split("=", 1) for a in sys.argv[5:])
    rows = list(rows_of(read(path), int(threads), about))
    with open(out, "a", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
            if as_json:
                print(json.dumps(row))
    if as_json:
        return
    if not rows:
        sys.exit("nothing was measured")
    print(f"medians of {rows[0]['runs']}; {threads} threads; ratios above 1: llmrun is faster")
    for name, text in about.items():
        print(f"  {name}: {text}")
    print(f"{'model':<10} {'at once':>7} {'server':<14} {'tokens/s':>9} {'ratio':>6} {'TTFT mean':>9} {'ratio':>6} "
          f"{'median':>9} {'ratio':>6} {'p99, ms':>9} {'ratio':>6} {'TPOT ms':>9} {'ratio':>6} {'peak MB':>8}")
    losing = []
    for row in rows:
        for side, m in row["sides"].items():
            cells = []
            for key in SHOWN:
                r = m["ratio"][key] if "ratio" in m else None
                cells.append(f"{m[key]:>9.1f} " + (f"{r:>6.2f}" if r else " " * 6))
                if r and r < 1:
                    losing.append(f"{row['model']}, {row['concurrency']} at once, {key}: {side} is ahead ({r:.2f})")
            print(f"{row['model']:<10} {row['concurrency']:>7} {side:<14} {' '.join(cells)} {m['peak_mb']:>8.0f}")
    for text in losing:
        print("losing: " + text)


if __name__ == "__main__":
    main()
