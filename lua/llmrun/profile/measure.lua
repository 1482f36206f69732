--- Measures what a model's steps cost on this machine: drives its engine through batches of all sizes and takes the
--- time of each step together with what the driver does between steps.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local others = require "llmrun.profile.others"
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
            rows = rows, seqs = seqs, outs = outs, context = context, pairs = pairs_, seconds = seconds, at = begin,
        }
    end
    self.watch:look()
end

function Meter:finish()
    while #self.active > 0 do
        if core.interrupted() then errors.raise("profile", "interrupted", "cancelled") end
        self:step()
    end
end

--- Steps by kind: lists of those with the same rows, sequences and tokens, and contexts that differ by less than a
--- quarter, in the order of the first of each.
function M.kinds(samples)
    local kinds, order = {}, {}
    for _, s in ipairs(samples) do
        local level = math.floor(math.log(s.context + s.pairs + 64) / math.log(1.25))
        local key = ("%d %d %d %d"):format(s.rows, s.seqs, s.outs, level)
        if not kinds[key] then
            kinds[key] = {}
            order[#order + 1] = kinds[key]
        end
        table.insert(kinds[key], s)
    end
    return order
end

--- What is measured, one piece after the other: functions of a meter.
---@param o { max_seqs: integer, longest: integer }
local function pieces_of(o)
    local list = {}
    local beside = math.min(6, o.max_seqs - 1)
    for _, n in ipairs { 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768 } do
        if n < o.longest then
            list[#list + 1] = function(meter) -- a prompt after a pause, and beside decoding rows
                core.sleep(o.pause)
                meter:submit(n, math.min(8, o.longest - n))
                meter:finish()
                for _ = 1, beside do meter:submit(20, 8) end
                for _ = 1, 3 do meter:step() end
                meter:submit(n, 2)
                meter:finish()
            end
        end
    end
    for _, n in ipairs { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128 } do
        if n <= o.max_seqs then
            list[#list + 1] = function(meter)
                for _ = 1, n do meter:submit(16, n <= 4 and 24 or 10) end
                meter:finish()
                if n & n - 1 == 0 and n <= 16 then -- looks back further
                    for _ = 1, n do meter:submit(math.min(o.longest - 16, 1024 // n), 8) end
                    meter:finish()
                end
            end
        end
    end
    return list
end

--- The samples of a designed set of steps, in order: { at, seconds, rows, seqs, outs, context, pairs, others }, the
--- last being how many processors other work had meanwhile. o: max_seqs, longest (tokens of a sequence), repeat, pause
--- (seconds before a prompt), part = { k, n } (only every n-th piece, from the k-th on); progress(fraction).
function M.run(model, o)
    local self = setmetatable({
        model = model, engine = model.engine, samples = {}, active = {}, salt = 0, watch = others.watch(),
    }, Meter)
    local first, every = o.part and o.part[1] or 1, o.part and o.part[2] or 1
    local pieces = pieces_of { max_seqs = o.max_seqs, longest = o.longest, pause = o.pause or 0.1 }
    self.watch:look()
    self:submit(8, 8) -- to warm up
    self:finish()
    self.samples = {}
    for k = 1, o["repeat"] do
        for i = first, #pieces, every do
            pieces[i](self)
            if o.progress then o.progress((k - 1 + i / #pieces) / o["repeat"]) end
        end
    end
    self.watch:look()
    for _, s in ipairs(self.samples) do s.others = self.watch:share(s.at, s.at + s.seconds) end
    return self.samples
end

return M
