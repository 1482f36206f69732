--- One program on several processes (src/dist/README.md): mpirun -n 4 llmrun --tp 2 --pp 2 program.lua
---
--- Rank 0 runs the program as ever. The other ranks come no further than M.start: they follow rank 0's orders, and load
--- what it loads. Programs and architecture scripts need no word about it.

local cjson = require "cjson.safe"
local core = require "llmrun.core"

local M = {}

local names = { ["--tp"] = "tp", ["--pp"] = "pp", ["--micro-rows"] = "micro_rows" }

--- Takes the flags of a run off the front of the command line. Returns them, or nil and what is wrong.
function M.flags(argv)
    local o = {}
    while argv[1] do
        local name, value = argv[1]:match("^(%-%-[%a%-]+)=(.*)$")
        if not name then name, value = argv[1], nil end
        local key = names[name]
        if not key then break end
        table.remove(argv, 1)
        if not value then value = table.remove(argv, 1) end
        local n = value and value:find("^%d+$") and math.tointeger(tonumber(value))
        if not n or n < 1 or n > 65536 then
            return nil, ("%s: a number of 1 or more expected, got %s"):format(name, value or "nothing")
        end
        o[key] = n
    end
    return o
end

-- What of the options of llm.load the other ranks need.
local shared = { "device", "isa", "compute", "arch", "allow_unused", "threads", "ctx" }

--- This rank's part of a model, joined with the others'. All ranks call this at once; all succeed, or all fail with
--- the same reason.
local function load_part(id, path, o)
    local opts = { parted = true }
    for _, k in ipairs(shared) do opts[k] = o[k] end
    if opts.device == "cuda" then opts.device = "cuda:" .. core.dist_info().local_rank end
    if not opts.threads or opts.threads == 0 then opts.threads = core.dist_info().threads end
    local loaded, model, info, code = pcall(require("llmrun.loader").open_here, path, opts)
    local failure = not loaded and tostring(model) or not model and tostring(info) or nil
    local ok, err, kind = core.dist_agree(failure, code, not failure and info.fingerprint or 0)
    if not ok then
        if loaded and model then model:close() end
        return nil, err, kind
    end
    ok, err = core.dist_join(model, id)
    if not ok then core.dist_die("loading", err) end -- out of memory for a few bytes, or a bug
    return model, info
end

--- loader.open on all ranks: called on rank 0.
function M.open(path, opts)
    local o = { path = path }
    for _, k in ipairs(shared) do o[k] = opts[k] end
    if type(o.arch) == "function" then
        return nil, "arch: on several processes it must be a name or a file, since each of them loads it", "unsupported"
    end
    local id, err, code = core.dist_load(cjson.encode(o))
    if not id then return nil, err, code end
    return load_part(id, path, o)
end

--- Is this program run by several processes?
function M.active() return M.on end

local function follow()
    local models = {} -- keeps their files open
    while true do
        local kind, id, text = core.dist_follow()
        if kind == "quit" then break end
        local o = kind == "load" and cjson.decode(text)
        models[id] = o and load_part(id, o.path, o) or nil
    end
    for id in pairs(models) do models[id] = nil end
    return 0
end

--- Joins the run, if there is one. o: M.flags. Returns nothing to go on with the program, or the exit status: of a
--- process that followed to the end, or that can't be part of a run (the reason is printed).
function M.start(o)
    local n = core.dist_launched()
    local wanted = (o.tp or 1) * (o.pp or 1)
    local function fail(status, err)
        io.stderr:write("llmrun: ", err, "\n")
        return status
    end
    if n == 1 then
        if wanted == 1 then return nil end
        return fail(2, ("--tp %d --pp %d needs %d processes: mpirun -n %d llmrun ..."):format(o.tp or 1, o.pp or 1,
            wanted, wanted))
    end
    local ok, err = core.dist_open()
    if not ok then return fail(1, err) end
    local leads = core.dist_info().rank == 0
    local pp = o.pp or (o.tp and n // o.tp) or 1
    ok, err = core.dist_divide(o.tp or n // pp, math.max(pp, 1), o.micro_rows)
    if not ok and leads then return fail(2, err) end
    if leads then
        M.on = true
        return nil
    end
    local good, status = xpcall(follow, debug.traceback)
    if not good then core.dist_die("following rank 0", status) end
    return status
end

return M
