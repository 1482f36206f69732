"""What the conformance programs share: processes that are ended with the program, llmrun servers, and checks.

A check is a function that raises if something is wrong. run() prints a line for each and ends the program with
"N passed, N failed", which scripts/conformance adds up.
"""
import re
import subprocess
import sys
import threading

started = []


def start(*words, **kw):
    """Starts a process that run() ends."""
    p = subprocess.Popen(words, **kw)
    started.append(p)
    return p


def llmrun_server(program, model, *flags):
    """Starts llmrun serve on a free port; the process and its HOST:PORT."""
    p = start(program, "serve", "-m", model, "--port", "0", "--no-page", "--threads", "1", *flags,
              stderr=subprocess.PIPE, text=True)
    for line in p.stderr:
        if " at http" in line:
            threading.Thread(target=p.stderr.read, daemon=True).start()
            return p, re.search(r"http://(\S+)", line).group(1)
    raise RuntimeError("a server did not start")


def stop_all():
    for p in started:
        if p.poll() is None:
            p.terminate()
    for p in started:
        p.wait(60)


def run(title, checks, *args, last=lambda: None):
    """Calls each check with args, then last(), ends what was started, and the program."""
    failed = 0
    try:
        for check in checks:
            try:
                check(*args)
                print(f"ok    {title}:", check.__name__)
            except Exception as e:  # the next one may still tell something
                failed += 1
                print(f"FAIL  {title}:", check.__name__, repr(e)[:500])
    finally:
        try:
            last()
        finally:
            stop_all()
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(failed > 0)
