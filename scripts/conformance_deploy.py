"""Tries examples/deploy/haproxy.cfg: Debian's haproxy before two llmrun servers.

Usage: conformance_deploy.py PROGRAM MODEL CONFIG. Starts the servers and haproxy itself. Prints a line for each check
and ends with "N passed, N failed".
"""
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time

import usage
from conformance_checks import llmrun_server, run, start

PROGRAM, MODEL, CONFIG = usage.arguments("PROGRAM MODEL CONFIG")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Replica:
    """An llmrun server on a port of its own."""

    def __init__(self):
        self.process, self.address = llmrun_server(PROGRAM, MODEL)


replicas = [Replica(), Replica()]
port = free_port()
text = open(CONFIG).read().replace("bind :8080", f"bind 127.0.0.1:{port}")
for name, r in zip(("127.0.0.1:8081", "127.0.0.1:8082"), replicas):
    assert name in text
    text = text.replace(name, r.address)
text = text.replace("fall 2", "fall 100")  # a machine that stands still for seconds is no failed replica
with tempfile.NamedTemporaryFile("w", suffix=".cfg", delete=False) as f:
    f.write(text)
    cfg = f.name
assert subprocess.run(["haproxy", "-c", "-q", "-f", cfg]).returncode == 0, "the configuration is not valid"
start("haproxy", "-db", "-f", cfg, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ask(path, body=None, headers=None, method=None):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
    c.request(method or ("POST" if body is not None else "GET"), path, data,
              {"Content-Type": "application/json", **(headers or {})})
    r = c.getresponse()
    text = r.read().decode()
    served = r.getheader("X-Served-By")
    c.close()
    return r.status, served, json.loads(text) if text.startswith("{") else text


def chat(messages, **more):
    status, served, body = ask("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0,
                                                        **more})
    assert status == 200, (status, body)
    return served, body


def user(text):
    return {"role": "user", "content": text}


def comes_up():
    for _ in range(100):
        try:
            if ask("/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("haproxy does not answer")


def keeps_conversations():
    seen, cached = {}, 0
    for k in range(8):
        # with and without a system message, as text and as parts
        begin = [{"role": "system", "content": "You are terse."}] if k % 2 else []
        first = f"Question {k}: name a colour, and say in one sentence why you like it more than all others."
        messages = begin + [user([{"type": "text", "text": first}] if k % 3 == 0 else first)]
        where = set()
        for turn in range(3):
            served, body = chat(messages)
            where.add(served)
            if turn:
                cached += body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            messages += [{"role": "assistant", "content": body["choices"][0]["message"]["content"]}, user("And more?")]
        assert len(where) == 1, (k, where)
        seen.setdefault(where.pop(), []).append(k)
    assert set(seen) == {"a", "b"}, seen
    assert cached == 16, cached


def spreads_them():
    counts = {"a": 0, "b": 0}
    for k in range(40):
        status, served, _ = ask("/tokenize", {"prompt": f"text {k} of many"})
        assert status == 200
        counts[served] += 1
    assert min(counts.values()) >= 8, counts


def obeys_the_client():
    for how in ({"headers": {"X-Prefix-Key": "mine"}}, {"key": "mine"}):
        where = set()
        for k in range(6):
            body = {"prompt": f"text {k}", "max_tokens": 1}
            if "key" in how:
                body["prompt_cache_key"] = how["key"]
            where.add(ask("/v1/completions", body, how.get("headers"))[1])
        assert len(where) == 1, where


def passes_long_bodies():
    body = json.dumps({"messages": [user("hi")], "max_tokens": 1, "x": "a" * 300000})
    assert ask("/v1/chat/completions", body)[0] == 200
    beyond = {"messages": [user("word " * 60000)], "max_tokens": 1}  # longer than tune.bufsize, and than the context
    status, _, answer = ask("/v1/chat/completions", beyond)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
    assert ask("/v1/chat/completions", "{")[0] == 400


def streams():
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    c.request("POST", "/v1/chat/completions", json.dumps({"messages": [user("Count.")], "max_tokens": 60, "stream": True,
                                                          "ignore_eos": True}), {"Content-Type": "application/json"})
    r = c.getresponse()
    times, last = [], b""
    for line in r:
        if line.startswith(b"data: "):
            times.append(time.time())
            last = line
    assert last == b"data: [DONE]\n", last
    assert times[len(times) // 2] - times[0] > 0.2 * (times[-1] - times[0]) > 0, "it came at once"


def running():
    total = 0
    for r in replicas:
        if r.process.poll() is None:
            c = http.client.HTTPConnection(r.address, timeout=10)
            c.request("GET", "/metrics")
            text = c.getresponse().read().decode()
            total += sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines()
                         if x.startswith("llmrun:num_requests_running{"))
    return total


def tells_of_clients_that_leave():
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    c.request("POST", "/v1/chat/completions", json.dumps({"messages": [user("Count to a million.")], "max_tokens": 1900,
                                                          "stream": True, "ignore_eos": True}),
              {"Content-Type": "application/json"})
    r = c.getresponse()
    r.readline()
    assert running() == 1
    r.close()
    c.close()
    for _ in range(50):
        if running() == 0:
            return
        time.sleep(0.1)
    raise AssertionError("the request goes on")


def survives_a_replica():
    replicas[0].process.terminate()
    for k in range(20):
        status, served, _ = ask("/tokenize", {"prompt": f"text {k} of many"})
        assert status == 200 and served, (k, status, served)
        time.sleep(0.05)
    assert served == "b"
    assert replicas[0].process.wait(30) == 0


run("haproxy", [comes_up, keeps_conversations, spreads_them, obeys_the_client, passes_long_bodies, streams,
                tells_of_clients_that_leave, survives_a_replica])
