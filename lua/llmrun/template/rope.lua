-- Strings that know where they came from.
--
-- A plain Lua string is data: text of a message, a tool's name, anything computed from such. Text that the template
-- itself holds is a rope: a table that lists pieces and says of each whether it is literal. Only literal pieces may
-- later be searched for special tokens, so the rule for every function here and for all filters is: a result piece is
-- literal only if each of its bytes is the template's own text. When in doubt it is data.
--
-- Shapes of a rope (metatable Rope; ropes are never changed once seen, except to cache):
--   { n = bytes, lit = true, s = text }      one literal text
--   { n, lit = false, t = {}, f = {} }       pieces; f[i] true where t[i] is literal
--   { n, lit, a = left, b = right }          a concatenation, made into pieces when first looked at
-- `s` caches the whole text. `lit` is true where all of it is literal. Concatenation is O(1), so a template may build
-- a long prompt by `ns.text = ns.text + piece`.

local state = require "llmrun.template.state"
local S, raise, charge, charge_bytes = state.S, state.raise, state.charge, state.charge_bytes
local concat_table = table.concat

local Rope = {}
local M = { Rope = Rope }

local SMALL = 2048 -- texts up to this size are joined at once

---A literal text.
function M.lit(s)
    return setmetatable({ n = #s, s = s, lit = true }, Rope)
end
local lit = M.lit

local function is_rope(v)
    return getmetatable(v) == Rope
end

---True for both kinds of strings.
function M.is_str(v)
    return type(v) == "string" or getmetatable(v) == Rope
end

-- Brings a rope into its form of pieces.
local function settle(r)
    if r.t then
        return
    end
    if not r.a then
        r.t, r.f = { r.s }, { true }
        return
    end
    local t, f, k = {}, {}, 0
    local stack, top = { r }, 1
    while top > 0 do
        local x = stack[top]
        stack[top] = nil
        top = top - 1
        if type(x) == "string" then
            k = k + 1
            t[k], f[k] = x, false
        elseif x.t then
            local xt, xf = x.t, x.f
            for i = 1, #xt do
                t[k + i], f[k + i] = xt[i], xf[i]
            end
            k = k + #xt
            charge(4 * #xt)
        elseif x.a then
            stack[top + 1], stack[top + 2] = x.b, x.a
            top = top + 2
        else
            k = k + 1
            t[k], f[k] = x.s, true
        end
        charge(4)
    end
    r.t, r.f, r.a, r.b = t, f, nil, nil
end

---The whole text as a Lua string.
function M.flat(v)
    if type(v) == "string" then
        return v
    end
    local s = v.s
    if not s then
        settle(v)
        charge_bytes(v.n)
        s = concat_table(v.t)
        v.s = s
    end
    return s
end
local flat = M.flat

---Length in bytes.
function M.size(v)
    return type(v) == "string" and #v or v.n
end

---Gives text s the provenance of v: for results whose every byte derives from v alone.
function M.like(v, s)
    if is_rope(v) and v.lit then
        return lit(s)
    end
    return s
end

function M.concat(a, b)
    local da, db = type(a) == "string", type(b) == "string"
    local na, nb = da and #a or a.n, db and #b or b.n
    if na == 0 then
        return b
    elseif nb == 0 then
        return a
    end
    local n = na + nb
    if n > S.max_bytes then
        charge_bytes(n)
    end
    if da and db then
        if n <= SMALL then
            charge(1 + n // 16)
            return a .. b
        end
        return setmetatable({ n = n, a = a, b = b, lit = false }, Rope)
    end
    local both = not da and not db and a.lit and b.lit
    if both and n <= SMALL and a.s and b.s then
        charge(1 + n // 16)
        return lit(a.s .. b.s)
    end
    return setmetatable({ n = n, a = a, b = b, lit = both or false }, Rope)
end

-- Makes a string value of k pieces with n bytes in all.
local function build(t, f, k, n)
    if k == 0 then
        return ""
    end
    local first = f[1]
    for i = 2, k do
        if f[i] ~= first then
            return setmetatable({ n = n, t = t, f = f, lit = false }, Rope)
        end
    end
    charge_bytes(n)
    local s = k == 1 and t[1] or concat_table(t, "", 1, k)
    return first and lit(s) or s
end

---The contents of an output buffer as a string value.
function M.from_buffer(out)
    return build(out.t, out.f, out.n, out.bytes)
end

---Writes a string value to the output.
function M.emit(v)
    local emit = state.emit
    if type(v) == "string" then
        return emit(v, false)
    end
    if v.lit then
        return emit(flat(v), true)
    end
    settle(v)
    local t, f = v.t, v.f
    for i = 1, #t do
        emit(t[i], f[i])
    end
end

---Joins k string values.
function M.join(parts, k)
    local t, f, m, n = {}, {}, 0, 0
    charge(k)
    for i = 1, k do
        local p = parts[i]
        if type(p) == "string" then
            m = m + 1
            t[m], f[m] = p, false
            n = n + #p
        else
            settle(p)
            local pt, pf = p.t, p.f
            for j = 1, #pt do
                t[m + j], f[m + j] = pt[j], pf[j]
            end
            m = m + #pt
            n = n + p.n
            charge(#pt)
        end
        if n > S.max_bytes then
            charge_bytes(n)
        end
    end
    return build(t, f, m, n)
end

---Returns a function cut(i, j) that gives bytes i..j of v with their provenance. Cheap when called left to right.
function M.cutter(v)
    if type(v) == "string" then
        return function(i, j)
            return v:sub(i, j)
        end
    elseif v.lit then
        local s = flat(v)
        return function(i, j)
            return lit(s:sub(i, j))
        end
    end
    settle(v)
    local t, f = v.t, v.f
    local at, before = 1, 0 -- a piece at or left of i, and the bytes before it
    return function(i, j)
        i, j = math.max(i, 1), math.min(j, v.n)
        if j < i then
            return ""
        end
        if i <= before then
            at, before = 1, 0
        end
        while before + #t[at] < i do
            before = before + #t[at]
            at = at + 1
            charge(1)
        end
        local rt, rf, m = {}, {}, 0
        local k, o = at, before
        while o < j do
            local p = t[k]
            m = m + 1
            rt[m], rf[m] = p:sub(math.max(i - o, 1), math.min(j - o, #p)), f[k]
            o = o + #p
            k = k + 1
        end
        charge(m)
        return build(rt, rf, m, j - i + 1)
    end
end

---Bytes i..j of v with their provenance.
function M.sub(v, i, j)
    if type(v) == "string" then
        return v:sub(i, j)
    end
    return M.cutter(v)(i, j)
end

---v repeated n times.
function M.rep(v, n)
    if n <= 0 then
        return ""
    end
    local size = M.size(v)
    if size == 0 then
        return v
    end
    if n > S.max_bytes or size * n > S.max_bytes then
        raise("limit", "a repeated string is over the limit of %d bytes", S.max_bytes)
    end
    if is_rope(v) and not v.lit then
        local parts = {}
        for i = 1, n do
            parts[i] = v
        end
        return M.join(parts, n)
    end
    charge_bytes(size * n)
    return M.like(v, flat(v):rep(n))
end

return M
