--- llmrun bench --url: load on any server with the OpenAI API, as many clients would make it, and what they see of it.
---
--- Requests arrive at --rate a second; the times between them are gamma-distributed with the shape --burstiness (1: a
--- Poisson process; less: bursts; more: even). --concurrency bounds how many are under way at once; the others wait to
--- be sent. All are streamed, without an end before their length (ignore_eos). With --shape conversation --requests
--- counts conversations: each turn sends all that was said before, the server's answers included.
---
--- TTFT: from sending a request to its first token. ITL: between two pieces of text. TPOT: mean time of a token after
--- the first. E2E: from sending to the end. Goodput: requests a second that keep all limits of --goodput.

local args = require "llmrun.cli.args"
local core = require "llmrun.core"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local net = require "llmrun.net"
local random = require "llmrun.random"
local statistics = require "llmrun.statistics"
local branch = require "llmrun.branch"

local M = {}

M.flags = {
    { "url", arg = "URL", help = "measures a server with the OpenAI API instead, e.g. http://127.0.0.1:8080" },
    { "served-model", arg = "NAME", help = "url: model to ask for (the server's first)" },
    { "api-key", arg = "KEY", help = "url: key to send (also from LLMRUN_API_KEY)" },
    { "rate", arg = "X", type = "number", above = 0, help = "url: requests a second (all at once)" },
    { "burstiness", arg = "X", type = "number", above = 0, default = 1, help = "url: below 1: bursts; above: evenly" },
    { "shape", arg = "KIND", choices = { "fixed", "uniform", "chat", "conversation" }, default = "fixed",
        help = "url: lengths: all as given; half to one and a half of that; as people chat; and in --turns turns" },
    { "goodput", arg = "LIST", help = "url: limits in milliseconds, e.g. ttft:500,tpot:50,e2e:5000" },
    { "report", arg = "FILE", help = "url: writes a page with plots (.html)" },
    { "load-seed", arg = "N", type = "integer", default = 1, help = "url: same seed, same load" },
}

function M.wanted(o) return o.url ~= nil end

-- Load ---------------------------------------------------------------------------------------------------------------

--- A length: n, or drawn around it.
local function draw_length(r, n, shape)
    local v = n
    if shape == "uniform" then v = n * (0.5 + r:uniform()) end
    if shape == "chat" then v = n * math.exp(r:normal() * 0.9 - 0.405) end -- mean n; people's lengths spread like this
    return math.max(1, math.floor(v + 0.5))
end

local words = {}
for w in ([[time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point home water
    room mother area money story fact month lot right study book eye job word business issue side kind head house
    service friend father power hour game line end member law car city community name]]):gmatch("%S+") do
    words[#words + 1] = w
end

--- About n tokens of text; no two alike from their beginning on, unless they share one.
local function text_of(r, n, shared)
    local parts = {}
    for i = 1, n do
        local k = i <= shared and (i * 7919) % #words or math.floor(r:uniform() * #words)
        parts[i] = words[k + 1]
    end
    return table.concat(parts, " ")
end

local function make_load(o)
    local r, list, at = random.new(o.load_seed), {}, 0
    local talk = o.shape == "conversation"
    local shape = talk and "chat" or o.shape
    local prompt, output = o.prompt or 128, o.output or 64
    for i = 1, o.requests do
        local turns = {}
        for k = 1, talk and o.turns or 1 do
            turns[k] = { text = text_of(r, draw_length(r, prompt, shape), k == 1 and o.shared or 0),
                output = draw_length(r, output, shape) }
        end
        list[i] = { at = at, turns = turns }
        if o.rate then at = at + r:gamma(o.burstiness) / o.rate end
    end
    return list
end

-- Requests -----------------------------------------------------------------------------------------------------------

local function parse_url(url)
    local host, port, path = url:match("^http://([^/:]+):?(%d*)(.*)$")
    if not host then
        host, port, path = url:match("^http://%[([^%]]+)%]:?(%d*)(.*)$")
    end
    if not host then args.fail("--url: http://HOST:PORT expected, got " .. url, 2) end
    return { host = host, port = port == "" and 80 or math.tointeger(tonumber(port)),
        path = path:gsub("/+$", ""):gsub("/v1$", "") }
end

local function headers_of(o)
    local key = o.api_key or os.getenv "LLMRUN_API_KEY"
    return key and { Authorization = "Bearer " .. key } or nil
end

local function first_model(target, headers)
    local c <close>, err = net.connect(target.host, target.port)
    if not c then args.fail(err) end
    local r, why = net.request(c, { path = target.path .. "/v1/models", headers = headers })
    local list = r and r.status == 200 and json.decode(r.body)
    if not list or not list.data or not list.data[1] then
        args.fail("the server lists no models: " .. (r and ("%d %s"):format(r.status, r.body:sub(1, 200)) or why))
    end
    return list.data[1].id
end

--- Connections that are open and not in use.
local Pool = {}
Pool.__index = Pool

--- One of them, or a new one; and whether it has been used.
function Pool:get()
    local c = table.remove(self.idle)
    if c then return c, true end
    return net.connect(self.target.host, self.target.port)
end

function Pool:close()
    for _, c in ipairs(self.idle) do c:close() end
end

--- Sends one request and notes when what came.
local function send(pool, messages, output, model, headers)
    local c, used = pool:get()
    if not c then return { error = used } end
    local m = { begin = core.now(), pieces = {}, prompt = 0, output = 0, said = {} }
    local last
    local function on_event(data)
        if data == "[DONE]" then return end
        local now = core.now()
        local e = json.decode(data)
        if type(e) ~= "table" then return end
        if e.error then m.error = tostring(e.error.message) end
        if type(e.usage) == "table" then m.prompt, m.output = e.usage.prompt_tokens, e.usage.completion_tokens end
        local choice = e.choices and e.choices[1]
        local delta = choice and choice.delta
        local said = delta and (delta.content ~= json.null and delta.content or delta.reasoning_content)
        if type(said) ~= "string" or said == "" then return end
        m.said[#m.said + 1] = said
        if last then m.pieces[#m.pieces + 1] = now - last else m.first = now - m.begin end
        last = now
    end
    local feed = net.events(on_event)
    local status, text = nil, {}
    local r, why = net.request(c, {
        path = pool.target.path .. "/v1/chat/completions", headers = headers, timeout = 600,
        body = json.encode {
            model = model, messages = messages, max_tokens = output,
            temperature = 0, stream = true, stream_options = { include_usage = true }, ignore_eos = true,
        },
        on_head = function(head) status = head.status end,
        on_data = function(piece)
            if status ~= 200 then text[#text + 1] = piece end
            feed(piece)
        end,
    })
    if not r and used and not status then -- the server had closed it meanwhile: that is no failure
        c:close()
        return send(pool, messages, output, model, headers)
    end
    m.total = core.now() - m.begin
    if not r then m.error = why end
    if r and status ~= 200 then m.error = ("%d %s"):format(status, table.concat(text):sub(1, 200)) end
    if not m.error and not m.first then m.error = "no text came" end
    if r and r.headers.connection ~= "close" then table.insert(pool.idle, c) else c:close() end
    return m
end

local function run_load(o, pool, list, model, headers, progress)
    local done, results, running, waiting, all = 0, {}, 0, {}, 0
    for _, job in ipairs(list) do all = all + #job.turns end
    local begin = core.now()
    local limit = o.concurrency and math.tointeger(tonumber(o.concurrency))
    if o.concurrency and not limit then args.fail("--concurrency: one number expected with --url", 2) end
    branch.map(list, function(job)
        local late = begin + job.at - core.now()
        if late > 0 then branch.sleep(late) end
        if limit and running >= limit then
            local turn = loop.ticket()
            table.insert(waiting, turn)
            loop.wait(turn, "bench")
        else
            running = running + 1
        end
        local messages = json.array()
        for _, turn in ipairs(job.turns) do
            messages[#messages + 1] = { role = "user", content = turn.text }
            local m = send(pool, messages, turn.output, model, headers)
            results[#results + 1] = m
            done = done + 1
            progress(("%d of %d requests"):format(done, all))
            if m.error then break end
            messages[#messages + 1] = { role = "assistant", content = table.concat(m.said) }
        end
        local turn = table.remove(waiting, 1)
        if turn then loop.fire(turn) else running = running - 1 end
    end)
    progress()
    return results, core.now() - begin
end

-- What came of it ----------------------------------------------------------------------------------------------------

local function quantile(sorted, q)
    return #sorted > 0 and statistics.quantile(sorted, q) or 0
end

--- Mean and quantiles of seconds, in milliseconds.
local function summary(values)
    local sum = 0
    for _, v in ipairs(values) do sum = sum + v end
    table.sort(values)
    local function ms(v) return math.floor(v * 1e6 + 0.5) / 1e3 end
    return {
        mean = ms(#values > 0 and sum / #values or 0), median = ms(quantile(values, 0.5)),
        p90 = ms(quantile(values, 0.9)), p99 = ms(quantile(values, 0.99)),
    }
end

local function parse_goodput(text)
    local limits = {}
    for word in (text or ""):gmatch("[^, ]+") do
        local name, value = word:match("^(%w+):([%d.]+)$")
        if name ~= "ttft" and name ~= "tpot" and name ~= "e2e" then
            args.fail("--goodput: ttft:MS, tpot:MS, e2e:MS expected, got " .. word, 2)
        end
        limits[name] = tonumber(value) / 1000
    end
    return next(limits) and limits
end

local function collect(o, results, seconds)
    local ttft, tpot, itl, e2e = {}, {}, {}, {}
    local limits = parse_goodput(o.goodput)
    local rec = { completed = 0, failed = 0, prompt_tokens = 0, output_tokens = 0, duration = seconds }
    local good, first_error = 0, nil
    for _, m in ipairs(results) do
        if m.error then
            rec.failed = rec.failed + 1
            first_error = first_error or m.error
        else
            rec.completed = rec.completed + 1
            rec.prompt_tokens, rec.output_tokens = rec.prompt_tokens + m.prompt, rec.output_tokens + m.output
            m.tpot = m.output > 1 and (m.total - m.first) / (m.output - 1) or nil
            ttft[#ttft + 1], e2e[#e2e + 1] = m.first, m.total
            if m.tpot then tpot[#tpot + 1] = m.tpot end
            table.move(m.pieces, 1, #m.pieces, #itl + 1, itl)
            if limits and m.first <= (limits.ttft or math.huge) and m.total <= (limits.e2e or math.huge)
                and (m.tpot or 0) <= (limits.tpot or math.huge) then
                good = good + 1
            end
        end
    end
    rec.request_rate = rec.completed / seconds
    rec.output_rate = rec.output_tokens / seconds
    rec.total_rate = (rec.output_tokens + rec.prompt_tokens) / seconds
    if limits then rec.goodput = good / seconds end
    rec.raw = { ttft = ttft, tpot = tpot, itl = itl, e2e = e2e }
    rec.ttft_ms, rec.tpot_ms, rec.itl_ms, rec.e2e_ms = summary(ttft), summary(tpot), summary(itl), summary(e2e)
    return rec, first_error
end

local function print_text(rec)
    print(("%d requests answered, %d failed, in %.1f s"):format(rec.completed, rec.failed, rec.duration))
    print(("%.2f requests/s, %.1f tokens/s generated, %.1f with the prompts%s"):format(rec.request_rate,
        rec.output_rate, rec.total_rate, rec.goodput and (", goodput %.2f requests/s"):format(rec.goodput) or ""))
    print(("%-6s %10s %10s %10s %10s"):format("ms", "mean", "median", "p90", "p99"))
    for _, name in ipairs { "ttft", "tpot", "itl", "e2e" } do
        local s = rec[name .. "_ms"]
        print(("%-6s %10.1f %10.1f %10.1f %10.1f"):format(name:upper(), s.mean, s.median, s.p90, s.p99))
    end
end

local function distribution(report, name, values)
    local x, y = {}, {}
    for i, v in ipairs(values) do x[i], y[i] = v * 1000, i / #values * 100 end
    return report.plot {
        title = name, x = { label = "milliseconds", min = 0 }, y = { label = "% of them at most", min = 0, max = 100 },
        series = { { name = name, x = x, y = y, kind = "steps" } }, width = 560, height = 340,
    }
end

local function write_report(path, rec, title)
    local report = require "llmrun.report"
    local rows, plots = {}, {}
    for i, name in ipairs { "ttft", "tpot", "itl", "e2e" } do
        local s, text = rec[name .. "_ms"], {}
        for k, key in ipairs { "mean", "median", "p90", "p99" } do text[k] = ("%.1f"):format(s[key]) end
        rows[i] = { name:upper(), table.unpack(text) }
        if #rec.raw[name] > 0 then plots[#plots + 1] = distribution(report, name:upper(), rec.raw[name]) end
    end
    local ok, err = report.save(path, report.page {
        title = title,
        lead = ("%d requests answered, %d failed, in %.1f s: %.2f requests/s, %.1f tokens/s."):format(rec.completed,
            rec.failed, rec.duration, rec.request_rate, rec.output_rate),
        sections = { { title = "Times", report.table { caption = "Milliseconds", heads = { "", "mean", "median", "p90",
            "p99" }, rows = rows }, report.plots(plots) } },
    })
    if not ok then args.fail(err) end
end

function M.run(o)
    parse_goodput(o.goodput)
    local target, headers = parse_url(o.url), headers_of(o)
    local model = o.served_model or first_model(target, headers)
    local list = make_load(o)
    local pool <close> = setmetatable({ target = target, idle = {} }, { __index = Pool, __close = Pool.close })
    local progress = require("llmrun.cli.common").progress()
    local results, seconds = run_load(o, pool, list, model, headers, progress)
    local rec, first_error = collect(o, results, seconds)
    if o.report then write_report(o.report, rec, ("%s at %s"):format(model, o.url)) end
    rec.raw = nil
    rec.model, rec.url, rec.concurrency, rec.rate, rec.shape = model, o.url, o.concurrency, o.rate, o.shape
    if o.json then print((json.encode(rec))) else print_text(rec) end
    if first_error then io.stderr:write("llmrun bench: first failure: ", first_error, "\n") end
    return rec.failed > 0 and 1 or 0
end

return M
