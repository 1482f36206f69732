-- Drafts that branch: what followed the last token at its last five places is tried in one step, not only at the last.
-- test-args: {smollm2}
-- test-expect: chain: +%d+%.%d tokens a step, %d+%.%d+ times as fast
-- test-expect: tree: +[1-9]%d*%.%d tokens a step, %d+%.%d+ times as fast
local llm = require "llmrun"
local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
local function drafter(ways, depth)
    return function(ctx)
        local t, out = ctx:tokens(200), { parents = {} }
        for i = #t - 1, 1, -1 do
            for k = 1, t[i] == t[#t] and #out <= (ways - 1) * depth and math.min(depth, #t - i) or 0 do
                out[#out + 1], out.parents[#out + 1] = t[i + k], k == 1 and 0 or #out
            end -- branches that begin alike are put together
        end
        return out
    end
end
local pets = { "cat likes milk", "dog likes bones", "hen likes corn", "cow likes grass", "pig likes mud" }
local function run(speculate)
    local s <close> = model:session()
    for i = 1, 25 do s:append(("the %s, "):format(pets[(i * i + i // 3) % 5 + 1])) end
    local r = s:gen { max_tokens = 100, min_p = 0.1, seed = 3, ignore_eos = true, speculate = speculate }
    return r.timing.total - r.timing.first_token, 100 / (100 - (r.speculation and r.speculation.accepted or 0))
end
local plain = run(false)
for _, how in ipairs { { "chain:", 1, 15 }, { "tree:", 5, 3 } } do
    local seconds, rate = run(drafter(how[2], how[3]))
    print(("%-6s %4.1f tokens a step, %.2f times as fast"):format(how[1], rate, plain / seconds))
end
