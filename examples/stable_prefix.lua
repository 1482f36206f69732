-- A template as code: segments say how long they stay the same, so that what changes can't spoil the cache of the rest.
--
--   llmrun examples/stable_prefix.lua [MODEL]
--
-- Each question comes with the time of day. A template that begins with the time computes everything anew each turn;
-- this one has the rules first (pinned: computed once for all sessions), then the conversation (shared), then the time
-- (volatile). Another order is an error that names the segment.
--
-- test-args: {smollm2}
-- test-expect: time first: +computed +%d+ tokens, +%d+ from the cache
-- test-expect: time last: +computed +%d+ tokens, +%d+ from the cache
-- test-expect: [2-9]%.%d times less
-- test-expect: error: .*segment 2: it is pinned, but stands behind segment 1, which is volatile

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
llm.seed(3)

local rules = [[
You are the clerk of a small library. You answer in one short sentence. The library is open from nine in the morning to
six in the evening, on Saturdays to one in the afternoon. A book may be kept for four weeks; a film for one week. Who is
late pays ten cents a day. Children pay nothing. Lost books are replaced by the borrower.
]]
local questions = { "Are you open now?", "How long may I keep a book?", "And a film?", "What if I am late?" }

local function message(role, text, cache)
    return { text = ("<|im_start|>%s\n"):format(role), literal = true, cache = cache }, { text = text },
        { text = "<|im_end|>\n", literal = true }
end

--- Appends segments to a list.
local function add(list, ...) table.move({ ... }, 1, select("#", ...), #list + 1, list) end

local function template(time_first)
    return function(v)
        local out = {}
        if time_first then add(out, message("system", "It is " .. v.time)) end
        add(out, message("system", rules, not time_first and "pinned" or nil))
        for i, m in ipairs(v.messages) do add(out, message(m.role, m.content, i == 1 and "shared" or nil)) end
        if not time_first then add(out, message("system", "It is " .. v.time, "volatile")) end
        add(out, { text = "<|im_start|>assistant\n", literal = true })
        return out
    end
end

--- Two visitors ask all questions; tokens computed and cached.
local function run(how)
    local computed, cached = 0, 0
    for _ = 1, 2 do
        local s <close> = model:session { template = how, vars = {} }
        for i, q in ipairs(questions) do
            s.vars.time = ("10:%02d"):format(10 * i)
            s:user(q)
            local r = s:gen { max_tokens = 20, temperature = 0 }
            computed, cached = computed + r.usage.computed_tokens, cached + r.usage.cached_tokens
        end
    end
    return computed, cached
end

local first, first_cached = run(template(true))
model:drop_cached()
local last, last_cached = run(template(false))
print(("time first:  computed %4d tokens, %4d from the cache"):format(first, first_cached))
print(("time last:   computed %4d tokens, %4d from the cache"):format(last, last_cached))
print(("%.1f times less to compute"):format(first / last))

local wrong = model:session { template = function()
    return { { text = "It is 10:00\n", cache = "volatile" }, { text = rules, cache = "pinned" } }
end }
wrong:user "Are you open?"
print("error: " .. tostring(select(2, pcall(wrong.gen, wrong))))
