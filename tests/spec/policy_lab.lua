-- What the specs of policies share: llmrun.testing's lab with its methods as functions, a generator of random numbers.
local testing = require "llmrun.testing"

local function generator(seed)
    local x = seed * 2654435761 % 2147483647 + 1
    return function(n)
        x = x * 48271 % 2147483647
        return x % n + 1
    end
end

-- An engine, with submit(prompt length or ids, request options) -> request, and its sequence.
local function lab(opts)
    local l = testing.lab(opts)
    for _, name in ipairs { "submit", "step", "finish", "order" } do
        local method = l[name]
        l[name] = function(...) return method(l, ...) end
    end
    return l
end

return {
    lab = lab, next_token = testing.next_token, reference = testing.reference, generator = generator,
    logged = testing.logged,
}
