--- Traces that are made: arrivals and lengths drawn by chance from a seed, as rows of traces.lua, one after the other,
--- so that a million of them need no memory.
---
---   for row in workload.rows "agents:rate=2,requests=500" do ... end
---   for row in workload.rows { kind = "agents", rate = 2, requests = 500, tenants = { a = 3, b = 1 } } do ... end
---   for row in workload.rows "poisson:rate=4,tenant=chat+burst:rate=2,tenant=batch,requests=500" do ... end
---
--- Kinds:
---   poisson        requests that know nothing of each other
---   burst          the same in bursts: gamma-distributed times between arrivals, `shape` below 1, or `on` and `off`
---   conversation   sessions of `turns` in the mean; a turn comes `think` seconds after the answer before it, and its
---                  prompt is all that was said and `prompt` new tokens
---   agents         sessions of `steps` in the mean, each with a tool's result of `result` tokens, `tool` seconds after
---                  the step before it has ended; all begin with the same `shared` tokens
---   fanout         a request, and after it `branches` at once that begin with its prompt (`shared` tokens)
---
--- Several, joined by "+" (or a list of tables), run side by side. rate counts requests, whatever they belong to:
--- sessions arrive at rate / (their mean length). Lengths and waits of people and tools are log-normal around their
--- means. Options of all kinds stand in `common`, those of one kind in `kinds`.

local errors = require "llmrun.errors"
local options = require "llmrun.options"
local random = require "llmrun.random"

local M = {}

M.names = { "poisson", "burst", "conversation", "agents", "fanout" }

local BLOCK = 64 -- tokens of an id of rows' blocks
local MOST_BLOCKS = 1 << 18 -- of a shared prefix: ids of one tenant's lie so far apart
local UNIQUE = 1 << 42 -- ids from here on belong to one prompt alone

--- What every kind knows: default, least, most.
M.common = {
    { "rate", 1, 1e-6, 1e6, help = "requests a second" },
    { "requests", 1000, 1, 1e9, integer = true, help = "how many in all" },
    { "seed", 1, -1e15, 1e15, integer = true, help = "same seed, same trace" },
    { "shape", 1, 0.01, 1000, help = "of the times between arrivals: 1: Poisson, less: bursts, more: even" },
    { "on", 0, 0, 1e6, help = "seconds in the mean of times with arrivals (0: always)" },
    { "off", 0, 0, 1e6, help = "seconds in the mean of times without" },
    { "swing", 0, 0, 0.99, help = "the rate goes up and down by this share, beginning at its lowest" },
    { "period", 86400, 1, 1e9, help = "seconds from low to low" },
    { "spread", 0.8, 0, 3, help = "of lengths: standard deviation of their logarithm (0: all equal)" },
    { "limit", 32768, 2, 1e8, integer = true, help = "most tokens of a request, prompt and output" },
    { "deadline", nil, 1e-3, 1e6, range = true, help = "seconds after arrival; A..B: drawn between them" },
    { "priority", nil, -1e6, 1e6, range = true, integer = true, help = "lower goes first; A..B: drawn between them" },
    { "tenant", nil, text = true, help = "name of the one tenant" },
    { "tenants", nil, text = true, help = "how many, equal ones; or names and weights, chat:3+batch:1" },
}

--- What a kind knows besides.
M.kinds = {
    poisson = { { "prompt", 512, 1, 1e7 }, { "output", 128, 1, 1e7 } },
    burst = { { "prompt", 512, 1, 1e7 }, { "output", 128, 1, 1e7 } },
    conversation = {
        { "turns", 5, 1, 1e4 }, { "think", 20, 0, 1e6 }, { "prompt", 80, 1, 1e7 }, { "output", 200, 1, 1e7 },
        { "shared", 0, 0, 1e7, integer = true },
    },
    agents = {
        { "steps", 8, 1, 1e4 }, { "tool", 1.5, 0, 1e6 }, { "result", 300, 1, 1e7 }, { "prompt", 300, 1, 1e7 },
        { "output", 100, 1, 1e7 }, { "shared", 1024, 0, 1e7, integer = true },
    },
    fanout = {
        { "branches", 8, 1, 1e4, integer = true }, { "shared", 1024, 1, 1e7, integer = true },
        { "prompt", 64, 1, 1e7 }, { "output", 128, 1, 1e7 }, { "plan", 64, 1, 1e7 },
    },
}

local function fail(...) error({ text = "trace: " .. string.format(...) }, 0) end

-- Options -------------------------------------------------------------------------------------------------------------

local function known_of(kind)
    local known, names = {}, {}
    for _, list in ipairs { M.common, M.kinds[kind] } do
        for _, o in ipairs(list) do
            known[o[1]], names[#names + 1] = o, o[1]
        end
    end
    return known, names
end

local function check_number(o, v)
    local n = o.integer and math.tointeger(tonumber(v)) or not o.integer and tonumber(v)
    if not n then
        fail("%s: %s expected, got '%s'", o[1], o.integer and "integer" or "number", tostring(v))
    elseif not (n >= o[3] and n <= o[4]) then
        fail("%s: %g to %g expected, got %s", o[1], o[3], o[4], tostring(v))
    end
    return n
end

local function check_range(o, v)
    local low, high = v, v
    if type(v) == "table" then low, high = v[1], v[2] end
    if type(v) == "string" and v:find("..", 1, true) then low, high = v:match("^(.-)%.%.(.*)$") end
    local range = { check_number(o, low), check_number(o, high) }
    if range[1] > range[2] then fail("%s: the lower end first, got %s..%s", o[1], low, high) end
    return range
end

--- { { name, weight }, ... } of the options tenant and tenants, by name.
local function check_tenants(o)
    local list = {}
    if o.tenant then return { { tostring(o.tenant), 1 } } end
    local n = math.tointeger(tonumber(o.tenants))
    if n then
        if n < 1 or n > 10000 then fail("tenants: 1 to 10000 expected, got %d", n) end
        for i = 1, n do list[i] = { ("t%d"):format(i), 1 } end
        return list
    end
    local weights = o.tenants
    if type(weights) == "string" then
        weights = {}
        for part in o.tenants:gmatch("[^+]+") do
            local name, weight = part:match("^([^:]+):?(.*)$")
            if not name then fail("tenants: NAME:WEIGHT expected, got '%s'", part) end
            weights[name] = weight == "" and 1 or tonumber(weight) or fail("tenants: no weight: '%s'", weight)
        end
    end
    for name, weight in pairs(weights or {}) do
        if type(name) ~= "string" or not (type(weight) == "number" and weight > 0 and weight < math.huge) then
            fail("tenants: names with weights above 0 expected")
        end
        list[#list + 1] = { name, weight }
    end
    table.sort(list, function(a, b) return a[1] < b[1] end)
    return list
end

--- The options of one part of a trace, checked and complete.
local function complete(given)
    local kind = given.kind
    if not M.kinds[kind] then
        local close = type(kind) == "string" and options.closest(kind, M.names)
        fail("no kind '%s'%s; there are %s", tostring(kind), close and (" (did you mean '%s'?)"):format(close) or "",
            table.concat(M.names, ", "))
    end
    local known, names = known_of(kind)
    local o = { kind = kind }
    for key, v in pairs(given) do
        local k = known[key]
        if k then
            if k.text then
                o[key] = v
            else
                o[key] = k.range and check_range(k, v) or check_number(k, v)
            end
        elseif key ~= "kind" then
            local close = options.closest(tostring(key), names)
            fail("%s has no option '%s'%s", kind, tostring(key),
                close and (" (did you mean '%s'?)"):format(close) or "")
        end
    end
    if kind == "burst" and not o.shape and not o.on then o.shape = 0.2 end
    if kind == "fanout" and (o.branches or 8) * (o.shared or 1024) > 1 << 28 then
        fail("fanout: branches times shared is %d tokens: at most %d expected", (o.branches or 8) * (o.shared or 1024),
            1 << 28)
    end
    if o.off and not o.on then fail("off without on: no time is left for arrivals") end
    for name, k in pairs(known) do
        if o[name] == nil then o[name] = k[2] end
    end
    o.tenants = check_tenants(o)
    return o
end

--- "kind:key=value,..." as a table.
local function parse_part(text)
    local kind, rest = text:match("^%s*([%w_]+)%s*:?(.*)$")
    if not kind then fail("KIND:KEY=VALUE,... expected, got '%s'", text) end
    local o = { kind = kind }
    for part in rest:gmatch("[^,]+") do
        local key, value = part:match("^%s*([%w_]+)%s*=%s*(.-)%s*$")
        if not key then fail("%s: KEY=VALUE expected, got '%s'", kind, part) end
        if o[key] then fail("%s: %s is given twice", kind, key) end
        o[key] = value
    end
    return o
end

--- Parts of a text: a "+" begins one where the name of a kind follows (those of tenants= have weights or none).
local function parse(text)
    local parts, from = {}, 1
    for at, kind in text:gmatch("()%+%s*([%w_]+)") do
        if M.kinds[kind] and at > from then
            parts[#parts + 1] = parse_part(text:sub(from, at - 1))
            from = at + 1
        end
    end
    parts[#parts + 1] = parse_part(text:sub(from))
    return parts
end

--- Whether a text means a trace that is made: it begins with the name of a kind.
---@param text any
---@return boolean
function M.is(text)
    if type(text) ~= "string" then return type(text) == "table" end
    local kind, colon, rest = text:match("^%s*([%w_]+)%s*(:?)(.*)$")
    if not kind then return false end
    return M.kinds[kind] and (colon == ":" or rest == "" or rest:sub(1, 1) == "+")
        or colon == ":" and rest:find("=", 1, true) ~= nil and not rest:find("/", 1, true)
end

-- Arrivals and lengths ------------------------------------------------------------------------------------------------

--- next() -> time of the next arrival, at `rate` a second in the long run.
local function arrivals(o, rate, r)
    local at, left = 0, nil
    local share = o.on > 0 and o.on / (o.on + o.off) or 1
    local omega = 2 * math.pi / o.period
    local function warp(u) -- the time by which a rate that swings has had as many arrivals as a steady one by u
        local low, high = u - o.swing / omega, u + o.swing / omega
        local t = u
        for _ = 1, 60 do
            local f = t - o.swing / omega * math.sin(omega * t) - u
            if math.abs(f) < 1e-7 then break end
            if f > 0 then high = t else low = t end
            t = t - f / (1 - o.swing * math.cos(omega * t))
            if t <= low or t >= high then t = (low + high) / 2 end
        end
        return t
    end
    return function()
        local gap = r:gamma(o.shape) / rate * share -- in times with arrivals, which are `share` of all
        if o.on > 0 then
            left = left or r:exponential() * o.on
            while gap > left do
                at, gap = at + left + r:exponential() * o.off, gap - left
                left = r:exponential() * o.on
            end
            left = left - gap
        end
        at = at + gap
        return o.swing > 0 and warp(at) or at
    end
end

--- A length around its mean.
local function length(r, mean, o)
    local n = mean * r:lognormal(o.spread)
    return math.max(1, math.floor(math.min(n, o.limit) + 0.5))
end

local function micro(t) return math.floor(t * 1e6 + 0.5) / 1e6 end

local function between(r, range, integer)
    if integer then return range[1] + r:integer(range[2] - range[1] + 1) - 1 end
    return micro(range[1] + (range[2] - range[1]) * r:uniform())
end

local function draw_tenant(r, list)
    if #list <= 1 then return list[1] and list[1][1], 1 end
    local sum = 0
    for _, t in ipairs(list) do sum = sum + t[2] end
    local u = r:uniform() * sum
    for i, t in ipairs(list) do
        u = u - t[2]
        if u < 0 or i == #list then return t[1], i end
    end
end

-- Kinds: a function that fills a unit, the rows that follow from one arrival, and the mean number of them ------------

--- Ids of a prompt's blocks: the first `shared` tokens, rounded down to whole blocks, have ids from `base` on.
local function block_ids(part, prompt, shared, base)
    local ids = {}
    for i = 1, (prompt + BLOCK - 1) // BLOCK do
        if i <= shared // BLOCK and i * BLOCK <= prompt then
            ids[i] = base + i
        else
            ids[i], part.unique = part.unique, part.unique + part.stride
        end
    end
    return ids
end

--- Both kinds of sessions: each row waits for the one before it, and its prompt holds all that was said.
local function session(part, unit, mean, first, more, wait)
    local o, r = part.options, part.random
    part.sessions = part.sessions + 1
    local name = ("%s%d"):format(part.prefix, part.sessions)
    local said, base = 0, (part.index * 10000 + unit.place) * MOST_BLOCKS
    for i = 1, r:geometric(mean) do
        local new = length(r, i == 1 and first or more, o)
        local prompt, output = said + new + (i == 1 and o.shared or 0), length(r, o.output, o)
        if i == 1 then
            prompt = math.min(prompt, o.limit - 1)
            output = math.min(output, o.limit - prompt)
        elseif prompt + output > o.limit then
            break
        end
        local row = { prompt = prompt, output = output, session = name }
        if i == 1 and o.shared > 0 then
            row.block, row.blocks = BLOCK, block_ids(part, prompt, o.shared, base)
        elseif i > 1 then
            row.wait, row.delay = i - 1, micro(wait * r:lognormal(o.spread))
        end
        unit[i] = row
        said = prompt + output
    end
end

local function single(part, unit)
    local o, r = part.options, part.random
    local prompt = math.min(length(r, o.prompt, o), o.limit - 1)
    unit[1] = { prompt = prompt, output = math.min(length(r, o.output, o), o.limit - prompt) }
end

local function fanout(part, unit)
    local o, r = part.options, part.random
    local shared = math.min(o.shared, o.limit - 2)
    local base = part.unique
    part.unique = part.unique + part.stride * (shared // BLOCK + 1)
    for i = 1, o.branches + 1 do
        local new = i == 1 and 0 or math.min(length(r, o.prompt, o), o.limit - 1 - shared)
        local prompt = shared + new
        local output = math.min(length(r, i == 1 and o.plan or o.output, o), o.limit - prompt)
        local ids = block_ids(part, prompt, 0, 0)
        for k = 1, shared // BLOCK do ids[k] = base + (k - 1) * part.stride end
        unit[i] = { prompt = prompt, output = output, block = BLOCK, blocks = ids }
        if i > 1 then unit[i].wait, unit[i].delay = 1, 0 end
    end
end

local makers = {
    poisson = { single, function() return 1 end },
    burst = { single, function() return 1 end },
    conversation = {
        function(part, unit)
            local o = part.options
            session(part, unit, o.turns, o.prompt, o.prompt, o.think)
        end,
        function(o) return o.turns end,
    },
    agents = {
        function(part, unit)
            local o = part.options
            session(part, unit, o.steps, o.prompt, o.result, o.tool)
        end,
        function(o) return o.steps end,
    },
    fanout = { fanout, function(o) return o.branches + 1 end },
}

--- One part: next_unit() -> the rows that follow from its next arrival, and when that is (at).
local function make_part(o, index, count, seed)
    local r = random.new(seed)
    for _ = 1, 4 do r:uniform() end -- neighbouring seeds are still alike in the first
    local part = {
        options = o, random = r, index = index, sessions = 0, unique = UNIQUE + index, stride = count,
        prefix = count > 1 and ("s%d."):format(index) or "s",
    }
    local fill, mean = makers[o.kind][1], makers[o.kind][2](o)
    local arrive = arrivals(o, o.rate / mean, r)
    local made = 0
    function part.next_unit()
        if made >= o.requests then return nil end
        local unit = { at = micro(arrive()) }
        unit.tenant, unit.place = draw_tenant(r, o.tenants)
        fill(part, unit)
        for i = #unit, o.requests - made + 1, -1 do unit[i] = nil end
        made = made + #unit
        for _, row in ipairs(unit) do
            row.tenant = unit.tenant
            if o.deadline then row.deadline = between(r, o.deadline) end
            if o.priority then row.priority = between(r, o.priority, true) end
        end
        return unit
    end
    return part
end

--- The parts' rows in order of time, from the first one's on; `after` names numbers of the whole.
local function merge(parts)
    local heads, number, unit, place, first = {}, 0, {}, 0, nil
    for i, p in ipairs(parts) do heads[i] = p.next_unit() end
    return function()
        if place >= #unit then
            local best
            for i in ipairs(parts) do
                if heads[i] and (not best or heads[i].at < heads[best].at) then best = i end
            end
            if not best then return nil end
            unit, place = heads[best], 0
            unit.first = number
            first = first or unit.at
            local at = micro(unit.at - first)
            for _, row in ipairs(unit) do row.at = at end
            heads[best] = parts[best].next_unit()
        end
        place, number = place + 1, number + 1
        local row = unit[place]
        row.number = number
        if row.wait then row.after, row.wait = unit.first + row.wait, nil end
        return row
    end
end

local function prepare(what, seed)
    local list = type(what) == "string" and parse(what) or what[1] and what or { what }
    local parts, names = {}, {}
    for i, given in ipairs(list) do
        local o = complete(given)
        names[i] = o.kind
        parts[i] = make_part(o, i, #list, (seed or o.seed) + (i - 1) * 7919)
    end
    return parts, table.concat(names, "+")
end

--- A function that gives one row after the other, nil at the end; and the names of its kinds. Or nil and a text.
---@param what string|table "kind:key=value,...", options with kind, or a list of these
---@param opts? { seed?: integer } seed: instead of the trace's own
---@return (fun(): table?)|nil rows, string kinds or the reason
function M.rows(what, opts)
    options.check("workload.rows", opts, { seed = "integer" }, 2)
    if type(what) ~= "string" and type(what) ~= "table" then
        errors.raise("workload.rows", "a text or a table expected, got " .. type(what))
    end
    local ok, parts, kinds = pcall(prepare, what, opts and opts.seed)
    if ok then return merge(parts), kinds end
    if type(parts) == "table" and parts.text then return nil, parts.text end
    error(parts, 0)
end

return M
