--- Traces of requests: arrival times and lengths, without text; what real services got, or made (workload.lua).
---
--- Files, told apart by the first line:
---   Azure LLM inference traces (CSV): TIMESTAMP,ContextTokens,GeneratedTokens
---   BurstGPT (CSV): Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type; the later ones also
---   Session ID and Elapsed time. Requests without a response (they failed) are left out; the log type is the tenant
---   Mooncake (JSON lines): timestamp (ms), input_length, output_length, hash_ids: one id a block of 512 prompt tokens;
---   where the ids are equal, so are the tokens
---   what llmrun serve --record wrote (recording.lua)
---   our own (JSON lines): rows as below; a first line { "format": "llmrun-trace-1", "block": N } may say more
---
--- A row is { at = seconds since the first, prompt = tokens, output = tokens, number = its line, and where known
--- blocks = list of ids, one for each `block` tokens of the prompt (512 unless the row says so), tenant, session,
--- priority, deadline = seconds after its arrival, after = number of an earlier row, delay = seconds }. A row with
--- `after` arrives `delay` seconds after that one's end; such rows stand behind the one that they wait for, before the
--- next that arrives by itself. The prompt of a session's row begins with the text (prompt and output) of the row
--- before it, unless it has blocks.

local cjson = require "cjson"
local errors = require "llmrun.errors"
local files = require "llmrun.files"
local json = require "llmrun.json"
local options = require "llmrun.options"
local workload = require "llmrun.workload"

local M = {}

M.block_tokens = 512 -- of a Mooncake hash id
M.format = "llmrun-trace-1"

local function count(v)
    local n = math.tointeger(tonumber(v))
    return n and n >= 0 and n < 2 ^ 31 and n or nil
end

local function seconds(v)
    local n = tonumber(v)
    return n and n >= 0 and n < 1e12 and n or nil
end

--- Days since 1 March of year 0.
local function day_number(year, month, day)
    if month < 3 then year, month = year - 1, month + 12 end
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day
end

local function seconds_of(text)
    local y, mo, d, h, mi, s = text:match("^(%d%d%d%d)%-(%d%d)%-(%d%d)[ T](%d%d):(%d%d):(%d%d%.?%d*)")
    if not y then return nil end
    y, mo, d, h, mi = math.tointeger(y), math.tointeger(mo), math.tointeger(d), math.tointeger(h), math.tointeger(mi)
    return (day_number(y, mo, d) * 24 + h) * 3600 + mi * 60 + tonumber(s)
end

-- Formats: a function of the first line gives nil (not this one), or parse(line) -> row, or nil and what is wrong, or
-- false (a line that holds no request); and whether the first line is a row itself. ----------------------------------

local function azure_row(line)
    local time, prompt, output = line:match("^([^,]+),([^,]+),([^,]+)$")
    local at = time and seconds_of(time)
    prompt, output = count(prompt), count(output)
    if not at or not prompt or not output then return nil, "a time and two numbers of tokens expected" end
    return { at = at, prompt = prompt, output = output }
end

local function azure(first)
    if first:match("^TIMESTAMP,ContextTokens,GeneratedTokens") then return azure_row, false end
end

local function cells(line)
    local list = {}
    for cell in (line .. ","):gmatch("([^,]*),") do list[#list + 1] = cell:match("^%s*(.-)%s*$") end
    return list
end

local function burstgpt(first)
    local names, place = cells(first), {}
    for i, name in ipairs(names) do place[name:lower()] = i end
    local at, prompt, output = place["timestamp"], place["request tokens"], place["response tokens"]
    if not (at and prompt and output) then return nil end
    local kind, session = place["log type"], place["session id"]
    return function(line)
        local c = cells(line)
        local row = { at = seconds(c[at]), prompt = count(c[prompt]), output = count(c[output]) }
        if #c ~= #names or not (row.at and row.prompt and row.output) then
            return nil, ("%d columns expected, a time and numbers of tokens among them"):format(#names)
        end
        if row.output == 0 then return false end
        row.tenant = kind and c[kind]:lower():match("^(%a+)")
        row.session = session and c[session] ~= "" and c[session] or nil
        return row
    end, false
end

local function ids_ok(ids, prompt, block)
    if type(ids) ~= "table" or #ids ~= (prompt + block - 1) // block then
        return nil, ("one for each %d tokens expected"):format(block)
    end
    for i, id in ipairs(ids) do
        local n = math.tointeger(id)
        if not n or n < 0 then return nil, "not a number" end
        ids[i] = n
    end
    return true
end

local function object(line)
    local ok, t = pcall(cjson.decode, line)
    if not ok or type(t) ~= "table" then return nil, "not a JSON object" end
    return t
end

local function mooncake_row(line)
    local t, bad = object(line)
    if not t then return nil, bad end
    local at, prompt, output = seconds(t.timestamp), count(t.input_length), count(t.output_length)
    if not at or not prompt or not output then return nil, "timestamp, input_length, output_length expected" end
    local ok, why = ids_ok(t.hash_ids, prompt, M.block_tokens)
    if not ok then return nil, "hash_ids: " .. why end
    return { at = at / 1000, prompt = prompt, output = output, blocks = t.hash_ids }
end

local own_fields = {
    at = "number", prompt = "integer", output = "integer", blocks = "table", block = "integer", tenant = "string",
    session = "string", priority = "integer", deadline = "number", after = "integer", delay = "number",
    number = "integer",
}

--- A row of our own format: the fields, checked; block: tokens of an id of blocks unless it says so itself.
local function own_row(line, number, block)
    local t, bad = object(line)
    if not t then return nil, bad end
    local row = {}
    for key, kind in pairs(own_fields) do
        local v = t[key]
        if v == cjson.null then v = nil end
        if v ~= nil and not options.is(v, kind) then return nil, ("%s: %s expected"):format(key, kind) end
        row[key] = kind == "integer" and math.tointeger(v) or v
    end
    row.prompt, row.output = count(row.prompt), count(row.output)
    if not row.prompt or not row.output then return nil, "prompt, output: numbers of tokens expected" end
    for _, key in ipairs { "at", "delay", "deadline" } do
        if row[key] and not seconds(row[key]) then return nil, key .. ": seconds expected" end
    end
    if not row.at and not row.after then return nil, "at or after expected" end
    row.number = row.number or number
    if row.after and row.after >= row.number then return nil, "after: the number of an earlier row expected" end
    if row.blocks then
        row.block = row.block or block
        if row.block < 1 then return nil, "block: at least 1 expected" end
        local ok, why = ids_ok(row.blocks, row.prompt, row.block)
        if not ok then return nil, "blocks: " .. why end
    end
    return row
end

local function json_lines(first)
    if not first:match("^%s*{") then return nil end
    local t = object(first)
    local format = t and t.format
    if t and t.llmrun == "recording" then
        return function() end, false, "recording"
    elseif format == M.format then
        local block = count(t.block) or M.block_tokens
        return function(line, number) return own_row(line, number, block) end, false, "llmrun"
    elseif type(format) == "string" then
        return nil, ("a file of the format '%s' is no trace"):format(format)
    end
    if t and t.prompt and not t.input_length then
        return function(line, number) return own_row(line, number, M.block_tokens) end, true, "llmrun"
    end
    return mooncake_row, true
end

local formats = { { "azure", azure }, { "burstgpt", burstgpt }, { "mooncake", json_lines } }

--- What parses the rows of a file that begins with this line, whether the line is a row, the format's name; or nil and
--- what is wrong.
local function find_format(first)
    for _, f in ipairs(formats) do
        local parse, row, name = f[2](first)
        if parse then return parse, row, name or f[1] end
        if row then return nil, row end
    end
    return nil, ("neither an Azure, BurstGPT nor Mooncake trace, nor one of llmrun's; it begins with '%s'"):format(
        first:sub(1, 60):gsub("[^\x20-\x7e]", "?"))
end

--- The rows of a file as they stand there: next() -> row; nil at the end; nil and a text where it can't go on. Behind
--- it the format's name. Or nil and a text.
local function file_rows(path)
    local file, err = io.open(path, "rb")
    if not file then return nil, err end
    local readable, why = file:read(0) -- nil without a reason: an empty file
    if not readable then
        file:close()
        return nil, ("%s: %s"):format(path, why or "no rows there")
    end
    local number = 1
    local line = file:read("l"):gsub("^\xEF\xBB\xBF", ""):gsub("\r$", "")
    local parse, is_row, format = find_format(line)
    if not parse then
        file:close()
        return nil, ("%s: %s"):format(path, is_row)
    end
    if format == "recording" then
        file:close()
        local rows, problem = require("llmrun.recording").rows(path)
        return rows, rows and format or problem
    end
    if not is_row then line = "" end
    return function()
        while line do
            local row, bad = false, nil
            if line ~= "" then row, bad = parse(line, number) end
            if row == nil then return nil, ("%s:%d: %s"):format(path, number, bad) end
            if row then row.number = row.number or number end
            line, number = file:read("l"), number + 1
            line = line and line:gsub("\r$", "")
            if row then return row end
        end
        file:close()
        return nil
    end, format
end

--- Reads at most `most` rows after the first `skip`, sorted by time.
---@param path string
---@param most? integer
---@param skip? integer
---@return table[]|nil rows, string format or the reason
function M.read(path, most, skip)
    local next_row, format = file_rows(path)
    if not next_row then return nil, format end
    local rows, left, last = {}, skip or 0, 0
    while not most or #rows < most do
        local row, bad = next_row()
        if bad then return nil, bad end
        if not row then break end
        row.at = row.at or last
        last = row.at
        if left > 0 then left = left - 1 else rows[#rows + 1] = row end
    end
    if #rows == 0 then return nil, path .. ": no rows there" end
    table.sort(rows, function(a, b)
        if a.at ~= b.at then return a.at < b.at end
        return a.number < b.number
    end)
    local first = rows[1].at
    for _, r in ipairs(rows) do r.at = r.at - first end
    return rows, format
end

local open_options = { most = "integer", skip = "integer", speed = "number", scale = "number", limit = "integer",
    seed = "integer" }

--- One row after the other of a file, relative to the first; nil and a text where the file goes wrong.
local function file_stream(path)
    local next_row, format = file_rows(path)
    if not next_row then return nil, format end
    local first, last
    return function()
        local row, bad = next_row()
        if not row then return nil, bad end
        if row.after and last then row.at = last end
        row.at = row.at or 0
        if last and row.at < last then
            return nil, ("%s: row %d is earlier than the one before; sort the file by time"):format(path, row.number)
        end
        last = row.at
        first = first or row.at
        row.at = row.at - first
        return row
    end, format
end

--- Rows one after the other, in constant memory, of a file or of what a text like "poisson:rate=5,requests=1000" says
--- (workload.lua). Returns a function that gives the next row, nil at the end, and raises where a file goes wrong; and
--- the format's name. Or nil and a text. Requests without a prompt or an answer are left out.
---
--- Options: most rows, skip (rows left out at the beginning), speed (arrivals so many times as fast), scale (lengths
--- times this), limit (rows with more tokens, output included, are left out), seed (of a made trace, instead of its
--- own).
---@param what string
---@param opts? table
---@return (fun(): table?)|nil rows, string format or the reason
function M.open(what, opts)
    options.check("trace", opts, open_options, 2)
    local o = opts or {}
    for _, name in ipairs { "speed", "scale" } do
        if o[name] and not (o[name] >= 1e-6 and o[name] <= 1e6) then
            return nil, ("trace: %s: 1e-06 to 1e+06 expected, got %g"):format(name, o[name])
        end
    end
    for name, least in pairs { most = 1, limit = 1, skip = 0 } do
        if o[name] and o[name] < least then
            return nil, ("trace: %s: %d or more expected, got %d"):format(name == "most" and "requests" or name, least,
                o[name])
        end
    end
    local next_row, format
    if workload.is(what) then
        next_row, format = workload.rows(what, { seed = o.seed })
    else
        next_row, format = file_stream(what)
        if not next_row and not what:find("[/.]") then
            format = ("%s; kinds of traces that can be made: %s"):format(format, table.concat(workload.names, ", "))
        end
    end
    if not next_row then return nil, format end
    local given, change, gone = 0, o.scale or o.limit, {} -- gone: rows left out, by number, of the last arrival
    local begin
    for _ = 1, o.skip or 0 do
        local row, bad = next_row()
        if not row then return nil, bad or ("%s: it has no more than %d rows"):format(what, o.skip) end
        if not row.after then gone = {} end
        gone[row.number] = true
    end
    local function rows()
        while not o.most or given < o.most do
            local row, bad = next_row()
            if not row then return nil, bad end
            begin = begin or (o.skip or 0) > 0 and row.at or 0
            row.at = row.at - begin
            if o.speed then row.at = row.at / o.speed end
            if not row.after then gone = {} end
            local number = row.number
            if row.after and gone[row.after] or row.prompt < 1 or row.output < 1 then
                row = nil -- without an answer there is nothing to be served
            elseif change then
                row = M.scale_row(row, o.scale or 1, o.limit)
            end
            if row then
                given = given + 1
                return row
            end
            gone[number] = true
        end
        return nil
    end
    local head, flaw = rows() -- an empty trace is an error here, not a surprise later
    if flaw then return nil, flaw end
    if not head then
        return nil, (o.skip or 0) > 0 and not o.limit and ("%s: it has no more than %d rows"):format(what, o.skip)
            or ("%s: no rows there%s"):format(what, o.limit and " that are short enough" or "")
    end
    return function()
        local row = head
        if row then
            head = nil
            return row
        end
        local bad
        row, bad = rows()
        if bad then errors.raise("trace", bad, "format") end
        return row
    end, format
end

--- Writes rows as a file of our own format; about: what the first line says of it. The number of rows; or nil and a
--- text.
---@param path string
---@param rows fun(): table?
---@param about? table
---@return integer? written, string? err
function M.write(path, rows, about)
    local file <close>, err = files.create(path)
    if not file then return nil, err end
    local head = { format = M.format }
    for k, v in pairs(about or {}) do head[k] = v end
    local ok, why = file:write(json.encode(head), "\n")
    local n = 0
    for row in rows do
        if row.after then row.at = nil end
        ok, why = file:write(json.encode(row), "\n")
        if not ok then break end
        n = n + 1
    end
    if ok then ok, why = file:done() end
    if not ok then return nil, why end
    return n
end

local function scaled(n, scale) return math.max(1, math.floor(n * scale + 0.5)) end

--- A row on another scale: lengths times `scale`, at least one token; nil if it then has more than `limit` tokens,
--- output included. It gets `block` (tokens of a full block).
---@param r table
---@param scale number
---@param limit? integer
---@return table?
function M.scale_row(r, scale, limit)
    local row = {}
    for k, v in pairs(r) do row[k] = v end
    row.output, row.prompt = scaled(r.output, scale), nil
    if r.blocks then
        -- blocks stay whole: a prompt is its full blocks and the rest of the last one
        local block = r.block or M.block_tokens
        row.block = scaled(block, scale)
        local rest = r.prompt % block
        row.prompt = r.prompt // block * row.block + (rest > 0 and math.min(row.block, scaled(rest, scale)) or 0)
    end
    row.prompt = math.max(1, row.prompt or scaled(r.prompt, scale))
    if limit and row.prompt + row.output > limit then return nil end
    return row
end

--- The rows on another scale (scale_row), and times divided by `speed` (0: all at once). Rows longer than `limit` are
--- left out.
---@param rows table[]
---@param opts { scale: number, speed: number, limit?: integer }
---@return table[] rows, integer left_out
function M.scale(rows, opts)
    local out, left_out = {}, 0
    for _, r in ipairs(rows) do
        local row = M.scale_row(r, opts.scale, opts.limit)
        if row then
            row.at = opts.speed > 0 and r.at / opts.speed or 0
            out[#out + 1] = row
        else
            left_out = left_out + 1
        end
    end
    return out, left_out
end

--- The prompt of a scaled row. tokens(n, salt) -> n ids that follow from salt; unique: a number no other row has.
---@param row table
---@param tokens fun(n: integer, salt: integer): integer[]
---@param unique integer
---@return integer[]
function M.prompt(row, tokens, unique)
    if not row.blocks then return tokens(row.prompt, 2 * unique) end
    local ids = {}
    for _, id in ipairs(row.blocks) do
        local n = math.min(row.block, row.prompt - #ids)
        if n > 0 then table.move(tokens(n, 2 * id + 1), 1, n, #ids + 1, ids) end
    end
    return ids
end

--- Share of all prompt tokens that an endless cache would have: leading blocks that an earlier row had. 0 without ids.
---@param rows table[] scaled
---@return number
function M.possible_hits(rows)
    local seen, hits, all = {}, 0, 0
    for _, r in ipairs(rows) do
        all = all + r.prompt
        for i, id in ipairs(r.blocks or {}) do
            local n = math.min(r.block, r.prompt - (i - 1) * r.block)
            if (seen[id] or 0) < n then break end
            hits = hits + n
        end
        for i, id in ipairs(r.blocks or {}) do
            seen[id] = math.max(seen[id] or 0, math.min(r.block, r.prompt - (i - 1) * r.block))
        end
    end
    return all > 0 and hits / all or 0
end

local function distribution(counts, n)
    local values, sum = {}, 0
    for v, c in pairs(counts) do
        values[#values + 1] = v
        sum = sum + v * c
    end
    table.sort(values)
    local out, below = { mean = sum / n, max = values[#values] }, 0
    for _, v in ipairs(values) do
        below = below + counts[v]
        for name, q in pairs { p50 = 0.5, p90 = 0.9, p99 = 0.99 } do
            if not out[name] and below >= q * n then out[name] = v end
        end
    end
    return out
end

--- What a trace is like: { requests, arrivals (requests that wait for no other), seconds (to the last arrival), rate
--- (of arrivals), burstiness (standard deviation of the times between arrivals over their mean; Poisson: 1), prompt,
--- output = { mean, p50, p90, p99, max }, tenants = { name = requests } }.
---@param rows fun(): table?
---@return table
function M.describe(rows)
    local n, arrivals, last, square = 0, 0, 0, 0
    local prompts, outputs, tenants = {}, {}, {}
    for row in rows do
        n = n + 1
        if not row.after then
            arrivals, square = arrivals + 1, square + (row.at - last) ^ 2
            last = row.at
        end
        prompts[row.prompt] = (prompts[row.prompt] or 0) + 1
        outputs[row.output] = (outputs[row.output] or 0) + 1
        local tenant = row.tenant or ""
        tenants[tenant] = (tenants[tenant] or 0) + 1
    end
    local mean = arrivals > 0 and last / arrivals or 0
    local variance = arrivals > 0 and math.max(0, square / arrivals - mean ^ 2) or 0
    return {
        requests = n, arrivals = arrivals, seconds = last, rate = last > 0 and arrivals / last or nil,
        burstiness = mean > 0 and math.sqrt(variance) / mean or nil, prompt = distribution(prompts, n),
        output = distribution(outputs, n), tenants = tenants,
    }
end

return M
