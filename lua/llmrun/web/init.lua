--- The page at /: a chat, and the engine at work. One HTML text (page.lua), served from the program; GET /engine gives
--- it what it draws. It shows no texts of others' requests, only their sizes and where they lie.

local core = require "llmrun.core"
local json = require "llmrun.json"

local M = {}

local shown = { "ttft", "tpot", "itl", "queue", "step", "hook", "batch" }
local counted = {
    "prompt_tokens", "generation_tokens", "computed_tokens", "prefix_queries", "prefix_hits", "steps",
    "preempt_recompute", "preempt_swap", "refused", "policy_failed",
}

local function arrays(look)
    json.array(look.blocks)
    json.array(look.sequences)
    for _, s in ipairs(look.sequences) do json.array(s.blocks) end
    return look
end

local function model_view(server, model)
    local stats, metrics = model:stats(), model:metrics()
    local hists, counters = {}, {}
    for _, name in ipairs(shown) do
        local h = metrics[name]
        hists[name] = { n = h.n, sum = h.sum }
    end
    for _, name in ipairs(counted) do counters[name] = metrics[name] end
    return {
        name = server.names[model], backend = model.info.backend, context = model.info.ctx, running = stats.running,
        waiting = stats.waiting, kv = stats.kv[1], block_size = stats.block_size, counters = counters, hists = hists,
        look = arrays(core.look(model.engine)),
    }
end

local function engine(req)
    local list = json.array()
    for i, model in ipairs(req.models) do list[i] = model_view(req.server, model) end
    return { time = core.now(), models = list, http = req.server.core:stats() }
end

local function page(_, res)
    local nonce = ("%016x%016x"):format(math.random(0), math.random(0))
    res:header("Content-Security-Policy", ("default-src 'none'; connect-src 'self'; style-src 'nonce-%s'; "
        .. "script-src 'nonce-%s'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"):format(nonce, nonce))
    res:header("X-Content-Type-Options", "nosniff")
    res:header("Referrer-Policy", "no-referrer")
    res:header("Cache-Control", "no-store")
    res:answer(200, (require("llmrun.web.page"):gsub("NONCE", nonce)), "text/html; charset=utf-8")
end

--- Adds the routes to a server.
function M.add(server)
    server.routes:add("GET /", page)
    server.routes:add("GET /engine", engine)
end

return M
