-- What bench does under load: traces, arrivals, prefix hits, on scripted models; and the command itself.
local core = require "llmrun.core"
local json = require "cjson"
local bench = require "llmrun.cli.bench_load"
local llm = require "llmrun"
local traces = require "llmrun.traces"

local FOLDER = "tests/data/traces/"

local function with_file(text, fn)
    local path = os.tmpname()
    local f = assert(io.open(path, "wb"))
    f:write(text)
    f:close()
    local ok, err = pcall(fn, path)
    os.remove(path)
    if not ok then error(err, 0) end
end

local function scripted(o)
    o = o or {}
    o.next, o.ctx = function(t) return 65 + #t % 20 end, o.ctx or 4096
    return llm.scripted(o)
end

describe("traces", function()
    it("are read: Azure", function()
        local rows, format = traces.read(FOLDER .. "azure_conv_2023.csv")
        assert.equal("azure", format)
        assert.equal(300, #rows)
        assert.same({ at = 0, prompt = 374, output = 44, number = 2 }, rows[1])
        assert.is_true(math.abs(rows[2].at - 4.314489) < 1e-4)
        rows = traces.read(FOLDER .. "azure_conv_2023.csv", 2, 1)
        assert.equal(2, #rows)
        assert.same({ 0, 396, 109 }, { rows[1].at, rows[1].prompt, rows[1].output })
    end)

    it("are read: Mooncake", function()
        local rows, format = traces.read(FOLDER .. "mooncake_conversation.jsonl")
        assert.equal("mooncake", format)
        assert.equal(300, #rows)
        assert.same({ 6758, 500, 14 }, { rows[1].prompt, rows[1].output, #rows[1].blocks })
        assert.is_true(rows[300].at > rows[1].at)
    end)

    it("cross midnights and months", function()
        local head = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        with_file(head .. "2024-02-28 23:59:59.5,1,1\r\n2024-03-01 00:00:00.5,2,3\r\n", function(path)
            local rows = assert(traces.read(path))
            assert.equal(86401, rows[2].at)
        end)
    end)

    it("with errors are refused, with the line", function()
        local azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        for text, pattern in pairs {
            [""] = "no rows",
            [azure] = "no rows",
            ["a,b,c\n"] = "neither an Azure, BurstGPT nor Mooncake trace, nor one of llmrun's; it begins with 'a,b,c'",
            [azure .. "2023-11-16 18:15:46.6,1,2\n2023-11-16 18:15:46.6,1\n"] = ":3: a time",
            [azure .. "2023-11-16 18:15:46.6,-1,2\n"] = ":2: a time",
            ["{\"timestamp\": 0}\n"] = ":1: timestamp",
            ["{nonsense\n"] = ":1: not a JSON",
            ["{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1]}\n"] = ":1: hash_ids",
            ["{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 5, \"hash_ids\": [\"x\"]}\n"] = ":1: hash_ids",
        } do
            with_file(text, function(path)
                local rows, err = traces.read(path)
                assert.is_nil(rows)
                assert.matches(pattern, err, 1, true)
            end)
        end
        assert.is_nil((traces.read "/no/such/file"))
    end)

    it("are scaled: equal ids are equal tokens, others are not", function()
        local rows = {
            { at = 0, prompt = 1100, output = 10, blocks = { 1, 2, 3 } },
            { at = 4, prompt = 1536, output = 400, blocks = { 1, 2, 9 } },
        }
        local scaled, left_out = traces.scale(rows, { scale = 1 / 32, speed = 2 })
        assert.equal(0, left_out)
        assert.same({ 34, 48 }, { scaled[1].prompt, scaled[2].prompt })
        assert.same({ 1, 13, 2.0 }, { scaled[1].output, scaled[2].output, scaled[2].at })
        local model <close> = scripted()
        local function tokens(n, salt) return bench.some_tokens(model, n, salt) end
        local a, b = traces.prompt(scaled[1], tokens, 1), traces.prompt(scaled[2], tokens, 2)
        assert.same({ 34, 48 }, { #a, #b })
        assert.same(table.move(a, 1, 32, 1, {}), table.move(b, 1, 32, 1, {}))
        assert.not_same({ a[33], a[34] }, { b[33], b[34] })
        assert.equal(32 / 82, traces.possible_hits(scaled))
        scaled, left_out = traces.scale(rows, { scale = 1 / 32, speed = 0, limit = 50 })
        assert.same({ 1, 1, 0 }, { #scaled, left_out, scaled[1].at })
    end)
end)

describe("bench under load", function()
    it("counts times as percentiles", function()
        local list = {}
        for i = 1, 101 do list[i] = (102 - i) / 1000 end
        assert.same({ mean = 51, median = 51, p90 = 91, p99 = 100 }, bench.percentiles(list))
        assert.is_nil(bench.percentiles {})
        local a, b, c = bench.fit { { 1, 10, 23 }, { 2, 10, 25 }, { 1, 20, 33 }, { 5, 7, 28 } }
        for i, v in ipairs { a - 11, b - 2, c - 1 } do assert.is_true(math.abs(v) < 1e-9, i) end
    end)

    it("runs requests together", function()
        local model <close> = scripted()
        local r = bench.measure_together(model, 8, { prompt = 128, shared = 64, output = 64, ["repeat"] = 2 })
        assert.same({ 8, 128, 64, 64 }, { r.concurrency, r.prompt, r.shared, r.output })
        assert.is_true(r.output_tps > 0 and r.ttft_ms.p99 >= r.ttft_ms.median and r.tpot_ms.mean > 0)
        assert.is_true(r.hit_rate > 0 and r.hit_rate <= 0.5) -- nothing is left of the round before
    end)

    it("keeps agents' histories: over 95 % of prompts are hits, turns compute what is new", function()
        local model <close> = scripted { kv = { blocks = 4000 } }
        local o = { sessions = 4, turns = 16, shared = 1024, prompt = 32, output = 16 }
        local r, turns = bench.measure_agents(model, o)
        assert.equal(2, r.forked)
        assert.equal(4 * 16 + 2 * 8, #turns)
        assert.is_true(r.hit_rate > 0.95, r.hit_rate)
        local longest = 0
        for _, t in ipairs(turns) do
            assert.equal(t.history + t.new, t.prompt)
            if t.turn > 1 then
                -- the new tokens, at most a block of the history, and the reply
                assert.is_true(t.computed <= t.new + 16 + o.output, t.computed)
                longest = math.max(longest, t.history)
            end
        end
        assert.is_true(longest > 1600, longest)
        local alone = bench.measure_turns(model, { longest = 2048, ["repeat"] = 1 })
        for _, t in ipairs(alone.turns) do assert.is_true(t.computed <= t.new + 16, t.computed) end
        assert.is_true(model:check())
    end)

    it("has no hits without a prefix cache", function()
        local model <close> = scripted { kv = { blocks = 4000, prefix_cache = false } }
        local r = bench.measure_agents(model, { sessions = 2, turns = 3, shared = 256, prompt = 32, output = 4 })
        assert.equal(0, r.hit_rate)
    end)

    it("replays a trace: nearly all hits that are possible with room enough, fewer without", function()
        local rows = traces.scale(assert(traces.read(FOLDER .. "mooncake_conversation.jsonl")), {
            scale = 1 / 32, speed = 0, limit = 2000,
        })
        local function replay(blocks)
            local model <close> = scripted { ctx = 2048, max_seqs = 4, kv = { blocks = blocks } }
            return bench.measure_replay(model, table.move(rows, 1, 60, 1, {}))
        end
        local large, small = replay(4000), replay(140)
        assert.equal(60, large.requests)
        assert.is_true(large.possible_hit_rate > 0.02)
        assert.is_true(large.hit_rate > 0.8 * large.possible_hit_rate, large.hit_rate)
        assert.is_true(large.hit_rate <= large.possible_hit_rate)
        assert.is_true(small.hit_rate < large.hit_rate and small.evicted > 0, small.hit_rate)
    end)

    it("waits for arrivals", function()
        local model <close> = scripted()
        local rows = traces.scale(assert(traces.read(FOLDER .. "azure_conv_2023.csv", 6)), { scale = 0.02, speed = 40 })
        local r = bench.measure_replay(model, rows)
        assert.is_true(rows[6].at > 0.1 and r.seconds >= rows[6].at, r.seconds)
        assert.equal(6, r.requests)
        assert.equal(0, r.possible_hit_rate)
    end)
end)

describe("llmrun bench", function()
    local function run(flags)
        local p <close> = assert(io.popen(("'%s' bench %s 2>&1; echo \"|$?\""):format(core.executable(), flags)))
        local out, status = p:read("a"):match("^(.*)|(%d+)\n$")
        return out, tonumber(status)
    end

    it("--concurrency prints a line each", function()
        local out, status = run "--concurrency 1,3 --prompt 24 --shared 16 --output 3 --repeat 1 --json"
        assert.equal(0, status, out)
        local n = 0
        for line in out:gmatch("[^\n]+") do
            local r = json.decode(line)
            n = n + 1
            assert.equal(n == 1 and 1 or 3, r.concurrency)
            assert.is_true(r.output_tps > 0 and r.ttft_ms.p90 > 0 and r.tpot_ms.median > 0)
        end
        assert.equal(2, n)
    end)

    it("--load agents and --replay print tables", function()
        local out, status = run "--load agents --sessions 2 --turns 3 --shared 64 --prompt 8 --output 2 --repeat 1"
        assert.equal(0, status, out)
        assert.matches("prefix hit rate %d+%.%d+ %%", out)
        assert.matches("TTFT grows by", out)
        out, status = run("--replay " .. FOLDER .. "mooncake_conversation.jsonl --requests 4 --scale 0.004 --speed 0")
        assert.equal(0, status, out)
        assert.matches("an endless cache would have", out)
    end)

    it("names wrong flags", function()
        for flags, pattern in pairs {
            ["--concurrency 1,x"] = "no number of sequences",
            ["--concurrency 1 --load agents"] = "one of",
            ["--load humans"] = "agents expected",
            ["--replay /no/such/file"] = "No such file",
            ["--replay x --scale 0"] = "--scale: above 0 expected, got 0",
            ["--concurrency 1 --prompt 4 --shared 5"] = "--shared is more",
        } do
            local out, status = run(flags)
            assert.is_true(status > 0)
            assert.matches(pattern, out, 1, true)
        end
    end)
end)
