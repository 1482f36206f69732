"""Uses the server's page as a person with a keyboard would, in Chromium through chromedriver.

Usage: conformance_page.py URL KEY [FOLDER]. Screenshots go to FOLDER. Prints a line for each check and ends with
"N passed, N failed".
"""
import base64
import json
import shutil
import subprocess
import sys
import time
import urllib.request

import usage
from conformance_checks import run, start

URL, KEY, FOLDER = usage.arguments("URL KEY [FOLDER]")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"enter": "\ue007", "right": "\ue014", "tab": "\ue004", "escape": "\ue00c"}


class Browser:
    """The few commands of the WebDriver protocol that are needed."""

    def __init__(self, port):
        self.base = f"http://127.0.0.1:{port}"
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1500",
                            "--disable-dev-shm-usage"]}
        caps = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self.session = self.call("POST", "/session", {"capabilities": caps})["sessionId"]

    def call(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as r:
                return json.load(r)["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(e.read().decode()[:300]) from None

    def do(self, method, path, body=None):
        return self.call(method, f"/session/{self.session}{path}", body)

    def js(self, script, *args):
        return self.do("POST", "/execute/sync", {"script": script, "args": list(args)})

    def keys(self, text):
        actions = [a for c in text for a in ({"type": "keyDown", "value": c}, {"type": "keyUp", "value": c})]
        self.do("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def wait(self, script, what, seconds=60):
        end = time.time() + seconds
        while time.time() < end:
            value = self.js("return " + script)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError("not in time: " + what)

    def shot(self, name):
        if FOLDER:
            with open(f"{FOLDER}/{name}.png", "wb") as f:
                f.write(base64.b64decode(self.do("GET", "/screenshot")))


def opens(b):
    b.do("POST", "/url", {"url": URL + "/"})
    b.wait("!document.getElementById('key-label').hidden", "asking for the key")
    b.js("document.getElementById('key').focus()")
    b.keys(KEY + KEYS["tab"])
    b.wait("document.getElementById('model').options.length > 0", "the models")
    assert b.js("return document.getElementById('engine').offsetParent") is None, "both views are shown"


def chats(b):
    b.js("document.getElementById('most').value = 24; document.getElementById('temperature').value = 0;"
         "document.getElementById('text').focus()")
    b.keys("Name a <b>colour</b>." + KEYS["enter"])
    b.wait("document.querySelectorAll('.message').length == 2", "the messages")
    b.wait("document.getElementById('send').disabled == false", "the answer's end")
    shown = b.js("return [...document.querySelectorAll('.message')].map(m => m.innerText)")
    assert "<b>colour</b>" in shown[0], shown
    assert b.js("return document.querySelectorAll('#talk b').length") == 0, "text became markup"
    assert "tokens/s" in shown[1] and "prompt tokens" in shown[1], shown
    assert b.js("return document.activeElement.id") == "text"
    b.keys("And another?" + KEYS["enter"])
    b.wait("document.querySelectorAll('.message').length == 4 && !document.getElementById('send').disabled", "turn 2")
    figures = b.js("return [...document.querySelectorAll('.figures')].pop().innerText")
    assert "(0 from" not in figures, figures  # the second turn finds the first one in the cache
    b.shot("chat")


def stops(b):
    b.js("document.getElementById('most').value = 2000")
    b.keys("Count to ten thousand." + KEYS["enter"])
    b.wait("document.getElementById('stop').disabled == false", "the answer's beginning")
    b.wait("[...document.querySelectorAll('.message')].pop().innerText.length > 40", "some text")
    b.keys(KEYS["escape"])
    b.wait("document.getElementById('send').disabled == false", "the stop")
    assert "stopped" in b.js("return [...document.querySelectorAll('.message')].pop().innerText")


def shows_the_engine(b):
    b.js("for (let i = 0; i < 3; i++) fetch('/v1/chat/completions', { method: 'POST', headers: headers(), body:"
         " JSON.stringify({ messages: [{ role: 'user', content: 'Tell me a story. ' + 'x '.repeat(60 * i) }],"
         " max_tokens: 400, n: 2, ignore_eos: true }) })")
    b.js("document.getElementById('tab-chat').focus()")
    b.keys(KEYS["right"])
    assert b.js("return document.activeElement.id") == "tab-engine", b.js("return document.activeElement.id")
    b.wait("document.querySelectorAll('.tile').length == 12", "the tiles")
    b.wait("[...document.querySelectorAll('#list tr')].some(r => r.innerText.includes('running'))", "running requests")
    time.sleep(4)
    map_text = b.js("return document.getElementById('map').getAttribute('aria-label')")
    tree_text = b.js("return document.getElementById('tree').getAttribute('aria-label')")
    assert "held" in map_text and "blocks known" in tree_text, (map_text, tree_text)
    assert " 0 of them shared" not in map_text, map_text
    painted = ("const c = document.getElementById(arguments[0]);"
               "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
               "return d.some((v, i) => i % 4 == 3 && v > 0)")
    for name in ("map", "tree", "plot-rate", "plot-ttft", "plot-load", "plot-step", "plot-kv"):
        assert b.js(painted, name), name + " is empty"
    b.shot("engine")


def has_no_complaints(b):
    logs = [x for x in b.do("POST", "/se/log", {"type": "browser"}) if x["level"] != "DEBUG" and "401" not in x["message"]]
    assert not logs, logs
    missing = b.js("return [...document.querySelectorAll('button,input,select,textarea,canvas')].filter(e =>"
                   " !e.labels?.length && !e.textContent.trim() && !e.ariaLabel).map(e => e.id)")
    assert not missing, f"without a name: {missing}"


driver = shutil.which("chromedriver")
if not driver:
    print("no chromedriver")
    sys.exit(2)
process = start(driver, "--port=0", stdout=subprocess.PIPE, text=True)
port = None
for line in process.stdout:
    if "successfully on port " in line:
        port = int(line.rsplit("on port ", 1)[1].strip().rstrip("."))
        break
browser = Browser(port)
run("page", [opens, chats, stops, shows_the_engine, has_no_complaints], browser, last=lambda: browser.do("DELETE", ""))
