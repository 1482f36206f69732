--- Any bytes as a trace of requests (llmrun.traces): rows, scaled and cut to prompts, or a refusal with its line.

local errors = require "llmrun.errors"
local traces = require "llmrun.traces"

local path = os.tmpname()

local function tokens(n, salt)
    local t = {}
    for i = 1, n do t[i] = (salt + i) % 100 end
    return t
end

-- Row by row: an error of the library, or rows in order that wait for earlier ones only.
local function stream()
    local rows, err = traces.open(path, { scale = 0.5, skip = 1 })
    if not rows then
        assert(type(err) == "string" and err ~= "")
        return
    end
    local ok, why = pcall(function()
        local last = 0
        for r in rows do
            assert(r.at >= last and r.prompt >= 1 and r.output >= 1, "a bad row")
            assert(not r.after or r.after < r.number, "a row waits for a later one")
            last = r.at
        end
    end)
    assert(ok or errors.is(why), why)
end

return function(text)
    local f <close> = assert(io.open(path, "wb"))
    f:write(text)
    f:close()
    stream()
    local rows, err = traces.read(path, 50, #text % 3)
    if not rows then
        assert(type(err) == "string" and err ~= "")
        return "refused"
    end
    local before = 0
    for _, r in ipairs(rows) do
        assert(r.at >= before and r.at < math.huge and math.type(r.prompt) == "integer" and r.output >= 0, "a bad row")
        before = r.at
    end
    local scaled, left_out = traces.scale(rows, { scale = 0.01, speed = 2, limit = 5000 })
    assert(#scaled + left_out == #rows)
    for i, r in ipairs(scaled) do assert(#traces.prompt(r, tokens, i) == r.prompt, "a prompt of another length") end
    local hits = traces.possible_hits(scaled)
    assert(hits >= 0 and hits <= 1)
    return "ok"
end
