-- Commands that help texts, starters, scripts and READMEs show: they have flags and files that there are.
local args = require "llmrun.cli.args"
local core = require "llmrun.core"

local function read(path)
    local f <close> = assert(io.open(path))
    return f:read "a"
end

local function output(command)
    local p <close> = assert(io.popen(command))
    return p:read "a"
end

-- The words of a shell command, up to where another one begins or a remark.
local function words(line)
    local list, i = {}, 1
    while true do
        i = line:find("%S", i)
        if not i or line:find("^[#|;&]", i) then return list end
        local word = ""
        while i <= #line and not line:find("^[%s;]", i) do
            local text, last = line:match([[^"([^"]*)"()]], i)
            if not text then text, last = line:match("^'([^']*)'()", i) end
            if not text then text, last = line:match("^(.)()", i) end
            word, i = word .. text, last
        end
        list[#list + 1] = word
    end
end

local commands = {}
for _, name in ipairs(require "llmrun.cli.commands") do commands[name] = require("llmrun.cli." .. name) end

-- What is wrong with a line that calls a command of llmrun, or nil. Prose may follow one in a README.
local function wrong(line, prose)
    for at in line:gmatch "%f[%w]llmrun ()%l+%f[^%w]" do
        local argv = words(line:sub(at))
        local cmd = commands[argv[1]]
        if cmd and not cmd.raw then
            local _, err = args.parse(cmd, argv[1], table.move(argv, 2, #argv, 1, {}))
            local placeholder = prose and err and (err:find "^unexpected" or err:find "needs a value" or err:find "got '[%u|]+'$" or err:find "got '[%l|]+|")
            if err and not placeholder then return err end
        end
    end
    for path in line:gmatch "%f[%w]examples/[%w_/]+[%w_/.]*%w" do
        if not path:find "%u" and not core.stat(path) then return "no " .. path end
    end
end

local function check(text, where, prose)
    for line in text:gsub("\\\n%s*", ""):gmatch "[^\n]+" do
        local err = wrong(prose and line:gsub("(%S)   .*", "%1"):gsub("`", " ; ") or line, prose)
        assert.is_nil(err, err and ("%s: %s: %s"):format(where, line, err))
    end
end

describe("commands that are shown", function()
    it("are seen", function()
        assert.equal("unknown flag --bogus", wrong "llmrun serve --bogus 3")
        assert.equal("unexpected argument 'b c'", wrong [[build/llmrun run -p "a" "b c" | cat]])
        assert.equal("no examples/none.lua", wrong "scripts/quickstart examples/none.lua")
        assert.is_nil(wrong [[git diff | llmrun run -p - --temperature 0 && cat x --bogus # --bogus]])
    end)

    it("are right in help texts", function()
        for name, cmd in pairs(commands) do check(cmd.examples, name) end
    end)

    it("are right in starters", function()
        local starters = require "llmrun.cli.starters"
        for _, kind in ipairs(starters.kinds) do check(select(2, starters.make(kind, "x")), kind) end
    end)

    it("are right in the help of scripts", function()
        for path in output("grep -lsE '^#!.*bash' scripts/*"):gmatch "%S+" do
            check(output(path .. " --help 2>&1"), path)
        end
    end)

    it("are right in READMEs", function()
        for path in output("ls README.md */README.md */*/README.md"):gmatch "%S+" do
            check(read(path), path, true)
        end
    end)
end)

describe("flags", function()
    it("are taken by the names that other commands have for them", function()
        local names = {
            { "ctx", "max-model-len", value = "128" },
            { "draft", "speculative-model", value = "smollm2" },
            { "kv-type", "kv-cache-dtype", value = "f16" },
            { "load-seed", "seed", value = "5" },
            { "max-batch-tokens", "max-num-batched-tokens", value = "64" },
            { "max-seqs", "max-num-seqs", value = "8" },
            { "no-prefix-cache", "no-enable-prefix-caching" },
            { "out", "output", value = "x", not_in = { bench = true } }, -- --output N: tokens
            { "policy", "policies", value = "fair" },
            { "served-model", "served-model-name", value = "x" },
            { "speculate", "speculative-method", value = "ngram" },
            { "speed", "load", value = "2", not_in = { bench = true } }, -- --load KIND
            { "template", "chat-template", value = "x" },
        }
        for _, n in ipairs(names) do
            local of = {} -- by name, the commands that show it
            for name, cmd in pairs(commands) do
                local shown = {}
                for _, f in ipairs(cmd.raw and {} or args.flags_of(cmd)) do shown[f[1]] = true end
                if (shown[n[1]] or shown[n[2]]) and not (n.not_in and n.not_in[name]) then
                    local own = shown[n[1]] and n[1] or n[2]
                    of[own] = name
                    local want = assert(args.parse(cmd, name, { "--" .. own, n.value }))
                    for _, other in ipairs(n) do
                        assert.same(want, assert(args.parse(cmd, name, { "--" .. other, n.value }), name .. " --" .. other))
                    end
                end
            end
            assert.is_truthy(of[n[1]] and of[n[2]], n[1]) -- else there is nothing to agree about
        end
    end)

    it("are called in messages what they were called on the command line", function()
        for line, want in pairs {
            ["serve --ctx 0"] = "--ctx: 1 to 268435456 expected, got 0", ["run --max-model-len=x"] = "--max-model-len: integer expected, got 'x'",
            ["serve -c 0"] = "--max-model-len: 1 to 268435456 expected, got 0", ["simulate --no-enable-prefix-caching=1"] = "--no-enable-prefix-caching takes no value",
            ["run --chat-template"] = "--chat-template needs a value (FILE)", ["bench --output x"] = "--output: integer expected, got 'x'",
        } do
            local argv = words(line)
            local _, err = args.parse(commands[argv[1]], argv[1], table.move(argv, 2, #argv, 1, {}))
            assert.equal(want, err)
        end
    end)
end)

describe("scripts", function()
    local list = {}
    for path in output("ls -d scripts/*"):gmatch "%S+" do
        local head = core.stat(path) == "file" and read(path):match "^[^\n]*\n" or ""
        -- the others are parts of these
        local by = path:find "%.py$" and "python3 " or path:find "%.lua$" and ("'%s' "):format(core.executable()) or ""
        local part = path:find "/usage%." or path == "scripts/conformance_checks.py"
        if head:find("#!", 1, true) or by ~= "" and not part then list[#list + 1] = { path, by .. path } end
    end

    local function run(command)
        local p <close> = assert(io.popen(("timeout 60 %s </dev/null 2>&1 >/dev/null; echo \"|$?\""):format(command)))
        local err, status = p:read("a"):match("^(.*)|(%d+)\n$")
        return err, tonumber(status)
    end

    it("tell what they are for, and what is wrong with an argument, and do nothing then", function()
        assert.is_true(#list > 37)
        local before = output "git status --porcelain"
        for _, s in ipairs(list) do
            local text = output(s[2] .. " --help 2>&1")
            assert.matches("usage:", text:lower(), 1, true, s[1])
            local err, status = run(s[2] .. " --help")
            assert.same({ "", 0 }, { err, status }, s[1])
            err, status = run(s[2] .. " --nonsense")
            assert.equal(2, status, s[1] .. ": " .. err)
            assert.is_truthy(err ~= "" and not err:find("Traceback", 1, true) and not err:find("line %d+:"), s[1] .. ": " .. err)
        end
        assert.equal(before, output "git status --porcelain")
    end)

    it("in Lua show examples of themselves, and tell which argument is wrong", function()
        for _, s in ipairs(list) do
            if s[1]:find "%.lua$" then
                local shown = ("\nexamples?:\n  build/llmrun " .. s[1]):gsub("%.", "%%.")
                assert.matches(shown, (output(s[2] .. " --help")))
            end
        end
        local llmrun = ("'%s' "):format(core.executable())
        for line, text in pairs {
            ["scripts/tour.lua nobody"] = "scripts/tour.lua: no example 'nobody' in examples/",
            ["scripts/gen_library.lua --chek"] = "scripts/gen_library.lua: unknown argument '--chek'",
            ["scripts/gen_manual.lua man"] = "scripts/gen_manual.lua: OUT is missing",
            ["scripts/gen_manual.lua woman x"] = "man, bash, zsh or fish expected, got 'woman'",
            ["scripts/expect.lua a b c"] = "scripts/expect.lua: unexpected argument 'c'",
        } do
            local err, status = run(llmrun .. line)
            assert.equal(2, status, line)
            assert.matches(text, err, 1, true)
        end
    end)
end)
