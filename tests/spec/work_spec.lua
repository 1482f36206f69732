-- What strangers and models write is read in a time that grows with its length alone: nothing is tried in all ways.
-- Limits of time are some hundred times what it takes, and still far below the square.
local constrain = require "llmrun.constrain"
local core = require "llmrun.core"
local grammars = require "llmrun.grammar"
local tools = require "llmrun.tools"

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" == "1"
local N = 200000

local function quick(what, fn)
    local began = core.thread_seconds()
    fn()
    local took = core.thread_seconds() - began
    assert.is_true(took < (sanitized and 20 or 2), ("%s: %.1f s"):format(what, took))
end

describe("texts of any length", function()
    it("are read as grammars", function()
        for what, text in pairs {
            ["no rule"] = ("a"):rep(N),
            ["a rule's options"] = "a" .. ("."):rep(N),
            ["names of digits"] = 'start: "x" ?a' .. ("1"):rep(N),
            ["names and blanks"] = 'start: "x" ?a' .. (" "):rep(N) .. ".",
            ["strings"] = 'root ::= "' .. ("a"):rep(N) .. '"',
            ["blanks"] = 'root ::= "a"' .. (" "):rep(N) .. "| b\nb ::=" .. (" "):rep(N) .. '"b"',
        } do
            quick(what, function() constrain.compile("grammar", { grammar = text }) end)
        end
    end)

    it("are read as schemas", function()
        local many = {}
        for i = 1, N // 4 do many[i] = ('"a%d":{}'):format(i) end
        many = table.concat(many, ",")
        local function refused(what, text, pattern)
            quick(what, function()
                local g, err, code = grammars.compile { json = text }
                assert.is_nil(g, what)
                assert.matches(pattern, err, 1, true)
                assert.is_true(code == "limit" or code == "format", code)
            end)
        end
        refused("steps up", ('{"$ref":"%s"}'):format(("../"):rep(N)), "a reference or $id of more than 2048 bytes")
        refused("marks", ('{"$dynamicRef":"%s/"}'):format(("#"):rep(N)), "")
        refused("a long name in the places of many", ('{"properties":{"%s":{"properties":{%s}}}}')
            :format(("k"):rep(N), many), "names of properties and of schemas are too long")
        refused("a long $id in those of many", ('{"$id":"%s/","properties":{%s}}')
            :format(("k"):rep(N), many:gsub("{}", '{"$id":"b"}')), "a reference or $id of more than 2048 bytes")
    end)

    it("are read as schemas with many combinations", function()
        local list = {}
        for i = 1, 60 do list[i] = ('{"properties":{"k%d":{"type":"string"}},"required":["k%d"]}'):format(i, i) end
        local began = core.thread_seconds()
        local g, err, code = grammars.compile { json = '{"oneOf":[' .. table.concat(list, ",") .. "]}" }
        assert.is_nil(g)
        assert.equal("limit", code)
        assert.matches("too many combinations of its parts", err, 1, true)
        assert.is_true(core.thread_seconds() - began < (sanitized and 60 or 7))
    end)

    it("are read as calls of tools", function()
        local blanks = (" "):rep(N)
        local defs = { f = {} }
        for name, format in pairs(tools.formats) do
            for what, text in pairs {
                blanks = blanks, ["blanks between"] = "x" .. blanks .. "y", ["no fence's end"] = "```json{" .. blanks .. "x",
                ["no tag's end"] = "<tool_call>" .. blanks .. "x", ["no calls"] = "[TOOL_CALLS]a" .. blanks .. "x",
                ["no list"] = "[" .. blanks .. "x", code = "```tool_code\n" .. ("\n"):rep(N),
            } do
                quick(name .. ": " .. what, function() format.parse(text, defs) end)
            end
        end
    end)

    it("are read as numbers by templates", function()
        local template = require "llmrun.template"
        local t = assert(template.compile "{{ text|float(7) }}")
        quick("digits", function() assert.equal("7", (t:render { text = ("1"):rep(N) .. "x" }:gsub("%.0$", ""))) end)
    end)
end)
