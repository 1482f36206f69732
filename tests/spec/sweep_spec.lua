-- Sweeps: intervals, processes, what a report holds, the command; failures that stay with the run that they happened to.
local core = require "llmrun.core"
local errors = require "llmrun.errors"
local farm = require "llmrun.farm"
local json = require "llmrun.json"
local llm = require "llmrun"
local page = require "llmrun.sweep.page"
local report = require "llmrun.report"
local shell = dofile "tests/spec/shell_support.lua"
local statistics = require "llmrun.statistics"
local sweep = require "llmrun.sweep"

-- Every tag of a page is closed, and nothing of it comes from elsewhere.
local function well_formed(html)
    local open, void = {}, { meta = true, ["!doctype"] = true }
    for close, name, rest in html:gsub("<style>.-</style>", ""):gmatch("<(/?)([%a!][%w]*)([^<>]-)>") do
        if close == "/" then
            assert.equal(table.remove(open), name)
        elseif not void[name] and rest:sub(-1) ~= "/" then
            open[#open + 1] = name
        end
    end
    assert.same({}, open)
    assert.is_nil(html:gsub('xmlns="http://www.w3.org/2000/svg"', ""):find("https?://"))
    assert.is_nil(html:find("<script") or html:find("url(", 1, true) or html:find("%f[%w]nan%f[%W]"))
    return html
end

describe("intervals", function()
    it("are Student's", function()
        assert.same({ 12.706, 2.776, 2.042 }, { statistics.t95(1), statistics.t95(4), statistics.t95(30) })
        assert.near(2.0211, statistics.t95(40), 2e-4) -- tables of the distribution
        assert.near(1.9842, statistics.t95(99), 2e-4)
        local i = statistics.interval { 4, 6, 5, 9 }
        assert.same({ 6, 4, 4, 9 }, { i.mean, i.n, i.low, i.high })
        assert.near(3.182 * 2.160247 / 2, i.half, 1e-3)
        assert.same({ mean = 3, n = 1, low = 3, high = 3 }, statistics.interval { 3 })
        assert.is_nil(statistics.interval {})
        local d = statistics.paired({ 1, nil, 3, 10 }, { 2, 5, 5, nil }, 4)
        assert.same({ 1.5, 2 }, { d.mean, d.n })
    end)

    it("hold the mean in 95 of 100 cases", function()
        local r = require("llmrun.random").new(3)
        local inside = 0
        for _ = 1, 1000 do
            local list = {}
            for k = 1, 5 do list[k] = 7 + r:normal() end
            local i = statistics.interval(list)
            if math.abs(i.mean - 7) <= i.half then inside = inside + 1 end
        end
        assert.near(950, inside, 25)
    end)
end)

describe("farm", function()
    local folder
    setup(function() folder = shell.folder() end)
    teardown(function() folder:remove() end)

    it("brings results in order, and keeps failures to themselves", function()
        local f = assert(io.open(folder:at "work.lua", "w"))
        f:write [[return { double = function(job)
            if job.n == 3 then error { odd = true } end
            if job.n == 4 then io.stderr:write "about to go"; os.exit(9) end
            if job.n == 5 then print "a line of the job's own"; io.stderr:write "a word\n" end
            if job.n == 6 then require("llmrun.errors").raise("work", "not six") end
            return { n = 2 * job.n, text = job.text }
        end }]]
        f:close()
        local told = {}
        -- children look for modules in the folder that they are run in
        local results = (function()
            local exec = require "llmrun.exec"
            local run = exec.exec
            exec.exec = function(command, o)
                o.cwd = folder.path
                return run(command, o)
            end
            local ok, out = pcall(farm.run, { { n = 1, text = "\n\"]]\0x" }, { n = 2 }, { n = 3 }, { n = 4 }, { n = 5 }, { n = 6 } },
                { module = "work", name = "double", jobs = 2, done = function(n) told[#told + 1] = n end })
            exec.exec = run
            assert(ok, out)
            return out
        end)()
        assert.same({ value = { n = 2, text = "\n\"]]\0x" } }, results[1])
        assert.equal(4, results[2].value.n)
        assert.matches("^table: ", results[3].error)
        assert.is_nil(results[3].value)
        assert.matches("^the process ended with status %d+: about to go", results[4].error)
        assert.same({ value = { n = 10 }, notes = "a word" }, results[5])
        assert.matches("work: not six$", results[6].error)
        assert.same({ 1, 2, 3, 4, 5, 6 }, told)
    end)

    it("ends the children when it is cancelled", function()
        local begin = core.now()
        local ok, err, code = llm.timeout(0.3, sweep.run, { policies = { "fcfs", "fair" }, jobs = 2, profile = "h100-8b",
            trace = "poisson:rate=50,requests=100000000" })
        assert.same({ nil, "limit" }, { ok, code }, err)
        assert.is_true(core.now() - begin < 20)
    end)
end)

describe("sweep", function()
    local options = {
        policies = { "fcfs", "fair", "mlfq:quantum=256" }, loads = { 0.5, 2 }, seeds = 2, profile = "h100-8b",
        trace = "agents:rate=60,shape=0.2,requests=60,tenants=2,deadline=1..4", slo = { ttft = 0.3, tpot = 0.05 },
        engine = { max_seqs = 4 }, jobs = 2,
    }
    local s, told
    setup(function()
        told = {}
        options.progress = function(done, all) told[#told + 1] = done / all end
        s = sweep.run(options)
    end)

    it("runs every policy, load and seed on the same traces", function()
        assert.same({ 12, 0, 1 }, { #s.runs, s.failed, told[12] })
        for l = 1, 2 do
            for seed = 1, 2 do
                local a, b = s.at(1, l, seed).value, s.at(2, l, seed).value
                assert.same({ 60, "fcfs", "fair" }, { a.requests, a.policy, b.policy })
                assert.equal(a.output_tokens, b.output_tokens)
                assert.equal(a.prompt_tokens, b.prompt_tokens)
            end
            assert.not_equal(s.at(1, l, 1).value.output_tokens, s.at(1, l, 2).value.output_tokens)
        end
        assert.is_true(s.at(1, 1, 1).value.seconds > s.at(1, 2, 1).value.seconds)
        assert.is_table(s.at(1, 2, 1).value.timeline)
        assert.is_nil(s.at(1, 1, 1).value.timeline)
    end)

    it("sums up over the seeds", function()
        local cell = s.cells[1][2].ttft_p99
        local a, b = s.at(1, 2, 1).value.ttft.p99 * 1e3, s.at(1, 2, 2).value.ttft.p99 * 1e3
        assert.near((a + b) / 2, cell.mean, 1e-9)
        assert.near(12.706 * math.abs(a - b) / 2, cell.half, 1e-6)
        local d = s.differences[2][2].ttft_p99
        local c = s.at(2, 2, 1).value.ttft.p99 * 1e3 - a + s.at(2, 2, 2).value.ttft.p99 * 1e3 - b
        assert.near(c / 2, d.mean, 1e-9)
        assert.equal((s.at(2, 1, 1).value.deadlines.met + s.at(2, 1, 2).value.deadlines.met) * 50, s.cells[2][1].deadlines.mean)
    end)

    it("comes out the same, however many at once", function()
        options.jobs, options.progress = 1, nil
        local again = sweep.run(options)
        assert.equal(sweep.text(s), sweep.text(again))
        assert.equal(page.html(s), page.html(again))
    end)

    it("is told as text and as a page", function()
        local text = sweep.text(s)
        assert.matches("load 0.5\npolicy +TTFT p50, ms", text)
        assert.matches("\nmlfq:quantum=256 +[%d.]+ ± [%d.]+", text)
        assert.matches("95 %% interval of the mean over 2 seeds, by Student's t", text)
        local html = well_formed(page.html(s, { title = "a < b", command = "llmrun sweep 'x & y'" }))
        for _, want in ipairs { "<h1>a &lt; b</h1>", "x &amp; y", "TTFT p99, ms", "KV used, mean, %", "fairness (Jain)",
            "within the SLO, %", "deadlines met, %", 'scope="col"', "prefers%-color%-scheme:dark", 'lang="en"', "Student's t",
            "Time line, load 2, seed 1", "against fcfs", ">t1</th>", "var%(%-%-s3%)" } do
            assert.matches(want:gsub("([()])", "%%%0"):gsub("%%%%", "%%"):gsub(", %%$", ", %%%%"), html)
        end
        local n = select(2, html:gsub("<svg ", ""))
        assert.is_true(n >= 15, n)
        options.loads, options.seeds, options.policies = { 1 }, 1, { "fcfs" }
        local one = sweep.run(options)
        html = well_formed(page.html(one))
        assert.is_nil(html:find("±"))
        assert.matches("no confidence intervals", html)
        assert.matches("one seed: no intervals", sweep.text(one))
    end)

    it("takes the pieces of a file as seeds", function()
        local file = sweep.run { policies = { "fcfs" }, seeds = 2, requests = 20, scale = 0.1, profile = "h100-8b",
            trace = "tests/data/traces/azure_conv_2023.csv" }
        assert.same({ 20, 20, 0 }, { file.runs[1].value.requests, file.runs[2].value.requests, file.failed })
        assert.not_equal(file.runs[1].value.output_tokens, file.runs[2].value.output_tokens)
    end)

    it("says what is wrong before it begins", function()
        local function wrong(changes, pattern)
            local o = { trace = "poisson:requests=5", profile = "h100-8b" }
            for k, v in pairs(changes) do o[k] = v end
            local ok, err = pcall(sweep.run, o)
            assert.is_true(not ok and errors.is(err), tostring(err))
            assert.matches(pattern, err.message, 1, true)
        end
        wrong({ policies = { "fiar", "fcfs" } }, "no policy 'fiar'")
        wrong({ policies = { "mlfq:quantom=2" } }, "did you mean 'quantum'?")
        wrong({ policies = { "fcfs", "fcfs" } }, "'fcfs' is there twice")
        wrong({ policies = {} }, "at least one")
        wrong({ loads = { 1, 0 } }, "1e-06 to 1e+06 expected, got '0'")
        wrong({ loads = { 2, 1 } }, "higher than the one before")
        wrong({ seeds = 0 }, "1 to 10000")
        wrong({ trace = "poisson:rate=0" }, "rate:")
        wrong({ trace = "/no/such.csv" }, "/no/such.csv")
        wrong({ trace = "tests/data/traces/azure_conv_2023.csv", seeds = 2 }, "requests says how long")
        wrong({ trace = "tests/data/traces/azure_conv_2023.csv", seeds = 4, requests = 100 }, "no more than 300 rows")
        wrong({ profile = "h100-8" }, "no profile 'h100-8'")
    end)
end)

describe("report", function()
    it("escapes, marks and saves", function()
        local html = well_formed(report.page { title = "<&>", lead = "\"x\"", sections = { { title = "one",
            report.table { caption = "a&b", heads = { "k", "v" }, rows = { { "<r>", { "5", "best" } } } },
            report.plots { report.plot({ title = "p", series = { { x = { 1, 2 }, y = { 1, 2 }, low = { 0, 2 }, high = { 2, 2 },
                marks = true, titles = { "<t>", "u" } } } }, "a note") }, report.facts { { "n", "v<" } }, report.pre "<x>" } } })
        for _, want in ipairs { "&lt;&amp;&gt;", 'aria%-label="a&amp;b"', '<td class="best">5</td>', "<title>&lt;t&gt;</title>",
            'role="img" aria%-label="p"', "<figcaption>a note", "<dd>v&lt;</dd>", 'href="#s1"' } do
            assert.matches(want, html)
        end
        local ok, err = report.save("/no/such/folder/x.html", html)
        assert.is_nil(ok)
        assert.matches("/no/such/folder", err)
    end)
end)

describe("llmrun sweep", function()
    local folder
    setup(function() folder = shell.folder() end)
    teardown(function() folder:remove() end)

    it("prints, writes a report, and tells of runs that fail", function()
        for name, text in pairs { ["dies.lua"] = "return { schedule = function() os.exit(7) end }",
            ["errs.lua"] = "return { name = 'errs', schedule = function() error 'oh no' end }" } do
            local f <close> = assert(io.open(folder:at(name), "w"))
            f:write(text)
        end
        local out, err, status = folder:llmrun("sweep -p fcfs,dies.lua,errs.lua --seeds 1 --trace poisson:requests=20 "
            .. "--profile h100-8b -o r.html")
        assert.equal("", err)
        assert.equal(1, status)
        assert.matches("fcfs +%d", out)
        assert.matches("dies.lua failed in 1 of 1 runs: the process ended with status %d", out)
        assert.matches("errs.lua said in 1 of 1 runs: .*oh no", out)
        local f <close> = assert(io.open(folder:at "r.html"))
        local html = well_formed(f:read "a")
        assert.matches("<h2 id=\"s1\">Failures", html)
        assert.matches("ended with status %d", html)
        out = folder:llmrun "sweep --json -p fair --trace poisson:requests=20 --profile h100-8b --seeds 2"
        local r = json.decode(out)
        assert.same({ 2, 0, "fair" }, { #r.runs, r.failed, r.setup.policies[1].name })
        assert.is_number(r.cells[1][1].ttft_p99.half)
        for line, want in pairs { [""] = "--trace TRACE", ["--trace x"] = "--profile", ["--loads 1,x --trace x --profile h100-8b"] = "'x'",
            ["--trace nope --profile h100-8b"] = "llmrun sweep: nope: No such file", ["-p f --trace poisson --profile h100-8b"] = "no policy 'f'" } do
            out, err, status = folder:llmrun("sweep " .. line)
            assert.equal("", out)
            assert.is_true(status > 0)
            assert.matches(want, err, 1, true)
        end
    end)
end)
