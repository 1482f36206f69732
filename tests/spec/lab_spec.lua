-- The policy lab's commands against what people do to them: numbers out of range, files that are none, Ctrl-C; and that
-- the same input gives the same bytes in every process.
local core = require "llmrun.core"
local files = require "llmrun.files"
local json = require "llmrun.json"
local shell = dofile "tests/spec/shell_support.lua"

local folder
setup(function() folder = shell.folder() end)
teardown(function() folder:remove() end)

local function read(name) return assert(folder:get(name)) end

local function write(name, text) folder:put(name, text) end

local RUN = " --trace poisson:rate=5,requests=5 --profile h100-8b "

describe("files", function()
    it("are there whole or not at all", function()
        local path = folder:at "whole"
        do
            local f <close> = assert(files.create(path))
            assert.is_true(f:write("one"))
            assert.is_true(f:done())
        end
        assert.equal("one", read "whole")
        pcall(function()
            local f <close> = assert(files.create(path))
            f:write("two")
            error("in the middle")
        end)
        assert.equal("one", read "whole")
        assert.error_matches(function() -- whoever calls it wrongly gets no file
            local f <close> = assert(files.create(path))
            f:write({})
        end, "string expected")
        assert.equal("one", read "whole")
        do
            local f <close> = assert(files.create("/dev/null")) -- no plain file: stays what it is
            assert.is_true(f:write("x"))
            assert.is_true(f:done())
        end
        assert.equal("other", (core.stat "/dev/null"))
        assert.same({ nil, "/no/such/x: No such file or directory" }, { files.create "/no/such/x" })
        assert.matches("is a folder", select(2, files.create(folder.path)))
    end)

    it("leave nothing when the process is killed", function()
        local inside = folder:at "killed"
        os.execute(("mkdir '%s'"):format(inside))
        for _, signal in ipairs { "KILL", "TERM" } do
            folder:put("half.lua", ([[
                local f <close> = assert(require("llmrun.files").create "%s/x")
                assert(f:write(("half "):rep(100000)))
                io.popen("kill -%s $PPID"):close()
                require("llmrun").sleep(20)]]):format(inside, signal))
            folder:llmrun(folder:at "half.lua")
            local p <close> = assert(io.popen(("ls -A '%s'"):format(inside)))
            -- where a file can't be without a name it is left, and tells whose it was
            assert.equal("", (p:read("a"):gsub("x%.tmp%-%d+%-%d+\n", "")))
        end
    end)
end)

describe("the lab's commands", function()
    it("refuse numbers that make no sense", function()
        for line, want in pairs {
            ["simulate" .. RUN .. "--speed 1e-300"] = "--speed: 1e-06 to 1e+06 expected, got 1e-300",
            ["simulate" .. RUN .. "--speed 1e999"] = "--speed: number expected, got '1e999'",
            ["simulate" .. RUN .. "--scale 0"] = "--scale: 1e-06 to 1e+06 expected, got 0",
            ["simulate" .. RUN .. "--sample 1e-9"] = "--sample: 0.001 to 1e+09 expected",
            ["simulate" .. RUN .. "--skip -1"] = "--skip: 0 to ",
            ["simulate" .. RUN .. "--requests 0"] = "--requests: 1 to ",
            ["simulate" .. RUN .. "--limit 0"] = "--limit: 1 to ",
            ["simulate" .. RUN .. "--slo-ttft -1"] = "--slo-ttft: 1e-09 to 1e+09 expected, got -1",
            ["simulate" .. RUN .. "--slo-tpot 0"] = "--slo-tpot: 1e-09 to 1e+09 expected, got 0",
            ["simulate --trace poisson:rate=0.001,requests=9 --profile h100-8b --sample 0.001"] = "more than a million",
            ["simulate" .. RUN .. "--replicas 100000"] = "of memory, and there are",
            ["sweep" .. RUN .. "--loads 1e300"] = "loads: numbers from 1e-06 to 1e+06 expected",
            ["sweep" .. RUN .. "--slo-ttft -1"] = "--slo-ttft: ",
            ["sweep" .. RUN .. "--skip -1"] = "--skip: ",
            ["tune --policy mlfq" .. RUN .. "--slo-tpot -1"] = "--slo-tpot: ",
            ["tune --policy mlfq" .. RUN .. "--load 1e300"] = "load: 1e-06 to 1e+06 expected",
            ["trace poisson --speed 1e-300"] = "--speed: ",
            ["trace poisson --limit -1"] = "--limit: ",
            ["bench --replay x.csv --skip -1"] = "--skip: ",
        } do
            local _, err, status = folder:llmrun(line)
            assert.is_true(status == 1 or status == 2, line .. ": status " .. status)
            assert.is_true(err:find(want, 1, true) ~= nil, line .. " said " .. err)
            assert.is_nil(err:find("traceback"))
        end
    end)

    it("are as strict when a program calls them", function()
        local simulate = require "llmrun.simulate"
        local rows = { { at = 0, prompt = 1, output = 1 } }
        for _, case in ipairs {
            { { slo = { ttft = -1 } }, "slo.ttft is -1" }, { { slo = { tpot = 0 / 0 } }, "slo.tpot is " },
            { { sample = 1e-9 }, "sample is 1e-09" }, { { trace = { { at = 1e300, prompt = 1, output = 1 } } }, "at is 1e+300" },
        } do
            local o = { trace = rows, profile = "h100-8b" }
            for k, v in pairs(case[1]) do o[k] = v end
            local ok, err = pcall(simulate.run, o)
            assert.is_true(not ok and tostring(err):find(case[2], 1, true) ~= nil, tostring(err))
        end
        local open = require("llmrun.traces").open
        for name, v in pairs { speed = 1e-300, scale = 1e300, skip = -1, most = 0, limit = 0 } do
            assert.is_nil((open("poisson:requests=5", { [name] = v })), name)
        end
        local ok, err = pcall(require("llmrun.sweep").run, { trace = "poisson:requests=5", profile = "h100-8b",
            policies = { "fcfs" }, slo = { ttft = -1 } })
        assert.is_true(not ok and tostring(err):find("slo.ttft is -1", 1, true) ~= nil)
    end)

    it("say what a file is that is no profile, and where nothing can be written, before they begin", function()
        write("null.json", "null")
        write("list.json", "[]")
        write("rows.json", '{"prompt": 3}')
        for line, want in pairs {
            ["simulate --trace poisson:requests=5 --profile ./null.json"] = "./null.json: an object expected, got null",
            ["simulate --trace poisson:requests=5 --profile ./list.json"] = "./list.json: it is no profile",
            ["sweep --trace poisson:requests=5 --profile ./rows.json"] = "./rows.json: it is no profile",
            ["simulate" .. RUN .. "--rows /no/such/x"] = "/no/such/x: No such file or directory",
            ["sweep" .. RUN .. "-o /no/such/x"] = "/no/such/x: No such file or directory",
            ["tune --policy mlfq" .. RUN .. "-o /no/such/x"] = "/no/such/x: No such file or directory",
            ["trace poisson -o /no/such/x"] = "/no/such/x: No such file or directory",
            ["profile -m no-such-model -o /no/such/x"] = "/no/such/x: No such file or directory",
            ["--record /no/such/x null.lua"] = "llmrun: --record: /no/such/x: No such file or directory",
        } do
            write("null.lua", "error 'it ran'")
            local _, err, status = folder:llmrun(line)
            assert.equal(1, status)
            assert.is_true(err:find(want, 1, true) ~= nil, line .. " said " .. err)
            assert.is_nil(err:find("traceback"))
        end
    end)

    it("count one thing as one", function()
        local out = folder:llmrun("simulate --trace poisson:requests=1 --profile h100-8b")
        assert.matches("^1 request, 1 done, 0 failed; 1 replica of", out)
        assert.matches("^2 requests, 2 done, 0 failed; 2 replicas of",
            (folder:llmrun("simulate --trace poisson:requests=2 --profile h100-8b --replicas 2")))
        assert.matches("^1 request, 1 of them arrives by itself", (folder:llmrun("trace poisson:requests=1")))
    end)

    it("end after Ctrl-C with one line, and leave no half of a file", function()
        local long = " --trace poisson:rate=50,requests=300000 --profile h100-8b "
        for line, name in pairs {
            ["simulate" .. long .. "--rows rows"] = "rows", ["trace poisson:requests=90000000 -o trace"] = "trace",
            ["sweep" .. long .. "-o sweep"] = "sweep",
            ["tune --policy mlfq" .. long .. "--requests 300000 -o tune"] = "tune",
        } do
            -- as soon as its file is there, it has begun; two signals at once (a process and its group) are one
            local p <close> = assert(io.popen(([[cd '%s'; '%s' %s 2>&1 & for i in $(seq 3000); do
                ! ls -l /proc/$!/fd | grep -qF -- '-> %s/' || break; sleep 0.01; done; kill -INT $! %s; wait $!; echo "|$?"]])
                :format(folder.path, core.executable(), line, folder.path, name == "trace" and "$!" or "")))
            assert.equal("llmrun: interrupted\n|130\n", p:read("a"))
            assert.is_nil((core.stat(folder:at(name))))
        end
    end)

    it("don't call a recording equal that holds nothing", function()
        write("nothing.lua", 'require("llmrun").scripted { next = function() return 65 end }:close()')
        local _, err, status = folder:llmrun("--record nothing.rec nothing.lua")
        assert.same({ "", 0 }, { err, status })
        for _, flags in ipairs { "", " --request all" } do
            local out, why, code = folder:llmrun("replay nothing.rec" .. flags)
            assert.same({ "", 1 }, { out, code })
            assert.matches("nothing.rec: it has no requests", why)
        end
    end)

    it("write the same bytes in every process, whatever its locale, seeds of tables and number of jobs", function()
        local made = "agents:rate=40,shape=0.3,tenants=3,deadline=1..9,requests=60"
        local lines = {
            trace = "trace " .. made .. " -o FILE",
            rows = "simulate --trace " .. made .. " --profile h100-8b --policy fair --replicas 2 --rows FILE --json",
            sweep = "sweep --policies fcfs,mlfq:quantum=64,fair --loads 1,2 --seeds 2 --trace " .. made
                .. " --profile h200-8b --slo-ttft 1 -j JOBS -o FILE --json",
            tune = "tune --policy mlfq --candidates 4 --rounds 2 --requests 40 --trace " .. made
                .. " --profile h100-8b -j JOBS -o FILE --json",
        }
        for name, line in pairs(lines) do
            local first
            for k, locale in ipairs { "C", "de_DE.UTF-8", "tr_TR.UTF-8" } do
                local text = line:gsub("FILE", name):gsub("JOBS", tostring(k))
                local p <close> = assert(io.popen(("cd '%s'; LC_ALL=%s OMP_NUM_THREADS=%d '%s' %s 2>errors; echo \"|$?\"")
                    :format(folder.path, locale, k, core.executable(), text)))
                local out = p:read("a")
                assert.equal("|0", out:match("(|%d+)\n$"))
                local all = out .. read(name)
                first = first or all
                assert.is_true(all == first, name .. " differs")
            end
            assert.is_true(#first > 500)
        end
        local html = read "sweep"
        assert.matches("<svg", html)
        assert.is_table((json.decode((read "rows"):match("^[^\n]+"))))
    end)
end)

describe("profile", function()
    local fit = require "llmrun.profile.fit"
    local others = require "llmrun.profile.others"

    it("finds how weights get cold", function()
        local truth = {
            kind = "table", rows = { 1, 8, 64 }, seconds = { 0.002, 0.006, 0.03 }, sequence = 0, token = 1e-4,
            decode_context = 1e-6, prefill_pair = 2e-7, cold_narrow = 4e-3, cold_wide = 2e-3, narrow_rows = 8,
        }
        local r, run, at = require("llmrun.random").new(5), {}, 0
        for i = 1, 400 do
            local wide = i % 23 == 0
            local n = wide and r:integer(50) + 10 or r:integer(8)
            run[i] = { rows = n, seqs = wide and 1 or n, outs = wide and i // 23 % 2 or n, context = wide and 0 or n * r:integer(200),
                pairs = wide and n * n // 2 or 0, pause = i % 57 == 0 and 0.2 or 0 }
        end
        -- what each takes follows from those before
        for i, s in ipairs(run) do
            at = at + s.pause
            s.at, s.seconds = at, 0
            fit.chill(run[i - 1] and { table.unpack(run, 1, i) } or { s }, 0.02, 0.7)
            s.seconds = fit.seconds(truth, s)
            at = at + s.seconds
        end
        local points = { 1, 8, 64 }
        local step = assert(fit.fit_run(run, points, function() return true end))
        assert.same({ 0.02, 0.7 }, { step.cool_seconds, step.cold_keep })
        assert.near(4e-3, step.cold_narrow, 1e-4)
        assert.is_true(fit.error(step, run).mean_abs < 5e-3)
        -- and the simulator takes as long as the model says
        local p = {
            format = "llmrun-profile-1", model = { context = 1000 }, step = step,
            kv = { bytes_per_token = 100, capacity_tokens = 1600 },
        }
        local result = require("llmrun.simulate").run { trace = { { at = 0, prompt = 20, output = 3 } }, profile = p, rows = true }
        local steps = { { rows = 20, seqs = 1, outs = 1, context = 0, pairs = 210 },
            { rows = 1, seqs = 1, outs = 1, context = 21, pairs = 0 }, { rows = 1, seqs = 1, outs = 1, context = 22, pairs = 0 } }
        at = 0
        for i, s in ipairs(steps) do
            s.at, s.seconds = at, 0
            fit.chill({ table.unpack(steps, 1, i) }, step.cool_seconds, step.cold_keep)
            s.seconds = fit.seconds(step, s)
            at = at + s.seconds
        end
        assert.near(at, result.records[1].e2e, 1e-9)
    end)

    it("tells how much of the machine others took", function()
        local w = others.watch()
        w.at, w.spent = { 0, 1, 2, 3 }, { 5, 5, 6.5, 6.5 }
        assert.equal(0, w:share(0.2, 0.8))
        assert.equal(1.5, w:share(1.1, 1.9))
        assert.equal(0.5, w:share(0, 3))
        assert.equal(0, others.watch():share(0, 1))
        local real = others.watch()
        real:look()
        real:look() -- too soon: left out
        assert.is_true(#real.at <= 1)
    end)
end)
