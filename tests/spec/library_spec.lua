-- Stubs for editors and the reference: current, readable by Lua, and neither more nor less than what is there.
local core = require "llmrun.core"
local llm = require "llmrun"
local testing = require "llmrun.testing"
local library = dofile "scripts/gen_library.lua"

-- Documented names and fields of each class.
local documented, fields = {}, {}
local function note(classes)
    for _, c in ipairs(classes) do
        documented[c.name] = documented[c.name] or {}
        for _, f in ipairs(c.functions) do
            documented[c.name][f.name] = f
        end
        fields[c.name] = {}
        for _, line in ipairs(c.doc) do
            local name = line:match "^@field ([%w_]+)"
            if name then table.insert(fields[c.name], name) end
        end
    end
end
for _, entry in ipairs(library.library) do note(library.classes(entry)) end
note(library.parse("lua/library/objects.lua").classes)

local function same_names(class, real)
    local private = library.private[class] or {}
    for name, value in pairs(real) do
        if type(value) == "function" and not name:find "^__" and not private[name] then
            assert.is_truthy(documented[class][name], class .. " has " .. name .. ", without a doc comment")
        end
    end
    for name in pairs(documented[class]) do
        assert.is_function(real[name], class .. " has no " .. name .. ", but it is documented")
    end
end

describe("the stubs", function()
    it("are current, as is the reference in lua/README.md", function()
        local p <close> = assert(io.popen(core.executable() .. ' scripts/gen_library.lua --check 2>&1; echo "|$?"'))
        assert.equal("|0\n", p:read "a")
    end)

    it("are Lua, without a parameter that is not there", function()
        for path, text in pairs(library.files()) do
            if path:find "%.lua$" then assert(load(text, "=" .. path, "t")) end
        end
        for class, list in pairs(documented) do
            for name, f in pairs(list) do
                local params = {}
                for p in f.args:gmatch "[%w_.]+" do params[p] = true end
                assert.is_true(#f.doc > 0, class .. " " .. name)
                for _, line in ipairs(f.doc) do
                    local p = line:match "^@param ([%w_.]+)"
                    assert.is_true(not p or params[p] or false, ("%s.%s: @param %s"):format(class, name, tostring(p)))
                end
            end
        end
    end)

    it("have the functions of llm, its modules and its objects", function()
        same_names("llmrun", llm)
        same_names("llmrun.json", require "llmrun.json")
        same_names("llmrun.testing", testing)
        for _, name in ipairs { "request", "get", "post", "stream" } do
            assert.is_truthy(documented["llmrun.http"][name])
            assert.is_function(llm.http[name])
        end
        for module, class in pairs { ["llmrun.serve"] = "llmrun.serve", ["llmrun.exchange"] = "llmrun.exchange",
            ["llmrun.testing.gguf"] = "llmrun.testing.gguf" } do
            for name in pairs(documented[class]) do assert.is_function(require(module)[name]) end
        end
        local model <close> = testing.model { "x" }
        local s <close> = model:session()
        local agent <close> = llm.agent { model = model, tools = { t = { description = "x", run = print } } }
        local lab <close> = testing.lab()
        same_names("llmrun.Model", getmetatable(model))
        same_names("llmrun.Session", getmetatable(s))
        same_names("llmrun.Agent", getmetatable(agent))
        same_names("llmrun.Lab", getmetatable(lab))
        same_names("llmrun.Sampler", getmetatable(llm.sampler { { "temperature", 1 } }))
        same_names("llmrun.Task", getmetatable(llm.spawn(function() end)))
        same_names("llmrun.Graph", require "llmrun.graph")
        s:append "x"
        local logits = s:logits()
        same_names("llmrun.Logits", getmetatable(logits).__index)
        same_names("llmrun.Memory", getmetatable(llm.memory()).__index)
        local server <close> = require("llmrun.serve").start { port = 0, routes = {}, log = function() end }
        same_names("llmrun.Server", getmetatable(server))
    end)

    it("have what routes get", function()
        local model <close> = testing.model {}
        testing.request({ ["GET /x"] = function(req, res)
            same_names("llmrun.RouteRequest", getmetatable(req))
            same_names("llmrun.RouteResponse", getmetatable(res))
            return "ok"
        end }, model, "GET /x")
    end)

    local function has(class, object)
        for name in pairs(documented[class]) do assert.is_function(object[name], class .. " " .. name) end
        for _, name in ipairs(fields[class]) do
            assert(pcall(function() return object[name] end), class .. "." .. name)
        end
    end

    it("have what policies, samplers and drafts see", function()
        local seen = {}
        local lab <close> = testing.lab { policy = { schedule = function(_, step)
            has("llmrun.PolicyStep", step)
            has("llmrun.PolicyRequest", step.waiting[1] or step.running[1])
            seen.policy = true
            step:default()
        end } }
        lab:submit(5, { max_tokens = 3 })
        assert.same({}, testing.logged(function() lab:finish() end))
        local model <close> = llm.scripted { next = function(t) return t[#t] end }
        local s <close> = model:session()
        s:append "aaaa"
        s:gen { max_tokens = 4, sampler = { function(_, ctx)
            has("llmrun.SamplerContext", ctx)
            for _, name in ipairs(fields["llmrun.SamplerContext"]) do assert.is_not_nil(ctx[name], name) end
            seen.sampler = true
        end } }
        s:gen { max_tokens = 4, speculate = function(ctx)
            has("llmrun.DraftContext", ctx)
            seen.draft = true
        end }
        assert.same({ policy = true, sampler = true, draft = true }, seen)
    end)

    it("have the options that calls take", function()
        local text = library.files()["lua/library/llmrun.lua"]
        for _, line in ipairs { "---@class llmrun.GenOptions", "---@field temperature? number", "---@field json? ",
            "---@class llmrun.LoadOptions", "---@field kv? llmrun.KvOptions", "---@field value_type? string" } do
            assert.matches(line, text, 1, true)
        end
        assert.not_matches("table: 0x", text, 1, true)
    end)
end)
