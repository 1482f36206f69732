-- Names at compile time: which slot of which frame a variable lives in.
--
-- A frame is the Lua table of one activation (the template itself, a macro call, a round of a recursive loop): values
-- at 1..n, the frame it was defined in under `up`. Blocks inside an activation share its frame but have scopes of
-- their own, so that what a loop's body sets is gone in the next round, as in Jinja. A variable that a scope assigns
-- starts, each time the scope is entered, with the value that the name has outside.
--
-- Names that no scope assigns are looked up in the variables of the render, then among the globals.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local value = require "llmrun.template.value"
local globals = require "llmrun.template.globals"
local S = state.S

local MAX_SLOTS = 2000

local M = {}

local Scope = {}
Scope.__index = Scope

local function new(parent, activation, options)
    return setmetatable({ vars = {}, used = {}, parent = parent, activation = activation, options = options }, Scope)
end

---The scope of a whole template. options.trusted: set of the names of variables whose strings count as the template's
---own text; options.roles: role name -> literal string of it.
function M.root(options)
    return new(nil, { level = 0, slots = 0 }, options)
end

---A scope inside this one, in the same frame.
function Scope:child()
    return new(self, self.activation, self.options)
end

---A scope inside this one whose code runs in a frame of its own.
function Scope:activation_child()
    local s = self:child()
    s.activation = { level = self.activation.level + 1, slots = 0 }
    return s
end

---Makes name a variable of this scope; returns its slot.
function Scope:declare(name)
    local slot = self.vars[name]
    if not slot then
        local a = self.activation
        slot = a.slots + 1
        if slot > MAX_SLOTS then
            state.raise("limit", "the template has too many variables")
        end
        a.slots = slot
        self.vars[name] = slot
    end
    return slot
end

---How to reach a variable from code of this scope: frames to go up, slot; nil if no scope assigns it.
function Scope:find(name)
    local s = self
    while s do
        local slot = s.vars[name]
        if slot then
            s.used[name] = true
            return self.activation.level - s.activation.level, slot
        end
        s = s.parent
    end
end

local function from_variables(name, trusted)
    local global = globals[name]
    if type(global) == "function" then
        global = nil -- a helper of globals.lua, not a value
    end
    if trusted then
        return function()
            local v = S.vars[name]
            if type(v) == "string" then
                return rope.lit(v)
            elseif v == nil then
                return global
            end
            return v
        end
    end
    return function()
        local v = S.vars[name]
        if v == nil then
            return global
        end
        return v
    end
end

---A function frame -> value of the name, nil if it has none.
function Scope:loader(name)
    local up, slot = self:find(name)
    if not up then
        return from_variables(name, self.options.trusted[name])
    elseif up == 0 then
        return function(f)
            return f[slot]
        end
    elseif up == 1 then
        return function(f)
            return f.up[slot]
        end
    end
    return function(f)
        for _ = 1, up do
            f = f.up
        end
        return f[slot]
    end
end

---A function frame -> value of the name, an undefined value if it has none.
function Scope:getter(name)
    local undef = value.undef(name)
    local up, slot = self:find(name)
    if up == 0 then
        return function(f)
            local v = f[slot]
            if v == nil then
                return undef
            end
            return v
        end
    end
    local load = self:loader(name)
    return function(f)
        local v = load(f)
        if v == nil then
            return undef
        end
        return v
    end
end

---Declares names and returns what sets them to their outer values when the scope is entered: a function(frame) or nil.
function Scope:assigned(names)
    local slots, loads, n = {}, {}, 0
    local outer = new(self.parent, self.activation, self.options)
    for i = 1, #names do
        local name = names[i]
        if not self.vars[name] then
            n = n + 1
            loads[n] = outer:loader(name)
            slots[n] = self:declare(name)
        end
    end
    if n == 0 then
        return nil
    elseif n == 1 then
        local slot, load = slots[1], loads[1]
        return function(f)
            f[slot] = load(f)
        end
    end
    return function(f)
        for i = 1, n do
            f[slots[i]] = loads[i](f)
        end
    end
end

return M
