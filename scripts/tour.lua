-- Runs the examples and writes what they print into examples/README.md, shortened:
--
--   build/llmrun scripts/tour.lua [NAME...]      all, or some; the others keep what stands there
--
-- Arguments and standard input are those of the example's test (-- test-args:, -- test-stdin:; see scripts/test).
--
-- examples:
--   build/llmrun scripts/tour.lua
--   build/llmrun scripts/tour.lua agent beam_search
local core = require "llmrun.core"
local catalog = require "llmrun.catalog"
local files = require "llmrun.files"
local usage = require "usage"

local names = usage.arguments "[NAME...]"

local README, MOST, WIDTH = "examples/README.md", 12, 118

local function read(path)
    local f <close> = assert(io.open(path))
    return f:read "a"
end

local function quote(s) return "'" .. s:gsub("'", "'\\''") .. "'" end

--- A line of output within the width, without control characters.
local function short(line)
    local home = (os.getenv "HOME" or "~"):gsub("%p", "%%%0")
    line = line:gsub(home, "~", 1):gsub("\27%[[%d;]*%a", ""):gsub("%c", " "):gsub("%s+$", "")
    if utf8.len(line) and utf8.len(line) > WIDTH then line = line:sub(1, utf8.offset(line, WIDTH - 3) - 1) .. " ..." end
    return line
end

local function run(name, text)
    local words = text:match "\n%-%- test%-args: *([^\n]*)" or ""
    words = words:gsub("{([%w.-]+)}", function(model) return assert(catalog.find(model)) end)
    local stdin = {}
    for line in text:gmatch "\n%-%- test%-stdin: *([^\n]*)" do stdin[#stdin + 1] = line .. "\n" end
    local input = os.tmpname()
    assert(files.save(input, table.concat(stdin)))
    local command = ("timeout 300 %s examples/%s.lua %s <%s 2>&1"):format(quote(core.executable()), name, words, input)
    local p <close> = assert(io.popen(command))
    local lines, left = {}, 0
    for line in p:lines() do
        if #lines < MOST then lines[#lines + 1] = short(line) else left = left + 1 end
    end
    os.remove(input)
    if left > 0 then lines[#lines + 1] = ("... (%d more lines)"):format(left) end
    return table.concat(lines, "\n")
end

local wanted = {}
for _, name in ipairs(names) do
    if core.stat("examples/" .. name .. ".lua") ~= "file" then
        usage.refuse(("no example '%s' in examples/"):format(name))
    end
    wanted[name] = true
end
local readme = read(README)
local head = readme:match "^(.-\n)## The tour\n" or readme:gsub("\n*$", "\n\n")
local before = {}
for name, output in readme:gmatch "\n### ([%w_]+)\n.-\n\n```\n(.-)\n```\n" do before[name] = output end

local list = {}
for name in head:gmatch "%- %[([%w_]+)%.lua%]" do list[#list + 1] = name end
local parts = { head, [[
## The tour

What they print (SmolLM2-135M; `build/llmrun scripts/tour.lua` writes this). The model is small, and its texts are what
they are: the programs are the point. Times are of a machine that was busy with other work.
]] }
for _, name in ipairs(list) do
    local text = read("examples/" .. name .. ".lua")
    local output = before[name]
    if #names == 0 or wanted[name] then
        io.stderr:write(name, "\n")
        output = run(name, text)
    end
    if output then
        local args = text:match "\n%-%- test%-args: *([^\n]*)"
        parts[#parts + 1] = ("\n### %s\n`llmrun examples/%s.lua%s`\n\n```\n%s\n```\n"):format(name, name,
            args and args ~= "" and " " .. args:gsub("[{}]", "") or "", output)
    end
end
assert(files.save(README, table.concat(parts)))
