-- Programs as endpoints: llmrun serve --routes examples/deploy/routes.lua
--
--   curl http://127.0.0.1:8080/triage -H 'Content-Type: application/json' -d '{"text":"The printer is on fire."}'
--   curl -N http://127.0.0.1:8080/both-sides -H 'Content-Type: application/json' -d '{"text":"Cats"}'
--
-- Each function runs as a coroutine per request, inside the engine: what it generates shares batches and KV pages with
-- everything else, and it is ended where it waits when its client goes away.

local llm = require "llmrun"
local exchange = require "llmrun.exchange"

--- The text of a request's body; a 400 that names the field if there is none.
local function text_of(req)
    local body = req:json()
    local text = type(body) == "table" and body.text
    if type(text) == "string" and text ~= "" then return text end
    exchange.fail(400, "text: a text expected", "text", "invalid_value")
end

local routes = {}

--- How urgent is it? The choice falls by probability, all three scored in one batch; the model goes on behind it.
routes["POST /triage"] = function(req)
    local s <close> = req.models[1]:session()
    s:system "You sort the mail of a help desk."
    s:user("Mail: " .. text_of(req) .. "\nHow urgent is it: low, normal or high?")
    local urgency, scores = s:select("urgency", { "low", "normal", "high" })
    s:append ", because"
    local why = s:gen { max_tokens = 40, temperature = 0, stop = "\n" }
    local by = {}
    for i, choice in ipairs(scores.choices) do by[choice.text] = scores.choices[i].score end
    return { urgency = urgency, scores = by, why = why.text, tokens = why.usage.completion_tokens }
end

--- Two answers side by side from one prompt, streamed as they come.
routes["POST /both-sides"] = function(req, res)
    local s <close> = req.models[1]:session()
    s:user("Say in one sentence what speaks for it, or against it: " .. text_of(req))
    llm.map({ "For:", "Against:" }, function(side)
        local branch <close> = s:fork()
        branch:append(side)
        for piece in branch:stream { max_tokens = 40, temperature = 0 } do
            res:event({ side = side, text = piece })
        end
    end)
    res:event "[DONE]"
end

return routes
