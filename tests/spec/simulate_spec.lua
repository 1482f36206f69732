-- The simulator: the engine's decisions on a virtual clock, figures that can be worked out by hand, and determinism.
local json = require "llmrun.json"
local profile = require "llmrun.profile"
local simulate = require "llmrun.simulate"

--- A profile whose steps take a second a row and nothing else.
local function plain(more)
    local p = {
        format = "llmrun-profile-1", name = "plain", model = { context = 1000 },
        step = { kind = "table", rows = { 1, 100 }, seconds = { 1, 100 } },
        kv = { bytes_per_token = 100, capacity_tokens = 1600 },
    }
    for k, v in pairs(more or {}) do p[k] = v end
    return p
end

--- Numbers that look random and are always the same.
local function numbers()
    local x = 7
    return function(low, high)
        x = (x * 1103515245 + 12345) % 2147483648
        return low + x // 65536 % (high - low + 1)
    end
end

local function mixed(n, gap)
    local random, rows, at = numbers(), {}, 0
    for i = 1, n do
        at = at + random(0, gap)
        rows[i] = { at = at, prompt = random(1, 60), output = random(1, 40), tenant = random(0, 2) == 0 and "a" or "b" }
    end
    return rows
end

local function bytes_of(r)
    r.wall = nil
    return (assert(json.encode(r)))
end

describe("simulate", function()
    it("gives times that follow from the profile", function()
        local r = simulate.run { trace = { { at = 5, prompt = 10, output = 4 } }, profile = plain(), rows = true }
        local one = r.records[1]
        assert.same({ 10, 1, 13 }, { one.ttft, one.tpot, one.e2e })
        assert.equal(18, r.seconds)
        assert.equal(13, r.replicas[1].busy)
        assert.equal(4, r.steps)
        assert.equal(4, r.output_tokens)
    end)

    it("counts contexts, sequences, tokens and steps", function()
        local p = plain()
        p.step.step, p.step.sequence, p.step.token = 1000, 100, 10
        p.step.prefill_pair, p.step.decode_context = 0.5, 0.25
        local r = simulate.run { trace = { { at = 0, prompt = 4, output = 2 } }, profile = p, rows = true }
        local first = 4 + 1000 + 100 + 10 + 0.5 * 10
        assert.equal(first, r.records[1].ttft)
        assert.equal(1 + 1000 + 100 + 10 + 0.25 * 5, r.records[1].tpot)
    end)

    it("is the same whether steps are left out or not, for every policy", function()
        for _, policy in ipairs { "fcfs", "priority", "shortest_first", "longest_prefix", "deadline", "fair", "mlfq" } do
            local text = {}
            for i, steady in ipairs { true, false } do
                text[i] = bytes_of(simulate.run {
                    trace = mixed(60, 60), profile = plain { kv = { bytes_per_token = 1, capacity_tokens = 320 } },
                    policy = policy, steady = steady, rows = true, engine = { max_seqs = 5, max_batch_tokens = 32 },
                })
            end
            assert.is_true(text[1] == text[2], policy)
        end
    end)

    it("gives the same bytes for the same input", function()
        local function once()
            return bytes_of(simulate.run { trace = mixed(100, 20), profile = "h100-8b", replicas = 3, rows = true })
        end
        assert.is_true(once() == once())
    end)

    it("reuses the prefixes of sessions and blocks", function()
        local rows = {
            { at = 0, prompt = 64, output = 16, session = "s" },
            { after = 1, delay = 3, prompt = 100, output = 4, session = "s" },
            { at = 400, prompt = 96, output = 1, blocks = { 7, 8, 9 }, block = 32 },
            { at = 600, prompt = 96, output = 1, blocks = { 7, 8, 1 }, block = 32 },
        }
        local r = simulate.run { trace = rows, profile = plain(), rows = true }
        assert.same({ 0, 64, 0, 64 },
            { r.records[1].cached, r.records[2].cached, r.records[3].cached, r.records[4].cached })
        assert.equal(64 + 15 + 3, r.records[2].at)
    end)

    it("sends requests where the router says", function()
        local rows = {}
        for i = 1, 8 do rows[i] = { at = 0, prompt = 8, output = 2, session = i % 2 == 0 and "x" or "y" } end
        local function of(router)
            local list = {}
            for i, x in ipairs(simulate.run { trace = rows, profile = plain(), replicas = 4, router = router }.replicas) do
                list[i] = x.requests
            end
            return list
        end
        assert.same({ 2, 2, 2, 2 }, of "round_robin")
        assert.same({ 2, 2, 2, 2 }, of "least_loaded")
        assert.same({ 0, 0, 8, 0 }, of(function() return 3 end))
        assert.same({ 0, 8, 0, 0 }, of { route = function(_, _, replicas) return replicas[2].kv_total > 0 and 2 or 1 end })
        table.sort(of "session")
        assert.same({ 4, 4 }, (function()
            local list = {}
            for _, n in ipairs(of "session") do
                if n > 0 then list[#list + 1] = n end
            end
            return list
        end)())
        assert.has_error(function() of(function() return 5 end) end)
    end)

    it("says what is wrong with a trace, a profile or an option", function()
        local function fails(pattern, o)
            o.profile = o.profile or plain()
            local ok, err = pcall(simulate.run, o)
            assert.is_false(ok)
            assert.matches(pattern, tostring(err))
        end
        local good = { { at = 0, prompt = 1, output = 1 } }
        fails("row 2 of the trace comes at 1 s, behind one at 2 s", {
            trace = { { at = 2, prompt = 1, output = 1 }, { at = 1, prompt = 1, output = 1 } } })
        fails("row 1 of the trace: prompt is 0", { trace = { { at = 0, prompt = 0, output = 1 } } })
        fails("row 1 of the trace: at is %-1", { trace = { { at = -1, prompt = 1, output = 1 } } })
        fails("row 1 of the trace: 990 prompt tokens and 20 new ones do not fit into the 1000", {
            trace = { { at = 0, prompt = 990, output = 20 } } })
        fails("come after row 9, which is not there", { trace = { good[1], { after = 9, prompt = 1, output = 1 } } })
        fails("no policy 'fcfss' %(did you mean 'fcfs'", { trace = good, policy = "fcfss" })
        fails("no router 'x'", { trace = good, router = "x" })
        fails("no profile 'h100'", { trace = good, profile = "h100" })
        fails("replicas is 0", { trace = good, replicas = 0 })
        fails("kv.bytes_per_token is missing", { trace = good, profile = plain { kv = { capacity_tokens = 5 } } })
        fails("step.seconds.2 is %-1", { trace = good,
            profile = plain { step = { kind = "table", rows = { 1, 2 }, seconds = { 1, -1 } } } })
        fails("tp 2", { trace = good, tp = 2, profile = plain { machine = { tp = 1 } } })
        local r = simulate.run { trace = { { at = 0, prompt = 990, output = 20 } }, profile = plain(), oversize = "drop" }
        assert.equal(1, r.failed)
    end)

    it("has profiles whose times shrink with tensor parallelism", function()
        for _, name in ipairs(profile.names) do
            local p = assert(profile.load(name))
            local a, room = profile.cost(p, { tp = 4, block_size = 16 })
            local b, more = profile.cost(p, { tp = 8, block_size = 16 })
            assert.is_true(a.seconds[1] > b.seconds[1] and more > room)
        end
        local small = setmetatable({ kv = { bytes_per_token = 1e5, memory = 40e9, reserve = 4e9 } },
            { __index = assert(profile.load "h100-70b") })
        assert.has_error(function() profile.cost(small, { tp = 1, block_size = 16 }) end,
            "1 GPU of 40 GB don't hold 73 GB of weights and 4 GB of reserve each; more tp or pp is needed")
    end)
end)

describe("llmrun simulate", function()
    local folder
    setup(function() folder = require("tests.spec.shell_support").folder() end)
    teardown(function() folder:remove() end)

    it("prints the same JSON in every process, and a line for each request", function()
        local line = "simulate --trace agents:rate=9,tenants=2,requests=60 --profile h200-8b --replicas 2 --policy fair "
            .. "--slo-ttft 1 --rows rows.jsonl --json"
        local one, err, status = folder:llmrun(line)
        assert.same({ "", 0 }, { err, status })
        assert.is_true(one == folder:llmrun(line))
        local r = json.decode(one)
        assert.same({ 60, 60, "fair" }, { r.requests, r.finished, r.policy })
        local n = 0
        for text in io.lines(folder:at "rows.jsonl") do
            n = n + 1
            assert.is_number(json.decode(text).ttft)
        end
        assert.equal(60, n)
    end)

    it("says what is wrong and fails", function()
        for line, want in pairs {
            ["simulate --profile h100-8b"] = "%-%-trace TRACE is needed",
            ["simulate --trace poisson:rate=5,requests=5"] = "%-%-profile NAME|FILE is needed",
            ["simulate --trace poisson:rate=5,requests=5 --profile h100-70b --tp 3"] = "tp = 3 does not divide",
            ["simulate --trace poisson:rate=5,requests=5 --profile h100-8b --tp 0"] = "numbers of 1 or more",
            ["simulate --trace poisson:rate=5,requests=5 --profile h100-8b --rows /dev/full"] = "/dev/full: No space left",
            ["simulate --trace poisson:rate=5,requests=5 --profile h100-8b --kv-tokens -5"] = "engine.kv_tokens is %-5",
            ["profile -m smollm2"] = "%-o FILE is needed",
        } do
            local _, err, status = folder:llmrun(line)
            assert.is_true(status > 0)
            assert.matches(want, err)
            assert.is_nil(err:find("traceback"))
        end
    end)
end)

describe("profile", function()
    local fit = require "llmrun.profile.fit"

    it("finds the costs that made the times", function()
        local truth = {
            rows = { 1, 8, 64, 512 }, seconds = { 0.004, 0.006, 0.03, 0.25 }, sequence = 2e-5, token = 3e-4,
            decode_context = 1e-6, prefill_pair = 2e-7,
        }
        local random, samples = numbers(), {}
        for i = 1, 200 do
            local decodes, prompt = random(0, 40), i % 3 == 0 and 0 or random(2, 400)
            local s = {
                rows = math.max(1, decodes + prompt), seqs = math.max(1, decodes) + (prompt > 0 and 1 or 0),
                outs = math.max(1, decodes) + random(0, 1), context = decodes * random(10, 900),
                pairs = prompt * random(1, 500),
            }
            s.seconds = fit.seconds(truth, s)
            samples[i] = s
        end
        local step = assert(fit.fit(samples, truth.rows))
        assert.is_true(fit.error(step, samples).mean_abs < 1e-3)
        assert.near(truth.token, step.token, 2e-5)
        assert.near(truth.decode_context, step.decode_context, 1e-7)
        assert.near(truth.prefill_pair, step.prefill_pair, 1e-8)
    end)

    it("measures a model, and the result is one that simulate takes", function()
        local llm = require "llmrun"
        local model <close> = llm.scripted { next = function() return 65 end, ctx = 256, max_seqs = 4 }
        local p, samples = require("llmrun.profile.make").profile(model, { ["repeat"] = 1, name = "scripted" })
        assert.is_true(#samples > 20 and p.error.n > 5)
        p = assert(profile.load(assert(json.decode(assert(json.encode(p))))))
        local r = simulate.run { trace = mixed(5, 1), profile = p }
        assert.equal(5, r.finished)
    end)
end)
