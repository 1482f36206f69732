-- The search for a policy's parameters: what it draws, whom it lets go on, that it finds what is there to be found.
local errors = require "llmrun.errors"
local json = require "llmrun.json"
local shell = dofile "tests/spec/shell_support.lua"
local tune = require "llmrun.tune"

describe("tune", function()
    local folder, base
    setup(function()
        folder = shell.folder()
        -- a policy whose first parameter is the most that run at once: the more, the sooner the first token
        local f <close> = assert(io.open(folder:at "most.lua", "w"))
        f:write [[return {
            params = { most = { 2, min = 1, max = 16, integer = true, log = true }, way = { "up", choices = { "up", "down" } },
                share = { 0.5, min = 0, max = 1 }, note = { "a text" }, weights = { type = "table" } },
            make = function(o)
                assert(o.note == "a text" and o.share >= 0 and o.share <= 1 and (o.way == "up" or o.way == "down"))
                return { schedule = function(_, step)
                    for _, r in ipairs(step.running) do step:run(r, 512) end
                    for i = 1, o.most - #step.running do if step.waiting[i] then step:run(step.waiting[i], 512) end end
                end }
            end }]]
        base = { policy = folder:at "most.lua", trace = "poisson:rate=60,prompt=200,output=40", profile = "h100-8b", jobs = 2,
            requests = 60, candidates = 9, rounds = 2, seeds = 1 }
    end)
    teardown(function() folder:remove() end)

    local function with(changes)
        local o = {}
        for k, v in pairs(base) do o[k] = v end
        for k, v in pairs(changes) do o[k] = v end
        return o
    end

    it("finds what is better, in rounds, beside the defaults", function()
        local told = {}
        local t = tune.run(with { progress = function(done, all, text) told[#told + 1] = ("%d/%d %s"):format(done, all, text) end })
        assert.same({ 20, 9, 60 }, { t.rounds[1].requests, t.rounds[1].tried, t.rounds[2].requests })
        assert.is_true(t.rounds[2].tried == 3 or t.rounds[2].tried == 4) -- the defaults go on though they are beaten
        local names, default = {}, t.candidates[1]
        for i, p in ipairs(t.space) do names[i] = p.name end
        assert.same({ "most", "share", "way" }, names)
        assert.same({ 2, 0.5, "up" }, { default.options.most, default.options.share, default.options.way })
        assert.same({ true, 2, nil }, { default.default, default.round, default.front })
        assert.is_true(#t.front >= 1)
        for _, i in ipairs(t.front) do
            local c = t.candidates[i]
            assert.is_true(c.options.most > 4, c.text)
            assert.is_true(c.less.mean < default.less.mean / 2 and c.more.mean > default.more.mean)
        end
        for _, c in ipairs(t.candidates) do
            assert.equal("integer", math.type(c.options.most))
            assert.is_true(c.options.most >= 1 and c.options.most <= 16 and c.options.share >= 0 and c.options.share <= 1)
            assert.is_nil(c.error)
        end
        assert.matches("^1/%d+ round 1 of 2$", told[1])
        assert.matches("round 2 of 2$", told[#told])

        local text = tune.text(t)
        assert.matches("round 1: 9 candidates on 20 requests\nround 2: %d candidates on 60 requests", text)
        assert.matches("tokens/s +TTFT p99, ms\n", text)
        assert.matches("most.lua:most=%d+,share=[%d.]+,way=%a+ +[%d.]+ +[%d.]+ +front\n", text)
        assert.matches("most=2,share=0.5,way=up +[%d.]+ +[%d.]+ +default\n", text)
        local html = tune.html(t)
        for _, want in ipairs { "<title>.-most=%d+", "1 to 16, by the logarithm", "up, down", "round 2" } do
            assert.matches(want, html)
        end
        -- again, otherwise spread over processes: the same to the byte
        local again = tune.run(with { jobs = 1 })
        assert.equal(text, tune.text(again))
        assert.equal(html, tune.html(again))
        assert.equal(json.encode(t), json.encode(again))
        if not os.getenv "LLMRUN_TEST_SANITIZE" then assert.not_equal(text, tune.text(tune.run(with { seed = 2 }))) end
    end)

    it("leaves what is given, and tries all where that is little", function()
        local t = tune.run(with { policy = "deadline:drop=false", trace = "poisson:rate=60,deadline=0.1..1", rounds = 1, requests = 20,
            more = "deadlines", less = "e2e_p90" })
        local texts = {}
        for i, c in ipairs(t.candidates) do texts[i] = c.text end
        assert.same({ "deadline:displace=true,drop=false", "deadline:displace=false,drop=false" }, texts)
        assert.matches("deadlines met, %% +E2E p90, s\n", tune.text(t))
        t = tune.run(with { policy = "fair:weights.a=3", rounds = 1, candidates = 2, requests = 10 })
        assert.equal("fair:generated=2,weights.a=3", t.candidates[1].text)
    end)

    it("goes on without candidates that fail", function()
        local f <close> = assert(io.open(folder:at "half.lua", "w"))
        f:write [[return { params = { x = { 1, min = 0, max = 2 } }, make = function(o)
            if o.x > 1 then error "too much" end
            return { finish = function() end }
        end }]]
        f:close()
        local t = tune.run(with { policy = folder:at "half.lua", requests = 20 })
        local failed = 0
        for _, c in ipairs(t.candidates) do
            assert.equal(c.options.x > 1, c.error ~= nil)
            if c.error then
                failed = failed + 1
                assert.equal(1, c.round)
            end
        end
        assert.is_true(failed > 0)
        assert.matches(failed .. " candidates failed; the first, .*too much", tune.text(t))
    end)

    it("says what is wrong before it begins", function()
        for pattern, changes in pairs {
            ["no policy 'mlfk'"] = { policy = "mlfk" },
            ["unknown option 'quantom'"] = { policy = "mlfq:quantom=3" },
            ["nothing of the policy 'fcfs' is left"] = { policy = "fcfs" },
            ["candidates: 1 to 100000"] = { candidates = 0 },
            ["rounds: 1 to 10"] = { rounds = 11 },
            ["eta: 1.5 to 100"] = { eta = 1 },
            ["more: one of tokens_per_s, "] = { more = "ttft_p99" },
            ["less: one of ttft_mean, "] = { less = "x" },
            ["rate:"] = { trace = "poisson:rate=0" },
            ["no profile 'x'"] = { profile = "x" },
            ["no more than 600 rows"] = { trace = "tests/data/traces/azure_conv_2023.csv", requests = 200, seeds = 4 },
        } do
            local ok, err = pcall(tune.run, with(changes))
            assert.is_true(not ok and errors.is(err), tostring(err))
            assert.matches(pattern, err.message, 1, true)
        end
        local f <close> = assert(io.open(folder:at "plain.lua", "w"))
        f:write "return function() return { finish = print } end"
        f:close()
        local ok, err = pcall(tune.run, with { policy = folder:at "plain.lua" })
        assert.is_false(ok)
        assert.matches("does not say what can be set", err.message)
    end)

    it("is a command", function()
        local out, err, status = folder:llmrun("tune -p most.lua:way=up,share=0.5 -c 3 --rounds 1 --seeds 1 --requests 20 "
            .. "--trace poisson:rate=60 --profile h100-8b -o t.html")
        assert.same({ "", 0 }, { err, status })
        assert.matches("round 1: 3 candidates on 20 requests", out)
        local f <close> = assert(io.open(folder:at "t.html"))
        assert.matches("Parameters of the policy most.lua", f:read "a")
        out, err, status = folder:llmrun "tune --trace poisson --profile h100-8b"
        assert.same({ "", 2 }, { out, status })
        assert.matches("%-%-policy", err)
        out, err = folder:llmrun "tune -p fcfs --trace poisson --profile h100-8b"
        assert.equal("llmrun tune: nothing of the policy 'fcfs' is left to be searched\n", out .. err)
    end)
end)
