"""Tries examples/deploy/prometheus.yml and dashboard.json: Debian's prometheus scraping two llmrun servers with a key.

Usage: conformance_prometheus.py PROGRAM MODEL FOLDER. Starts the servers and prometheus itself. Prints a line for each
check and ends with "N passed, N failed". Only the addresses, the key's file and the interval of the configuration are
changed. Grafana is not needed: its part of the dashboard is checked for what it reads of a panel, and every expression is
asked of prometheus with the variables filled in.
"""
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse

import usage
from conformance_checks import llmrun_server, run, start

PROGRAM, MODEL, FOLDER = usage.arguments("PROGRAM MODEL FOLDER")
KEY = "sk-scrape"
work = tempfile.TemporaryDirectory()


def path(name, text=None):
    full = os.path.join(work.name, name)
    if text is not None:
        with open(full, "w", encoding="utf-8") as f:
            f.write(text)
    return full


servers = [llmrun_server(PROGRAM, MODEL, "--api-key", KEY)[1] for _ in range(2)]
with open(os.path.join(FOLDER, "prometheus.yml"), encoding="utf-8") as file:
    config = file.read()
for old, new in (("127.0.0.1:8081", servers[0]), ("127.0.0.1:8082", servers[1]),
                 ("/etc/prometheus/llmrun-key", path("key", KEY)), ("scrape_interval: 5s", "scrape_interval: 1s")):
    assert old in config, old
    config = config.replace(old, new)
with open(os.path.join(FOLDER, "dashboard.json"), encoding="utf-8") as file:
    board = json.load(file)
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % s.getsockname()[1]


def request(host, method, what, body=None, headers=None):
    c = http.client.HTTPConnection(host, timeout=60)
    try:
        c.request(method, what, body, headers or {})
        r = c.getresponse()
        return r.status, r.read().decode()
    finally:
        c.close()


def api(what, **query):
    status, text = request(address, "GET", f"/api/v1/{what}?" + urllib.parse.urlencode(query))
    answer = json.loads(text)
    assert status == 200 and answer["status"] == "success", (what, query, text[:300])
    return answer["data"]


def eventually(condition, seconds=60):
    end, last = time.time() + seconds, None
    while time.time() < end:
        try:
            last = condition()
            if last:
                return last
        except (OSError, AssertionError) as e:
            last = e
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s: {last!r}")


def has_a_valid_configuration():
    done = subprocess.run(["promtool", "check", "config", path("prometheus.yml", config)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, text = request(servers[0], "GET", "/metrics", headers={"Authorization": "Bearer " + KEY})
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    # names are vLLM's with another word before the colon, so that dashboards can be taken over
    said = [line for line in done.stderr.splitlines() if not line.endswith("metric names should not contain ':'")
            and not line.startswith("llmrun:iteration_tokens_total non-counter")]
    assert not said and not done.stdout, said


def scrapes_both_with_the_key():
    start("prometheus", "--config.file", path("prometheus.yml"), "--storage.tsdb.path", path("data"),
          "--web.listen-address", address, "--log.level", "error", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: sorted(t["labels"]["instance"] for t in api("targets")["activeTargets"]
                              if t["health"] == "up" and t["lastError"] == "") == sorted(servers))


def sees_what_the_servers_did():
    body = json.dumps({"messages": [{"role": "user", "content": "Name three colours of the sky."}], "max_tokens": 12,
                       "ignore_eos": True})
    for n, server in ((3, servers[0]), (1, servers[1])):
        for _ in range(n):
            status, text = request(server, "POST", "/v1/chat/completions", body,
                                   {"Content-Type": "application/json", "Authorization": "Bearer " + KEY})
            assert status == 200, text

    def counted():
        found = {r["metric"]["instance"]: float(r["value"][1])
                 for r in api("query", query="llmrun:generation_tokens_total")["result"]}
        return found == {servers[0]: 36, servers[1]: 12}
    eventually(counted)


def expressions():
    for panel in board["panels"]:
        for target in panel["targets"]:
            expr = target["expr"].replace("$model", ".*").replace("$instance", ".*").replace("$__rate_interval", "1m")
            assert "$" not in expr, expr
            yield panel, expr


def has_series_for_every_expression():
    names = set(api("label/__name__/values"))
    for panel, expr in expressions():
        for name in re.findall(r"llmrun:\w+", expr):
            assert name in names, (panel["title"], name)
        api("query", query=expr)  # parses, and can be computed

    def drawn():
        # a rate wants two scrapes around what it counts; without any request of a kind a ratio stays undefined
        return [p["title"] for p, e in expressions() if not api("query", query=e)["result"]]
    empty = eventually(lambda: drawn() or "none")
    assert empty == "none", empty


def has_figures_where_requests_were():
    wanted = {"Time to first token", "Between tokens", "Whole requests", "A step of the engine", "Tokens a second",
              "Answers by status"}

    def numbers():
        found = set()
        for panel, expr in expressions():
            values = [float(r["value"][1]) for r in api("query", query=expr)["result"]]
            if any(v > 0 for v in values):
                found.add(panel["title"])
        return wanted <= found
    eventually(numbers, 90)


def fills_the_variables():
    for v in board["templating"]["list"]:
        m = re.fullmatch(r"label_values\((\S+), (\w+)\)", v["query"]) if v["type"] == "query" else None
        if m:
            series = api("series", **{"match[]": m.group(1)})
            assert {s.get(m.group(2)) for s in series} - {None}, v["query"]


def is_a_dashboard_that_grafana_reads():
    assert isinstance(board["schemaVersion"], int) and board["title"] and board["uid"]
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for p in board["panels"]:
        assert p["type"] in {"stat", "timeseries", "gauge", "bargauge", "table", "heatmap"}, p["type"]
        g = p["gridPos"]
        assert 0 <= g["x"] and 0 < g["w"] and g["x"] + g["w"] <= 24 and g["h"] > 0, p["title"]
        cells = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert not cells & taken, p["title"]
        taken |= cells
        refs = [t["refId"] for t in p["targets"]]
        assert len(set(refs)) == len(refs), p["title"]
        assert p["datasource"], p["title"]


run("prometheus", [has_a_valid_configuration, scrapes_both_with_the_key, sees_what_the_servers_did,
                   has_series_for_every_expression, has_figures_where_requests_were, fills_the_variables,
                   is_a_dashboard_that_grafana_reads], last=work.cleanup)
