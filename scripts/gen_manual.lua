-- The manual page and the shells' completions, out of the tables that --help is made of (lua/llmrun/cli). The build
-- runs it with the program it has just linked:
--
--   llmrun scripts/gen_manual.lua man|bash|zsh|fish OUT
--
-- examples:
--   build/llmrun scripts/gen_manual.lua man llmrun.1
--   build/llmrun scripts/gen_manual.lua bash /dev/stdout
local core = require "llmrun.core"
local args = require "llmrun.cli.args"
local commands = require "llmrun.cli.commands"
local version = require("llmrun").version

local usage = require "usage"

local kind, out = usage.arguments "man|bash|zsh|fish OUT"
local cmds = {}
for i, name in ipairs(commands) do cmds[i] = { name = name, cmd = require("llmrun.cli." .. name) } end

-- How the program is called, as --help says it: its lines, and the flags in them.
local calls, first_flags = {}, {}
do
    local p <close> = assert(io.popen("'" .. core.executable() .. "' --help"))
    for line in p:lines() do
        local call, rest = line:gsub("^usage:", "      "):match "^       (%S.-)(   .*)$"
        call = call or line:match "^       (llmrun .*)$"
        if call then calls[#calls + 1] = { call, (rest or ""):match "^%s*(.-)%s*$" } end
        for flag in (call or ""):gmatch "%-%-[%a-]+" do
            if flag ~= "--help" then first_flags[#first_flags + 1] = flag end
        end
    end
    first_flags[#first_flags + 1] = "--help"
end

-- What the environment says to the program.
local environment = {
    { "LLMRUN_MODELS", "Where models are looked for by name, and fetched to (~/.cache/llmrun)." },
    { "LLMRUN_DEVICE", "The device that \"auto\" stands for: cpu, cuda:0 and so on." },
    { "LLMRUN_ISA", "Kernels of one instruction set, not the best the processor has: scalar, avx2, avx512, amx." },
    { "LLMRUN_API_KEY", "Key of the server's API, for serve and for bench --url." },
    { "LLMRUN_LUA", "A folder from which the Lua library is taken instead of the one inside the program." },
    { "LLMRUN_CUDA_PLUGIN", "File of the CUDA plugin, instead of the one that was installed." },
    { "LLMRUN_MPI_PLUGIN", "File of the MPI carrier, instead of the one that was installed." },
    { "LLMRUN_NCCL_PLUGIN", "File of the NCCL carrier, instead of the one that was installed." },
}

-- ---- roff ----

local escapes = {
    ["\\"] = "\\e", ["-"] = "\\-", ["'"] = "\\(aq", ["`"] = "\\(ga", ["^"] = "\\(ha", ["~"] = "\\(ti",
}
local function roff(text)
    text = text:gsub("[\\%-'`^~]", escapes):gsub("^%.", "\\&."):gsub("\n%.", "\n\\&.")
    return text
end

local function man_flags(add, flags)
    for _, f in ipairs(flags) do
        local names = (f.short and "\\fB\\-" .. f.short .. "\\fR, " or "") .. "\\fB" .. roff("--" .. f[1]) .. "\\fR"
        add(".TP\n" .. names .. (f.arg and " \\fI" .. roff(f.arg) .. "\\fR" or ""))
        local text = f.help or ""
        if f.choices then text = text .. " (" .. table.concat(f.choices, ", ") .. ")" end
        if f.default ~= nil then text = text .. " [" .. tostring(f.default) .. "]" end
        add(roff(text == "" and "(no words)" or text))
    end
end

-- Paragraphs are told by empty lines; lines of a help text that are indented stay as they are.
local function man_text(add, text)
    local literal = false
    for line in (text:gsub("%s+$", "") .. "\n"):gmatch("([^\n]*)\n") do
        local indented = line:find("^%s%s")
        if indented and not literal then add ".nf" end
        if literal and not indented then add ".fi" end
        literal = indented ~= nil
        add(line == "" and ".PP" or roff(line))
    end
    if literal then add ".fi" end
end

local function manual()
    local t = {}
    local function add(s) t[#t + 1] = s end
    local function example(lines)
        add ".PP\n.nf\n.RS"
        for _, line in ipairs(lines) do add(roff(line)) end
        add ".RE\n.fi"
    end
    add('.\\" made by scripts/gen_manual.lua from the program\'s own help\n.TH LLMRUN 1 "" "llmrun ' .. version ..
        '" "User Commands"')
    add '.SH NAME\nllmrun \\- LLM inference whose decisions are Lua programs'
    add ".SH SYNOPSIS"
    for _, call in ipairs(calls) do
        add(".TP\n.B " .. roff(call[1]))
        local what = call[2]:gsub("^one of:$", "one of the commands below")
        add(roff(what == "" and "shows the version" or what))
    end
    add(".SH DESCRIPTION\n" .. roff("Runs a Lua program that uses language models, or one of the commands below. " ..
        "A program loads a model with require(\"llmrun\").load and holds conversations with it; the engine batches " ..
        "all that runs side by side. The Lua library is described in the folder of the documentation, " ..
        "/usr/share/doc/llmrun where llmrun is installed as a package."))
    example {
        'local llm = require "llmrun"', 'local model <close> = llm.load "model.gguf"', "local s = model:session()",
        's:user "Name a city in Italy."', "for piece in s:stream { max_tokens = 40 } do io.write(piece) end",
    }
    add ".SH COMMANDS"
    for _, c in ipairs(cmds) do
        local cmd = c.cmd
        add(".SS llmrun " .. roff(c.name .. " " .. (cmd.usage or "[FLAGS...]")))
        add(roff(cmd.summary:sub(1, 1):upper() .. cmd.summary:sub(2)) .. ".")
        if cmd.help then
            add ".PP"
            man_text(add, cmd.help)
        end
        man_flags(add, cmd.flags or {})
        if cmd.model then add '.PP\nAnd the flags of models, below.' end
        if cmd.examples then example(args.lines(cmd.examples)) end
    end
    add ".SH FLAGS OF MODELS\nCommands that load a model take these."
    man_flags(add, args.model_flags)
    add ".SH ENVIRONMENT"
    for _, e in ipairs(environment) do add(".TP\n.B " .. e[1] .. "\n" .. roff(e[2])) end
    add(".SH EXIT STATUS\n0, 1 if something failed (the reason is on standard error), 2 for wrong usage, 130 after " ..
        "Ctrl\\-C.")
    add(".SH FILES\n.TP\n.I \\(ti/.cache/llmrun\nModels that are known by a name.")
    return table.concat(t, "\n") .. "\n"
end

-- ---- shells ----

-- What completes a flag's value: "file", a list of words, or nothing.
local function completes(f)
    if f.choices then return f.choices end
    local arg = f.arg or ""
    for _, word in ipairs { "FILE", "MODEL", "PATH", "FOLDER" } do
        if arg:find(word) then return "file" end
    end
end

local function names(list) return table.concat(list, " ") end

local function bash()
    local t = {
        "# bash completion of llmrun; made by scripts/gen_manual.lua",
        "_llmrun() {",
        "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} cmd=${COMP_WORDS[1]} words=''",
        "    COMPREPLY=()",
        "    if [ \"$COMP_CWORD\" -eq 1 ]; then",
        ("        mapfile -t COMPREPLY < <(compgen -W %q -- \"$cur\"; compgen -f -X '!*.lua' -- \"$cur\";"):format(
            names(commands) .. " " .. names(first_flags)),
        "            compgen -d -S / -- \"$cur\")",
        "        if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi",
        "        return",
        "    fi",
        "    case \"$cmd $prev\" in",
    }
    for _, c in ipairs(cmds) do
        for _, f in ipairs(args.flags_of(c.cmd)) do
            local how = completes(f)
            if type(how) == "table" then
                local pattern = ("'%s --%s'"):format(c.name, f[1])
                if f.short then pattern = pattern .. (" | '%s -%s'"):format(c.name, f.short) end
                t[#t + 1] = ("    %s) words=%q ;;"):format(pattern, names(how))
            end
        end
    end
    t[#t + 1] = "    esac\n    if [ -z \"$words\" ] && [[ $cur == -* ]]; then\n        case $cmd in"
    for _, c in ipairs(cmds) do
        local flags = {}
        for _, f in ipairs(args.flags_of(c.cmd)) do flags[#flags + 1] = "--" .. f[1] end
        t[#t + 1] = ("        %s) words=%q ;;"):format(c.name, names(flags))
    end
    t[#t + 1] = [[
        esac
    fi
    if [ -n "$words" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}
complete -F _llmrun llmrun
]]
    return table.concat(t, "\n")
end

local function zsh()
    local function quote(s)
        return (s:gsub("'", "'\\''"):gsub("%[", "\\["):gsub("%]", "\\]"):gsub(":", "\\:"):gsub("\n", " "))
    end
    local t = { "#compdef llmrun", "# made by scripts/gen_manual.lua", "_llmrun() {", "  local context state line",
        "  if (( CURRENT == 2 )); then", "    local -a commands=(" }
    for _, c in ipairs(cmds) do t[#t + 1] = ("      '%s:%s'"):format(c.name, quote(c.cmd.summary)) end
    t[#t + 1] = "    )\n    _describe command commands\n    _files -g '*.lua'\n    return\n  fi"
    t[#t + 1] = "  local cmd=$words[2]\n  shift words; (( CURRENT-- ))\n  case $cmd in"
    for _, c in ipairs(cmds) do
        t[#t + 1] = ("  %s)\n    _arguments -s \\"):format(c.name)
        for _, f in ipairs(args.flags_of(c.cmd)) do
            local how, action = completes(f), ""
            if f.arg then
                action = ":" .. quote(f.arg) .. ":"
                if how == "file" then action = action .. "_files" end
                if type(how) == "table" then action = action .. "(" .. names(how) .. ")" end
            end
            local text = quote(f.help or "")
            t[#t + 1] = ("      '--%s[%s]%s' \\"):format(f[1], text, action)
            if f.short then t[#t + 1] = ("      '-%s[%s]%s' \\"):format(f.short, text, action) end
        end
        t[#t + 1] = "      '*:file:_files' ;;"
    end
    t[#t + 1] = "  *) _files ;;\n  esac\n}\n_llmrun \"$@\"\n"
    return table.concat(t, "\n")
end

local function fish()
    local function quote(s) return "'" .. s:gsub("\\", "\\\\"):gsub("'", "\\'"):gsub("\n", " ") .. "'" end
    local t = { "# fish completion of llmrun; made by scripts/gen_manual.lua" }
    for _, c in ipairs(cmds) do
        t[#t + 1] = ("complete -c llmrun -n __fish_use_subcommand -a %s -d %s"):format(c.name, quote(c.cmd.summary))
        for _, f in ipairs(args.flags_of(c.cmd)) do
            local how = completes(f)
            local value = f.arg and " -x"
            if how == "file" then value = " -r -F" end
            if type(how) == "table" then value = " -x -a " .. quote(names(how)) end
            t[#t + 1] = ("complete -c llmrun -n '__fish_seen_subcommand_from %s' -l %s%s%s -d %s"):format(c.name, f[1],
                f.short and " -s " .. f.short or "", value or "", quote(f.help or ""))
        end
    end
    return table.concat(t, "\n") .. "\n"
end

local make = { man = manual, bash = bash, zsh = zsh, fish = fish }
if not make[kind] then usage.refuse(("man, bash, zsh or fish expected, got '%s'"):format(kind)) end
assert(require("llmrun.files").save(out, make[kind]()))
