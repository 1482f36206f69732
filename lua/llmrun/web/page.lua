--- The page at /, as text: no build step, nothing from elsewhere. NONCE is replaced for each request.
return [==[
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llmrun</title>
<style nonce="NONCE">
:root {
  color-scheme: light dark;
  --back: #fbfbfa; --panel: #ffffff; --line: #dcdcd6; --text: #1d1d1b; --soft: #5f5f58; --accent: #0b5fae;
  --mine: #e9f1fa; --free: #ededea; --cached: #b5b5ad; --warn: #a6341b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #161615; --panel: #1f1f1e; --line: #3a3a37; --text: #ecece8; --soft: #a3a39b; --accent: #7ab4ee;
    --mine: #22303d; --free: #2a2a28; --cached: #62625c; --warn: #f0937a;
  }
}
* { box-sizing: border-box; }
html, body { height: 100%; margin: 0; }
body { font: 15px/1.5 system-ui, sans-serif; background: var(--back); color: var(--text);
  display: flex; flex-direction: column; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
header { display: flex; gap: 1.2em; align-items: center; padding: .5em 1em; border-bottom: 1px solid var(--line);
  background: var(--panel); flex-wrap: wrap; }
header h1 { font-size: 1.05em; margin: 0; }
[role=tablist] { display: flex; gap: .3em; }
button, select, input, textarea { font: inherit; color: inherit; background: var(--panel);
  border: 1px solid var(--line); border-radius: 6px; padding: .3em .7em; }
button { cursor: pointer; }
button:disabled { opacity: .5; cursor: default; }
[role=tab][aria-selected=true], button.main { background: var(--accent); border-color: var(--accent);
  color: var(--panel); }
#state { margin-left: auto; color: var(--soft); font-variant-numeric: tabular-nums; }
main { flex: 1; min-height: 0; display: flex; }
section { flex: 1; min-height: 0; display: flex; flex-direction: column; }
section[hidden] { display: none; }
label { color: var(--soft); font-size: .9em; }
#options { display: flex; flex-wrap: wrap; gap: .4em 1em; padding: .6em 1em; align-items: center;
  border-bottom: 1px solid var(--line); }
#options input[type=number] { width: 5.5em; }
#system { flex: 1; min-width: 14em; }
#talk { flex: 1; overflow: auto; padding: 1em; }
.message { max-width: 50em; margin: 0 auto .8em; padding: .6em .9em; border: 1px solid var(--line);
  border-radius: 8px; background: var(--panel); white-space: pre-wrap; overflow-wrap: anywhere; }
.message.user { background: var(--mine); }
.message h2 { font-size: .8em; margin: 0 0 .2em; color: var(--soft); font-weight: 600; }
.message .figures { font-size: .8em; color: var(--soft); margin: .4em 0 0; }
.problem { color: var(--warn); }
form { display: flex; gap: .6em; padding: .8em 1em; border-top: 1px solid var(--line); background: var(--panel);
  align-items: end; }
form textarea { flex: 1; resize: vertical; min-height: 3em; }
#engine:not([hidden]) { overflow: auto; padding: 1em; display: block; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.4em, 1fr)); gap: .5em; margin-bottom: 1em; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .45em .65em;
  line-height: 1.3; }
.tile b { display: block; font-size: 1.15em; white-space: nowrap;
  font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .8em; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(21em, 1fr)); gap: .8em; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6em .8em; }
figcaption { font-size: .85em; color: var(--soft); margin-bottom: .3em; display: flex; gap: .2em 1em; flex-wrap: wrap; }
figcaption strong { color: var(--text); }
figcaption i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; }
canvas { width: 100%; display: block; }
canvas.plot { height: 9em; }
canvas.map { height: 15em; }
table { width: 100%; border-collapse: collapse; font-size: .88em; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15em .5em; border-bottom: 1px solid var(--line); }
th:nth-child(2), td:nth-child(2) { text-align: left; }
.wide { grid-column: 1 / -1; overflow: auto; }
</style>
</head>
<body>
<header>
  <h1>llmrun</h1>
  <div role="tablist" aria-label="Views">
    <button role="tab" id="tab-chat" aria-controls="chat" aria-selected="true">Chat</button>
    <button role="tab" id="tab-engine" aria-controls="engine" aria-selected="false" tabindex="-1">Engine</button>
  </div>
  <label>Model <select id="model"></select></label>
  <label id="key-label" hidden>API key <input id="key" type="password" autocomplete="off"></label>
  <span id="state" role="status"></span>
</header>
<main>
<section id="chat" role="tabpanel" aria-labelledby="tab-chat">
  <div id="options">
    <label for="system">System</label><input id="system" placeholder="what the assistant is told first">
    <label>Temperature <input id="temperature" type="number" min="0" max="5" step="0.1" value="0.7"></label>
    <label>Most tokens <input id="most" type="number" min="1" step="1" value="512"></label>
    <label>Seed <input id="seed" type="number" step="1"></label>
    <button id="clear">New chat</button>
  </div>
  <div id="talk" role="log" aria-label="Conversation" tabindex="0"></div>
  <form id="ask">
    <textarea id="text" rows="2" aria-label="Message" placeholder="Enter sends, Shift+Enter is a new line, Esc stops">
</textarea>
    <button class="main" id="send">Send</button>
    <button type="button" id="stop" disabled>Stop</button>
  </form>
</section>
<section id="engine" role="tabpanel" aria-labelledby="tab-engine" tabindex="0" hidden>
  <div class="tiles" id="tiles"></div>
  <div class="panels">
    <figure><figcaption id="cap-rate"></figcaption><canvas class="plot" id="plot-rate" role="img"></canvas></figure>
    <figure><figcaption id="cap-ttft"></figcaption><canvas class="plot" id="plot-ttft" role="img"></canvas></figure>
    <figure><figcaption id="cap-tpot"></figcaption><canvas class="plot" id="plot-tpot" role="img"></canvas></figure>
    <figure><figcaption id="cap-load"></figcaption><canvas class="plot" id="plot-load" role="img"></canvas></figure>
    <figure><figcaption id="cap-step"></figcaption><canvas class="plot" id="plot-step" role="img"></canvas></figure>
    <figure><figcaption id="cap-kv"></figcaption><canvas class="plot" id="plot-kv" role="img"></canvas></figure>
    <figure class="wide"><figcaption><strong>KV blocks</strong> <span id="map-text"></span></figcaption>
      <canvas class="map" id="map" role="img"></canvas></figure>
    <figure class="wide"><figcaption><strong>Prefix tree</strong> <span id="tree-text"></span></figcaption>
      <canvas class="map" id="tree" role="img"></canvas></figure>
    <figure class="wide"><figcaption><strong>Sequences</strong> <span id="list-text"></span></figcaption>
      <table><thead><tr><th>sequence</th><th>state</th><th>prompt</th><th>from cache</th><th>generated</th>
        <th>to compute</th><th>tokens</th><th>blocks</th><th>preempted</th><th>priority</th><th>tenant</th></tr></thead>
        <tbody id="list"></tbody></table></figure>
  </div>
</section>
</main>
<script nonce="NONCE">
"use strict";
const $ = id => document.getElementById(id);
const el = (name, text, cls) => {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
};
const headers = () => {
  const h = { "Content-Type": "application/json" };
  if ($("key").value) h.Authorization = "Bearer " + $("key").value;
  return h;
};
const say = (text, bad) => { $("state").textContent = text; $("state").classList.toggle("problem", !!bad); };
async function get(path) {
  const r = await fetch(path, { headers: headers() });
  if (r.status === 401) { $("key-label").hidden = false; throw new Error("an API key is needed"); }
  if (!r.ok) throw new Error(r.status + " " + r.statusText);
  return r.json();
}

// Views
const tabs = ["chat", "engine"];
function show(name, focus) {
  for (const t of tabs) {
    $(t).hidden = t !== name;
    $("tab-" + t).setAttribute("aria-selected", t === name);
    $("tab-" + t).tabIndex = t === name ? 0 : -1;
  }
  if (focus) $("tab-" + name).focus();
  history.replaceState(null, "", "#" + name);
  if (name === "engine") look();
}
for (const t of tabs) {
  $("tab-" + t).onclick = () => show(t);
  $("tab-" + t).onkeydown = e => {
    if (e.key === "ArrowRight" || e.key === "ArrowLeft") show(tabs[(tabs.indexOf(t) + 1) % 2], true);
  };
}

async function listModels() {
  try {
    const list = (await get("/v1/models")).data;
    $("model").replaceChildren(...list.map(m => new Option(m.id, m.id)));
    say("ready");
  } catch (e) { say(e.message, true); }
}
$("key").onchange = () => { sessionStorage.setItem("key", $("key").value); listModels(); };

// Chat
let messages = [], running = null;
function bubble(role, text) {
  const box = el("div", undefined, "message " + role);
  box.append(el("h2", role === "user" ? "You" : "Model"));
  const body = el("div", text);
  box.append(body);
  $("talk").append(box);
  $("talk").scrollTop = $("talk").scrollHeight;
  return { box, body };
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const p of parts) if (p.startsWith("data: ") && p !== "data: [DONE]") yield JSON.parse(p.slice(6));
  }
}
async function answer() {
  const system = $("system").value.trim();
  const request = {
    model: $("model").value, stream: true, stream_options: { include_usage: true },
    messages: (system ? [{ role: "system", content: system }] : []).concat(messages),
    temperature: Number($("temperature").value), max_tokens: Number($("most").value),
  };
  if ($("seed").value !== "") request.seed = Number($("seed").value);
  const out = bubble("assistant", ""), begin = performance.now();
  let text = "", first = 0, usage = null, why = "";
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  say("answering");
  try {
    const r = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(request),
      signal: running.signal });
    if (!r.ok) throw new Error((await r.json()).error.message);
    for await (const e of events(r)) {
      if (e.error) throw new Error(e.error.message);
      if (e.usage) usage = e.usage;
      const c = e.choices[0];
      if (!c) continue;
      if (c.delta.content) {
        first = first || performance.now() - begin;
        text += c.delta.content;
        out.body.textContent = text;
        const t = $("talk");
        if (t.scrollHeight - t.scrollTop - t.clientHeight < 120) t.scrollTop = t.scrollHeight;
      }
      why = c.finish_reason || why;
    }
    say("ready");
  } catch (e) {
    why = e.name === "AbortError" ? "stopped" : "failed";
    if (why === "failed") out.box.append(el("p", e.message, "problem"));
    say(why, why === "failed");
  }
  const seconds = (performance.now() - begin - first) / 1000, n = usage ? usage.completion_tokens : 0;
  const figures = ["first token after " + (first / 1000).toFixed(2) + " s"];
  if (n > 1) figures.push(n + " tokens", ((n - 1) / seconds).toFixed(1) + " tokens/s");
  if (usage) figures.push(usage.prompt_tokens + " prompt tokens (" + usage.prompt_tokens_details.cached_tokens +
    " from the cache)");
  if (why === "length") figures.push("cut at the limit of tokens");
  if (why === "stopped") figures.push("stopped");
  if (first) out.box.append(el("p", figures.join(", "), "figures"));
  if (text) messages.push({ role: "assistant", content: text }); else messages.pop();
  running = null;
  $("stop").disabled = true;
  $("send").disabled = false;
  $("text").focus();
}
$("ask").onsubmit = e => {
  e.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  messages.push({ role: "user", content: text });
  bubble("user", text);
  answer();
};
$("text").onkeydown = e => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); $("ask").requestSubmit(); }
};
$("stop").onclick = () => running && running.abort();
document.addEventListener("keydown", e => { if (e.key === "Escape" && running) running.abort(); });
$("clear").onclick = () => {
  if (running) running.abort();
  messages = [];
  $("talk").replaceChildren();
  $("text").focus();
};

// Engine: drawing
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function canvas(id) {
  const c = $(id), ratio = window.devicePixelRatio || 1, w = c.clientWidth, h = c.clientHeight;
  if (c.width !== Math.round(w * ratio) || c.height !== Math.round(h * ratio)) {
    c.width = Math.round(w * ratio);
    c.height = Math.round(h * ratio);
  }
  const g = c.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, w, h);
  return { c, g, w, h };
}
const colors = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
const short = v => Number.isInteger(v) && v < 1e4 ? String(v) : v >= 1e6 ? (v / 1e6).toFixed(1) + "M" :
  v >= 1e4 ? (v / 1e3).toFixed(0) + "k" :
  v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2);
function nice(v) {
  if (!(v > 0)) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].map(m => m * p).find(x => x >= v * 0.999);
}
// series: [{ name, values }]; values may hold null
function plot(id, title, unit, series) {
  const { c, g, w, h } = canvas("plot-" + id), left = 44, bottom = h - 6;
  const cap = $("cap-" + id);
  cap.replaceChildren(el("strong", title));
  const span = Math.max(30, ...series.map(s => s.values.length));
  let most = 0;
  for (const s of series) for (const v of s.values) most = Math.max(most, v || 0);
  most = nice(most);
  g.font = "11px system-ui, sans-serif";
  g.textAlign = "right";
  g.textBaseline = "middle";
  for (let i = 0; i <= 2; i++) {
    const y = bottom - (bottom - 8) * i / 2;
    g.strokeStyle = css("--line");
    g.beginPath(); g.moveTo(left, y); g.lineTo(w, y); g.stroke();
    g.fillStyle = css("--soft");
    g.fillText(short(most * i / 2), left - 5, y);
  }
  series.forEach((s, k) => {
    const last = [...s.values].reverse().find(v => v !== null && v !== undefined);
    const label = el("span"), mark = el("i");
    mark.style.background = colors[k];
    label.append(mark, s.name + (last === undefined ? "" : " " + short(last) + (unit ? " " + unit : "")));
    cap.append(label);
    g.strokeStyle = colors[k];
    g.lineWidth = 2;
    g.beginPath();
    let down = false;
    s.values.forEach((v, i) => {
      const x = left + (w - left) * (i + span - s.values.length) / (span - 1), y = bottom - (bottom - 8) * v / most;
      if (v === null || v === undefined) { down = false; return; }
      if (down) g.lineTo(x, y); else g.moveTo(x, y);
      const alone = v => v === null || v === undefined;
      if (alone(s.values[i - 1]) && alone(s.values[i + 1])) { g.arc(x, y, 1, 0, 7); g.moveTo(x, y); }
      down = true;
    });
    g.stroke();
  });
  c.setAttribute("aria-label", cap.textContent);
}
const hue = id => "hsl(" + (id * 137.508 % 360).toFixed(0) + " 62% 52%)";
function drawMap(m) {
  const { c, g, w, h } = canvas("map"), total = m.kv.total, owner = new Map();
  for (const s of m.look.sequences) for (const b of s.blocks) if (!owner.has(b)) owner.set(b, s.id);
  const per = Math.max(1, Math.ceil(total / 8000)), cells = Math.ceil(total / per);
  let side = Math.max(3, Math.floor(Math.sqrt(w * h / cells)));
  while (side > 3 && Math.floor(w / side) * Math.floor(h / side) < cells) side--;
  side = Math.min(side, 16);
  const columns = Math.floor(w / side), gap = side > 5 ? 1 : 0;
  const paint = (i, color, shared) => {
    const x = i % columns * side, y = Math.floor(i / columns) * side;
    g.fillStyle = color;
    g.fillRect(x, y, side - gap, side - gap);
    if (shared && side > 4) {
      g.fillStyle = css("--text");
      g.fillRect(x + side / 2 - 1.5, y + side / 2 - 1.5, 3 - gap, 3 - gap);
    }
  };
  for (let i = 0; i < cells; i++) paint(i, css("--free"));
  let shared = 0;
  for (const b of m.look.blocks) {
    const cell = Math.floor(b.block / per);
    if (b.refs > 1) shared++;
    paint(cell, b.refs > 0 ? hue(owner.get(b.block) || 0) : css("--cached"), b.refs > 1);
  }
  const text = total + " blocks of " + m.block_size + " tokens: " + m.kv.used + " held (a colour a sequence), " +
    shared + " of them shared (a dot), " + m.kv.cached + " cached (grey), " + m.kv.free + " free" +
    (per > 1 ? "; a cell is " + per + " blocks" : "");
  $("map-text").textContent = text;
  c.setAttribute("aria-label", text);
}
function drawTree(m) {
  const { c, g, w, h } = canvas("tree"), nodes = new Map(), roots = [];
  for (const b of m.look.blocks) if (b.depth) nodes.set(b.block, { b, children: [], rows: 0 });
  for (const n of nodes.values()) {
    const parent = nodes.get(n.b.parent);
    if (parent) parent.children.push(n); else roots.push(n);
  }
  const ordered = [...nodes.values()].sort((x, y) => y.b.depth - x.b.depth);
  for (const n of ordered) n.rows = n.children.length ? n.children.reduce((sum, k) => sum + k.rows, 0) : 1;
  const rows = roots.reduce((sum, n) => sum + n.rows, 0), deep = ordered.length ? ordered[0].b.depth : 0;
  const dx = Math.min(40, w / Math.max(deep, 1)), dy = Math.min(18, h / Math.max(rows, 1));
  const owner = new Map();
  for (const s of m.look.sequences) for (const b of s.blocks) if (!owner.has(b)) owner.set(b, s.id);
  const stack = [];
  let y = 0;
  for (const n of roots) { stack.push([n, y]); y += n.rows; }
  while (stack.length) {
    const [n, at] = stack.pop();
    g.fillStyle = n.b.refs > 0 ? hue(owner.get(n.b.block) || 0) : css("--cached");
    g.globalAlpha = n.b.hits > 0 || n.b.refs > 0 ? 1 : .55;
    g.fillRect((n.b.depth - 1) * dx, at * dy, Math.max(1, dx - 1), Math.max(1, n.rows * dy - (dy > 3 ? 1 : 0)));
    g.globalAlpha = 1;
    let row = at;
    for (const k of n.children) { stack.push([k, row]); row += k.rows; }
  }
  const text = nodes.size + " blocks known, " + roots.length + " beginnings, " + rows + " ends, longest " +
    deep * m.block_size + " tokens; left to right: a prompt's beginning to its end; pale: never used again so far";
  $("tree-text").textContent = text;
  c.setAttribute("aria-label", text);
}
function drawList(m) {
  const order = { running: 0, waiting: 1, idle: 2 };
  const list = [...m.look.sequences].sort((a, b) => (order[a.state] ?? 3) - (order[b.state] ?? 3) || b.id - a.id);
  $("list-text").textContent = m.running + " running, " + m.waiting + " waiting, " + list.length + " shown";
  $("list").replaceChildren(...list.slice(0, 100).map(s => {
    const row = el("tr");
    for (const v of [s.id, s.state, s.prompt, s.cached, s.generated, s.pending, s.len, s.blocks.length, s.preempted,
      s.priority, s.tenant]) row.append(el("td", v === undefined ? "" : v));
    row.cells[0].style.color = hue(s.id);
    return row;
  }));
}

// Engine: figures over time
const size = 120;
const past = new Map();
function remember(m, time) {
  let p = past.get(m.name);
  if (!p) { p = { last: null, t: 0, series: {} }; past.set(m.name, p); }
  const add = (name, v) => {
    const s = p.series[name] = p.series[name] || [];
    s.push(v);
    if (s.length > size) s.shift();
  };
  const mean = name => {
    const a = m.hists[name], b = p.last.hists[name];
    return a.n > b.n ? (a.sum - b.sum) / (a.n - b.n) * 1000 : null;
  };
  if (p.last && time > p.t) {
    const dt = time - p.t, per = name => (m.counters[name] - p.last.counters[name]) / dt;
    add("generated", per("generation_tokens"));
    add("computed", per("computed_tokens"));
    add("ttft", mean("ttft")); add("queue", mean("queue"));
    add("tpot", mean("itl"));
    add("running", m.running); add("waiting", m.waiting);
    add("step", mean("step")); add("hook", mean("hook"));
    add("used", m.kv.used / m.kv.total * 100); add("cached", m.kv.cached / m.kv.total * 100);
    const asked = m.counters.prefix_queries - p.last.counters.prefix_queries;
    add("hits", asked > 0 ? (m.counters.prefix_hits - p.last.counters.prefix_hits) / asked * 100 : null);
  }
  p.last = m;
  p.t = time;
  return p.series;
}
const latest = (s, unit) => {
  const v = s && [...s].reverse().find(x => x !== null);
  return v === undefined || v === null ? "-" : short(v) + (unit || "");
};
function draw(view) {
  const all = view.models.map(m => [m, remember(m, view.time)]);
  const [m, s] = all.find(([x]) => x.name === $("model").value) || all[0];
  const c = m.counters, pick = name => s[name] || [];
  const tiles = [
    [m.running, "running"], [m.waiting, "waiting"], [latest(s.generated), "tokens/s generated"],
    [latest(s.computed), "tokens/s computed"], [latest(s.ttft, " ms"), "time to first token"],
    [latest(s.tpot, " ms"), "between tokens"], [(m.kv.used / m.kv.total * 100).toFixed(0) + " %", "of KV blocks held"],
    [c.prefix_queries ? (c.prefix_hits / c.prefix_queries * 100).toFixed(0) + " %" : "-", "of prompts from the cache"],
    [latest(s.hook, " ms"), "policy hooks a step"], [c.preempt_recompute + c.preempt_swap, "preemptions"],
    [view.http.connections, "connections"], [view.http.gone, "clients left"],
  ];
  $("tiles").replaceChildren(...tiles.map(([v, name]) => {
    const t = el("div", undefined, "tile");
    t.append(el("b", v), el("span", name));
    return t;
  }));
  plot("rate", "Tokens a second", "", [{ name: "generated", values: pick("generated") },
    { name: "computed", values: pick("computed") }]);
  plot("ttft", "Time to first token", "ms", [{ name: "TTFT", values: pick("ttft") },
    { name: "of it waiting", values: pick("queue") }]);
  plot("tpot", "Between tokens", "ms", [{ name: "ITL", values: pick("tpot") }]);
  plot("load", "Requests", "", [{ name: "running", values: pick("running") },
    { name: "waiting", values: pick("waiting") }]);
  plot("step", "A step", "ms", [{ name: "whole", values: pick("step") },
    { name: "policy hooks", values: pick("hook") }]);
  plot("kv", "KV blocks, prefix hits", "%", [{ name: "held", values: pick("used") },
    { name: "cached", values: pick("cached") }, { name: "hits", values: pick("hits") }]);
  drawMap(m);
  drawTree(m);
  drawList(m);
}
let timer = null;
async function look() {
  clearTimeout(timer);
  if (!$("engine").hidden && !document.hidden) {
    try { draw(await get("/engine")); if (!running) say("live"); } catch (e) { say(e.message, true); }
    timer = setTimeout(look, 1000);
  }
}
document.addEventListener("visibilitychange", look);
window.addEventListener("resize", look);

$("key").value = sessionStorage.getItem("key") || "";
if ($("key").value) $("key-label").hidden = false;
listModels();
show(location.hash === "#engine" ? "engine" : "chat");
$("text").focus();
</script>
</body>
</html>
]==]
