#!/usr/bin/env python3
"""One round of scripts/compare serve: the same load on every server, one after another.

serve_round.py LLMRUN CONFIG SEED [ONLY]; CONFIG is a JSON file: {"model", "concurrency", "prompt", "shared", "output",
"requests", "results", "sides": {name: {"url", "pid"}}}. While one server is measured, the processes of the others are
stopped, so that none can take the machine from it. Adds a line "side model concurrency {json}" for each to the results.
"""
import json
import os
import signal
import subprocess
import sys


def tree(pid):
    """A process and all below it."""
    below = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as f:
                    below.setdefault(int(f.read().rsplit(")", 1)[1].split()[1]), []).append(int(name))
            except OSError:
                pass
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += below.get(found[-1], [])
    return found


def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def peak_mb(pids):
    """Sum of the processes' peak resident sets."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8") as f:
                total += sum(int(line.split()[1]) for line in f if line.startswith("VmHWM"))
        except OSError:
            pass
    return total / 1024


def main():
    llmrun, path, seed = sys.argv[1:4]
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    sides, size = config["sides"], config["concurrency"]
    chosen = sys.argv[4:] or list(sides)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # nobody is left stopped
    trees = {name: tree(side["pid"]) for name, side in sides.items()}
    for pids in trees.values():
        send(pids, signal.SIGSTOP)
    try:
        for name in chosen:
            send(trees[name], signal.SIGCONT)
            run = subprocess.run([
                llmrun, "bench", "--url", sides[name]["url"], "--requests", str(max(size, config["requests"])),
                "--concurrency", str(size), "--prompt", str(config["prompt"]), "--shared", str(config["shared"]),
                "--output", str(config["output"]), "--load-seed", seed, "--json"],
                capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(f"{name} failed: {run.stderr.strip()[-500:]}")
            record = json.loads(run.stdout)
            record["peak_mb"] = peak_mb(trees[name])
            with open(config["results"], "a", encoding="utf-8") as f:
                f.write(f"{name} {config['model']} {size} {json.dumps(record)}\n")
            send(trees[name], signal.SIGSTOP)
    finally:
        for pids in trees.values():
            send(pids, signal.SIGCONT)


if __name__ == "__main__":
    main()
