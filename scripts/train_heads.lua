-- Text that a model writes, and its final hidden row behind each token: what scripts/train_heads learns from.
--
--   llmrun scripts/train_heads.lua MODEL OUT TOKENS [THREADS]
--
-- OUT holds, for each text, a count n, n token ids (int32) and n rows of floats: row i is the one behind token i. The
-- texts are answers to questions made of a list of tasks and a list of subjects, drawn greedily, 32 at a time.
--
-- example:
--   build/llmrun scripts/train_heads.lua smollm2 rows.bin 20000 2

local llm = require "llmrun"
local files = require "llmrun.files"
local runner = require "llmrun.runner"
local usage = require "usage"

local name, path, tokens, threads = usage.arguments "MODEL OUT TOKENS [THREADS]"
local want = math.tointeger(tokens) or usage.refuse(("TOKENS: integer expected, got '%s'"):format(tokens))
local model <close> = llm.load(name, { ctx = 512, max_seqs = 32, threads = math.tointeger(threads),
    kv = { blocks = 32 * 33 } }) -- room for all: what does not fit would be computed again in each step
local out <close> = assert(files.create(path))

local tasks = {
    "Write a short story about %s.", "Explain %s to a child.", "List five facts about %s.",
    "Write a Python function that has to do with %s.", "What are the advantages and disadvantages of %s?",
    "Write a letter to a friend about %s.", "Describe %s step by step.", "Write a poem about %s.",
    "Summarize the history of %s.", "Give me three tips about %s.", "Write a JSON object that describes %s.",
    "Compare %s with something similar.", "Why is %s important?", "Write a dialogue between two people about %s.",
}
local subjects = {
    "a lighthouse", "photosynthesis", "sorting a list", "the French Revolution", "bicycles", "baking bread",
    "volcanoes", "a lost dog", "compound interest", "electric cars", "prime numbers", "the moon", "gardening",
    "chess", "a rainy day", "the human heart", "recursion", "a train journey", "coffee", "whales",
    "the stock market", "a haunted house", "binary search", "rivers", "music lessons", "vaccines", "solar panels",
    "a birthday party", "databases", "penguins",
}

local ends = {}
for _, id in ipairs(model.info.eog) do ends[id] = true end

-- The row behind the session's last token, and the likeliest next one.
local function step(s)
    local op = assert(model.runner:submit("train_heads", s.seq, { kind = "logits" }))
    local guard <close> = setmetatable({}, { __close = function() op:close() end }) -- luacheck: ignore 211
    op:wait(runner.DONE)
    local info = op.req:info()
    if info.state == "failed" then error(info.error) end
    return assert(op.req:hidden(), "the model tells no hidden rows"), op.req:logits():argmax()
end

local done, started = 0, os.time()
local function write(prompt)
    if done >= want then return end
    local s <close> = model:session()
    s:user(prompt)
    s:logits() -- opens the answer
    local ids, rows = { s.tokens[s.len] }, {}
    for n = 1, 256 do
        local row, id = step(s)
        rows[n] = row
        if ends[id] then break end
        ids[n + 1] = id
        s:append(id)
    end
    ids[#rows + 1] = nil
    assert(out:write(string.pack("<i4", #rows), string.pack("<" .. ("i4"):rep(#ids), table.unpack(ids)),
        table.concat(rows)))
    done = done + #rows
    io.stderr:write(("\r%d of %d tokens, %d s "):format(done, want, os.time() - started))
end

local prompts = {}
for i = 0, #tasks * #subjects - 1 do -- each task and subject meet once, in an order that mixes both
    prompts[#prompts + 1] = tasks[i % #tasks + 1]:format(subjects[(i + i // #tasks) % #subjects + 1])
end
llm.map(prompts, write, { concurrency = 32 })
io.stderr:write "\n"
assert(out:done())
