-- Expressions: tokens -> syntax tree, by Jinja's grammar.
--
-- A node is a table { k = kind, pos = byte offset, d = depth below it, ... }:
--   const v | str v (text) | name id | tuple/list items | dict keys, vals | attr obj, name | item obj, key
--   slice from, to, step | call fn, args | filter name, obj, args | test name, obj, args | neg/pos/not a
--   binary op, a, b | concat items | compare a, ops, list | and/or a, b | if cond, a, b
-- args is { n, [i] = node, names = {...}, vals = {...}, star = node, star2 = node }.
--
-- Nothing here recurses deeper than MAX_NEST, and no tree gets deeper than MAX_DEPTH, so that a hostile template ends
-- in an error and not in a full stack.

local lexer = require "llmrun.template.lexer"
local fail = lexer.fail

local MAX_NEST = 150 -- brackets in brackets
local MAX_DEPTH = 600 -- operators on operators

local Parser = {}
Parser.__index = Parser

local M = { Parser = Parser, MAX_NEST = MAX_NEST }

-- Tokens -------------------------------------------------------------------------------------------------------------

---The current token as a reader would call it.
function Parser:describe()
    local kind = self.kind[self.i]
    if kind == "name" or kind == "int" or kind == "float" then
        return "'" .. tostring(self.val[self.i]) .. "'"
    elseif kind == "str" then
        return "a string"
    elseif kind == "data" then
        return "text"
    elseif kind == "eof" then
        return "the end of the template"
    elseif kind == "%}" then
        return "the end of the block"
    elseif kind == "}}" then
        return "the end of the expression"
    end
    return "'" .. kind .. "'"
end

function Parser:fail(fmt, ...)
    fail(self.pos[self.i], fmt, ...)
end

function Parser:is(kind)
    return self.kind[self.i] == kind
end

---True if the current token is the given word.
function Parser:is_name(word)
    return self.kind[self.i] == "name" and self.val[self.i] == word
end

function Parser:skip(kind)
    if self.kind[self.i] == kind then
        self.i = self.i + 1
        return true
    end
    return false
end

function Parser:skip_name(word)
    if self:is_name(word) then
        self.i = self.i + 1
        return true
    end
    return false
end

---Takes a token of this kind or fails; returns its value and position.
function Parser:expect(kind)
    local i = self.i
    if self.kind[i] ~= kind then
        self:fail("expected %s, found %s", kind == "name" and "a name" or "'" .. kind .. "'", self:describe())
    end
    self.i = i + 1
    return self.val[i], self.pos[i]
end

-- Nodes --------------------------------------------------------------------------------------------------------------

-- Finishes a node whose depth is one more than that of the deepest of the given nodes.
local function node(n, ...)
    local d = 0
    for i = 1, select("#", ...) do
        local sub = select(i, ...)
        if sub and sub.d > d then
            d = sub.d
        end
    end
    n.d = d + 1
    if d >= MAX_DEPTH then
        fail(n.pos, "the expression is nested too deeply")
    end
    return n
end

local function list_node(n, items)
    local d = 0
    for i = 1, #items do
        if items[i].d > d then
            d = items[i].d
        end
    end
    return node(n, { d = d })
end

function Parser:enter()
    self.nest = self.nest + 1
    if self.nest > MAX_NEST then
        self:fail("the expression is nested too deeply")
    end
end

function Parser:leave()
    self.nest = self.nest - 1
end

-- Grammar, from the loosest binding to the tightest ------------------------------------------------------------------

---A whole expression. no_if: leave a following "if" alone (as in "for x in y if z").
function Parser:expression(no_if)
    self:enter()
    local e = self:parse_or()
    if not no_if then
        while self:is_name "if" do
            local pos = self.pos[self.i]
            self.i = self.i + 1
            local cond = self:parse_or()
            local other
            if self:skip_name "else" then
                other = self:expression()
            end
            e = node({ k = "if", pos = pos, cond = cond, a = e, b = other }, cond, e, other)
        end
    end
    self:leave()
    return e
end

-- A chain of "and" or of "or", from the left; part: the method that reads what stands between.
local function chain(word, part)
    return function(self)
        local a = self[part](self)
        while self:is_name(word) do
            local pos = self.pos[self.i]
            self.i = self.i + 1
            local b = self[part](self)
            a = node({ k = word, pos = pos, a = a, b = b }, a, b)
        end
        return a
    end
end

Parser.parse_or, Parser.parse_and = chain("or", "parse_and"), chain("and", "parse_not")

function Parser:parse_not()
    local pos, count = self.pos[self.i], 0
    while self:skip_name "not" do
        count = count + 1
    end
    local e = self:parse_compare()
    for _ = 1, count do
        e = node({ k = "not", pos = pos, a = e }, e)
    end
    return e
end

local compare_ops = { ["=="] = true, ["!="] = true, ["<"] = true, ["<="] = true, [">"] = true, [">="] = true }

function Parser:parse_compare()
    local a = self:parse_sum()
    local ops, list = {}, {}
    local pos = self.pos[self.i]
    while true do
        local kind, op = self.kind[self.i]
        if compare_ops[kind] then
            op = kind
            self.i = self.i + 1
        elseif self:skip_name "in" then
            op = "in"
        elseif self:is_name "not" and self.kind[self.i + 1] == "name" and self.val[self.i + 1] == "in" then
            op = "not in"
            self.i = self.i + 2
        else
            break
        end
        ops[#ops + 1] = op
        list[#ops] = self:parse_sum()
    end
    if #ops == 0 then
        return a
    end
    return list_node({ k = "compare", pos = pos, a = a, ops = ops, list = list }, { a, table.unpack(list) })
end

-- A left-associative level: operators `ops` between what `below` parses.
local function binary_level(ops, below)
    return function(self)
        local a = self[below](self)
        while ops[self.kind[self.i]] do
            local op, pos = self.kind[self.i], self.pos[self.i]
            self.i = self.i + 1
            local b = self[below](self)
            a = node({ k = "binary", pos = pos, op = op, a = a, b = b }, a, b)
        end
        return a
    end
end

Parser.parse_sum = binary_level({ ["+"] = true, ["-"] = true }, "parse_concat")

function Parser:parse_concat()
    local a = self:parse_product()
    if not self:is "~" then
        return a
    end
    local pos, items = self.pos[self.i], { a }
    while self:skip "~" do
        items[#items + 1] = self:parse_product()
    end
    return list_node({ k = "concat", pos = pos, items = items }, items)
end

Parser.parse_product = binary_level({ ["*"] = true, ["/"] = true, ["//"] = true, ["%"] = true }, "parse_power")
Parser.parse_power = binary_level({ ["**"] = true }, "parse_unary")

function Parser:parse_unary(no_filter)
    local kind, pos = self.kind[self.i], self.pos[self.i]
    local e
    if kind == "-" or kind == "+" then
        self.i = self.i + 1
        self:enter()
        local a = self:parse_unary(true)
        self:leave()
        e = node({ k = kind == "-" and "neg" or "pos", pos = pos, a = a }, a)
    else
        e = self:primary()
    end
    e = self:postfix(e)
    return no_filter and e or self:filters(e)
end

local constants = { ["true"] = true, ["True"] = true, ["false"] = false, ["False"] = false }

function Parser:primary()
    local kind, val, pos = self.kind[self.i], self.val[self.i], self.pos[self.i]
    if kind == "name" then
        self.i = self.i + 1
        if constants[val] ~= nil then
            return { k = "const", pos = pos, d = 1, v = constants[val] }
        elseif val == "none" or val == "None" then
            return { k = "none", pos = pos, d = 1 }
        end
        return { k = "name", pos = pos, d = 1, id = val }
    elseif kind == "str" then
        local parts = {}
        while self:is "str" do
            parts[#parts + 1] = self.val[self.i]
            self.i = self.i + 1
        end
        return { k = "str", pos = pos, d = 1, v = table.concat(parts) }
    elseif kind == "int" or kind == "float" then
        self.i = self.i + 1
        return { k = "const", pos = pos, d = 1, v = val }
    elseif kind == "(" then
        self.i = self.i + 1
        local e = self:tuple(true)
        self:expect ")"
        return e
    elseif kind == "[" then
        return self:list()
    elseif kind == "{" then
        return self:dict()
    end
    return self:fail("unexpected %s", self:describe())
end

local tuple_ends = { ["}}"] = true, ["%}"] = true, [")"] = true }

---One expression, or a tuple where commas follow. in_parens: an empty one is allowed; no_if as in expression().
function Parser:tuple(in_parens, no_if)
    local pos, items, is_tuple = self.pos[self.i], {}, false
    while not tuple_ends[self.kind[self.i]] do
        items[#items + 1] = self:expression(no_if)
        if not self:is "," then
            break
        end
        is_tuple = true
        self.i = self.i + 1
    end
    if not is_tuple then
        if #items == 1 then
            return items[1]
        elseif not in_parens then
            self:fail("expected an expression, found %s", self:describe())
        end
    end
    return list_node({ k = "tuple", pos = pos, items = items }, items)
end

function Parser:list()
    local _, pos = self:expect "["
    local items = {}
    while not self:is "]" do
        items[#items + 1] = self:expression()
        if not self:is "]" then
            self:expect ","
        end
    end
    self:expect "]"
    return list_node({ k = "list", pos = pos, items = items }, items)
end

function Parser:dict()
    local _, pos = self:expect "{"
    local keys, vals, all = {}, {}, {}
    while not self:is "}" do
        local n = #keys + 1
        keys[n] = self:expression()
        self:expect ":"
        vals[n] = self:expression()
        all[2 * n - 1], all[2 * n] = keys[n], vals[n]
        if not self:is "}" then
            self:expect ","
        end
    end
    self:expect "}"
    return list_node({ k = "dict", pos = pos, keys = keys, vals = vals }, all)
end

-- What follows an operand: .name [key] (args).
function Parser:postfix(e)
    while true do
        local kind, pos = self.kind[self.i], self.pos[self.i]
        if kind == "." then
            self.i = self.i + 1
            if self:is "name" then
                e = node({ k = "attr", pos = pos, obj = e, name = self:expect "name" }, e)
            else
                local v = self:expect "int"
                e = node({ k = "item", pos = pos, obj = e, key = { k = "const", pos = pos, d = 1, v = v } }, e)
            end
        elseif kind == "[" then
            self.i = self.i + 1
            local key = self:subscript()
            e = node({ k = "item", pos = pos, obj = e, key = key }, e, key)
        elseif kind == "(" then
            e = self:call(e)
        else
            return e
        end
    end
end

function Parser:call(fn)
    local pos = self.pos[self.i]
    local args = self:call_args()
    return node({ k = "call", pos = pos, fn = fn, args = args }, fn, args)
end

-- What follows that: |filter, "is test", and calls of their results.
function Parser:filters(e)
    while true do
        local kind = self.kind[self.i]
        if kind == "|" then
            self.i = self.i + 1
            e = self:filter(e)
        elseif kind == "name" and self.val[self.i] == "is" then
            e = self:test(e)
        elseif kind == "(" then
            e = self:call(e)
        else
            return e
        end
    end
end

-- The inside of [...] after the bracket: a key, a slice, or a tuple of keys.
function Parser:subscript()
    local pos, items = self.pos[self.i], {}
    while not self:is "]" do
        items[#items + 1] = self:slice()
        if not self:is "]" then
            self:expect ","
        end
    end
    self:expect "]"
    if #items == 1 then
        return items[1]
    end
    return list_node({ k = "tuple", pos = pos, items = items }, items)
end

function Parser:slice()
    local pos = self.pos[self.i]
    local parts = {}
    if not self:is ":" then
        parts[1] = self:expression()
        if not self:is ":" then
            return parts[1]
        end
    end
    for part = 2, 3 do
        if not self:skip ":" then
            break
        end
        if not (self:is ":" or self:is "]" or self:is ",") then
            parts[part] = self:expression()
        end
    end
    return node(
        { k = "slice", pos = pos, from = parts[1], to = parts[2], step = parts[3] },
        parts[1], parts[2], parts[3]
    )
end

---Arguments in parentheses. The result has a depth as nodes have.
function Parser:call_args()
    local _, pos = self:expect "("
    local args = { n = 0, names = {}, vals = {}, pos = pos }
    local all = {}
    while not self:is ")" do
        if self:skip "*" then
            if args.star or args.star2 then
                fail(pos, "a call takes one * argument, before any **")
            end
            args.star = self:expression()
            all[#all + 1] = args.star
        elseif self:skip "**" then
            if args.star2 then
                fail(pos, "a call takes one ** argument")
            end
            args.star2 = self:expression()
            all[#all + 1] = args.star2
        elseif self:is "name" and self.kind[self.i + 1] == "=" then
            local name = self:expect "name"
            self.i = self.i + 1
            local m = #args.names + 1
            args.names[m], args.vals[m] = name, self:expression()
            all[#all + 1] = args.vals[m]
        else
            if args.star or args.star2 or #args.names > 0 then
                self:fail("a positional argument follows a named one")
            end
            args.n = args.n + 1
            args[args.n] = self:expression()
            all[#all + 1] = args[args.n]
        end
        if not self:is ")" then
            self:expect ","
        end
    end
    self:expect ")"
    if args.n > 200 then
        fail(pos, "too many arguments")
    end
    return list_node(args, all)
end

local no_args = { n = 0, names = {}, vals = {}, d = 0 }

function Parser:dotted_name()
    local name, pos = self:expect "name"
    while self:skip "." do
        name = name .. "." .. self:expect "name"
    end
    return name, pos
end

---The part of a filter after "|".
function Parser:filter(obj)
    local name, pos = self:dotted_name()
    local args = self:is "(" and self:call_args() or no_args
    return node({ k = "filter", pos = pos, name = name, obj = obj, args = args }, obj, args)
end

local starts_operand =
    { name = true, str = true, int = true, float = true, ["("] = true, ["["] = true, ["{"] = true }
local ends_test = { ["else"] = true, ["or"] = true, ["and"] = true }

function Parser:test(obj)
    local pos = self.pos[self.i]
    self.i = self.i + 1
    local negated = self:skip_name "not"
    local name = self:dotted_name()
    local args = no_args
    if self:is "(" then
        args = self:call_args()
    elseif starts_operand[self.kind[self.i]] and not (self:is "name" and ends_test[self.val[self.i]]) then
        if self:is_name "is" then
            self:fail "tests with 'is' cannot be chained"
        end
        local arg = self:postfix(self:primary())
        args = { n = 1, names = {}, vals = {}, d = arg.d, arg }
    end
    local e = node({ k = "test", pos = pos, name = name, obj = obj, args = args }, obj, args)
    if negated then
        e = node({ k = "not", pos = pos, a = e }, e)
    end
    return e
end

return M
