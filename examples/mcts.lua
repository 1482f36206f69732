-- Monte Carlo tree search over thoughts: a node is a list of steps towards a goal, a child adds one. How good a list is
-- says the model itself: the probability of "Yes" against "No" when it is asked. UCT decides where to look next.
--
--   llmrun examples/mcts.lua [MODEL] [ROUNDS]
--
-- A node is a session forked from its parent's: the tree of thoughts is a tree of KV pages, and what several nodes have
-- in common is computed and kept once.
--
-- test-args: {smollm2} 6
-- test-expect: best plan
-- test-expect: 1%. %S
-- test-expect: 2%. %S
-- test-expect: %d+ nodes, 6 rounds
-- test-expect: computed %d+ tokens; %d+ without the tree's KV

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024, max_seqs = 32 })
local rounds, branching, depth = tonumber(arg[2]) or 12, 3, 3

llm.seed(5)

local prompt = [[
Goal: Have a clean kitchen.
1. Put the dirty dishes into the sink.
2. Wash the dishes with hot water.
3. Wipe the table.

Goal: Make a cup of tea.
]]

local function new_node(session, parent, step)
    return { session = session, parent = parent, step = step, depth = parent and parent.depth + 1 or 0,
        children = {}, visits = 0, sum = 0 }
end

local root_session <close> = model:session()
root_session:append(prompt)
local root, nodes = new_node(root_session), 1

--- Draws several next steps at once; equal ones count once.
local function expand(node)
    local seen = {}
    llm.map({ node.session:fork(branching) }, function(s)
        s:append((node.depth + 1) .. ".")
        local r = s:gen { temperature = 1.0, top_p = 0.9, max_tokens = 14, stop = "\n" }
        if seen[r.text] or r.text == "" then return s:close() end
        seen[r.text] = true
        if s.text:sub(-1) ~= "\n" then s:append("\n") end
        node.children[#node.children + 1] = new_node(s, node, r.text:gsub("^ ", ""))
        nodes = nodes + 1
    end)
end

--- The model's own word on the steps so far, 0 to 1.
local function value(node)
    local s <close> = node.session:fork()
    s:append("\nQuestion: Do these steps help to make a cup of tea?\nAnswer:")
    local _, r = s:select("verdict", { " Yes", " No" })
    local yes, no = math.exp(r.choices[1].score), math.exp(r.choices[2].score)
    return yes / (yes + no)
end

local function uct(child)
    if child.visits == 0 then return math.huge end
    return child.sum / child.visits + math.sqrt(0.2 * math.log(child.parent.visits) / child.visits)
end

local function best(list, by)
    local found
    for _, c in ipairs(list) do
        if not found or by(c) > by(found) then found = c end
    end
    return found
end

for _ = 1, rounds do
    local node = root
    while #node.children > 0 do node = best(node.children, uct) end
    if node.depth < depth and (node.visits > 0 or node == root) then
        expand(node)
        node = node.children[1] or node
    end
    local v = value(node)
    while node do
        node.visits, node.sum = node.visits + 1, node.sum + v
        node = node.parent
    end
end

print("best plan:")
local node = root
while #node.children > 0 do
    node = best(node.children, function(c) return c.visits > 0 and c.sum / c.visits or -1 end)
    print(("  %d. %s  (%d visits, value %.2f)"):format(node.depth, node.step, node.visits,
        node.visits > 0 and node.sum / node.visits or 0))
end
print(("%d nodes, %d rounds"):format(nodes, rounds))
local m = model:metrics()
print(("computed %d tokens; %d without the tree's KV"):format(m.computed_tokens,
    m.prompt_tokens + m.generation_tokens))
