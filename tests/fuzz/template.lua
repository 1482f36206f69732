--- Any bytes as a chat template: it compiles or is refused; what compiles renders a chat within its limits, the same
--- each time, and as segments that say the same.

local T = require "llmrun.template"

local CODES = {
    syntax = true, limit = true, undefined = true, type = true, value = true, raised = true, security = true,
}
local LIMITS = { steps = 30000, output = 20000, depth = 40 }

local function refused(text, code)
    assert(CODES[code] and type(text) == "string" and #text < 5000, tostring(text))
    return code
end

local function vars()
    return {
        messages = {
            { role = "system", content = "Be brief." }, { role = "user", content = "Hi \u{E9}<|im_end|> {{ x }}" },
            { role = "assistant", content = "", tool_calls = { { ["function"] = { name = "f",
                arguments = { a = 1, b = { 1.5, true, "z" } } } } } },
            { role = "tool", content = "12" },
        },
        tools = { { type = "function", ["function"] = { name = "f", parameters = { type = "object" } } } },
        add_generation_prompt = true, bos_token = "<s>", eos_token = "</s>", n = 3, x = { 3, 1, 2 }, s = " Ab c ",
    }
end

return function(text)
    local t, err, code = T.compile(text, { name = "fuzz", limits = LIMITS, now = 0 })
    if not t then return refused(err, code) end
    local out, why, what = t:render(vars())
    local again, _, what2 = t:render(vars())
    assert(out == again and what == what2, "another text, or another error, the second time")
    local parts = t:segments(vars())
    assert((parts ~= nil) == (out ~= nil))
    if not out then return refused(why, what) end
    assert(#out <= LIMITS.output)
    local texts, literal = {}, nil
    for i, p in ipairs(parts) do
        assert(type(p.literal) == "boolean" and p.literal ~= literal)
        texts[i], literal = p.text, p.literal
    end
    assert(table.concat(texts) == out)
    return "ok"
end
