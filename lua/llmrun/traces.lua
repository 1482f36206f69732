--- Traces of requests that real services got: arrival times and lengths, without text.
---
--- Two formats, told apart by the first line:
---   Azure LLM inference traces (CSV): TIMESTAMP,ContextTokens,GeneratedTokens
---   Mooncake (JSON lines): timestamp (ms), input_length, output_length, hash_ids: one id a block of 512 prompt tokens;
---   where the ids are equal, so are the tokens
--- A row is { at = seconds since the first, prompt = tokens, output = tokens, blocks = list of ids or nil,
--- number = its line }.

local cjson = require "cjson"

local M = {}

M.block_tokens = 512 -- of a Mooncake hash id

local function count(v)
    local n = math.tointeger(tonumber(v))
    return n and n >= 0 and n < 2 ^ 31 and n or nil
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

local function azure_row(line)
    local time, prompt, output = line:match("^([^,]+),([^,]+),([^,]+)$")
    local at = time and seconds_of(time)
    prompt, output = count(prompt), count(output)
    if not at or not prompt or not output then return nil, "a time and two numbers of tokens expected" end
    return { at = at, prompt = prompt, output = output }
end

local function mooncake_row(line)
    local ok, t = pcall(cjson.decode, line)
    if not ok or type(t) ~= "table" then return nil, "not a JSON object" end
    local at, prompt, output = tonumber(t.timestamp), count(t.input_length), count(t.output_length)
    if not at or not prompt or not output then return nil, "timestamp, input_length, output_length expected" end
    local ids = t.hash_ids
    if type(ids) ~= "table" or #ids ~= (prompt + M.block_tokens - 1) // M.block_tokens then
        return nil, ("hash_ids: one for each %d tokens expected"):format(M.block_tokens)
    end
    for _, id in ipairs(ids) do
        if not count(id) then return nil, "hash_ids: not a number" end
    end
    return { at = at / 1000, prompt = prompt, output = output, blocks = ids }
end

--- Reads at most `most` rows after the first `skip`.
---@param path string
---@param most? integer
---@param skip? integer
---@return table[]|nil rows, string format or the reason
function M.read(path, most, skip)
    local file <close>, err = io.open(path, "rb")
    if not file then return nil, err end
    local readable, why = file:read(0) -- nil without a reason: an empty file
    if not readable and why then return nil, ("%s: %s"):format(path, why) end
    local rows, parse, format, number, left = {}, nil, nil, 0, skip or 0
    for line in file:lines() do
        number = number + 1
        line = line:gsub("\r$", "")
        if not parse then
            if line:match("^TIMESTAMP,ContextTokens,GeneratedTokens") then
                parse, format = azure_row, "azure"
                goto continue
            elseif line:match("^%s*{") then
                parse, format = mooncake_row, "mooncake"
            else
                return nil, path .. ": neither an Azure nor a Mooncake trace"
            end
        end
        if line ~= "" then
            if left > 0 then
                left = left - 1
            else
                if most and #rows >= most then break end
                local row, bad = parse(line)
                if not row then return nil, ("%s:%d: %s"):format(path, number, bad) end
                row.number = number
                rows[#rows + 1] = row
            end
        end
        ::continue::
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

local function scaled(n, scale) return math.max(1, math.floor(n * scale + 0.5)) end

--- The rows on another scale: lengths times `scale`, at least one token, and times divided by `speed` (0: all at once).
--- Rows get `block` (tokens of a full block). Rows longer than `limit` tokens, output included, are left out.
---@param rows table[]
---@param opts { scale: number, speed: number, limit?: integer }
---@return table[] rows, integer left_out
function M.scale(rows, opts)
    local out, left_out = {}, 0
    for _, r in ipairs(rows) do
        local row = {
            at = opts.speed > 0 and r.at / opts.speed or 0, output = scaled(r.output, opts.scale), blocks = r.blocks,
        }
        if r.blocks then
            -- blocks stay whole: a prompt is its full blocks and the rest of the last one
            row.block = scaled(M.block_tokens, opts.scale)
            local full = r.prompt // M.block_tokens
            local rest = r.prompt % M.block_tokens
            row.prompt = full * row.block + (rest > 0 and math.min(row.block, scaled(rest, opts.scale)) or 0)
        end
        row.prompt = math.max(1, row.prompt or scaled(r.prompt, opts.scale))
        if opts.limit and row.prompt + row.output > opts.limit then
            left_out = left_out + 1
        else
            out[#out + 1] = row
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

return M
