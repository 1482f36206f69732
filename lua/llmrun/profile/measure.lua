--- Measures what a model's steps cost on this machine: drives its engine through batches of all sizes and takes the
--- time of each step together with what the driver does between steps.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local sample_tokens = require "llmrun.sample_tokens"

local M = {}

local Meter = {}
Meter.__index = Meter

function Meter:submit(n_prompt, n_output)
    self.salt = self.salt + 1
    local seq = errors.check("profile", self.engine:seq())
    errors.check("profile", seq:append(sample_tokens(self.model, n_prompt, self.salt)))
    local request = errors.check("profile", self.engine:request(seq, {
        kind = "generate", max_tokens = n_output, ignore_eos = true, stages = { { "temperature", 0 } },
    }))
    self.active[#self.active + 1] = { request = request, seq = seq }
end

--- One step, and its sample.
function Meter:step()
    local begin = core.now()
    errors.check("profile", self.engine:step())
    while self.engine:next_event() do end
    local kept = {}
    for _, job in ipairs(self.active) do
        if job.request:active() then
            kept[#kept + 1] = job
        else
            job.request:close()
            job.seq:close()
        end
    end
    self.active = kept
    local seconds = core.now() - begin
    local rows, seqs, outs, context, pairs_ = self.engine:last_load()
    if rows > 0 then
        self.samples[#self.samples + 1] = {
            rows = rows, seqs = seqs, outs = outs, context = context, pairs = pairs_, seconds = seconds,
        }
    end
end

function Meter:finish()
    while #self.active > 0 do
        if core.interrupted() then errors.raise("profile", "interrupted", "cancelled") end
        self:step()
    end
end

--- Steps of one kind become one: the median time, the mean context. A kind: the same rows, sequences and tokens, and
--- contexts that differ by less than a quarter.
function M.merge(samples)
    local kinds, order = {}, {}
    for _, s in ipairs(samples) do
        local level = math.floor(math.log(s.context + s.pairs + 64) / math.log(1.25))
        local key = ("%d %d %d %d"):format(s.rows, s.seqs, s.outs, level)
        if not kinds[key] then
            kinds[key] = {}
            order[#order + 1] = key
        end
        table.insert(kinds[key], s)
    end
    local out = {}
    for i, key in ipairs(order) do
        local list, context, pairs_ = kinds[key], 0, 0
        table.sort(list, function(a, b) return a.seconds < b.seconds end)
        for _, s in ipairs(list) do context, pairs_ = context + s.context, pairs_ + s.pairs end
        local s = list[1]
        out[i] = {
            rows = s.rows, seqs = s.seqs, outs = s.outs, context = context / #list, pairs = pairs_ / #list,
            seconds = list[(#list + 1) // 2].seconds, n = #list,
        }
    end
    return out
end

--- The samples of a designed set of steps. o: max_seqs, longest (tokens of a sequence), repeat; progress(fraction).
function M.run(model, o)
    local self = setmetatable({ model = model, engine = model.engine, samples = {}, active = {}, salt = 0 }, Meter)
    local decodes, prompts = {}, {}
    for _, n in ipairs { 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128 } do
        if n <= o.max_seqs then decodes[#decodes + 1] = n end
    end
    for _, n in ipairs { 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768 } do
        if n < o.longest then prompts[#prompts + 1] = n end
    end
    local done, all = 0, o["repeat"] * (2 * #decodes + 2 * #prompts)
    local function count()
        done = done + 1
        if o.progress then o.progress(done / all) end
    end
    self:submit(8, 8) -- to warm up
    self:finish()
    self.samples = {}
    for _ = 1, o["repeat"] do
        for _, n in ipairs(prompts) do -- alone, and beside decoding rows
            self:submit(n, 1)
            self:finish()
            count()
            for _ = 1, math.min(6, o.max_seqs - 1) do self:submit(20, 8) end
            for _ = 1, 3 do self:step() end
            self:submit(n, 2)
            self:finish()
            count()
        end
        for _, n in ipairs(decodes) do
            for _ = 1, n do self:submit(16, 10) end
            self:finish()
            count()
            if n & n - 1 == 0 and n <= 16 then -- looks back further
                for _ = 1, n do self:submit(math.min(o.longest - 16, 1024 // n), 8) end
                self:finish()
            end
            count()
        end
    end
    return self.samples
end

return M
