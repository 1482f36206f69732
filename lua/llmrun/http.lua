--- llm.http: HTTP requests that wait in the run loop, so that everything else goes on meanwhile.
---
---   local r, err, code = llm.http.get("https://example.org/x", { timeout = 5 })
---   local r = llm.http.post(url, nil, { json = { q = "rain" } })
---   for piece in llm.http.stream { url = url } do io.write(piece) end
---
--- An answer is { status, headers (names in lower case), body, url (the last one, after redirects), seconds }. What
--- goes wrong on the way is nil, text, code: "limit" (time, size, redirects), "invalid" (the URL), "io" (all else). A
--- status of 404 or 500 is an answer like any other.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local notes = require "llmrun.record.notes"
local options = require "llmrun.options"

local M = {}

local client, timer
local waiting = {} -- id -> { ticket, news }

local known = {
    url = "string", method = "string", headers = "table", body = "string", json = "any", timeout = "number",
    connect_timeout = "number", max_bytes = "integer", redirects = "integer", insecure = "boolean",
}

local drive

--- Does what libcurl asked for: descriptors to watch, a time to be called again.
local function follow()
    while true do
        local changes, seconds = client:changes()
        for _, change in ipairs(changes) do
            local fd, what = change[1], change[2]
            if what then loop.watch(fd, what, function() drive(fd) end) else loop.unwatch(fd) end
        end
        if seconds then
            if timer then loop.cancel_timer(timer) end
            timer = seconds >= 0 and loop.after(seconds, function()
                timer = nil
                drive()
            end) or nil
        end
        if #changes == 0 then return end
    end
end

--- Tells those who wait what is new.
local function report()
    local id, url, text, code = client:finished()
    while id do
        local w = waiting[id]
        if w then w.done, w.url, w.error, w.code = true, url, text, code end
        id, url, text, code = client:finished()
    end
    for _, w in pairs(waiting) do
        if w.ticket and (w.done or w.pieces) then
            local ticket = w.ticket
            w.ticket = nil
            loop.fire(ticket)
        end
    end
end

function drive(fd)
    client:step(fd)
    follow()
    report()
end

local function header_lines(call, headers)
    local lines, names = {}, {}
    for name in pairs(headers or {}) do names[#names + 1] = name end
    table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
    for _, name in ipairs(names) do
        local value = headers[name]
        if type(name) ~= "string" or name:find("[^%w!#$%%&'*+.^_`|~-]") or name == "" then
            errors.raise(call, ("headers: '%s' is no name of a header"):format(tostring(name)))
        elseif type(value) ~= "string" and type(value) ~= "number" then
            errors.raise(call, ("headers['%s']: text expected, got %s"):format(name, type(value)))
        end
        value = tostring(value)
        if value:find("[\r\n%z]") then errors.raise(call, ("headers['%s']: more than one line"):format(name)) end
        lines[#lines + 1] = value == "" and name .. ";" or name .. ": " .. value
    end
    return lines
end

local function parse_headers(text)
    local headers = {}
    for line in text:gmatch("[^\r\n]+") do
        local name, value = line:match("^([^:]+):%s*(.-)%s*$")
        if name then
            name = name:lower()
            headers[name] = headers[name] and headers[name] .. ", " .. value or value
        end
    end
    return headers
end

--- Begins a transfer. Returns its id and what waits for it, or nil, text, code.
local function begin(call, o)
    options.check(call, o, known, 3)
    if type(o.url) ~= "string" or o.url == "" then errors.raise(call, "url expected") end
    if o.url:find("%z") then errors.raise(call, "the url holds a zero byte") end
    if o.method and not o.method:find("^%u+$") then
        errors.raise(call, ("method: capital letters expected, got '%s'"):format(o.method))
    end
    for _, name in ipairs { "timeout", "connect_timeout", "max_bytes" } do
        local v = o[name]
        if v and (v <= 0 or v ~= v) then errors.raise(call, name .. ": a number above 0 expected") end
    end
    if o.redirects and o.redirects < 0 then errors.raise(call, "redirects: at least 0 expected") end
    if o.json ~= nil and o.body then errors.raise(call, "body or json, not both") end
    loop.check_can_wait(call)
    local headers, body = o.headers or {}, o.body
    if o.json ~= nil then
        body = errors.check(call .. ": json", require("llmrun.json").encode(o.json))
        headers = { ["Content-Type"] = "application/json" }
        for k, v in pairs(o.headers or {}) do headers[k] = v end
    end
    client = client or errors.check(call, core.http_client())
    local id, err, code = client:add {
        url = o.url, method = o.method or (body and "POST" or "GET"), headers = header_lines(call, headers),
        body = body, timeout = o.timeout, connect_timeout = o.connect_timeout, max_bytes = o.max_bytes,
        redirects = o.redirects,
        insecure = o.insecure,
    }
    if not id then return nil, ("%s: %s"):format(call, err), code end
    local w = { began = core.now() }
    waiting[id] = w
    follow()
    return id, w
end

local function forget(id)
    if not waiting[id] then return end
    waiting[id] = nil
    client:remove(id)
    follow()
end

local function forgotten_at_exit(id)
    return setmetatable({}, { __close = function() forget(id) end })
end

local function answer(id, w)
    local head, status = client:head(id)
    return { status = status, headers = parse_headers(head), url = w.url, seconds = core.now() - w.began }
end

local function request(call, o)
    local id, w, code = begin(call, o)
    if not id then return nil, w, code end
    local guard <close> = forgotten_at_exit(id) -- luacheck: ignore 211
    if not w.done then
        w.ticket = loop.ticket()
        loop.wait(w.ticket, call, function() forget(id) end)
    end
    if w.error then
        notes.put("http", { url = notes.address(o.url), error = w.error })
        return nil, ("%s: %s"):format(call, w.error), w.code
    end
    local r = answer(id, w)
    r.body = client:data(id)
    notes.put("http", { url = notes.address(o.url), status = r.status, body = r.body, seconds = r.seconds })
    return r
end

local function with(call, o, more)
    if o ~= nil and type(o) ~= "table" then
        errors.raise(call, ("table of options expected, got %s"):format(type(o)))
    end
    local all = {}
    for k, v in pairs(o or {}) do all[k] = v end
    for k, v in pairs(more) do all[k] = v end
    return all
end

--- A request. Options: url, method (GET, or POST if there is a body), headers ({ Name = "value" }), body, json (a
--- value, sent as such), timeout (30 s for all of it), connect_timeout (10), max_bytes (16 MiB of answer), redirects
--- (5), insecure (certificates aren't looked at).
---@param o table
---@return table? answer, string? err, string? code
function M.request(o)
    if type(o) ~= "table" then errors.raise("llm.http.request", "table of options expected, got " .. type(o)) end
    return request("llm.http.request", o)
end

--- A GET of a URL; options as in request.
---@param url string
---@param o? table
---@return table? answer, string? err, string? code
function M.get(url, o) return request("llm.http.get", with("llm.http.get", o, { url = url })) end

--- A POST to a URL; options as in request.
---@param url string
---@param body? string (or json in o)
---@param o? table
---@return table? answer, string? err, string? code
function M.post(url, body, o)
    return request("llm.http.post", with("llm.http.post", o, { url = url, body = body, method = "POST" }))
end

--- As request, piece by piece: for piece, answer in llm.http.stream{ ... } do ... end; answer has status and headers.
--- Raises what goes wrong; leaving the loop ends the transfer.
---@param o table
function M.stream(o)
    local call = "llm.http.stream"
    if type(o) ~= "table" then errors.raise(call, "table of options expected, got " .. type(o)) end
    local id, w, code = begin(call, o)
    if not id then errors.raise(call, (w:gsub("^llm.http.stream: ", "")), code) end
    w.pieces = true
    local head
    local function next_piece()
        while true do
            if not waiting[id] then return nil end
            local piece = client:data(id)
            if piece ~= "" then
                head = head or answer(id, w)
                notes.put("http", { url = notes.address(o.url), status = head.status, piece = piece })
                return piece, head
            end
            if w.done then
                local err, why = w.error, w.code
                forget(id)
                if err then errors.raise(call, err, why) end
                return nil
            end
            w.ticket = loop.ticket()
            loop.wait(w.ticket, call, function() forget(id) end)
        end
    end
    return next_piece, nil, nil, forgotten_at_exit(id)
end

return M
