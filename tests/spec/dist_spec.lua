--- Runs on several processes (mpirun): the same tokens bit for bit as one, refusals, and ends that leave nobody behind.

local gguf = require "llmrun.testing.gguf"
local core = require "llmrun.core"

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" == "1"
local program = "tests/spec/dist_program.lua"

local function sh(command)
    local p = assert(io.popen(command))
    local text = p:read "a"
    local _, _, status = p:close()
    return text, status
end

local self = (sh "readlink /proc/$PPID/exe"):gsub("\n", "")
local there = select(2, sh "command -v mpirun >/dev/null 2>&1") == 0
    and core.stat(self:gsub("[^/]*$", "") .. "libllmrun_mpi.so") == "file"
local folder = (sh "mktemp -d"):gsub("\n", "")

--- What a command printed on standard output and standard error, its status, and seconds; 124: it took minutes.
local function run(command)
    local begin = core.now()
    local out, status = sh(("ASAN_OPTIONS=detect_leaks=0 timeout -k 5 %d %s 2>%s/err </dev/null"):format(
        sanitized and 600 or 300, command, folder))
    local f <close> = assert(io.open(folder .. "/err"))
    return out, f:read "a", status, core.now() - begin
end

--- mpirun on one machine, however many cores it has. No network device but the loopback is looked for.
local function mpirun(n, rest)
    return ("mpirun --allow-run-as-root --oversubscribe --mca btl self,vader,tcp -n %d %s %s"):format(n, self, rest)
end

--- llama-like, 8 heads, 2 KV heads, width 64, 4 layers.
local function eight_heads(path, changes)
    return gguf.tiny(path, function(keys, tensors)
        keys.of["llama.attention.head_count"][2] = gguf.u32(8)
        keys.of["llama.attention.head_count_kv"][2] = gguf.u32(2)
        keys.of["llama.block_count"][2] = gguf.u32(4)
        for l = 0, 1 do
            for _, name in ipairs { "attn_k", "attn_v" } do
                local t = tensors.of[("blk.%d.%s.weight"):format(l, name)]
                t[2], t[3] = { 64, 16 }, gguf.random(64 * 16, 50 + l, 0.2)
            end
        end
        for i = 1, #tensors do
            local t = tensors[i]
            local l, name = t[1]:match "^blk%.(%d+)%.(.*)"
            if l then
                local norm = name:find "norm"
                tensors[#tensors + 1] = { ("blk.%d.%s"):format(l + 2, name), t[2],
                    norm and t[3] or gguf.random(#t[3] // 4, 90 + i, 0.2) }
            end
        end
        if changes then changes(keys, tensors) end
    end)
end

--- The program on each layout prints what one process prints.
local function check(model, kv, layouts)
    local want, err, status = run(("%s %s %s %s %s/saved"):format(self, program, model, kv, folder))
    assert.equal(0, status, err)
    assert.matches("swaps\ttrue", want)
    for _, layout in ipairs(layouts) do
        local n, flags = layout:match "^(%d+) ?(.*)"
        local got, errors, code = run(mpirun(n, ("%s %s %s %s %s/saved"):format(flags, program, model, kv, folder)))
        assert.equal(0, code, layout .. ": " .. errors)
        assert.equal(want, got, layout)
        if n ~= "1" then assert.matches("ranks tp %d pp %d", errors) end
    end
end

--- Ends this spec's processes of a folder's name: how many there were.
local function left_behind()
    local n = 0
    for pid in sh("grep -l -a -s -F " .. folder .. " /proc/[0-9]*/cmdline"):gmatch "/proc/(%d+)/" do
        local f = io.open(("/proc/%s/comm"):format(pid))
        local name = f and f:read "l"
        if f then f:close() end
        if name == "llmrun" then n = n + 1 end
    end
    return n
end

local function nobody_left()
    for _ = 1, 100 do
        if left_behind() == 0 then return true end
        os.execute "sleep 0.1"
    end
    return false, left_behind() .. " processes are left"
end

if not there then
    describe("several processes", function()
        it("need Open MPI", function()
            pending "no mpirun, or llmrun was built without MPI"
        end)
    end)
    return
end

describe("several processes", function()
    local tiny = folder .. "/tiny.gguf"
    setup(function() eight_heads(tiny) end)
    teardown(function() os.execute("rm -r " .. folder) end)

    local function script(text)
        local path = folder .. "/program.lua"
        local f <close> = assert(io.open(path, "w"))
        f:write(text)
        return path
    end

    it("say what one process says, bit for bit", function()
        check(tiny, "f16", sanitized and { "4 --tp 2 --pp 2 --micro-rows 8" }
            or { "1", "2", "4", "8", "2 --pp 2 --micro-rows 8", "4 --tp 2 --pp 2 --micro-rows 16" })
    end)

    it("keep keys and values in few bits as one does #slow", function()
        local name = folder .. "/wide.gguf"
        gguf.tiny(name) -- heads of 32
        check(name, "q8_0", { "2 --tp 2", "2 --pp 2" })
    end)

    it("share a mixture's experts and say what one process says", function()
        local arch = dofile "tests/spec/arch_support.lua"
        local name = folder .. "/mixture.gguf"
        local say = script(([[
            local m <close> = require "llmrun".load('%s', { threads = 1, ctx = 64 })
            local s <close> = m:session()
            s:append { 5, 6, 7, 8, 9, 10, 11, 12, 13 }
            local r = s:gen { max_tokens = 8, temperature = 0, ignore_eos = true, logprobs = 0 }
            for i, l in ipairs(r.logprobs) do print(r.tokens[i], ("%%a"):format(l.logprob)) end]]):format(name))
        local function agree(layouts)
            local want, err, status = run(("%s %s"):format(self, say))
            assert.equal(0, status, err)
            for _, layout in ipairs(layouts) do
                local n, flags = layout:match "^(%d+) (.*)"
                local got, errors, code = run(mpirun(n, flags .. " " .. say))
                assert.equal(0, code, errors)
                assert.equal(want, got, layout)
            end
        end
        arch.write(name, arch.case "gpt-oss", function(_, tensors) -- in blocks, with biases
            for i, t in ipairs(tensors) do
                local part = t[1]:match "ffn_(%a+)_exps%.weight$"
                if part then t[3], t[4] = gguf.blocks(39, 64 * 32 * 4, i, part == "down" and -6 or -5), 39 end
            end
        end)
        agree(sanitized and { "2 --tp 2" } or { "2 --tp 2", "4 --tp 4", "4 --tp 2 --pp 2" })
        if sanitized then return end
        arch.write(name, arch.case "deepseek_v3") -- groups, and experts of all rows beside them
        agree { "2 --tp 2", "2 --pp 2" }
    end)

    it("with a device each say what one says", function() -- emulated; data goes through the host
        local emulated = dofile "tests/spec/cuda_support.lua"
        if not emulated.built then return pending "the emulated device is not built: no C++ compiler" end
        -- a device each; nearly all that is free on the fullest is for KV, and batches still have room
        local with = ("env EMU_MEMORY=8000000 LLMRUN_CUDA_PLUGIN='%s' "):format(emulated.plugin)
        local function agree(name, layouts)
            local say = script(([[
                local m <close> = require "llmrun".load('%s', { device = "cuda:0", ctx = 64, max_batch_tokens = 16,
                    kv = { memory = 0.95 } })
                local s <close> = m:session()
                s:append { 5, 66, 7, 81, 9, 10, 11, 12, 13 }
                local r = s:gen { max_tokens = 4, temperature = 0, ignore_eos = true, logprobs = 0 }
                for i, l in ipairs(r.logprobs) do print(r.tokens[i], ("%%a"):format(l.logprob)) end]]):format(name))
            local want, err, status = run(with .. self .. " " .. say)
            assert.equal(0, status, err)
            assert.equal(4, select(2, want:gsub("\n", "")))
            for _, layout in ipairs(layouts) do
                local n, flags = layout:match "^(%d+) (.*)"
                local got, errors, code = run(with .. mpirun(n, flags .. " " .. say))
                assert.equal(0, code, errors)
                assert.equal(want, got, layout)
            end
        end
        agree(tiny, sanitized and { "2 --tp 2" } or { "2 --tp 2", "2 --pp 2 --micro-rows 8" })
        local arch, mixture = dofile "tests/spec/arch_support.lua", folder .. "/mixture.gguf"
        arch.write(mixture, arch.case "gpt-oss") -- each has half of the experts
        agree(mixture, { "2 --tp 2" })
    end)

    it("on two hosts say what one process says #slow", function()
        local _, lacking = sh "[ $(id -u) = 0 ] && command -v ip tc unshare >/dev/null && unshare -un true 2>/dev/null"
        if lacking ~= 0 then return pending "network namespaces need root, iproute2, and a kernel that has them" end
        local rest = (" %s %s f16 %s/saved"):format(program, tiny, folder)
        local want = run(self .. rest)
        local got, err, status = run(("scripts/two_hosts --ranks 2 %s --tp 2 --pp 2 --micro-rows 16%s"):format(self, rest))
        assert.equal(0, status, err)
        assert.equal(want, got)
        assert.matches("ranks tp 2 pp 2", err)
    end)

    it("refuse what heads can't be split into, with the counts that can", function() -- B55
        for _, n in ipairs(sanitized and { 3 } or { 3, 16 }) do
            local out, err, status, seconds = run(mpirun(n, ("%s %s f16 %s/saved"):format(program, tiny, folder)))
            assert.equal("", out)
            assert.equal(1, status)
            assert.matches("8 heads with 2 KV heads can't be split over " .. n .. " ranks", err, 1, true)
            assert.matches("counts that can be: 1 2 4 8\n", err, 1, true)
            assert.is_true(seconds < 200 or sanitized)
        end
        local _, err, status = run(mpirun(5, ("--pp 5 %s %s f16 x"):format(program, tiny)))
        assert.equal(1, status)
        assert.matches("the model's 4 layers make 1 to 4 pipeline stages (--pp), not 5", err, 1, true)
    end)

    it("refuse flags that don't fit", function()
        local _, err, status = run(self .. " --tp 2 " .. program)
        assert.equal(2, status)
        assert.matches("--tp 2 --pp 1 needs 2 processes: mpirun -n 2 llmrun", err, 1, true)
        _, err, status = run(mpirun(2, "--tp 3 --version"))
        assert.equal(2, status)
        assert.matches("--tp 3 times --pp 1 is not the number of processes, 2", err, 1, true)
        _, err, status = run(self .. " --tp x " .. program)
        assert.equal(2, status)
        assert.matches("--tp: a number of 1 or more expected, got x", err, 1, true)
    end)

    it("end with the program's status, and with its errors", function()
        local _, _, status = run(mpirun(2, script(("local m = require 'llmrun'.load('%s', { ctx = 64 }) os.exit(7)"):format(tiny))))
        assert.equal(7, status)
        local _, err
        _, err, status = run(mpirun(2, script(("local m = require 'llmrun'.load('%s', { ctx = 64 }) error 'oops'"):format(tiny))))
        assert.equal(1, status)
        assert.matches("oops", err)
        assert.is_true(nobody_left())
    end)

    it("load nothing where a rank has no file, or another one", function()
        os.execute(("mkdir %s/here %s/there && cp %s %s/here/m.gguf"):format(folder, folder, tiny, folder))
        local load = script [[
            local ok, err = pcall(require "llmrun".load, "m.gguf", { ctx = 64 })
            print(ok, err)]]
        local command = ("mpirun --allow-run-as-root --oversubscribe -n 1 --wdir %s/here %s %s : -n 1 --wdir %s/there %s %s")
            :format(folder, self, load, folder, self, load)
        local out, err, status = run(command)
        assert.equal(0, status, err)
        assert.matches("^false\t.*rank 1 %(.*%): m.gguf: .*No such file", out)
        eight_heads(folder .. "/there/m.gguf", function(_, tensors)
            tensors.of["blk.1.ffn_up.weight"][3] = gguf.random(64 * 96, 7, 0.2)
        end)
        out, err, status = run(command)
        assert.equal(0, status, err)
        assert.matches("^false\t.*rank 1 %(.*%) has another file than rank 0", out)
    end)

    it("fail to start where a rank has no memory", function()
        if sanitized then return end -- the sanitizer's own memory is beyond any limit
        local load = script(([[
            local ok, err = pcall(require "llmrun".load, "%s", { ctx = 64, kv = { blocks = 3000000, block_size = 16 } })
            print(ok, err)]]):format(tiny))
        local out, err, status = run(("mpirun --allow-run-as-root --oversubscribe -n 1 %s %s : -n 1 sh -c 'ulimit -v 4000000; exec %s %s'")
            :format(self, load, self, load))
        assert.equal(0, status, err)
        assert.matches("^false\t.*rank 1 %(.*%): no memory for 3000000 KV blocks", out)
    end)

    local endless = [[
        local m = require "llmrun".load("%s", { ctx = 256 })
        local s = m:session()
        s:append "x"
        io.stderr:write "begun\n"
        %s
        while true do
            s:gen { max_tokens = 100, temperature = 0, ignore_eos = true }
            s:rewind(1)
        end]]

    it("all end within seconds when one dies", function()
        -- kills the first other child of mpirun's
        local kill = [[
            os.execute "p=$(cut -d' ' -f4 /proc/$PPID/stat); for c in $(cat /proc/$p/task/*/children); do [ $c = $PPID ] || { (sleep 0.3; kill -9 $c) & break; }; done"]]
        local _, err, status, seconds = run(mpirun(4, "--tp 2 --pp 2 " .. script(endless:format(tiny, kill))))
        assert.is_true(status ~= 0 and status ~= 124)
        assert.matches("begun", err)
        assert.matches("rank %d with PID %d+ on node .* exited on signal 9", err)
        assert.is_true(seconds < 200 or sanitized, seconds .. " s")
        assert.is_true(nobody_left())
    end)

    it("all end on Ctrl-C", function()
        local path = script(endless:format(tiny, ("io.open('%s/begun', 'w'):close()"):format(folder)))
        local _, err, _, seconds = run(([[sh -c '%s & p=$!; while [ ! -e %s/begun ]; do sleep 0.1; done
            kill -INT $p; wait $p']]):format(mpirun(2, "--pp 2 " .. path), folder))
        assert.matches("begun", err)
        assert.is_true(seconds < 200 or sanitized, seconds .. " s")
        assert.is_true(nobody_left())
    end)

    it("take no processor while they wait #slow", function()
        local out, err, status = run(mpirun(2, script(([[
            local llm, core = require "llmrun", require "llmrun.core"
            local m = llm.load("%s", { ctx = 64 })
            local f <close> = io.popen "p=$(cut -d' ' -f4 /proc/$PPID/stat); cat /proc/$p/task/*/children"
            local pids = f:read "a"
            local function used()
                local sum = 0
                for pid in pids:gmatch "%%d+" do
                    local p = io.open("/proc/" .. pid .. "/stat")
                    if p then
                        local stat = p:read("a"):gsub("^.*%%) ", "")
                        p:close()
                        local i = 0
                        for v in stat:gmatch "%%S+" do
                            i = i + 1
                            if i == 12 or i == 13 then sum = sum + tonumber(v) end
                        end
                    end
                end
                return sum / 100
            end
            llm.sleep(0.5)
            local before = used()
            llm.sleep(3)
            print(used() - before)]]):format(tiny))))
        assert.equal(0, status, err)
        assert.is_true(tonumber(out) < 0.6, out .. "s of processor time in 3 s")
    end)
end)
