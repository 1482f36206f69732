--- What llmrun new writes: for each kind its files, with NAME in the place of the name, and how it is run.

local M = {}

M.kinds = { "program", "policy", "sampler", "architecture", "route" }

local starters = {}

starters.program = {
    run = "llmrun @NAME/main.lua",
    { "NAME/main.lua", [[
-- llmrun NAME/main.lua [QUESTION]
local llm = require "llmrun"
local ask = require "ask"

local model <close> = llm.load(os.getenv "MODEL" or "smollm2")
print(ask(model, arg[1] or "What is the capital of Italy?"))
]] },
    { "NAME/ask.lua", [[
local llm = require "llmrun"

--- Asks the model twice at once, and lets it choose between its own answers.
return function(model, question)
    local s <close> = model:session()
    s:system "You answer in one short sentence."
    s:user(question)
    local drafts = llm.map({ 1, 2 }, function(n)
        local branch <close> = s:fork()
        return branch:gen { max_tokens = 40, temperature = 0.5, seed = n, stop = "\n" }.text
    end)
    if drafts[1] == drafts[2] then return drafts[1] end
    s:user(("Which is better?\n1: %s\n2: %s"):format(drafts[1], drafts[2]))
    return drafts[tonumber((s:select("best", { "1", "2" })))]
end
]] },
    { "NAME/ask_spec.lua", [[
local testing = require "llmrun.testing"
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
local ask = dofile(here .. "ask.lua")

describe("ask", function()
    it("asks what it is asked, and returns what the model says", function()
        local model <close> = testing.model { "Rome." }
        assert.equal("Rome.", ask(model, "What is the capital of Italy?"))
        assert.matches("capital of Italy", model.asked[1], 1, true)
        assert.matches("one short sentence", model.asked[1], 1, true)
        assert.equal(1, #model.asked) -- both branches asked the same, and said the same
    end)
end)
]] },
}

starters.policy = {
    run = "llmrun serve --policy @NAME.lua",
    { "NAME.lua", [[
--- A scheduling policy: the shortest prompt goes first, but nobody waits for ever.
--- Hooks and what they see: lua/README.md, "Policies", and policy.lua.
local patience = 5 -- seconds after which a request counts as short

return {
    name = "NAME",
    schedule = function(_, step)
        local waiting = step:sorted(step.waiting, function(r)
            return r.queue_time > patience and 0 or r.prompt_tokens
        end)
        for _, r in ipairs(step.running) do step:run(r) end
        for _, r in ipairs(waiting) do step:run(r) end
    end,
}
]] },
    { "NAME_spec.lua", [[
local testing = require "llmrun.testing"
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"

describe("policy NAME", function()
    it("lets the short prompt go first", function()
        local lab <close> = testing.lab { policy = dofile(here .. "NAME.lua"), max_seqs = 1 }
        lab:submit(90, { name = "long", max_tokens = 3 })
        lab:submit(5, { name = "short", max_tokens = 3 })
        assert.same({ "short", "long" }, lab:order())
    end)

    it("fails in no hook", function()
        local lines = testing.logged(function()
            local lab <close> = testing.lab { policy = dofile(here .. "NAME.lua"), max_batch_tokens = 16 }
            for i = 1, 5 do lab:submit(i * 7, { max_tokens = 4 }) end
            lab:finish()
        end)
        assert.same({}, lines)
    end)
end)
]] },
}

starters.sampler = {
    run = [[in a program: s:gen { sampler = dofile("@NAME.lua")() }]],
    { "NAME.lua", [[
local llm = require "llmrun"

--- A sampler: the 40 best tokens, drawn the more boldly the less sure the model is.
--- Stages, and what a function may do with logits: lua/README.md, "Samplers and
--- logits".
return function(options)
    local most = options and options.temperature or 1
    return llm.sampler {
        { "top_k", 40 },
        function(logits)
            local sure = math.exp(-logits:entropy()) -- 1: one token has it all
            local temperature = math.max(0.1, most * (1 - sure))
            logits:scale(1 / temperature)
        end,
    }
end
]] },
    { "NAME_spec.lua", [[
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
local sampler = dofile(here .. "NAME.lua")

describe("sampler NAME", function()
    it("keeps to a token that is sure", function()
        assert.equal(2, (sampler():draw({ 0, 0, 20, 0 }, { seed = 1 })))
    end)

    it("leaves a choice where there is one", function()
        local ids, probs = sampler():probs { 1, 0.9, 0.8, -20 }
        assert.equal(0, ids[1])
        assert.is_true(probs[1] < 0.6)
        assert.is_true(probs[2] > 0.2)
    end)
end)
]] },
}

starters.architecture = {
    run = [[in a program: llm.load("model.gguf", { arch = "@NAME.lua" })]],
    { "NAME.lua", [[
--- An architecture: how a model's layers are wired. This one is Llama's; what else there is to build with stands in
--- lua/README.md, "Architectures". g: the layer graph; hp: the file's hyperparameters.
return function(g, hp)
    local x = g:embed "token_embd"
    for l = 0, hp.layers - 1 do
        local b = g:name("blk", l)
        local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
        -- true: in files of this family the rows of q and k are in the order that turns neighbouring pairs
        local a = g:attention(g:rotate(q, hp, hp.heads, true), g:rotate(k, hp, hp.kv_heads, true), v,
            { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
        x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
        x = x + g:ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, hp, { normalize = true })
    end
    x = g:rms_norm(x, "output_norm", hp.eps)
    return g:head(x), x
end
]] },
    { "NAME_spec.lua", [[
local llm = require "llmrun"
local gguf = require "llmrun.testing.gguf"
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"

describe("architecture NAME", function()
    local path = os.tmpname()
    setup(function() gguf.tiny(path) end) -- a Llama of 2 layers with random weights
    teardown(function() os.remove(path) end)

    local function best(arch)
        local model <close> = llm.load(path, { ctx = 64, arch = arch })
        local s <close> = model:session()
        s:append "abc"
        return s:logits():topk(5)
    end

    it("gives the logits of the built-in one", function()
        local ids, logits = best(here .. "NAME.lua")
        local want_ids, want = best(nil)
        assert.same(want_ids, ids)
        for i = 1, 5 do assert.near(want[i], logits[i], 1e-4) end
    end)
end)
]] },
}

starters.route = {
    run = "llmrun serve --routes @NAME.lua",
    { "NAME.lua", [[
-- A program as an endpoint:
--   curl http://127.0.0.1:8080/NAME -H 'Content-Type: application/json' -d '{"text":"The printer is on fire."}'
local exchange = require "llmrun.exchange"

return {
    ["POST /NAME"] = function(req)
        local text = req:json().text
        if type(text) ~= "string" then exchange.fail(400, "text: a text expected", "text") end
        local s <close> = req.models[1]:session()
        s:system "You sum up a text in one sentence."
        s:user(text)
        return { summary = s:gen { max_tokens = 60, stop = "\n" }.text }
    end,
}
]] },
    { "NAME_spec.lua", [[
local testing = require "llmrun.testing"
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
local routes = dofile(here .. "NAME.lua")

describe("POST /NAME", function()
    it("answers with the model's summary", function()
        local model <close> = testing.model { "Fire." }
        local r = testing.request(routes, model, "POST /NAME", { text = "The printer is on fire." })
        assert.equal(200, r.status)
        assert.equal("Fire.", r.json.summary)
        assert.matches("printer", model.asked[1])
    end)

    it("wants a text", function()
        local model <close> = testing.model {}
        assert.equal(400, testing.request(routes, model, "POST /NAME", { other = 1 }).status)
    end)
end)
]] },
}

--- The files of a kind, { { path =, text = }, ... }, the second (or last) being its spec, and how it is run: "@" stands
--- for the folder.
---@param kind string
---@param name string
---@return table files, string run
function M.make(kind, name)
    local files, s = {}, starters[kind]
    for i, f in ipairs(s) do files[i] = { path = (f[1]:gsub("NAME", name)), text = (f[2]:gsub("NAME", name)) } end
    return files, (s.run:gsub("NAME", name))
end

return M
