-- Stubs for editors (LuaCATS, as lua-language-server reads them) in lua/library, and the reference in lua/README.md,
-- both out of the doc comments in lua/llmrun and lua/library/objects.lua:
--
--   llmrun scripts/gen_library.lua            writes them
--   llmrun scripts/gen_library.lua --check    says which are not current; status 1 if any is
--
-- examples:
--   build/llmrun scripts/gen_library.lua
--   build/llmrun scripts/gen_library.lua --check
--
-- A doc comment is the lines with three dashes over a function or a class. Options of calls are the tables that the
-- library itself checks them with.

local sorted_keys = require("llmrun.tables").sorted_keys

local as_program = arg and arg[0] and arg[0]:find "gen_library" -- a spec loads it for its functions
local check = as_program and require "usage".arguments("[--check]", { "--check" })

-- What programs see: files of lua/library, each with the modules whose classes stand in it. var, class: the variable
-- that a module returns, and the name of its class; only: of its functions, these. keep: of the other variables, these.
-- of: how the reference calls the module.
local library = {
    { "llmrun", of = "llm", { "init", var = "llm", class = "llmrun" }, { "loop" }, { "errors" }, { "model" },
        { "session" }, { "adapter" }, { "sampler" }, { "agent" }, { "policy" }, { "serve", keep = "Server" },
        { "exchange", keep = { Request = "llmrun.RouteRequest", Response = "llmrun.RouteResponse" } },
        { "graph", keep = { Graph = "llmrun.Graph" } } },
    { "llmrun/http", of = "llm.http", { "http", var = "M", class = "llmrun.http" } },
    { "llmrun/json", of = "json", { "json", var = "M", class = "llmrun.json" } },
    { "llmrun/exchange", of = "exchange", only = { fail = true },
        { "exchange", var = "M", class = "llmrun.exchange" } },
    { "llmrun/serve", of = "serve", only = { start = true, run = true },
        { "serve", var = "M", class = "llmrun.serve" } },
    { "llmrun/testing", of = "testing", { "testing/init", var = "M", class = "llmrun.testing" } },
    { "llmrun/testing/gguf", of = "gguf", only = { tiny = true, write = true },
        { "testing/gguf", var = "M", class = "llmrun.testing.gguf" } },
}
local called = {
    ["llmrun.Model"] = "model", ["llmrun.Session"] = "s", ["llmrun.Task"] = "task", ["llmrun.Agent"] = "agent",
    ["llmrun.Adapter"] = "adapter", ["llmrun.Sampler"] = "sampler", ["llmrun.PolicyWatch"] = "watch",
    ["llmrun.Server"] = "server", ["llmrun.RouteRequest"] = "req", ["llmrun.RouteResponse"] = "res",
    ["llmrun.Graph"] = "g", ["llmrun.Lab"] = "lab", ["llmrun.Logits"] = "logits", ["llmrun.Memory"] = "memory",
    ["llmrun.SamplerContext"] = "ctx", ["llmrun.DraftContext"] = "ctx", ["llmrun.PolicyStep"] = "step",
    ["llmrun.PolicyRequest"] = "request", ["llmrun.Error"] = "err",
}
-- Methods that are the library's own business.
local private = {
    ["llmrun.Task"] = { when_done = true, join = true, result = true },
    ["llmrun.PolicyWatch"] = { busy = true, step = true },
    ["llmrun.Graph"] = { new = true, use = true, add = true, act = true, scale = true },
    ["llmrun.RouteResponse"] = { broken = true }, ["llmrun.Model"] = { check = true },
    ["llmrun.Server"] = { take = true },
}
local M = { library = library, private = private, called = called }

local function read(path)
    local f <close> = assert(io.open(path, "rb"))
    return f:read "a"
end

-- ---- reading doc comments ----

--- Classes of a file: list of { name, var, doc = { lines }, functions = { { name, sep, args, doc } } }, by variable
--- too. Variables without a class have one without a name. Fields of a class's table that are other modules' functions
--- are functions of the class.
function M.parse(path)
    local classes, by_var, doc, aliases, requires = {}, {}, {}, {}, {}
    local function class_of(var)
        if not by_var[var] then
            by_var[var] = { var = var, doc = {}, functions = {} }
            classes[#classes + 1] = by_var[var]
        end
        return by_var[var]
    end
    local in_table
    for line in read(path):gmatch "[^\n]*" do
        local text = line:match "^%-%-%-(.*)$"
        if text and not text:find "^%-" then
            doc[#doc + 1] = text
        else
            local var, sep, name, params = line:match "^function ([%w_]+)([.:])([%w_]+)%((.-)%)"
            local class_var = line:match "^local ([%w_]+) = "
            local is_class = doc[1] and table.concat(doc, "\n"):match "@class ([%w._]+)"
            if var then
                if not name:find "^__" then
                    local list = class_of(var).functions
                    list[#list + 1] = { name = name, sep = sep, args = params, doc = doc }
                end
            elseif class_var and is_class then
                local c = class_of(class_var)
                c.name, c.doc = is_class, doc
            end
            local what, module = line:match '^local ([%w_]+) = require "([%w._]+)"$'
            if what then requires[what] = module end
            if class_var and is_class and line:find "{$" then in_table = class_var end
            if line:find "^}" then in_table = nil end
            local field, from, fn = line:match "^    ([%w_]+) = ([%w_]+)%.([%w_]+),$"
            if in_table and field and fn:find "^%l" then
                aliases[#aliases + 1] = { var = in_table, name = field, module = requires[from], fn = fn }
            end
            doc = {}
        end
    end
    for _, a in ipairs(aliases) do
        for _, c in ipairs(M.parse("lua/" .. a.module:gsub("%.", "/") .. ".lua").classes) do
            for _, f in ipairs(c.functions) do
                if c.var == "M" and f.name == a.fn then
                    table.insert(class_of(a.var).functions, { name = a.name, sep = ".", args = f.args, doc = f.doc })
                end
            end
        end
    end
    return { classes = classes, by_var = by_var }
end

--- The classes that stand in a file of the library, in order.
function M.classes(entry)
    local list = {}
    for i = 2, #entry do
        local source = entry[i]
        local parsed = M.parse("lua/llmrun/" .. source[1] .. ".lua")
        for _, c in ipairs(parsed.classes) do
            local name = c.name
            if source.var then
                if c.var == source.var then
                    name = source.class
                elseif entry.of ~= "testing" then
                    name = nil
                end
            elseif type(source.keep) == "string" then
                if c.var ~= source.keep then name = nil end
            elseif source.keep then
                name = source.keep[c.var]
            end
            if name then list[#list + 1] = { name = name, var = c.var, doc = c.doc, functions = {} } end
            for _, f in ipairs(name and c.functions or {}) do
                local hidden = private[name] and private[name][f.name]
                if source.var and entry.only and not entry.only[f.name] then hidden = true end
                if not hidden then table.insert(list[#list].functions, f) end
            end
        end
    end
    return list
end

-- ---- option tables ----

--- Classes of options: name -> { field = type }, from the tables that the library checks them with.
function M.options()
    local model, session, sampler = require "llmrun.model", require "llmrun.session", require "llmrun.sampler"
    local joined = require("llmrun.tables").merged
    return {
        ["llmrun.LoadOptions"] = joined(model.engine_options, model.load_options, { kv = "llmrun.KvOptions" }),
        ["llmrun.KvOptions"] = model.kv_options,
        ["llmrun.SessionOptions"] = joined(model.session_options, { adapter = "llmrun.Adapter" }),
        ["llmrun.GenOptions"] = joined(session.gen_options, sampler.options, { fault = false }),
        ["llmrun.ServeOptions"] = joined(require("llmrun.serve").options, { on_ready = "fun(server: llmrun.Server)" }),
        ["llmrun.AgentOptions"] = joined(require("llmrun.agent").options,
            { model = "llmrun.Model", session = "llmrun.Session", gen = "llmrun.GenOptions" }),
    }
end

-- ---- stubs ----

local HEAD = [[
---@meta
-- luacheck: ignore
-- Generated by scripts/gen_library.lua from the doc comments in lua/llmrun; do not edit.
]]

local function stub_functions(out, class, var)
    for _, f in ipairs(class.functions) do
        for _, line in ipairs(f.doc) do out[#out + 1] = "---" .. line end
        out[#out + 1] = ("function %s%s%s(%s) end\n"):format(var, f.sep, f.name, f.args)
    end
end

local function stub(entry)
    local out = { HEAD }
    local module
    for _, c in ipairs(M.classes(entry)) do
        local var = c.name:match "([%w_]+)$"
        if c.var == "llm" or c.var == "M" then
            var, module = c.var == "llm" and "llm" or "M", c.var == "llm" and "llm" or "M"
        end
        local has_class = false
        for _, line in ipairs(c.doc) do
            out[#out + 1] = "---" .. line
            has_class = has_class or line:find "@class" ~= nil
        end
        if not has_class then out[#out + 1] = "---@class " .. c.name end
        if c.var == "llm" then
            out[#out + 1] = "---@field version string\n---@field http llmrun.http\n---@field Error llmrun.Error"
        end
        out[#out + 1] = ("local %s = {}\n"):format(var)
        stub_functions(out, c, var)
    end
    if entry.of == "llm" then
        local options = M.options()
        for _, name in ipairs(sorted_keys(options)) do
            out[#out + 1] = "---@class " .. name
            for _, field in ipairs(sorted_keys(options[name])) do
                local kind = options[name][field]
                if kind then
                    if type(kind) == "table" then kind = kind[1] end
                    out[#out + 1] = ("---@field %s? %s"):format(field, kind)
                end
            end
            out[#out + 1] = ""
        end
    end
    out[#out + 1] = "return " .. module
    return (table.concat(out, "\n"):gsub("[ \t]+\n", "\n")) .. "\n"
end

-- ---- the reference ----

--- The first sentence of a doc comment.
local function first_sentence(doc)
    local words = {}
    for _, line in ipairs(doc) do
        if line:find "^@" or line:find "^   " or line:find "^%s*$" then break end
        words[#words + 1] = line:match "^%s*(.-)%s*$"
    end
    local text = table.concat(words, " ")
    text = text:gsub("<", "\\<")
    for stop in text:gmatch "()[.;]%f[%s\0]" do -- not within brackets, nor at dots that stand for something
        local part = text:sub(1, stop - 1)
        local _, opened = part:gsub("[({]", "")
        local _, closed = part:gsub("[)}]", "")
        local enough = part:sub(-1) ~= "." and (text:sub(stop, stop) == "." or #part > 45)
        if opened <= closed and enough then return part .. "." end
    end
    return text
end

local function signature(class, f, of)
    local optional, results = {}, {}
    for _, line in ipairs(f.doc) do
        local name = line:match "^@param ([%w_]+)%?"
        if name then optional[name] = true end
        local kind = line:match "^@return (.+)$"
        if kind then results[#results + 1] = (kind:gsub("llmrun%.", "")) end
    end
    local params = f.args:gsub("[%w_]+", function(p) return optional[p] and p .. "?" or p end)
    local text = ("%s%s%s(%s)"):format(called[class.name] or of, f.sep, f.name, params)
    if #results > 0 then text = text .. " -> " .. table.concat(results, ", ") end
    return "`" .. text .. "`"
end

local function reference()
    local out = {}
    local function chapter(title, classes, of)
        for _, c in ipairs(classes) do
            if #c.functions > 0 then
                out[#out + 1] = ("\n**%s**\n"):format(c.name == title and "`require \"" .. title .. "\"`" or
                    "`" .. c.name .. "`")
                for _, f in ipairs(c.functions) do
                    out[#out + 1] = ("- %s: %s"):format(signature(c, f, of), first_sentence(f.doc))
                end
            end
        end
    end
    for _, entry in ipairs(library) do chapter(entry[1]:gsub("/", "."), M.classes(entry), entry.of) end
    chapter("", M.parse("lua/library/objects.lua").classes, "")
    return table.concat(out, "\n") .. "\n"
end

--- All that is made: path -> text.
function M.files()
    local files = {}
    for _, entry in ipairs(library) do files["lua/library/" .. entry[1] .. ".lua"] = stub(entry) end
    local readme = read "lua/README.md"
    local head, tail = readme:match "^(.-<!%-%- made by scripts/gen_library.lua %-%->\n).-(<!%-%- end %-%->.*)$"
    assert(head, "lua/README.md has no place for the reference")
    files["lua/README.md"] = head .. reference() .. "\n" .. tail
    return files
end

if not as_program then return M end

local stale = false
local files = M.files()
for _, path in ipairs(sorted_keys(files)) do
    local f = io.open(path, "rb")
    local now = f and f:read "a"
    if f then f:close() end
    if now ~= files[path] then
        if check then
            print(path .. " is not current (llmrun scripts/gen_library.lua makes it)")
            stale = true
        else
            os.execute(("mkdir -p '%s'"):format(path:match "^(.*)/"))
            assert(require("llmrun.files").save(path, files[path]))
            print("wrote " .. path)
        end
    end
end
if stale then os.exit(1) end
