-- Traces: files of every format, and those that are made: what they are distributed like, that a seed says all of it.
local json = require "llmrun.json"
local random = require "llmrun.random"
local shell = dofile "tests/spec/shell_support.lua"
local traces = require "llmrun.traces"
local workload = require "llmrun.workload"

local N = os.getenv "LLMRUN_TEST_SANITIZE" and 2000 or 8000

local function rows_of(what, opts)
    local list = {}
    for row in assert(workload.rows(what, opts)) do list[#list + 1] = row end
    return list
end

local function moments(values)
    local sum, square = 0, 0
    for _, v in ipairs(values) do sum = sum + v end
    local mean = sum / #values
    for _, v in ipairs(values) do square = square + (v - mean) ^ 2 end
    return mean, math.sqrt(square / #values)
end

-- The times between arrivals: of rows that wait for no other.
local function gaps(rows)
    local list, last = {}, 0
    for _, row in ipairs(rows) do
        if not row.after then
            list[#list + 1], last = row.at - last, row.at
        end
    end
    return list
end

-- Within so many standard errors of what is expected; share: the spread of one value relative to its mean.
local function near(expected, got, share, n)
    local room = 5 * expected * share / math.sqrt(n)
    assert.is_true(math.abs(got - expected) < room, ("%g expected (within %g), got %g"):format(expected, room, got))
end

describe("random numbers", function()
    it("are distributed as they say", function()
        local r = random.new(5)
        local values = {}
        local function draw(fn)
            for i = 1, N do values[i] = fn() end
            return moments(values)
        end
        local mean, sd = draw(function() return r:uniform() end)
        near(0.5, mean, 0.58, N)
        near(12 ^ -0.5, sd, 1, N)
        mean, sd = draw(function() return r:exponential() end)
        near(1, mean, 1, N)
        near(1, sd, 2, N)
        for _, shape in ipairs { 0.2, 1, 4 } do
            mean, sd = draw(function() return r:gamma(shape) end)
            near(1, mean, shape ^ -0.5, N)
            near(shape ^ -0.5, sd, 2 + 1 / shape, N)
        end
        mean = draw(function() return r:lognormal(0.8) end)
        near(1, mean, 0.95, N)
        for _, m in ipairs { 1, 2.5, 8 } do
            mean, sd = draw(function() return r:geometric(m) end)
            near(m, mean, 1, N)
            near(1 + math.sqrt(m * (m - 1)), 1 + sd, 1, N)
        end
        local seen = {}
        for _ = 1, 600 do seen[r:integer(6)] = true end
        assert.same({ true, true, true, true, true, true }, seen)
    end)
end)

describe("made traces", function()
    it("arrive by Poisson, in bursts, evenly", function()
        for what, cv in pairs { ["poisson:rate=4"] = 1, ["burst:rate=4"] = 0.2 ^ -0.5, ["burst:rate=4,shape=0.5"] = 2 ^ 0.5,
            ["poisson:rate=4,shape=16"] = 0.25 } do
            local mean, sd = moments(gaps(rows_of(what .. ",requests=" .. N)))
            near(0.25, mean, cv, N)
            near(cv, sd / mean, 1.5 + cv ^ 2, N)
        end
    end)

    it("pause, and swing over the day, at the same rate in the long run", function()
        local rows = rows_of("burst:rate=5,on=3,off=9,requests=" .. N)
        assert.near(5, N / rows[N].at, 5 * 12 / math.sqrt(rows[N].at)) -- counts of on-off times vary by their lengths
        local quiet = 0
        for _, gap in ipairs(gaps(rows)) do quiet = quiet + math.max(0, gap - 1) end
        assert.near(0.7, quiet / rows[N].at, 0.15) -- most of the time nobody comes
        rows = rows_of("poisson:rate=10,swing=0.8,period=100,requests=" .. N)
        near(10, N / rows[N].at, 2, N)
        local low, high = 0, 0
        for _, row in ipairs(rows) do
            local phase = row.at % 100
            if phase < 10 or phase >= 90 then low = low + 1 elseif phase >= 40 and phase < 60 then high = high + 1 end
        end
        -- the mean of 1 - 0.8 cos over a fifth around its ends
        local part = 0.8 * math.sin(0.2 * math.pi) / (0.2 * math.pi)
        near((1 + part) / (1 - part), high / low, math.sqrt(1 / (1 - part) + 1 / (1 + part)), N / 5)
    end)

    it("have lengths around their means, up to the limit", function()
        local rows = rows_of("poisson:prompt=300,output=50,requests=" .. N)
        local prompts, logs = {}, {}
        for i, row in ipairs(rows) do prompts[i], logs[i] = row.prompt, math.log(row.prompt) end
        near(300, (moments(prompts)), 0.95, N)
        local _, sigma = moments(logs)
        assert.near(0.8, sigma, 0.05)
        for _, row in ipairs(rows_of "poisson:prompt=300,output=90,limit=400,requests=2000") do
            assert.is_true(row.prompt >= 1 and row.output >= 1 and row.prompt + row.output <= 400)
        end
        assert.same({ 300, 50 }, { rows_of("poisson:spread=0,prompt=300,output=50")[7].prompt, 50 })
    end)

    it("converse: every turn holds what was said", function()
        local rows = rows_of { kind = "conversation", rate = 3, turns = 4, think = 7, prompt = 50, output = 80,
            requests = N, limit = 100000 }
        local sessions, thinks, last = 0, {}, nil
        for i, row in ipairs(rows) do
            assert.equal(i, row.number)
            if row.after then
                assert.same({ last.number, last.session, last.at }, { row.after, row.session, row.at })
                assert.is_true(row.prompt > last.prompt + last.output)
                thinks[#thinks + 1] = row.delay
            else
                sessions = sessions + 1
                assert.equal("s" .. sessions, row.session)
            end
            last = row
        end
        near(4, N / sessions, 1, sessions)
        near(7, (moments(thinks)), 0.95, #thinks)
        near(3, N / last.at, 1.5, sessions) -- rate counts requests
    end)

    it("are agents with tools on one prefix for each tenant", function()
        local prefix, tenants = {}, {}
        for _, row in ipairs(rows_of { kind = "agents", tenants = { a = 3, b = 1 }, shared = 200, requests = N // 4 }) do
            tenants[row.tenant] = (tenants[row.tenant] or 0) + (row.after and 0 or 1)
            if row.after then
                assert.is_nil(row.blocks)
                assert.is_true(row.delay >= 0)
            else
                assert.equal((row.prompt + 63) // 64, #row.blocks)
                local head = table.concat(row.blocks, " ", 1, 3)
                prefix[row.tenant] = prefix[row.tenant] or head
                assert.equal(prefix[row.tenant], head)
                for k = 4, #row.blocks do
                    assert.is_nil(prefix[row.blocks[k]])
                    prefix[row.blocks[k]] = true
                end
            end
        end
        assert.not_equal(prefix.a, prefix.b)
        near(0.75, tenants.a / (tenants.a + tenants.b), 0.6, tenants.a + tenants.b)
    end)

    it("fan out: branches begin with what they came from", function()
        local rows = rows_of "fanout:branches=3,shared=128,requests=400,rate=9"
        for i = 1, 400, 4 do
            local root = rows[i]
            assert.same({ 128, 2 }, { root.prompt, #root.blocks })
            for k = i + 1, i + 3 do
                assert.same({ root.number, 0 }, { rows[k].after, rows[k].delay })
                assert.same(root.blocks, { rows[k].blocks[1], rows[k].blocks[2] })
                assert.is_true(rows[k].prompt > 128)
                assert.not_equal(rows[k].blocks[3], rows[k - 1].blocks[3])
            end
        end
    end)

    it("run side by side, in order, each with its tenant, deadlines and priorities", function()
        local rows = rows_of("poisson:rate=4,tenant=chat,deadline=2..5,requests=300 + agents:rate=8,tenants=x:1+y:2,"
            .. "priority=1..3,requests=600")
        assert.equal(900, #rows)
        local seen, last = {}, 0
        for i, row in ipairs(rows) do
            assert.is_true(row.at >= last and row.number == i)
            last = row.at
            local key = row.tenant .. (row.priority or "")
            seen[key] = (seen[key] or 0) + 1
            if row.tenant == "chat" then assert.is_true(row.deadline >= 2 and row.deadline <= 5) end
            if row.after then assert.equal(row.session, rows[row.after].session) end
        end
        assert.equal(300, seen.chat)
        for _, key in ipairs { "x1", "x2", "x3", "y1", "y2", "y3" } do assert.is_true(seen[key] > 20, key) end
    end)

    it("follow from the seed, and from nothing else", function()
        local function text(what, opts)
            local list = {}
            for i, row in ipairs(rows_of(what, opts)) do list[i] = json.encode(row) end
            return table.concat(list, "\n")
        end
        for _, kind in ipairs(workload.names) do
            local what = kind .. ":requests=60,seed=9,tenants=3"
            assert.equal(text(what), text(what))
            assert.not_equal(text(what), text(what, { seed = 10 }))
            assert.equal(text(kind .. ":requests=60,seed=10,tenants=3"), text(what, { seed = 10 }))
        end
    end)

    it("say what is wrong with a text", function()
        for text, pattern in pairs {
            ["poison:rate=4"] = "no kind 'poison' (did you mean 'poisson'?)",
            ["poisson:rate=0"] = "rate: 1e-06 to 1e+06 expected, got 0",
            ["poisson:rate=nan"] = "rate: number expected, got 'nan'",
            ["poisson:requests=0"] = "requests: 1 to 1e+09 expected",
            ["poisson:requests=2.5"] = "requests: integer expected",
            ["agents:stepz=4"] = "agents has no option 'stepz' (did you mean 'steps'?)",
            ["poisson:rate"] = "KEY=VALUE expected, got 'rate'",
            ["poisson:rate=1,rate=2"] = "rate is given twice",
            ["poisson:deadline=5..2"] = "the lower end first",
            ["poisson:tenants=a:0"] = "weights above 0",
            ["poisson:tenants=0"] = "1 to 10000",
            ["burst:off=4"] = "off without on",
            ["fanout:branches=1000,shared=1000000"] = "branches times shared is 1000000000 tokens",
        } do
            local rows, err = traces.open(text)
            assert.is_nil(rows, text)
            assert.matches(pattern, err, 1, true)
        end
        local rows, err = workload.rows { { kind = "agents" }, { kind = 5 } }
        assert.is_nil(rows)
        assert.matches("no kind '5'", err)
    end)
end)

describe("trace files", function()
    local folder
    setup(function() folder = shell.folder() end)
    teardown(function() folder:remove() end)

    local function file(text)
        local path = folder:at "trace"
        local f <close> = assert(io.open(path, "wb"))
        f:write(text)
        return path
    end

    it("are read row by row, as at once", function()
        for _, path in ipairs { "tests/data/traces/azure_conv_2023.csv", "tests/data/traces/mooncake_conversation.jsonl" } do
            local whole, format = traces.read(path)
            local rows, same = traces.open(path)
            assert.equal(format, same)
            for _, row in ipairs(whole) do assert.same(row, rows()) end
            assert.is_nil(rows())
        end
        local rows = assert(traces.open("tests/data/traces/azure_conv_2023.csv", { skip = 10, most = 2, speed = 2 }))
        local whole = traces.read("tests/data/traces/azure_conv_2023.csv", 12)
        assert.same({ 0, whole[11].prompt }, { rows().at, whole[11].prompt })
        assert.near((whole[12].at - whole[11].at) / 2, rows().at, 1e-9)
        assert.is_nil(rows())
    end)

    it("of BurstGPT: columns by name, failed requests left out", function()
        local head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        local rows, format = traces.open(file(head
            .. "5,ChatGPT,472,18,490,Conversation log\r\n45,GPT-4,10,0,10,API log\n45.5,GPT-4,17,3,20,API log\n"))
        assert.equal("burstgpt", format)
        assert.same({ at = 0, prompt = 472, output = 18, tenant = "conversation", number = 2 }, rows())
        assert.same({ at = 40.5, prompt = 17, output = 3, tenant = "api", number = 4 }, rows())
        assert.is_nil(rows())
        rows = assert(traces.open(file("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
            .. "Total tokens,Log Type\n1,77,2.5,GPT-4,17,3,20,Conversation log\n2,,2.5,GPT-4,17,3,20,API log\n")))
        assert.same({ "77", nil }, { rows().session, rows().session })
        local none, err = traces.open(file(head .. "5,ChatGPT,472,18\n"))
        assert.is_nil(none)
        assert.matches(":2: 6 columns expected", err)
    end)

    it("of our own: written and read again, bit by bit", function()
        for _, what in ipairs { "agents:requests=50,tenants=2,deadline=1..9", "fanout:requests=50,priority=2",
            "conversation:requests=50" } do
            local path = folder:at "own.jsonl"
            assert.equal(50, traces.write(path, traces.open(what), { made = what }))
            local rows, format = traces.open(path)
            assert.equal("llmrun", format)
            for row in workload.rows(what) do
                local got = rows()
                if row.after then got.at, row.at = nil, nil end
                assert.same(row, got)
            end
            assert.is_nil(rows())
        end
        local rows = traces.open(file '{"at":3,"prompt":5,"output":2}\n\n{"after":1,"prompt":9,"output":1}\n')
        assert.same({ at = 0, prompt = 5, output = 2, number = 1 }, rows())
        assert.same({ at = 0, prompt = 9, output = 1, number = 3, after = 1 }, rows())
        local ok, err = traces.write("/no/such/folder/x", rows)
        assert.is_nil(ok)
        assert.matches("/no/such/folder", err)
    end)

    it("leave out who waits for a request that is left out", function()
        local text = '{"at":0,"prompt":50,"output":2}\n{"after":1,"prompt":9,"output":1}\n{"after":2,"prompt":9,"output":1}\n'
            .. '{"at":4,"prompt":5,"output":2}\n{"after":4,"prompt":9,"output":1}\n'
        for _, opts in ipairs { { limit = 20 }, { skip = 1 } } do
            local rows, numbers = traces.open(file(text), opts), {}
            for row in rows do numbers[#numbers + 1] = row.number end
            assert.same({ 4, 5 }, numbers)
        end
        local azure = traces.open(file("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,5,0\n"
            .. "2023-11-16 18:15:47.6,0,5\n2023-11-16 18:15:48.6,7,1\n"))
        assert.same({ 7, nil }, { azure().prompt, azure() })
        local rows, err = traces.open(file(text), { limit = 2 })
        assert.is_nil(rows)
        assert.matches("no rows there that are short enough", err)
    end)

    it("with errors are refused, with the line", function()
        local row = '{"at":0,"prompt":5,"output":2'
        for text, pattern in pairs {
            [""] = "no rows there",
            ['{"format":"llmrun-trace-1"}\n'] = "no rows there",
            ['{"format":"something-2"}\n'] = "'something-2' is no trace",
            ["id;when;tokens\n1;2;3\n"] = "begins with 'id;when;tokens'",
            ["\0\1\2garbage"] = "begins with '???garbage'",
            ['{"at":0,"prompt":5}\n'] = ":1: prompt, output",
            [row .. ',"tenant":5}\n'] = ":1: tenant: string expected",
            [row .. ',"after":1}\n'] = ":1: after: the number of an earlier row",
            [row .. ',"deadline":-1}\n'] = ":1: deadline: seconds expected",
            [row .. ',"blocks":[1,2]}\n'] = ":1: blocks: one for each 512",
            [row .. ',"block":0,"blocks":[1,2]}\n'] = ":1: block: at least 1",
            ['{"prompt":5,"output":2}\n'] = ":1: at or after expected",
            [row .. "}\n" .. row .. "}\n{nonsense\n"] = ":3: not a JSON object",
            ['{"at":5,"prompt":5,"output":2}\n{"at":4,"prompt":5,"output":2}\n'] = "row 2 is earlier than the one before",
        } do
            local ok, err = pcall(function()
                local rows, why = traces.open(file(text))
                if not rows then error(why, 0) end
                for _ in rows do end -- luacheck: ignore 542
            end)
            assert.is_false(ok, text)
            assert.matches(pattern, tostring(err), 1, true)
        end
    end)

    it("take no memory, however long they are", function()
        local rows, n = assert(traces.open("agents:rate=100,requests=" .. N)), 0
        collectgarbage()
        local before, most = collectgarbage "count", 0
        for _ in rows do
            n = n + 1
            if n % 1000 == 0 then
                collectgarbage()
                most = math.max(most, collectgarbage "count" - before)
            end
        end
        assert.equal(N, n)
        assert.is_true(most < 200, most)
    end)
end)

describe("llmrun trace", function()
    local folder
    setup(function() folder = shell.folder() end)
    teardown(function() folder:remove() end)

    it("makes traces, says what they are like, refuses what it can't read", function()
        local out, err, status = folder:llmrun "trace --kind agents --rate 3 -n 200 --seed 4 -o a.jsonl"
        assert.same({ "", 0 }, { out, status })
        assert.matches("a.jsonl: 200 requests", err)
        local rows = traces.open(folder:at "a.jsonl")
        for row in workload.rows "agents:requests=200,rate=3,seed=4" do
            local got = rows()
            assert.same({ row.at, row.prompt, row.after }, { got.at, got.prompt, got.after })
        end
        local d = json.decode((folder:llmrun "trace a.jsonl --json"))
        assert.same({ 200, "number" }, { d.requests, type(d.burstiness) })
        assert.is_true(d.arrivals < 60 and d.prompt.p50 <= d.prompt.p90 and d.prompt.p99 <= d.prompt.max)
        assert.matches("200 requests, %d+ of them arrive", (folder:llmrun "trace a.jsonl"))
        assert.matches("tenants: x %d+, y %d+", (folder:llmrun "trace poisson:tenants=x:3+y:1"))
        for line, want in pairs { [""] = "TRACE or --kind", ["errors"] = "errors: no rows there", ["poisson:rat=2"] = "did you mean 'rate'",
            ["nothing"] = "No such file or directory; kinds of traces", ["a.jsonl -o /no/such/x"] = "/no/such/x",
            ["--kind agents x"] = "not both", ["a.jsonl --rate 4"] = "--speed", ["--kind what"] = "one of poisson, burst" } do
            out, err, status = folder:llmrun("trace " .. line)
            assert.equal("", out)
            assert.is_true(status > 0)
            assert.matches(want, err, 1, true)
        end
    end)
end)
