-- A drafter of our own: answers that quote a tool's result are copied from it, many tokens a step. The text is the same
-- as without: whatever is drafted, the model has the last word.
-- test-args: {smollm2}
-- test-expect: same text: true
-- test-expect: %d%.%d+ tokens a step
local llm = require "llmrun"
local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })

local result = '{"order": 48213, "customer": "Ada Lovelace", "items": [{"sku": "A-17", "count": 3, "price": 12.5}, '
    .. '{"sku": "B-02", "count": 1, "price": 240.0}], "status": "shipped", "carrier": "North Star Parcel"}'
local memory = llm.memory():add(model:tokenize(result))

local function ask(speculate)
    local s <close> = model:session()
    s:append("The tool returned:\n" .. result .. "\n\nThe answer to the customer quotes it:\n")
    return s:gen { max_tokens = 120, temperature = 0, speculate = speculate }
end

local plain = ask(nil)
local drafted = ask(function(ctx) return memory:propose(ctx:tokens(8), 12) end)
local n, sp = #drafted.tokens, drafted.speculation or { accepted = 0, acceptance = 0 }

print(drafted.text)
print("same text: " .. tostring(plain.text == drafted.text))
print(("%.2f tokens a step, %.0f %% of the drafts taken, %.2f times as fast"):format(n / (n - sp.accepted),
    100 * sp.acceptance, drafted.timing.tokens_per_second / plain.timing.tokens_per_second))
