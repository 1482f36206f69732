-- llmrun new, and llmrun.testing, which its specs and those of users stand on.
local core = require "llmrun.core"
local llm = require "llmrun"
local shell = require "tests.spec.shell_support"
local testing = require "llmrun.testing"

describe("llmrun new", function()
    local folder = shell.folder()
    teardown(function() folder:remove() end)

    for _, kind in ipairs(require("llmrun.cli.starters").kinds) do
        it("writes a " .. kind .. " whose spec holds, and that luacheck likes", function()
            local out, err, status = folder:llmrun(("new my_%s --kind %s"):format(kind, kind))
            assert.equal("", err)
            assert.equal(0, status)
            local command = out:match "test  llmrun ([^\n]+)\n$"
            out, err, status = folder:llmrun(command .. " --output=TAP")
            assert.equal(0, status, out .. err)
            assert.matches("^ok 1", out)
            assert.not_matches("not ok", out)
        end)
    end

    it("writes files that luacheck has nothing to say about", function()
        local p <close> = assert(io.popen(("which luacheck >/dev/null || exit; cd '%s'; luacheck -q --no-color --std lua54+busted %s 2>&1")
            :format(folder.path, "--ignore 122/arg -- .")))
        local out = p:read "a"
        assert.is_true(out == "" or out:find("0 warnings / 0 errors", 1, true) ~= nil, out)
    end)

    it("writes a program that runs as it is", function()
        local path = require("llmrun.catalog").find "smollm2"
        if not path then return pending "no smollm2 (scripts/fetch_model smollm2)" end
        local out, err, status = folder:llmrun "my_program/main.lua"
        assert.equal("", err)
        assert.equal(0, status)
        assert.is_true(#out > 3)
    end)

    it("leaves nothing where it can't write all", function()
        for _, kind in ipairs { "program", "policy" } do
            local p <close> = assert(io.popen(("cd '%s'; ulimit -f 0; '%s' new none --kind %s 2>&1 | cat; ls -d none* 2>&1")
                :format(folder.path, core.executable(), kind)))
            local out = p:read "a"
            assert.matches("^llmrun new: none[^\n]*: File too large\n", out)
            assert.not_matches("\nnone", out)
        end
    end)

    it("writes a policy and a route that the commands take", function()
        local path = require("llmrun.catalog").find "smollm2"
        if not path then return pending "no smollm2 (scripts/fetch_model smollm2)" end
        local _, err, status = folder:llmrun "run --policy my_policy.lua -p hi -n 2"
        assert.equal("", err)
        assert.equal(0, status)
    end)

    it("overwrites nothing, and wants a name", function()
        local f = assert(io.open(folder:at "mine_spec.lua", "w"))
        f:write "-- mine"
        f:close()
        local _
        local out, err, status = folder:llmrun "new mine --kind sampler"
        assert.equal("", out)
        assert.equal("llmrun new: mine_spec.lua is there already\n", err)
        assert.equal(1, status)
        assert.is_nil(core.stat(folder:at "mine.lua"))
        _, err, status = folder:llmrun "new my_program"
        assert.matches("my_program/main.lua is there already", err, 1, true)
        assert.equal(1, status)
        for _, name in ipairs { "", "7x", "a.b", "none/x", "a b" } do
            _, err, status = folder:llmrun("new '" .. name .. "'")
            assert.matches("^llmrun new: ", err)
            assert.is_true(status > 0)
        end
        _, err = folder:llmrun "new x --kind nothing"
        assert.matches("one of program, policy, sampler, architecture, route expected", err, 1, true)
    end)

    it("says what the disk says", function()
        local _, err, status = folder:llmrun "new /proc/x --kind policy"
        assert.matches("^llmrun new: /proc/x.lua: ", err)
        assert.equal(1, status)
    end)
end)

describe("testing.model", function()
    local function ask(model, text, opts)
        local s <close> = model:session()
        s:user(text)
        return s:gen(opts or {}).text
    end

    it("gives each new prompt the next answer, the same prompt the same", function()
        local model <close> = testing.model { "one", "two" }
        assert.equal("one", ask(model, "a"))
        assert.equal("two", ask(model, "b"))
        assert.equal("one", ask(model, "a"))
        assert.equal(2, #model.asked)
        assert.matches("<|im_start|>user\na<|im_end|>", model.asked[1], 1, true)
    end)

    it("goes on in conversations, forks and streams", function()
        local model <close> = testing.model { "first", "second", "third" }
        local s <close> = model:session()
        s:user "x"
        assert.equal("first", s:gen().text)
        s:user "y"
        local f <close> = s:fork()
        local pieces = {}
        for p in s:stream {} do pieces[#pieces + 1] = p end
        assert.equal("second", table.concat(pieces))
        assert.equal("second", f:gen().text)
        f:user "z"
        assert.equal("third", f:gen().text)
        assert.matches("second", model.asked[3], 1, true)
    end)

    it("takes a function, and plain text", function()
        local model <close> = testing.model(function(prompt, n) return ("%d:%d"):format(n, #prompt) end)
        local s <close> = model:session()
        s:append "abc"
        assert.equal("1:3", s:gen().text)
    end)

    it("says which prompt has no answer", function()
        local model <close> = testing.model {}
        local ok, err = pcall(ask, model, "the question")
        assert.is_false(ok)
        assert.matches("there is no answer 1, for the prompt '.*the question", tostring(err))
        assert.has_error(function() testing.model "x" end)
    end)

    it("holds with constraints that the answer keeps", function()
        local model <close> = testing.model { '{"a":1}' }
        local s <close> = model:session()
        s:user "json"
        assert.same({ a = 1 }, s:gen({ json = { properties = { a = { type = "integer" } }, required = { "a" },
            additionalProperties = false }, whitespace = "none" }).value)
    end)
end)

describe("testing.lab", function()
    it("steps by hand and tells who ran", function()
        local lab <close> = testing.lab { max_batch_tokens = 16, chunk = 8 }
        lab:submit(20, { name = "a", max_tokens = 2 })
        lab:submit(4, { name = "b", max_tokens = 2 })
        assert.equal(12, lab:step())
        assert.same({ a = 8, b = 4 }, lab:ran())
        lab:step()
        assert.same({ a = 8, b = 1 }, lab:ran())
        assert.same({ "b", "a" }, lab:order())
        assert.same(testing.reference(lab.prompts[lab.requests[1]], 2), lab.requests[1]:tokens())
    end)

    it("counts the steps to the end", function()
        local lab <close> = testing.lab()
        lab:submit({ 1, 2, 3 }, { max_tokens = 4 })
        assert.equal(4, lab:finish())
        assert.equal(0, lab:finish())
    end)
end)

describe("testing.request", function()
    it("sends a body to a route and reads the answer", function()
        local model <close> = testing.model { "hi" }
        local r = testing.request({ ["POST /x"] = function(req) return req.body:upper(), 201 end }, model, "POST /x", "abc")
        assert.equal(201, r.status)
        assert.equal("ABC", r.body)
        assert.equal(llm.version, require("llmrun").version)
    end)
end)
