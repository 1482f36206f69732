-- Tokens of a batch are drawn by all threads: what comes out must be what one thread draws.
local llm = require "llmrun"

local forms = {
    { temperature = 0 },
    { temperature = 0.8, top_k = 40 },
    { temperature = 1, logprobs = 3 },
    { temperature = 0.9, top_p = 0.95, min_p = 0.02, repetition_penalty = 1.2, presence_penalty = 0.3 },
    { temperature = 0.7, json = { type = "object", required = { "name", "age" },
        properties = { name = { type = "string", maxLength = 8 }, age = { type = "integer", maximum = 99 } } } },
    { temperature = 1.2, mirostat = 2, mirostat_tau = 4 },
    { sampler = function(logits) return (logits:argmax()) end },
    { temperature = 0.8, top_k = 2000 },
    { temperature = 1, choices = { "red", "green", "blue" } },
    { temperature = 0.8, frequency_penalty = 0.5, no_repeat_ngram = 2 },
}

--- Texts, tokens and log-probabilities of all forms, run as one batch.
local function run(threads)
    local model <close> = llm.load("smollm2", { ctx = 128, threads = threads, max_seqs = #forms })
    local out = llm.map(forms, function(form, i)
        local s <close> = model:session()
        s:append(("Story number %d. Once upon a time"):format(i or 0))
        local o = { max_tokens = 12, seed = 7 }
        for k, v in pairs(form) do o[k] = v end
        local r = s:gen(o)
        local parts = { r.text, #(r.tokens or {}) }
        for _, t in ipairs(r.logprobs or {}) do parts[#parts + 1] = ("%.9g"):format(t.logprob or t) end
        return table.concat(parts, "|")
    end)
    model:check()
    return out
end

describe("tokens drawn by several threads", function()
    it("are those that one thread draws, in any form", function()
        local one, three = run(1), run(3)
        for i in ipairs(forms) do assert.equal(one[i], three[i]) end
        assert.matches("|12|", one[3], 1, true)
    end)
end)
