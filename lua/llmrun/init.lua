--- require "llmrun": what programs use. See lua/README.md.

local best = require "llmrun.best"
local branch = require "llmrun.branch"
local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local options = require "llmrun.options"

---@class llmrun
local llm = {
    version = "0.1.0",
    spawn = branch.spawn,
    all = branch.all,
    any = branch.any,
    race = branch.race,
    map = branch.map,
    first_valid = best.first_valid,
    best_of = best.best_of,
    sleep = branch.sleep,
    timeout = branch.timeout,
    Error = errors.Error,
}

--- Runs fn(...) as a program, where nothing else does: in a Lua that is not llmrun's, by `require "llmrun"` of the
--- module llmrun.so. Calls that wait for a model must be inside. Returns what fn returns; raises its error, or
--- "interrupted" after Ctrl-C. In a program of llmrun's, or inside another run, it just calls fn.
---@param fn function
---@return any ...
function llm.run(fn, ...)
    if type(fn) ~= "function" then error("llm.run: function expected, got " .. type(fn), 2) end
    if loop.current() then return fn(...) end
    if loop.running then errors.raise("llm.run", "a hook can't begin a run inside of another", "state") end
    local core = require "llmrun.core"
    local restore = require("llmrun.yieldable").install()
    core.catch_interrupts "stop"
    local results = table.pack(loop.run(fn, ...))
    core.catch_interrupts "before"
    restore()
    if results[1] == "done" then return table.unpack(results, 2, results.n) end
    if results[1] == "interrupted" then error("interrupted", 0) end
    error(type(results[3]) == "table" and results[3] or results[2], 0)
end

--- Loads a model: a GGUF file, a folder with one, or a name that scripts/fetch_model knows.
---   device ("auto", "cpu", "cuda:0"), threads (0 = all), isa, compute ("fast"; "int8": activations of
---   8 bits; "bf16": needs AMX; "f32": the exact reference path; "loose": GPUs, cuBLAS for many rows)
---   arch: name, file or function of the layer graph; allow_unused: load although it leaves tensors unused
---   ctx: longest sequence; kv = { memory = 0.9 | bytes, blocks = n | "auto", type = "f16", block_size = 16,
---     prefix_cache = true, spill = "folder", spill_bytes = n }; max_batch_tokens, max_seqs, chunk, prompt_rows,
---     preempt, swap_bytes, max_pinned
---   policy: who runs when, see policy.lua
---   template: a chat template in place of the model's, Jinja text or a function
---@param name string
---@param opts? llmrun.LoadOptions
---@return llmrun.Model
function llm.load(name, opts)
    if type(name) ~= "string" then errors.raise("llm.load", "a file or a model's name expected, got " .. type(name)) end
    local models = require "llmrun.model"
    options.check("llm.load", opts, models.load_options, 2)
    local o = {}
    for k, v in pairs(opts or {}) do o[k] = v end
    if o.device == "auto" then o.device = nil end
    if o.compute == "fast" then o.compute = nil end
    local modes = { fast = true, int8 = true, bf16 = true, f32 = true, loose = true }
    if o.compute and not modes[o.compute] then
        errors.raise("llm.load", "compute: \"fast\", \"int8\", \"bf16\", \"f32\" or \"loose\" expected")
    end
    local path = errors.check("llm.load", require("llmrun.catalog").find(name))
    local core_model, info = errors.check("llm.load", require("llmrun.loader").open(path, o))
    info.default_kv_type = o.compute == "f32" and "f32" or nil
    return models.new("llm.load", core_model, o, info)
end

--- Serves models and programs over HTTP, with the OpenAI API: see serve.lua.
---@param opts llmrun.ServeOptions
function llm.serve(opts) return require("llmrun.serve").run(opts) end

--- A model whose tokens a function gives, { vocab =, next = function(tokens) ... }: see scripted.lua.
---@param opts table
---@return llmrun.Model
function llm.scripted(opts) return require("llmrun.scripted").new(opts) end

--- Puts the policy of a file in charge of a model's engine, and again whenever the file changes: see policy.lua.
---@param model llmrun.Model
---@param path string
---@param opts? table
function llm.watch(model, path, opts) return model:watch(path, opts) end

--- A chain of sampling stages: see sampler.lua.
---@param stages table
---@return llmrun.Sampler
function llm.sampler(stages) return require("llmrun.sampler").new(stages) end

--- A model that calls tools until it has an answer: see agent.lua.
---@param opts llmrun.AgentOptions
---@return llmrun.Agent
function llm.agent(opts) return require("llmrun.agent").new(opts) end

--- Runs a program beside the engine and waits for its end: see exec.lua.
---@param command string[]|string
---@param opts? table
---@return table? result, string? err, string? code
function llm.exec(command, opts) return require("llmrun.exec").exec(command, opts) end

--- Runs a program of a stranger's, within limits: see sandbox.lua.
---@param source string
---@param opts? table
---@return table? result, string? err, string? code
function llm.sandbox(source, opts) return require("llmrun.sandbox").run(source, opts) end

--- HTTP requests: see http.lua. Loaded when first used.
llm.http = setmetatable({}, { __index = function(_, key) return require("llmrun.http")[key] end })

--- A memory of token texts, for functions that draft: see spec.lua.
---@param max_tokens? integer
---@return llmrun.Memory
function llm.memory(max_tokens) return require("llmrun.spec").memory(max_tokens) end

--- Sets the seed from which those of later requests follow (each request without one gets its own).
---@param n integer
function llm.seed(n) require("llmrun.seeds").set(n) end

return llm
