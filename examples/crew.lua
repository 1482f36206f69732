-- Plan and execute with a crew: a planner splits the task, workers do the parts side by side, an editor puts the
-- results together. Each role is a session; all of them share the briefing at the beginning, whose KV is computed once.
--
--   llmrun examples/crew.lua [MODEL] [TASK]
--
-- test-args: {smollm2}
-- test-expect: plan 1: %S
-- test-expect: plan 3: %S
-- test-expect: worker 1: %S
-- test-expect: worker 3: %S
-- test-expect: editor: %S
-- test-expect: computed %d+ tokens; %d+ without shared KV

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
local task = arg[2] or "A birthday party for a child in a small garden"

local briefing <close> = model:session()
briefing:append(([[
This is the notebook of a crew that plans things. The planner writes three short points, each of them one thing that has
to be taken care of. A worker writes one sentence on how to do a point. The editor writes one closing sentence.

Task: A picnic at the lake
Planner:
1. Food and drinks
2. Blankets and games
3. The way to the lake
Worker on "Food and drinks": We bring sandwiches, fruit and a large bottle of lemonade.
Editor: With full baskets and good company, it will be a lovely day at the lake.

Task: %s
]]):format(task))
briefing:logits()

local function role(text, stop, most)
    local s <close> = briefing:fork()
    s:append(text)
    return (s:gen { temperature = 0, max_tokens = most, stop = stop, repetition_penalty = 1.1 }.text:gsub("^%s+", ""))
end

-- the numbers are ours, the points the model's
local plan, points = "Planner:\n", {}
for i = 1, 3 do
    plan = plan .. i .. "."
    points[i] = role(plan, "\n", 12)
    plan = plan .. " " .. points[i] .. "\n"
    print(("plan %d: %s"):format(i, points[i]))
end

local work = llm.map(points, function(point)
    return role(('%sWorker on "%s":'):format(plan, point), "\n", 32)
end)
for i, text in ipairs(work) do print(("worker %d: %s"):format(i, text)) end

local notes = plan
for i, text in ipairs(work) do notes = notes .. ('Worker on "%s": %s\n'):format(points[i], text) end
print("editor: " .. role(notes .. "Editor:", "\n", 40))

local m = model:metrics()
print(("computed %d tokens; %d without shared KV"):format(m.computed_tokens, m.prompt_tokens + m.generation_tokens))
