-- Statements: tokens -> syntax tree.
--
-- A body is a list of statement nodes:
--   text v | output e | set target, e | setblock target, filters, body | if arms {cond, body}, other
--   for target, iter, cond, body, other, recursive | break | continue | macro id, params, defaults, body
--   callblock params, defaults, call, body | filterblock filters, body | with names, exprs, body | scope body
-- A target is a name { k = "name", id }, a tuple of targets, or { k = "nsref", id, attr }.
-- include, import, extends and block are refused: a template is one text.

local lexer = require "llmrun.template.lexer"
local expr = require "llmrun.template.expr"
local fail = lexer.fail

local Parser = expr.Parser
local MAX_BLOCKS = 100 -- blocks in blocks

local M = {}

local statements = {}

-- Parses statements up to {% word %} with one of the given words; the word itself is left as the current token.
function Parser:body(ends, opened)
    local list, n = {}, 0
    self.blocks = self.blocks + 1
    if self.blocks > MAX_BLOCKS then
        self:fail "blocks are nested too deeply"
    end
    while true do
        local kind, pos = self.kind[self.i], self.pos[self.i]
        local stat
        if kind == "data" then
            stat = { k = "text", pos = pos, v = self.val[self.i] }
            self.i = self.i + 1
        elseif kind == "{{" then
            self.i = self.i + 1
            stat = { k = "output", pos = pos, e = self:tuple() }
            self:expect "}}"
        elseif kind == "{%" then
            self.i = self.i + 1
            if ends and self:is "name" and ends[self.val[self.i]] then
                break
            end
            stat = self:statement()
            self:expect "%}"
        else -- eof
            if ends then
                fail(opened, "this block has no end (expected %s)", ends.text)
            end
            break
        end
        n = n + 1
        list[n] = stat
    end
    self.blocks = self.blocks - 1
    return list
end

-- Words that end a body, with a text for messages.
local function ends(...)
    local set = { text = "'" .. table.concat({ ... }, "' or '") .. "'" }
    for _, word in ipairs { ... } do
        set[word] = true
    end
    return set
end

-- A body up to its end word, which is taken.
function Parser:closed_body(set, opened)
    local body = self:body(set, opened)
    self.i = self.i + 1
    return body
end

local refused = {
    include = true, import = true, from = true, extends = true, block = true, autoescape = true, trans = true,
    ["do"] = true, debug = true,
}

function Parser:statement()
    local pos = self.pos[self.i]
    if not self:is "name" then
        self:fail("expected the name of a statement, found %s", self:describe())
    end
    local word = self.val[self.i]
    local parse = statements[word]
    if parse then
        self.i = self.i + 1
        return parse(self, pos)
    elseif refused[word] then
        fail(pos, "the statement '%s' is not supported in a chat template", word)
    elseif word:find "^end" or word == "else" or word == "elif" then
        fail(pos, "'%s' without the block that it ends", word)
    end
    return fail(pos, "unknown statement '%s'", word)
end

-- Targets ------------------------------------------------------------------------------------------------------------

local not_assignable = { ["true"] = true, ["false"] = true, ["none"] = true, True = true, False = true, None = true }

function Parser:target_name()
    local id, pos = self:expect "name"
    if not_assignable[id] then
        fail(pos, "'%s' cannot be assigned to", id)
    end
    return { k = "name", id = id, pos = pos }
end

function Parser:one_target(with_namespace)
    if self:skip "(" then
        self:enter()
        local t = self:target(with_namespace)
        self:leave()
        self:expect ")"
        return t
    end
    local t = self:target_name()
    if with_namespace and self:skip "." then
        t = { k = "nsref", pos = t.pos, id = t.id, attr = self:expect "name" }
    end
    return t
end

---A name, or names with commas.
function Parser:target(with_namespace)
    local pos = self.pos[self.i]
    local first = self:one_target(with_namespace)
    if not self:is "," then
        return first
    end
    local items = { first }
    while self:skip "," do
        if not (self:is "name" and self.val[self.i] ~= "in" or self:is "(") then
            break
        end
        items[#items + 1] = self:one_target(with_namespace)
    end
    return { k = "tuple", pos = pos, items = items }
end

-- Statements ---------------------------------------------------------------------------------------------------------

local if_ends, else_ends = ends("elif", "else", "endif"), ends "endif"

statements["if"] = function(self, pos)
    local arms, other = {}, nil
    while true do
        local cond = self:tuple(false, true)
        self:expect "%}"
        arms[#arms + 1] = { cond = cond, body = self:body(if_ends, pos) }
        if self:skip_name "elif" then
            goto next
        elseif self:skip_name "else" then
            self:expect "%}"
            other = self:closed_body(else_ends, pos)
        else
            self.i = self.i + 1
        end
        do
            return { k = "if", pos = pos, arms = arms, other = other }
        end
        ::next::
    end
end

local for_ends, for_else_ends = ends("else", "endfor"), ends "endfor"

statements["for"] = function(self, pos)
    local target = self:target()
    if target.id == "loop" then
        fail(target.pos, "'loop' is the loop's own variable")
    end
    if not self:skip_name "in" then
        self:fail("expected 'in', found %s", self:describe())
    end
    local iter = self:tuple(false, true)
    local cond
    if self:skip_name "if" then
        cond = self:expression()
    end
    local recursive = self:skip_name "recursive"
    self:expect "%}"
    self.loops = self.loops + 1
    local body = self:body(for_ends, pos)
    self.loops = self.loops - 1
    local other
    if self:skip_name "else" then
        self:expect "%}"
        other = self:closed_body(for_else_ends, pos)
    else
        self.i = self.i + 1
    end
    return {
        k = "for", pos = pos, target = target, iter = iter, cond = cond, recursive = recursive, body = body,
        other = other,
    }
end

local function loop_control(word)
    statements[word] = function(self, pos)
        if self.loops == 0 then
            fail(pos, "'%s' outside of a loop", word)
        end
        return { k = word, pos = pos }
    end
end
loop_control "break"
loop_control "continue"

-- Filters written as "a | b(1)" after a block's name.
function Parser:filter_list(first)
    local list = {}
    if first then
        list[1] = self:filter(nil)
    end
    while self:skip "|" do
        list[#list + 1] = self:filter(nil)
    end
    return list
end

-- Parses the body of a block that is a scope of its own, out of which no loop can be left.
function Parser:function_body(set, pos)
    local loops = self.loops
    self.loops = 0
    local body = self:closed_body(set, pos)
    self.loops = loops
    return body
end

local set_ends = ends "endset"

function statements.set(self, pos)
    local target = self:target(true)
    if self:skip "=" then
        return { k = "set", pos = pos, target = target, e = self:tuple() }
    end
    local filters = self:filter_list(false)
    self:expect "%}"
    return { k = "setblock", pos = pos, target = target, filters = filters, body = self:function_body(set_ends, pos) }
end

-- Parameters in parentheses: names, and defaults by index.
function Parser:params()
    local params, defaults, seen = {}, {}, {}
    self:expect "("
    while not self:is ")" do
        local t = self:target_name()
        if seen[t.id] then
            fail(t.pos, "the parameter '%s' is named twice", t.id)
        end
        seen[t.id] = true
        params[#params + 1] = t.id
        if self:skip "=" then
            defaults[#params] = self:expression()
        elseif next(defaults) then
            fail(t.pos, "a parameter without a default follows one with a default")
        end
        if not self:is ")" then
            self:expect ","
        end
    end
    self:expect ")"
    return params, defaults
end

local macro_ends, call_ends = ends "endmacro", ends "endcall"

function statements.macro(self, pos)
    local id = self:target_name().id
    local params, defaults = self:params()
    self:expect "%}"
    local body = self:function_body(macro_ends, pos)
    return { k = "macro", pos = pos, id = id, params = params, defaults = defaults, body = body }
end

function statements.call(self, pos)
    local params, defaults = {}, {}
    if self:is "(" then
        params, defaults = self:params()
    end
    local call = self:expression()
    if call.k ~= "call" then
        fail(pos, "expected a call")
    end
    self:expect "%}"
    local body = self:function_body(call_ends, pos)
    return { k = "callblock", pos = pos, params = params, defaults = defaults, call = call, body = body }
end

local filter_ends, with_ends, generation_ends = ends "endfilter", ends "endwith", ends "endgeneration"

function statements.filter(self, pos)
    local filters = self:filter_list(true)
    self:expect "%}"
    return { k = "filterblock", pos = pos, filters = filters, body = self:function_body(filter_ends, pos) }
end

statements["with"] = function(self, pos)
    local names, exprs = {}, {}
    while not self:is "%}" do
        if #names > 0 then
            self:expect ","
        end
        names[#names + 1] = self:target()
        self:expect "="
        exprs[#names] = self:expression()
    end
    self:expect "%}"
    return { k = "with", pos = pos, names = names, exprs = exprs, body = self:closed_body(with_ends, pos) }
end

-- The marks around what the model says, used in training only.
function statements.generation(self, pos)
    self:expect "%}"
    return { k = "scope", pos = pos, body = self:function_body(generation_ends, pos) }
end

---Parses a template's text.
---@return table body, string source  the source with line ends normalised, to which the positions refer
function M.parse(source)
    local tokens = lexer.scan(source)
    local p = setmetatable({
        kind = tokens.kind, val = tokens.val, pos = tokens.pos, i = 1, nest = 0, blocks = 0, loops = 0,
    }, Parser)
    return p:body(nil, 1), tokens.src
end

return M
