-- Beam search: the WIDTH most probable continuations so far are carried on side by side.
--
--   llmrun examples/beam_search.lua [MODEL] [WIDTH] [LENGTH]
--
-- Each beam is a session. A step asks all of them for their logits, which share a batch; a beam with several children
-- forks, one with none is closed. No KV is copied but for the last block of a fork.
--
-- test-args: {smollm2} 4 16
-- test-expect: greedy: +%-%d
-- test-expect: beam 1: +%-%d
-- test-expect: beam 4: +%-%d
-- test-expect: beam 1 against greedy: [+-]%d
-- test-expect: computed %d+ tokens; %d+ without forks

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512, max_seqs = 32 })
local width, length = tonumber(arg[2]) or 4, tonumber(arg[3]) or 24

local ends = {}
for _, id in ipairs(model.info.eog) do ends[id] = true end

--- All children of a list of beams: { beam, id, logprob of the whole }.
local function expand(beams)
    local lists = llm.map(beams, function(beam)
        local logits = beam.session:logits()
        local ids = logits:topk(width)
        local children = {}
        for i, lp in ipairs(logits:logprob(ids)) do
            children[i] = { beam = beam, id = ids[i], logprob = beam.logprob + lp }
        end
        return children
    end)
    local all = {}
    for _, list in ipairs(lists) do table.move(list, 1, #list, #all + 1, all) end
    table.sort(all, function(a, b) return a.logprob > b.logprob end)
    return all
end

--- The best children as beams; sessions of parents go to their children.
local function choose(children, beams, finished)
    local kept, used = {}, {}
    for _, c in ipairs(children) do
        if #kept == width then break end
        if ends[c.id] then
            finished[#finished + 1] = { text = c.beam.text, logprob = c.logprob }
        else
            kept[#kept + 1] = c
            used[c.beam] = (used[c.beam] or 0) + 1
        end
    end
    for i, c in ipairs(kept) do -- the last child takes its parent's session, the others fork it
        used[c.beam] = used[c.beam] - 1
        local s = used[c.beam] > 0 and c.beam.session:fork() or c.beam.session
        kept[i] = { session = s, logprob = c.logprob, text = c.beam.text .. model:detokenize(c.id), id = c.id }
    end
    for _, b in ipairs(beams) do
        if not used[b] then b.session:close() end
    end
    for _, b in ipairs(kept) do b.session:append(b.id) end
    return kept
end

local s <close> = model:session()
s:user "Describe the sea in one short sentence."
s:logits()
local greedy <close> = s:fork()
local r = greedy:gen { temperature = 0, max_tokens = length, logprobs = true }
local sum = 0
for _, t in ipairs(r.logprobs) do sum = sum + t.logprob end
print(("greedy: %7.2f  %s"):format(sum, r.text:gsub("\n", " ")))

local beams, finished = { { session = s:fork(), logprob = 0, text = "" } }, {}
for _ = 1, length do beams = choose(expand(beams), beams, finished) end
table.move(beams, 1, #beams, #finished + 1, finished)
table.sort(finished, function(a, b) return a.logprob > b.logprob end)
for i = 1, width do
    print(("beam %d: %7.2f  %s"):format(i, finished[i].logprob, finished[i].text:gsub("\n", " ")))
end
print(("beam 1 against greedy: %+.2f"):format(finished[1].logprob - sum))
for _, b in ipairs(beams) do b.session:close() end
local m = model:metrics()
print(("computed %d tokens; %d without forks and their KV"):format(m.computed_tokens,
    m.prompt_tokens + m.generation_tokens))
