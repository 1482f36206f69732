#!/usr/bin/env python3
"""Medians and ratios of what scripts/compare speed measured: speed_table.py RESULTS THREADS OUT JSON.

RESULTS has lines "side model kind {json}". Appends JSON lines to OUT; prints them, or a table if JSON is empty.
"""
import json
import statistics
import sys


def rows_of(path, threads):
    runs, about = {}, {}
    for line in open(path):
        side, model, kind, text = line.split(" ", 3)
        record = json.loads(text)
        if side != "llmrun":
            about[side] = record.get("peer")
        metrics = ("prefill", "decode") if kind == "single" else ("batch",)
        for metric in metrics:
            name = f"decode of {record['batch']}" if metric == "batch" else metric
            value = float(record["prefill_tps" if metric == "prefill" else "decode_tps"])
            entry = runs.setdefault((model, name), {"runs": {}, "extra": {}})
            entry["runs"].setdefault(side, []).append(value)
            share = record.get(metric + "_share")
            if side == "llmrun" and share:
                entry["extra"].setdefault("share_of_limit", []).append(share)
    for (model, metric), entry in runs.items():
        medians = {side: round(statistics.median(v), 2) for side, v in entry["runs"].items()}
        peers = {side: v for side, v in medians.items() if side != "llmrun"}
        best = max(peers, key=peers.get) if peers else None
        row = {"model": model, "metric": metric, "threads": int(threads), **medians, "best_peer": best,
               "ratio": round(medians["llmrun"] / peers[best], 3) if best else None, "runs": entry["runs"],
               "peers": about}
        for name, values in entry["extra"].items():
            row[name] = round(statistics.median(values), 4)
        yield row


def main():
    path, threads, out, as_json = sys.argv[1:5]
    rows = list(rows_of(path, threads))
    with open(out, "a") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    sides = ["llmrun"] + sorted({s for r in rows for s in r["peers"]})
    count = max(len(r["runs"]["llmrun"]) for r in rows)
    names = sorted({p for r in rows for p in r["peers"].values()})
    print(f"tokens a second, median of {count}, {threads} threads; " + ", ".join(names))
    print(f"{'model':<11} {'':<13}" + "".join(f"{s:>14}" for s in sides) + "   ratio to the best   of the limit")
    for row in rows:
        cells = "".join(f"{row[s]:>14.1f}" if s in row else f"{'-':>14}" for s in sides)
        ratio = f"{row['ratio']:>12.2f}x" if row["ratio"] else f"{'-':>13}"
        share = f"{100 * row['share_of_limit']:>16.1f} %" if "share_of_limit" in row else ""
        print(f"{row['model']:<11} {row['metric']:<13}{cells}{ratio}{share}")


if __name__ == "__main__":
    main()
