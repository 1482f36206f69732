--- Reading a recording: its lines, checked; the requests in it with their tokens; the rows of a trace.
---
---   local rec, err, code = recording.read("run.rec")
---   rec.header; rec.events: the lines in order, as tables; rec.requests: id -> { id, of, prompt, tokens, steps, ended,
---     final, line ... }; rec.order: their ids by arrival; rec.cut: its end is missing (the program was killed)
---   rec:prompt(id) -> the request's prompt as token ids
---
--- The last line may be cut off in the middle; all else that is wrong is an error that names the line.

local json = require "llmrun.json"

local M = {}

M.VERSION = 1

---@class llmrun.Recording
local Recording = {}
Recording.__index = Recording

-- What lines must have: field -> type. The first of each names its kind.
local kinds = {
    { "seq", seq = "integer", salt = "string?", adapter = "string?" },
    { "fork", fork = "integer", of = "integer", len = "integer" },
    { "add", add = "integer", ids = "table" },
    { "cut", cut = "integer", len = "integer" },
    { "drop", drop = "integer" },
    { "pin", pin = "integer", on = "boolean" },
    { "forget", forget = "boolean" },
    { "request", request = "integer", of = "integer", t = "number", kind = "string", prompt = "integer",
        seed = "integer?", max_tokens = "integer?", options = "table?", stop = "table?", stop_ids = "table?",
        n_top = "integer?", score_from = "integer?", priority = "integer?", tenant = "string?", deadline = "number?",
        ignore_eos = "boolean?", special = "boolean?" },
    { "step", step = "integer", t = "number", ms = "number", rows = "integer", run = "string?", draft = "string?",
        took = "string?", ended = "string?" },
    { "ended", ended = "string", t = "number" },
    { "call", call = "integer" },
    { "note", note = "string" },
    { "adapter", adapter = "string", path = "string", scale = "number?" },
    { "policy", policy = "string" },
    { "end", ["end"] = "boolean" },
}

local function fits(v, want)
    local optional = want:sub(-1) == "?"
    if optional then want = want:sub(1, -2) end
    if v == nil or v == json.null then return optional end
    return (want == "integer" and math.type(v) or type(v)) == want
end

--- A line as a table with its kind; or nil and what is wrong. Lines of kinds that are not known are let be.
local function parse(line)
    local t, err = json.decode(line, { ordered = line:find('^{"request"') ~= nil })
    if type(t) ~= "table" then return nil, err or "no object" end
    for _, kind in ipairs(kinds) do
        local name = kind[1]
        if t[name] ~= nil then
            for field, want in pairs(kind) do
                if field ~= 1 and not fits(t[field], want) then
                    return nil, ("%s: %s expected"):format(field, (want:gsub("?$", "")))
                end
            end
            return { kind = name, v = t }
        end
    end
    return { kind = "unknown", v = t }
end

--- f(id, rest) for each part of "3:45 4:67,68".
local function parts(text, f)
    for word in text:gmatch "%S+" do
        local id, rest = word:match "^(%d+)(.*)$"
        if not id then return nil, ("'%s' begins with no request's number"):format(word:sub(1, 20)) end
        local ok, err = f(math.tointeger(tonumber(id)), rest)
        if ok == false then return nil, ("'%s': %s"):format(word:sub(1, 40), err or "not understood") end
    end
    return true
end

--- The decisions of a step: list of { id, what, n }; what is ":", "+", "-", "!", "~" or "^".
function M.decisions(text)
    local list = {}
    local ok, err = parts(text, function(id, rest)
        local what, n = rest:match "^([:+!~^-])(%d*)$"
        if not what or (n == "") ~= (what:find "[!~^]" ~= nil) then return false end
        list[#list + 1] = { id, what, math.tointeger(tonumber(n)) }
    end)
    if not ok then return nil, err end
    return list
end

--- The drafts of a step: request -> list of tokens, with parents (the place of the token before, 0: the text).
function M.drafts(text)
    local all = {}
    local ok, err = parts(text, function(id, rest)
        local list = { parents = {} }
        for token, parent in rest:gmatch "[:,](%d+)%.?(%-?%d*)" do
            list[#list + 1] = math.tointeger(tonumber(token))
            list.parents[#list] = parent == "" and #list - 1 or math.tointeger(tonumber(parent)) + 1
        end
        if #list == 0 then return false end
        all[id] = list
    end)
    if not ok then return nil, err end
    return all
end

--- "3:45 4:67,68" as a list of { id, tokens }
local function read_took(text)
    local list = {}
    local ok, err = parts(text, function(id, rest)
        local tokens = {}
        for token in rest:gmatch "[:,](%d+)" do tokens[#tokens + 1] = math.tointeger(tonumber(token)) end
        if #tokens == 0 or rest ~= ":" .. table.concat(tokens, ",") then return false end
        list[#list + 1] = { id, tokens }
    end)
    if not ok then return nil, "took: " .. err end
    return list
end

local finishes = { stop = true, length = true, cancelled = true, error = true, none = true }

--- "3:stop:120" as a list of { id, how, length of the sequence }
local function read_ended(text)
    local list = {}
    local ok, err = parts(text, function(id, rest)
        local how, len = rest:match "^:(%a+):(%d+)$"
        if not finishes[how] then return false end
        list[#list + 1] = { id, how, math.tointeger(tonumber(len)) }
    end)
    if not ok then return nil, "ended: " .. err end
    return list
end

--- What a step's texts say, into the event; nil and what is wrong.
local function read_step(e, last_run)
    local v = e.v
    if v.run == "=" then v.run = last_run end
    local run, err = M.decisions(v.run or "")
    if not run then return nil, "run: " .. err end
    e.draft, err = M.drafts(v.draft or "")
    if not e.draft then return nil, "draft: " .. err end
    e.took, err = read_took(v.took or "")
    if not e.took then return nil, err end
    e.ended, err = read_ended(v.ended or "")
    return e.ended, err
end

-- Texts: what sequences hold at a place in the file -------------------------------------------------------------------

local Texts = {}
Texts.__index = Texts

local function new_texts() return setmetatable({ seqs = {}, of = {}, roots = {} }, Texts) end

function Texts:shorten(id, len)
    local s = self.seqs[id]
    if not s or len > #s or len < 0 then return false, ("sequence %d can't be cut to %d"):format(id, len) end
    for i = #s, len + 1, -1 do s[i] = nil end
    return true
end

--- Tokens that requests drew go to their sequences; the end of one brings it to its true length.
function Texts:step(e)
    for _, t in ipairs(e.took or {}) do
        local s = self.seqs[self.of[t[1]]]
        if s then table.move(t[2], 1, #t[2], #s + 1, s) end
    end
    for _, t in ipairs(e.ended or {}) do
        local of = self.of[t[1]]
        local s = self.seqs[of]
        if s and t[3] <= #s then self:shorten(of, t[3]) end
        self.of[t[1]] = nil
    end
    return true
end

--- Carries out an event; false and why, if it can't be.
function Texts:apply(e)
    local v, seqs = e.v, self.seqs
    if e.kind == "seq" then
        seqs[v.seq], self.roots[v.seq] = {}, v.seq
    elseif e.kind == "fork" then
        local from = seqs[v.of]
        if not from or v.len > #from or v.len < 0 then return false, "a fork of what is not there" end
        seqs[v.fork], self.roots[v.fork] = table.move(from, 1, v.len, 1, {}), self.roots[v.of]
    elseif e.kind == "add" then
        local s = seqs[v.add]
        if not s then return false, ("sequence %d is not there"):format(v.add) end
        for _, id in ipairs(v.ids) do
            if math.type(id) ~= "integer" then return false, "ids: integers expected" end
        end
        table.move(v.ids, 1, #v.ids, #s + 1, s)
    elseif e.kind == "cut" then
        return self:shorten(v.cut, v.len)
    elseif e.kind == "drop" then
        seqs[v.drop], self.roots[v.drop] = nil, nil
    elseif e.kind == "request" then
        local s = seqs[v.of]
        if not s then return false, ("sequence %d is not there"):format(v.of) end
        if v.prompt ~= #s then
            return false, ("a prompt of %d tokens, but the sequence holds %d"):format(v.prompt, #s)
        end
        self.of[v.request] = v.of
    end
    return self:step(e)
end

-- Reading -------------------------------------------------------------------------------------------------------------

local function new_request(v, line, of)
    local r = { id = v.request, line = line, salt = of.salt, adapter = of.adapter, tokens = {}, steps = {} }
    for k, x in pairs(v) do
        if k ~= "request" then r[k] = x end
    end
    return r
end

--- What an event means for the requests of a recording. nil and what is wrong.
local function note_event(rec, e)
    local v = e.v
    if e.kind == "seq" then
        rec.seqs[v.seq] = v
    elseif e.kind == "fork" then
        rec.seqs[v.fork] = rec.seqs[v.of]
    elseif e.kind == "request" then
        if rec.requests[v.request] then return nil, ("request %d comes twice"):format(v.request) end
        rec.requests[v.request] = new_request(v, e.line, rec.seqs[v.of] or {})
        rec.order[#rec.order + 1] = v.request
    elseif e.kind == "call" then
        rec.calls[v.call] = rec.calls[v.call] or {}
        table.insert(rec.calls[v.call], v)
    elseif e.kind == "adapter" then
        rec.adapters[v.adapter] = v
    elseif e.kind == "step" then
        rec.steps = rec.steps + 1
        for id in pairs(e.draft) do
            if rec.requests[id] then rec.requests[id].drafts = true end
        end
    elseif e.kind == "end" then
        rec.cut = false
    end
    for _, t in ipairs(e.took or {}) do
        local r = rec.requests[t[1]] -- nil: one that was at work when the recording began
        for _, token in ipairs(r and t[2] or {}) do
            r.tokens[#r.tokens + 1] = token
            r.steps[#r.tokens] = v.step
        end
    end
    for _, t in ipairs(e.ended or {}) do
        local r = rec.requests[t[1]]
        if r then r.ended, r.final, r.t_end = t[2], t[3], v.t + (v.ms or 0) / 1000 end
    end
    return true
end

--- A line's event: kind, v (its table), and of steps and ends took, ended, draft; last_run: the decisions of the step
--- before. nil and what is wrong.
function M.event(line, last_run)
    local e, err = parse(line)
    if not e then return nil, err end
    local ok = true
    if e.kind == "step" then
        ok, err = read_step(e, last_run)
    elseif e.kind == "ended" then
        e.ended, err = read_ended(e.v.ended)
        ok = e.ended
    end
    if not ok then return nil, err end
    return e
end

--- Goes through the lines after the first: on(event, texts) before each is carried out. Fills rec. nil, line number,
--- what is wrong.
local function each(rec, next_line, on)
    local texts, last_run = new_texts(), nil
    while true do
        local line, number = next_line()
        if not line then return true end
        local e, err = M.event(line, last_run)
        if not e then return nil, number, err end
        e.line = number
        if e.kind == "step" then last_run = e.v.run or last_run end
        on(e, texts)
        local ok
        ok, err = note_event(rec, e)
        if ok then ok, err = texts:apply(e) end
        if not ok then return nil, number, err end
    end
end

--- The first line's table; nil, text, code.
local function read_header(path, line)
    local h = line and json.decode(line)
    if type(h) ~= "table" or h.llmrun ~= "recording" then
        return nil, path .. ": not a recording of llmrun", "format"
    elseif h.version ~= M.VERSION then
        return nil, ("%s: a recording of version %s; this program reads version %d"):format(path, tostring(h.version),
            M.VERSION), "unsupported"
    elseif type(h.model) ~= "table" or type(h.options) ~= "table" then
        return nil, path .. ":1: model and options expected", "format"
    end
    return h
end

--- A recording that each goes through; the file is open.
local function open(path)
    local f, err = io.open(path, "rb")
    if not f then return nil, err, "not_found" end
    local first = f:read "L"
    local header, why, code = read_header(path, first and first:sub(-1) == "\n" and first or nil)
    if not header then
        f:close()
        return nil, why, code
    end
    local number = 1
    local rec = setmetatable({
        path = path, header = header, events = {}, requests = {}, order = {}, seqs = {}, calls = {}, adapters = {},
        steps = 0, cut = true,
    }, Recording)
    return rec, function()
        local line = f:read "L"
        number = number + 1
        if not line or line:sub(-1) ~= "\n" then -- the end, or a line that was being written
            f:close()
            return nil
        end
        return line:sub(1, -2), number
    end
end

--- Reads all of a recording. nil, text, code.
---@param path string
---@return llmrun.Recording?, string?, string?
function M.read(path)
    local rec, next_line, code = open(path)
    if not rec then return nil, next_line, code end
    local ok, number, err = each(rec, next_line, function(e) rec.events[#rec.events + 1] = e end)
    if not ok then return nil, ("%s:%d: damaged: %s"):format(path, number, err), "format" end
    return rec
end

--- Token ids of a request's prompt.
function Recording:prompt(id)
    local texts = new_texts()
    for _, e in ipairs(self.events) do
        if e.kind == "request" and e.v.request == id then
            return table.move(texts.seqs[e.v.of], 1, e.v.prompt, 1, {})
        end
        texts:apply(e)
    end
end

-- As a trace ----------------------------------------------------------------------------------------------------------

local BLOCK = 512 -- tokens of a block's id, as traces.lua has them

--- Numbers of the 512-token blocks of a prompt: equal where all tokens up to there are equal. root: { n = 0 }.
local function block_ids(tokens, n, root)
    local ids, node = {}, root
    for at = 1, n, BLOCK do
        local key = table.concat(tokens, ",", at, math.min(n, at + BLOCK - 1))
        node.next = node.next or {}
        local child = node.next[key]
        if not child then
            root.n = root.n + 1
            child = { id = root.n }
            node.next[key] = child
        end
        ids[#ids + 1] = child.id
        node = child
    end
    return ids
end

--- An iterator over the requests that generate, as rows of a trace (traces.lua), in order of arrival: at, prompt,
--- output, blocks, tenant, session, priority, deadline, number (of the line). nil, text, code.
---@param path string
function M.rows(path)
    local rec, next_line, code = open(path)
    if not rec then return nil, next_line, code end
    local rows, root = {}, { n = 0 }
    local ok, number, err = each(rec, next_line, function(e, texts)
        local v = e.v
        local s = e.kind == "request" and v.kind == "generate" and texts.seqs[v.of]
        if not s or #s ~= v.prompt then return end
        rows[#rows + 1] = {
            at = v.t, prompt = v.prompt, tenant = v.tenant, session = ("s%d"):format(texts.roots[v.of]),
            priority = v.priority, deadline = v.deadline, number = e.line, id = v.request,
            blocks = block_ids(s, v.prompt, root),
        }
    end)
    if not ok then return nil, ("%s:%d: damaged: %s"):format(path, number, err), "format" end
    for _, r in ipairs(rows) do
        r.output, r.id = #rec.requests[r.id].tokens, nil
    end
    local i = 0
    return function()
        i = i + 1
        return rows[i]
    end
end

return M
