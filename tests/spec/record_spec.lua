-- Recordings and their replay: a crowd with everything in it, damaged and foreign files, killed programs, the command.
local core = require "llmrun.core"
local errors = require "llmrun.errors"
local file = require "llmrun.recording"
local json = require "llmrun.json"
local llm = require "llmrun"
local record = require "llmrun.record"
local replay = require "llmrun.replay"

local hf = dofile "tests/spec/hf_support.lua"
local S = dofile "tests/spec/serve_support.lua"
local shell = dofile "tests/spec/shell_support.lua"

local folder = shell.folder()
teardown(function()
    folder:remove()
    hf.clean()
end)

-- A few letters, each as likely as the text so far makes it, so that draws depend on seed and every token before.
local function letters(tokens)
    local h = #tokens
    for i = math.max(1, #tokens - 40), #tokens do h = (h * 31 + tokens[i]) % 1000003 end
    local row = { default = -30 }
    for i = 0, 7 do row[97 + i] = ((h * (i + 3)) % 97) / 40 end
    row[98] = row[98] + (tokens[#tokens] == 97 and 3 or 0) -- something for n-grams to find
    return row
end

local function model_of(opts)
    local o = { next = letters, ctx = 512, max_seqs = 8, max_batch_tokens = 48, kv = { blocks = 26, block_size = 8 } }
    for k, v in pairs(opts or {}) do o[k] = v end
    return llm.scripted(o)
end

local function replayed(rec, opts)
    local o = replay.load_options(rec)
    o.next, o.compute = letters, nil
    local m <close> = model_of(o)
    local r = replay.new(rec, m, opts)
    r:run()
    for _, d in ipairs(r.differences) do r:explain(d) end
    m.engine:check()
    return r, replay.report(r)
end

local function all_alone(rec)
    local o = replay.load_options(rec)
    o.next, o.compute = letters, nil
    local m <close> = model_of(o)
    for _, id in ipairs(rec.order) do
        local r = replay.alone(rec, m, id)
        assert.same({}, r.differences)
    end
end

--- Preemption, shared prefixes, forks, drafts, constraints, samplers in Lua, tools with random results.
local function crowd(m)
    local rules = "the rules that all share, a few blocks of them: "
    local function dice() return ("%d pips"):format(math.random(1, 1 << 40)) end
    local function plain(i)
        local s <close> = m:session()
        s:append(rules .. "question " .. i)
        s:gen { max_tokens = 30, temperature = 0.9, seed = i }
        s:append(" tool says " .. dice() .. " ")
        s:gen { max_tokens = 16, top_p = 0.9, speculate = { method = "ngram", k = 4, fixed = true } }
        local f <close> = s:fork()
        f:append "!"
        f:gen { max_tokens = 8, stop = { "ab", "cd" } }
        s:rewind(40)
        s:gen { max_tokens = 8, temperature = 0, logprobs = 2 }
    end
    local tasks = {}
    for i = 1, 4 do tasks[i] = function() plain(i) end end
    tasks[5] = function()
        local s <close> = m:session()
        s:append(rules)
        s:gen { regex = "(ab|cd)+e[a-h]{12}", max_tokens = 40, speculate = { method = "ngram", k = 3, fixed = true } }
    end
    tasks[6] = function()
        local s <close> = m:session { salt = "secret-salt" }
        s:append(rules)
        s:gen { max_tokens = 40, lua = function(prefix)
            if #prefix > 14 then return nil end
            return { regex = ("[a-h]{%d}"):format(math.random(3, 6)) }
        end }
    end
    tasks[7] = function()
        local s <close> = m:session()
        s:append "a sampler in Lua"
        s:gen { max_tokens = 10, sampler = function() return 97 + math.random(0, 7) end }
        s:gen { max_tokens = 10, sampler = llm.sampler { { "top_k", 4 }, { "penalties", { repetition = 1.3 } },
            { "logit_bias", { [99] = 2, [100] = -math.huge } }, { "temperature", 0.8 } } }
    end
    tasks[8] = function()
        local s <close> = m:session()
        s:append "left early"
        for _ in s:stream { max_tokens = 60 } do
            if s.len > 22 then break end
        end
        s:append "scored"
        s:score()
        s:logits()
    end
    llm.all(tasks)
end

local recorded -- path of the crowd's recording

describe("a recording", function()
    it("of a crowd gives the same tokens again, with the same steps, and alone", function()
        recorded = folder:at "crowd.rec"
        do
            local m <close> = model_of()
            assert(record.begin(m, recorded))
            assert.is_nil((record.begin(m, recorded)))
            crowd(m)
            local metrics = m:metrics()
            assert.is_true(metrics.preempt_recompute + metrics.preempt_swap > 0, "nobody was preempted")
            assert.is_true(metrics.prefix_hits > 0 and metrics.speculation.accepted > 0)
        end
        local rec = assert(file.read(recorded))
        assert.is_false(rec.cut)
        local r, text = replayed(rec)
        assert.same({}, r.differences)
        assert.is_true(r.compared >= 18 and r.tokens > 200, text)
        assert.equal(1, r.given)
        assert.equal(r.steps, r.equal_steps, text)
        assert.matches("^%d+ tokens of %d+ requests equal", text)
        all_alone(rec)
    end)

    it("says the same under any policy", function()
        local r = replayed(assert(file.read(recorded)), { policy = "shortest_first" })
        assert.same({}, r.differences)
    end)

    it("is judged by a policy in the shadow", function()
        local r, text = replayed(assert(file.read(recorded)), { shadow = "shortest_first" })
        assert.same({}, r.differences)
        assert.equal(r.steps, r.equal_steps)
        local sum = r.shadow:summary()
        assert.equal(r.steps, sum.steps)
        assert.equal(0, sum.failures, sum.last_error)
        assert.equal(#r.rec.order, sum.n_requests)
        assert.is_true(sum.differing > 0 and sum.differing < sum.steps, text)
        assert.matches("shortest_first in the shadow: %d+ of %d+ steps differ", text)
    end)

    it("with a token altered tells which, and how close it was", function()
        local lines, done = {}, nil
        for line in io.lines(recorded) do
            if not done and line:find '"step":12,' then
                line, done = line:gsub('"took":"(%d+):(%d+)', function(id, token)
                    return ('"took":"%s:%d'):format(id, token == "97" and 98 or 97)
                end)
            end
            lines[#lines + 1] = line
        end
        assert.equal(1, done)
        local path = folder:at "altered.rec"
        hf.write(path, table.concat(lines, "\n") .. "\n")
        local rec = assert(file.read(path))
        local r, text = replayed(rec)
        assert.equal(1, #r.differences)
        local d = r.differences[1]
        assert.equal(12, d.step)
        assert.is_true(d.recorded ~= d.drawn and #d.best == 2)
        assert.matches("differ; the first: request %d+ %(line %d+ of the recording%), token %d+, step 12", text)
        assert.matches("recorded %d+ \"[^\n]*drawn %d+ \"", text)
        assert.matches("logits: recorded [%d.-]+, drawn [%d.-]+; the best two are .* apart", text)
    end)

    it("is the owner's alone, and has no keys in it", function()
        local p <close> = assert(io.popen(("stat -c %%a '%s'"):format(recorded)))
        assert.equal("600\n", p:read "a")
        assert.is_nil(hf.read(recorded):find("secret-salt", 1, true))
        local path, key = folder:at "served.rec", "sk-0123456789abcdef"
        do
            local m <close> = S.teller { "Hello", "!" }
            assert(record.begin(m, path))
            local server <close> = S.start { models = { m }, api_keys = { bob = key } }
            local r = S.post(server, "/v1/chat/completions", { messages = { { role = "user", content = "hi" } } },
                { Authorization = "Bearer " .. key })
            assert.equal(200, r.status)
            local result = assert(llm.exec { "echo", "a result with " .. key .. " in it" })
            assert.matches(key, result.stdout, 1, true)
        end
        local text = hf.read(path)
        assert.is_nil(text:find(key, 1, true))
        assert.matches('"note":"exec"', text, 1, true)
        assert.matches("a result with [key] in it", text, 1, true)
        assert.equal(1, #assert(file.read(path)).order)
    end)

    it("is a trace for the simulator", function()
        local rows = {}
        for row in assert(file.rows(recorded)) do rows[#rows + 1] = row end
        assert.equal(#rows, #assert(require("llmrun.traces").read(recorded)))
        assert.is_true(#rows >= 18)
        local sessions, blocks = {}, 0
        for i, row in ipairs(rows) do
            assert.is_true(row.prompt > 0 and row.output >= 0 and row.at >= (i > 1 and rows[i - 1].at or 0))
            sessions[row.session] = (sessions[row.session] or 0) + 1
            blocks = math.max(blocks, #row.blocks)
        end
        assert.equal(1, blocks)
        assert.is_true(sessions[rows[1].session] == 4)
    end)

    it("is not begun twice, nor while requests are active; a file that can't be made is told", function()
        local m <close> = model_of()
        local _, err = record.begin(m, folder:at "no/such/folder.rec")
        assert.matches("No such file", err, 1, true)
        local s <close> = m:session()
        s:append "x"
        local task = llm.spawn(s.gen, s, { max_tokens = 200 })
        llm.sleep(0)
        local _, why, code = record.begin(m, folder:at "late.rec")
        assert.equal("state", code)
        assert.matches("no request is active", why, 1, true)
        task:cancel()
    end)

    it("that can't be written any more ends, and the program goes on", function()
        local m <close> = model_of()
        local errs = {}
        local stderr = io.stderr
        io.stderr = { write = function(_, ...) errs[#errs + 1] = table.concat { ... } end } -- luacheck: ignore 122
        if core.stat "/dev/full" then
            local _, err = record.begin(m, "/dev/full")
            assert.matches("/dev/full: write: No space left", err, 1, true)
        end
        local recorder = assert(record.begin(m, folder:at "full.rec"))
        local f = recorder.file
        recorder.file = { write = function() return nil, "No space left on device" end, close = function() f:close() end }
        local s <close> = m:session()
        s:append "x"
        local ok, r = pcall(s.gen, s, { max_tokens = 4 })
        io.stderr = stderr -- luacheck: ignore 122
        assert.is_true(ok)
        assert.equal(4, #r.tokens)
        assert.matches("No space left", table.concat(errs), 1, true)
        assert.is_nil(m.runner.recorder)
        assert.is_nil(m.runner.observers)
    end)
end)

describe("a file that is", function()
    local function refused(text, pattern)
        local path = folder:at "bad.rec"
        hf.write(path, text)
        local rec, err = file.read(path)
        assert.is_nil(rec)
        assert.matches(pattern, err)
        assert.is_nil((file.rows(path)))
    end

    it("no recording, or of another version, is refused", function()
        refused("", "not a recording")
        refused("{}\n", "not a recording")
        refused('{"llmrun":"recording","version":1', "not a recording")
        refused('{"llmrun":"recording","version":99,"model":{},"options":{}}\n', "version 99; this program reads version 1")
        refused('{"llmrun":"recording","version":1}\n', "model and options expected")
        assert.is_nil((file.read(folder:at "nothing.rec")))
    end)

    it("damaged names the line", function()
        local head = '{"llmrun":"recording","version":1,"model":{},"options":{}}\n'
        refused(head .. "nonsense\n", ":2: damaged")
        refused(head .. '{"seq":1}\n{"add":2,"ids":[1]}\n', ":3: damaged: sequence 2 is not there")
        refused(head .. '{"seq":"x"}\n', ":2: damaged: seq: integer expected")
        refused(head .. '{"seq":1}\n{"request":1,"of":1,"t":0,"kind":"generate","prompt":4}\n', "a prompt of 4 tokens")
        for _, field in ipairs { '"run":"1:x"', '"took":"1"', '"took":"a:1"', '"ended":"1:never:3"', '"draft":"1"' } do
            refused(head .. ('{"step":1,"t":0,"ms":1,"rows":1,%s}\n'):format(field), ":2: damaged: %a+: ")
        end
        local bytes = {}
        for i = 1, 400 do bytes[i] = string.char(i * 7919 % 256) end
        refused(head .. table.concat(bytes) .. "\n", "damaged")
    end)

    it("hostile is an error of the replay that names the line", function()
        local head = hf.read(recorded):match "^[^\n]*\n"
        local request = '{"request":1,"of":1,"t":0,"kind":"generate","prompt":1,"max_tokens":4,"seed":1%s}\n'
        for line, want in pairs {
            ['{"seq":1}\n{"add":1,"ids":[99999]}\n'] = "bad.rec:3: ", ['{"pin":7,"on":true}\n'] = "sequence 7 is not there",
            ['{"seq":1,"adapter":"00"}\n'] = "adapter 00 is not named",
            ['{"seq":1}\n{"add":1,"ids":[97]}\n' .. request:format ',"options":{"json":{"type":"no such"}}'] =
                "bad.rec:4: request 1 can't be made again",
            ['{"seq":1}\n{"add":1,"ids":[97]}\n' .. request:format ',"options":{"top_k":"x"}'] = "request 1: top_k",
            ['{"seq":1}\n{"add":1,"ids":[97]}\n' .. request:format ',"options":{"stages":[["no",1]]}'] = "unknown sampler stage",
            ['{"seq":1}\n{"add":1,"ids":[97]}\n' .. request:format ',"n_top":99999'] = "request 1",
            ['{"seq":1}\n{"add":1,"ids":[97]}\n' .. request:format ',"options":{"logit_bias":{"$":"what"}}'] = "unknown mark",
        } do
            hf.write(folder:at "bad.rec", head .. line)
            local ok, err = pcall(replayed, assert(file.read(folder:at "bad.rec")))
            assert.is_false(ok, line)
            assert.is_true(errors.is(err), tostring(err))
            assert.matches(want, err.message, 1, true)
        end
    end)

    it("cut off anywhere is read up to there", function()
        local text = hf.read(recorded)
        local whole = assert(file.read(recorded))
        for _, share in ipairs { 0.3, 0.62, 0.97 } do
            local path = folder:at "cut.rec"
            hf.write(path, text:sub(1, #text * share // 1))
            local rec = assert(file.read(path))
            assert.is_true(rec.cut and rec.steps < whole.steps + 1)
            local r, report = replayed(rec)
            assert.same({}, r.differences)
            assert.matches("has no end", report, 1, true)
        end
    end)

    it("of another model is refused", function()
        local m <close> = llm.scripted { next = letters, vocab = { "other", "pieces" } }
        local ok, err = pcall(replay.new, assert(file.read(recorded)), m)
        assert.is_false(ok)
        assert.is_true(errors.is(err))
        assert.matches("was recorded with another model", err.message, 1, true)
    end)
end)

describe("on the command line", function()
    local program = [[
        local llm = require "llmrun"
        local m <close> = llm.load("%s", { kv = { blocks = 40 } })
        llm.map({ 1, 2, 3 }, function(i)
            local s <close> = m:session()
            s:append("a text of more than sixteen tokens: number " .. i)
            s:gen { max_tokens = 12, ignore_eos = true, seed = i }
        end)
        %s
    ]]
    local path

    before_each(function()
        path = path or hf.model "llama-bf16"
        if not path:find "^/" then path = os.getenv "PWD" .. "/" .. path end
    end)

    it("a program is recorded and replayed, alone, step by step, with another policy", function()
        hf.write(folder:at "p.lua", program:format(path, ""))
        local _, err, status = folder:llmrun "--record p.rec p.lua"
        assert.equal(0, status, err)
        local out
        out, err, status = folder:llmrun "replay p.rec"
        assert.equal(0, status, err)
        assert.matches("36 tokens of 3 requests equal", out, 1, true)
        out = folder:llmrun "replay p.rec --request all --threads 1"
        assert.matches("36 tokens of 3 requests equal", out, 1, true)
        out = folder:llmrun "replay p.rec --policy fair"
        assert.matches("36 tokens of 3 requests equal", out, 1, true)
        out = folder:llmrun "replay p.rec --list"
        assert.matches("3 requests", out, 1, true)
        hf.write(folder:at "in", "where\nqueue\nbatch\nblocks\ntree\nrequests\nlogits 2 3\nstep 2\ndecisions\n"
            .. "request 1\nreplay.step + 0\nerror 'x'\nlocal y =\npolicy\nhelp\ngo\n")
        out, err, status = folder:llmrun "replay p.rec --stop-at-request 2:4 <in"
        assert.equal(0, status, err)
        for _, text in ipairs {
            "before step 5", "3 run", ", depth ", "recorded: ", "before step 7", "step 7, 3 rows", "as recorded",
            "console:1: x", "near <eof>", "36 tokens of 3 requests equal",
        } do
            assert.matches(text, out, 1, true)
        end
        out, _, status = folder:llmrun "replay p.rec --request 9"
        assert.equal("", out)
        assert.equal(1, status)
        hf.write(folder:at "q.rec", (hf.read(folder:at "p.rec"):gsub('("step":5,[^\n]-"took":"1:)(%d+)', function(a, t)
            return a .. (t + 1) % 100
        end, 1)))
        out, _, status = folder:llmrun "replay q.rec"
        assert.equal(1, status)
        assert.matches("1 of 3 requests differ; the first: request 1", out, 1, true)
    end)

    it("a program killed in the middle leaves what it did", function()
        hf.write(folder:at "k.lua", program:format(path, "while true do crowd = m:session():append('x'):gen { max_tokens = 400 } end"))
        local pid
        do
            local p <close> = assert(io.popen(("cd '%s'; '%s' --record k.rec k.lua >/dev/null 2>&1 & echo $!"):format(
                folder.path, core.executable())))
            pid = p:read "n"
        end
        S.eventually(function()
            local kind, size = core.stat(folder:at "k.rec")
            return kind and size > 8000
        end, 20)
        os.execute(("kill -9 %d"):format(pid))
        local rec = assert(file.read(folder:at "k.rec"))
        assert.is_true(rec.cut and rec.steps > 20)
        local out, err, status = folder:llmrun "replay k.rec"
        assert.equal(0, status, err .. out)
        assert.matches("requests equal", out, 1, true)
        assert.matches("has no end", out, 1, true)
    end)

    it("what is wrong is told in a line", function()
        for line, want in pairs {
            ["replay"] = "no recording", ["replay nothing.rec"] = "No such file", ["replay p.lua"] = "not a recording",
            ["replay p.rec --stop-at-request x"] = "N:TOKEN expected", ["--record"] = "needs a value",
            ["replay p.rec --stop-at-request 1:99"] = "request 1 drew 12 tokens, no 99th",
        } do
            local _, err, status = folder:llmrun(line)
            assert.is_true(status > 0)
            assert.matches(want, err, 1, true)
            assert.is_nil(err:find("traceback", 1, true))
        end
        local other = hf.model "qwen2-f16"
        if not other:find "^/" then other = os.getenv "PWD" .. "/" .. other end
        local _, err, status = folder:llmrun("replay p.rec -m " .. other)
        assert.equal(1, status)
        assert.matches("was recorded with another model", err, 1, true)
    end)
end)

describe("options in a recording", function()
    local plain = require "llmrun.record.plain"

    it("come back as they were", function()
        local f = function() end
        local v = {
            list = { 1, 2.5, "x" }, map = { a = true, b = { [3] = "x", [4] = 1 } }, bytes = "\xff\0", inf = -math.huge,
            big = math.maxinteger, dollar = { ["$"] = 1 }, empty = {}, f = f,
        }
        local text = assert(json.encode(plain.encode(v, { [f] = 7 })))
        local back = plain.decode(assert(json.decode(text)), function(n) return "function " .. n end)
        v.f = "function 7"
        assert.same(v, back)
        local nan = plain.decode(assert(json.decode(assert(json.encode(plain.encode(0 / 0))))))
        assert.is_true(nan ~= nan)
    end)
end)
