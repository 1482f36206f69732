-- Statements: syntax tree -> closures.
--
-- A statement is function(frame) that writes to the output and returns nil, or BREAK or CONTINUE to leave or go on with
-- the loop around it. compile(body, options) gives run(), which renders with the variables in state.S.
--
-- Macros, caller blocks and recursive loops run in frames of their own (scope.lua); everything else shares the frame it
-- stands in.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local value = require "llmrun.template.value"
local ops = require "llmrun.template.ops"
local show = require "llmrun.template.show"
local scopes = require "llmrun.template.scope"
local Expr = require "llmrun.template.compile_expr"
local globals = require "llmrun.template.globals"
local S, raise, charge, emit = state.S, state.raise, state.charge, state.emit
local to_value, to_cond = Expr.value, Expr.cond
local type, getmetatable = type, getmetatable

local BREAK, CONTINUE = 1, 2

local M = {}

local compile = {}

-- Bodies -------------------------------------------------------------------------------------------------------------

-- The names that statements of a body assign in its own scope.
local function assigned_names(body, list)
    list = list or {}
    local function add(target)
        if target.k == "name" then
            list[#list + 1] = target.id
        elseif target.k == "tuple" then
            for _, t in ipairs(target.items) do
                add(t)
            end
        end
    end
    for _, stat in ipairs(body) do
        if stat.k == "set" or stat.k == "setblock" then
            add(stat.target)
        elseif stat.k == "macro" then
            list[#list + 1] = stat.id
        elseif stat.k == "if" then
            for _, arm in ipairs(stat.arms) do
                assigned_names(arm.body, list)
            end
            assigned_names(stat.other or {}, list)
        end
    end
    return list
end

local own_budget = { ["for"] = true, macro = true, callblock = true }

-- About how many closures one run of a piece of syntax calls, loops in it apart.
local function weight(node)
    local n = node.k and 1 or 0
    for key, sub in pairs(node) do
        if type(sub) == "table" and not (key == "body" and own_budget[node.k]) then
            n = n + weight(sub)
        end
    end
    return n
end

local function sequence(list)
    local n = #list
    if n == 0 then
        return function() end
    elseif n == 1 then
        return list[1]
    end
    return function(f)
        for i = 1, n do
            local signal = list[i](f)
            if signal then
                return signal
            end
        end
    end
end

-- The statements of a body, in a scope that has been entered.
local function statements(scope, body)
    local list = {}
    for _, stat in ipairs(body) do
        list[#list + 1] = compile[stat.k](scope, stat)
    end
    return sequence(list)
end

-- A body with a scope of its own.
local function block(scope, body)
    local inner = scope:child()
    local enter = inner:assigned(assigned_names(body))
    local run = statements(inner, body)
    if not enter then
        return run
    end
    return function(f)
        enter(f)
        return run(f)
    end
end

-- Runs a body and returns what it wrote.
local function captured(run, f)
    local outer = S.out
    local out = state.new_buffer()
    S.out = out
    run(f)
    S.out = outer
    return rope.from_buffer(out)
end

local function enter_call()
    S.depth = S.depth + 1
    if S.depth > S.max_depth then
        raise("limit", "macros or recursive loops are nested too deeply")
    end
end

local function leave_call()
    S.depth = S.depth - 1
end

-- Output -------------------------------------------------------------------------------------------------------------

local function emit_value(v)
    if type(v) == "string" then
        return emit(v, false)
    elseif getmetatable(v) == rope.Rope then
        return rope.emit(v)
    end
    local s = show.str(v)
    if type(s) == "string" then
        return emit(s, false)
    end
    return rope.emit(s)
end

function compile.text(_, node)
    local text = node.v
    return function()
        emit(text, true)
    end
end

-- The operands of a chain a + b + c, from left to right.
local function operands(node, list)
    list = list or {}
    if node.k == "binary" and node.op == "+" then
        operands(node.a, list)
        list[#list + 1] = node.b
    else
        list[#list + 1] = node
    end
    return list
end

local function has_text(list)
    for _, node in ipairs(list) do
        if node.k == "str" then
            return true
        end
    end
    return false
end

-- Writes a piece of a sum that must be a string since another piece is one.
local function emit_text(scope, node)
    local e, pos = to_value(scope, node), node.pos
    return function(f)
        S.pos = pos
        local v = e(f)
        if type(v) == "string" then
            return emit(v, false)
        elseif getmetatable(v) == rope.Rope then
            return rope.emit(v)
        end
        return ops.add(v, "") -- raises the error
    end
end

local output

-- Writes several expressions one after the other; neighbouring constants become one.
local function output_list(scope, nodes, one)
    local list, text = {}, nil
    local function flush()
        if text then
            list[#list + 1] = compile.text(scope, { v = text })
            text = nil
        end
    end
    for _, node in ipairs(nodes) do
        if node.k == "str" then
            text = (text or "") .. node.v
        else
            flush()
            list[#list + 1] = one(scope, node)
        end
    end
    flush()
    return sequence(list)
end

-- Writes an expression without building its string first where the pieces can be written one by one.
function output(scope, node)
    if node.k == "str" then
        return compile.text(scope, node)
    elseif node.k == "concat" then
        return output_list(scope, node.items, output)
    elseif node.k == "binary" and node.op == "+" then
        local list = operands(node)
        if has_text(list) then
            return output_list(scope, list, emit_text)
        end
    elseif node.k == "if" then
        local cond = to_cond(scope, node.cond)
        local a, b = Expr.in_branch(scope, function()
            return output(scope, node.a), node.b and output(scope, node.b)
        end)
        return function(f)
            if cond(f) then
                return a(f)
            elseif b then
                return b(f)
            end
        end
    elseif node.k == "const" then
        local text = show.str(node.v)
        return function()
            emit(text, true)
        end
    end
    local e, pos = to_value(scope, node), node.pos
    return function(f)
        S.pos = pos
        return emit_value(e(f))
    end
end

function compile.output(scope, node)
    local run, pos = output(scope, node.e), node.pos
    return function(f)
        S.pos = pos
        run(f)
    end
end

-- Assignment ---------------------------------------------------------------------------------------------------------

-- function(frame, value) that assigns to a target declared in this scope.
local function assigner(scope, target)
    if target.k == "name" then
        local slot = scope:declare(target.id)
        return function(f, v)
            f[slot] = v
        end
    elseif target.k == "nsref" then
        local load, attr, undef = scope:loader(target.id), target.attr, value.undef(target.id)
        return function(f, v)
            local ns = load(f)
            globals.set_namespace(ns == nil and undef or ns, attr, v)
        end
    end
    local list, n = {}, #target.items
    for i, t in ipairs(target.items) do
        list[i] = assigner(scope, t)
    end
    return function(f, v)
        local items, count = value.iter(v)
        if count ~= n then
            raise("value", "expected %d values to unpack, got %d", n, count)
        end
        for i = 1, n do
            list[i](f, items[i])
        end
    end
end

function compile.set(scope, node)
    local e, assign, pos = to_value(scope, node.e), assigner(scope, node.target), node.pos
    return function(f)
        S.pos = pos
        assign(f, e(f))
    end
end

-- function(frame, value) -> value for a list of filter nodes.
local function filter_chain(scope, nodes)
    local list = {}
    for i, node in ipairs(nodes) do
        local current
        local apply = Expr.filter(scope, node, function()
            return current
        end)
        list[i] = function(f, v)
            current = v
            local r = apply(f)
            current = nil
            return r
        end
    end
    return function(f, v)
        for i = 1, #list do
            v = list[i](f, v)
        end
        return v
    end
end

function compile.setblock(scope, node)
    local run, filter = block(scope, node.body), filter_chain(scope, node.filters)
    local assign, pos = assigner(scope, node.target), node.pos
    return function(f)
        S.pos = pos
        assign(f, filter(f, captured(run, f)))
    end
end

function compile.filterblock(scope, node)
    local run, filter, pos = block(scope, node.body), filter_chain(scope, node.filters), node.pos
    return function(f)
        S.pos = pos
        emit_value(filter(f, captured(run, f)))
    end
end

compile["with"] = function(scope, node)
    local inner = scope:child()
    local exprs, assigns, names = {}, {}, {}
    for i, e in ipairs(node.exprs) do
        exprs[i] = to_value(scope, e)
        assigns[i] = assigner(inner, node.names[i])
    end
    local enter = inner:assigned(assigned_names(node.body, names))
    local run = statements(inner, node.body)
    return function(f)
        local vals = {}
        for i = 1, #exprs do
            vals[i] = exprs[i](f)
        end
        if enter then
            enter(f)
        end
        for i = 1, #exprs do
            assigns[i](f, vals[i])
        end
        return run(f)
    end
end

function compile.scope(scope, node)
    return block(scope, node.body)
end

-- Branches and loops -------------------------------------------------------------------------------------------------

compile["if"] = function(scope, node)
    local n = #node.arms
    local conds, bodies, places = {}, {}, {}
    for i, arm in ipairs(node.arms) do
        conds[i], places[i] = to_cond(scope, arm.cond), arm.cond.pos
        bodies[i] = Expr.in_branch(scope, function()
            return statements(scope, arm.body)
        end)
    end
    local other = node.other and Expr.in_branch(scope, function()
        return statements(scope, node.other)
    end)
    return function(f)
        for i = 1, n do
            S.pos = places[i]
            if conds[i](f) then
                return bodies[i](f)
            end
        end
        if other then
            return other(f)
        end
    end
end

compile["break"] = function()
    return function()
        return BREAK
    end
end

function compile.continue()
    return function()
        return CONTINUE
    end
end

-- The loop variable: { items, n, i, depth, rerun }
local Loop = {}

local function undefined_item(name)
    return value.undef_attr(name)
end

local loop_attr = {
    index = function(l)
        return l.i
    end,
    index0 = function(l)
        return l.i - 1
    end,
    revindex = function(l)
        return l.n - l.i + 1
    end,
    revindex0 = function(l)
        return l.n - l.i
    end,
    first = function(l)
        return l.i == 1
    end,
    last = function(l)
        return l.i == l.n
    end,
    length = function(l)
        return l.n
    end,
    depth = function(l)
        return l.depth
    end,
    depth0 = function(l)
        return l.depth - 1
    end,
    previtem = function(l)
        return l.i > 1 and l.items[l.i - 1] or undefined_item "previtem"
    end,
    nextitem = function(l)
        return l.i < l.n and l.items[l.i + 1] or undefined_item "nextitem"
    end,
    cycle = function(l)
        return value.func("cycle", {}, function(args, n)
            if n == 0 then
                raise("type", "no items for cycling given")
            end
            return args[(l.i - 1) % n + 1]
        end, true)
    end,
    changed = function(l)
        return value.func("changed", {}, function(args, n)
            local now = value.tuple(table.move(args, 1, n, 1, {}))
            if l.before and ops.eq(l.before, now) then
                return false
            end
            l.before = now
            return true
        end, true)
    end,
}

value.register(Loop, "loop", function(l, name)
    local get = loop_attr[name]
    if get then
        return get(l)
    end
end, function(l, args, n)
    if not l.rerun then
        raise("type", "the loop must have the 'recursive' marker to be called")
    elseif n ~= 1 then
        raise("type", "a recursive loop takes one argument")
    end
    return l.rerun(args[1], l.depth + 1)
end)

-- The items that pass a loop's condition.
local function filtered(f, items, n, assign, cond)
    local out, m = {}, 0
    for i = 1, n do
        charge(2)
        assign(f, items[i])
        if cond(f) then
            m = m + 1
            out[m] = items[i]
        end
    end
    return out, m
end

-- Compiles a loop in `scope`; gives run(frame, iterable, depth, rerun).
local function loop_runner(scope, node)
    local inner, test = scope:child(), scope:child()
    local assign = assigner(inner, node.target)
    local cond
    if node.cond then
        for name, slot in pairs(inner.vars) do
            test.vars[name] = slot
        end
        cond = to_cond(test, node.cond)
    end
    local loop_slot = inner:declare "loop"
    local enter = inner:assigned(assigned_names(node.body))
    local run = statements(inner, node.body)
    local other = node.other and block(scope, node.other)
    local with_loop = inner.used.loop or node.recursive
    local target_slot = node.target.k == "name" and inner.vars[node.target.id]
    local cost = 4 + weight(node.body)
    -- the condition is tried item by item, unless the body may look ahead
    local lazy = cond and not with_loop

    return function(f, iterable, depth, rerun)
        local items, n = value.iter(iterable)
        if cond and not lazy then
            items, n = filtered(f, items, n, assign, cond)
        end
        local loop
        if with_loop then
            loop = setmetatable({ items = items, n = n, i = 0, depth = depth, rerun = rerun }, Loop)
        end
        local finished = false -- a round that came to its end; Jinja runs the else part if there was none
        for i = 1, n do
            local left = S.left - cost
            S.left = left
            if left < 0 then
                charge(0)
            end
            if target_slot then
                f[target_slot] = items[i]
            else
                assign(f, items[i])
            end
            if not lazy or cond(f) then
                if loop then
                    loop.i = i
                    f[loop_slot] = loop
                end
                if enter then
                    enter(f)
                end
                local signal = run(f)
                if not signal then
                    finished = true
                elseif signal == BREAK then
                    break
                end
            end
        end
        if other and not finished then
            return other(f)
        end
    end
end

compile["for"] = function(scope, node)
    local iter, pos = to_value(scope, node.iter), node.pos
    if not node.recursive then
        local run = loop_runner(scope, node)
        return function(f)
            S.pos = pos
            return run(f, iter(f), 1)
        end
    end
    local run = loop_runner(scope:activation_child(), node)
    return function(f)
        local function rerun(iterable, depth)
            enter_call()
            local text = captured(function(inner)
                run(inner, iterable, depth, rerun)
            end, { up = f })
            leave_call()
            return text
        end
        S.pos = pos
        run({ up = f }, iter(f), 1, rerun)
    end
end

-- Macros -------------------------------------------------------------------------------------------------------------

local Macro = {}

local special = { "varargs", "kwargs", "caller" }

-- Compiles parameters and body; gives make(frame) -> macro value.
local function macro_maker(scope, node, name)
    local inner = scope:activation_child()
    local slots, defaults, index = {}, {}, {}
    for i, param in ipairs(node.params) do
        slots[i] = inner:declare(param)
        index[param] = i
    end
    local extra = {}
    for _, word in ipairs(special) do
        if not index[word] then
            extra[word] = inner:declare(word)
        end
    end
    for i in pairs(node.defaults) do
        defaults[i] = to_value(inner, node.defaults[i])
    end
    local enter = inner:assigned(assigned_names(node.body))
    local run = statements(inner, node.body)
    local code = {
        name = name, params = node.params, slots = slots, defaults = defaults, index = index, enter = enter, run = run,
        cost = 30 + weight(node.body),
    }
    for word, slot in pairs(extra) do
        code[word] = inner.used[word] and slot or nil
    end
    return function(f)
        return setmetatable({ code = code, frame = f }, Macro)
    end
end

-- Puts the named arguments of a call into the macro's frame.
local function bind_named(code, f, given, named)
    local kwargs = code.kwargs and value.dict({}, {}, true)
    for i = 1, named and #named or 0 do
        local name = named[i]
        local at = code.index[name]
        if at then
            if at <= given then
                raise("type", "macro '%s' got multiple values for argument '%s'", code.name, name)
            end
            f[code.slots[at]] = named[name]
        elseif name == "caller" and code.caller then
            f[code.caller] = named[name]
        elseif kwargs then
            value.dict_set(kwargs, name, named[name])
        else
            raise("type", "macro '%s' takes no keyword argument '%s'", code.name, name)
        end
    end
    if kwargs then
        f[code.kwargs] = kwargs
    end
end

local function call_macro(macro, args, n, named)
    local code, f = macro.code, { up = macro.frame }
    local count = #code.params
    charge(code.cost)
    enter_call()
    for i = 1, math.min(n, count) do
        f[code.slots[i]] = args[i]
    end
    if code.varargs then
        f[code.varargs] = value.tuple(table.move(args, count + 1, n, 1, {}))
    elseif n > count then
        raise("type", "macro '%s' takes not more than %d argument(s)", code.name, count)
    end
    bind_named(code, f, n, named)
    for i = n + 1, count do
        local default = code.defaults[i]
        if default and f[code.slots[i]] == nil then
            f[code.slots[i]] = default(f)
        end
    end
    if code.enter then
        code.enter(f)
    end
    local text = captured(code.run, f)
    leave_call()
    return text
end

value.register(Macro, "macro", function(macro, name)
    if name == "name" then
        return macro.code.name
    elseif name == "arguments" then
        return value.tuple(table.move(macro.code.params, 1, #macro.code.params, 1, {}))
    elseif name == "catch_kwargs" or name == "catch_varargs" or name == "caller" then
        return macro.code[name:gsub("^catch_", "")] ~= nil
    end
end, call_macro)

function compile.macro(scope, node)
    local slot = scope:declare(node.id)
    local make = macro_maker(scope, node, node.id)
    return function(f)
        f[slot] = make(f)
    end
end

function compile.callblock(scope, node)
    local make = macro_maker(scope, node, "caller")
    local callee, args = to_value(scope, node.call.fn), Expr.arguments(scope, node.call.args)
    local pos = node.call.pos
    return function(f)
        S.pos = pos
        local fn = callee(f)
        local list, n, named = args(f)
        named = named or {}
        if named.caller ~= nil then
            raise("type", "the argument 'caller' is given by the call block")
        end
        named[#named + 1] = "caller"
        named.caller = make(f)
        S.pos = pos
        emit_value(value.call(fn, list, n, named))
    end
end

---Compiles a template's body. For options see scope.lua.
---@return function run  runs it once, writing to state.S.out
function M.compile(body, options)
    local root = scopes.root(options)
    local enter = root:assigned(assigned_names(body))
    local run = statements(root, body)
    return function()
        local f = {}
        if enter then
            enter(f)
        end
        run(f)
    end
end

return M
