#!/usr/bin/env python3
"""The other side of scripts/compare programs: the two programs of programs.json against a server with the OpenAI API.

One thread a branch, connections that stay open, POST /v1/chat/completions. What llama-server offers is used: prompts stay
in its slots (cache_prompt), drafts of one prompt come from one request (--ask n), which computes the prompt once, or each
from its own (--ask single). One JSON line a run: seconds, tokens of the prompts, of those computed, generated.
"""
import argparse
import concurrent.futures
import http.client
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

ap = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
ap.add_argument("url", help="of the server, as http://127.0.0.1:8080")
ap.add_argument("--runs", type=int, default=1)
ap.add_argument("--first", type=int, default=1, help="number that stands in the first run's prefix (default 1)")
ap.add_argument("--program", choices=["tree", "agent"], action="append", help="one of them (default: both)")
ap.add_argument("--ask", choices=["n", "single"], default="n", help="one request for n drafts (default), or one for each")
ap.add_argument("--name", default="server", help="of this side, for the output")
ap.add_argument("--beside", nargs=argparse.REMAINDER, help="a command (llmrun's side) to run first; its lines are printed, too (last)")
args = ap.parse_args()

with open(os.path.splitext(os.path.abspath(__file__))[0] + ".json", encoding="utf-8") as f:
    config = json.load(f)
server = urllib.parse.urlparse(args.url)
pool = concurrent.futures.ThreadPoolExecutor(16)
local = threading.local()
lock = threading.Lock()
usage = {}


def post(body):
    """The answer's status and text, over this thread's connection; a new one if the server has closed it meanwhile."""
    for fresh in (False, True):
        if fresh or not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(server.hostname, server.port, timeout=600)
            local.connection.connect()
            local.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            local.connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            reply = local.connection.getresponse()
            return reply.status, reply.read()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            if fresh:
                raise
    raise AssertionError


def chat(messages, n=1, **fields):
    """Choices of one request."""
    status, text = post(json.dumps({"messages": messages, "cache_prompt": True, "n": n, **fields}))
    if status != 200:
        raise RuntimeError(f"{status}: {text[:500].decode()}")
    r = json.loads(text)
    with lock:
        u = r["usage"]
        details = u.get("prompt_tokens_details") or {}
        usage["told"] |= "cached_tokens" in details
        cached = details.get("cached_tokens", 0)
        usage["prompt"] += u["prompt_tokens"]
        usage["cached"] += cached
        usage["generated"] += n * fields["max_tokens"]  # the server counts those of one choice
        usage["calls"] += 1
    return r["choices"]


def drafts(messages, n, tokens, seed):
    """n next turns: texts."""
    fields = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95,
              "min_p": 0}
    if args.ask == "single":
        jobs = [pool.submit(chat, messages, seed=seed + i, **fields) for i in range(n)]
        return [j.result()[0]["message"]["content"] for j in jobs]
    return [c["message"]["content"] for c in chat(messages, n, seed=seed, **fields)]


def rating(messages, question):
    """The expected digit."""
    choice = chat(messages + [{"role": "user", "content": question}], max_tokens=1, temperature=0, logprobs=True,
                  top_logprobs=10)[0]
    total = weight = 0.0
    for t in choice["logprobs"]["content"][0]["top_logprobs"]:
        if t["token"].strip() in "123456789" and len(t["token"].strip()) == 1:
            p = math.exp(t["logprob"])
            total, weight = total + int(t["token"]) * p, weight + p
    return total / weight if weight else 0.0


def begin(task, run):
    return [{"role": "system", "content": f"Shift {run}.\n" + "\n\n".join(config["system"])},
            {"role": "user", "content": task.replace("%d", str(run))}]


def proposals(bases, n, c, seed):
    """n next turns of each of several conversations, judged side by side; best first."""
    jobs = [threads.submit(drafts, b, n, c["step_tokens"], seed + 10 * i) for i, b in enumerate(bases)]
    found = [b + [{"role": "assistant", "content": text}] for b, j in zip(bases, jobs) for text in j.result()]
    scores = [pool.submit(rating, m, c["rate"]) for m in found]
    order = sorted(range(len(found)), key=lambda i: (-scores[i].result(), i))
    return [found[i] for i in order]


def tree(run):
    c = config["tree"]
    kept = [begin(c["task"], run)]
    for level in range(1, c["levels"] + 1):
        best = proposals(kept, c["proposals"], c, 100 * level)[:c["keep"]]
        kept = [m + [{"role": "user", "content": c["next"] if level < c["levels"] else c["answer"]}] for m in best]
    drafts(kept[0], 1, c["answer_tokens"], 7)


def agent(run):
    c = config["agent"]
    messages = begin(c["task"], run)
    for turn in range(len(c["results"]) + 1):
        messages = proposals([messages], c["branches"], c, 100 * turn)[0]
        if turn < len(c["results"]):
            messages = messages + [{"role": "user", "content": c["results"][turn]}]


if args.beside:
    ours = subprocess.run(args.beside, stdout=subprocess.PIPE, text=True, check=False)
    if ours.returncode:
        sys.exit(f"{args.beside[0]} ended with {ours.returncode}")
    print(ours.stdout, end="", flush=True)
threads = concurrent.futures.ThreadPoolExecutor(8)  # of drafts, which wait for those of pool
for number in range(args.first, args.first + args.runs):
    for name in args.program or ("tree", "agent"):
        program = {"tree": tree, "agent": agent}[name]
        usage = {"prompt": 0, "cached": 0, "generated": 0, "calls": 0, "told": False}
        start = time.perf_counter()
        program(number + 5000 * (name == "agent"))  # a prefix that the server has not seen
        usage["seconds"] = time.perf_counter() - start
        told = usage.pop("told")
        usage["computed"] = usage["prompt"] - usage["cached"] + usage["generated"] if told else None
        usage.update(program=name, side=args.name)
        print(json.dumps(usage), flush=True)
