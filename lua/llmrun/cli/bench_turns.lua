--- Two sides that decode the same requests in one engine, in short turns: what else the machine does, and how fast its
--- memory is at the time, hits both alike.
---
--- Each side has a copy of every request. A policy lets one side run until it is some tokens ahead, then the other one
--- as far; the order of the two changes from pair to pair of turns (1 2, 2 1, 1 2 ...), so that a machine that becomes
--- slower or faster favours neither. A side's time is that of its own steps from its first token on, and what making
--- drafts took before that (a draft model's own prompt). All of it: a turn that took long for what the side did counts,
--- so sums are compared, and not medians of turns.
---
--- Between the copies nothing is shared: each side of each round has a namespace of its own, so none finds the other
--- one's prompts, nor what a draft model made of them.

local core = require "llmrun.core"

local M = {}

local Turns = {}
Turns.__index = Turns

--- Of two sides, the one whose turn it is; nil if neither has requests. `has`: which sides do.
local function pick(w, has)
    while has[1] or has[2] do
        local first = w.pair % 2 == 1 and 1 or 2
        for _, side in ipairs { first, 3 - first } do
            if has[side] and w[side].count < w.goal then return side end
        end
        w:end_pair()
    end
end

--- Both had a turn.
function Turns:end_pair()
    local a, b = self[1], self[2]
    if a.turn.tokens > 0 and b.turn.tokens > 0 then -- else they are of the first tokens, and part of the next ones
        self.pairs[#self.pairs + 1] = { a.turn, b.turn }
        a.turn, b.turn = { time = 0, tokens = 0 }, { time = 0, tokens = 0 }
    end
    self.pair, self.goal = self.pair + 1, self.goal + self.stride
end

--- The step that was under way has ended: it is its side's, if that had a token before; else its drafts are.
function Turns:charge(now)
    local s = self.side and self[self.side]
    self.side = nil
    if not s then return end
    if s.before == 0 then
        s.beside = s.beside + self.drafting()
        return
    end
    local time, tokens = now - self.since, s.count - s.before
    s.time, s.tokens = s.time + time, s.tokens + tokens
    s.turn.time, s.turn.tokens = s.turn.time + time, s.turn.tokens + tokens
end

function Turns:schedule(step)
    self:charge(self.now())
    local has, mine = { false, false }, { {}, {} }
    for _, list in ipairs { step.running, step.waiting } do
        for _, r in ipairs(list) do
            has[r.tag] = true
            table.insert(mine[r.tag], r)
        end
    end
    local side = pick(self, has)
    if not side then return end
    if self.on_side then self.on_side(side) end
    self.side, self[side].before, self.since = side, self[side].count, self.now()
    for _, r in ipairs(mine[side]) do step:run(r) end
end

function Turns:token(r)
    local s = self[r.tag]
    s.count = s.count + 1
end

--- Runs start(side, i), i = 1..n, of both sides, each in a task: it makes request i with tag = side, and waits for it.
--- o: n; stride (tokens a turn, of all requests of a side); on_side(side), before each step; now, a clock. Returns the
--- sides, each { time, tokens, beside = time of drafts before the first token }, and the pairs of turns, each
--- { { time, tokens }, { time, tokens } }.
function M.run(llm, model, o, start)
    local w = setmetatable({
        pair = 1, goal = o.n, stride = o.stride, on_side = o.on_side, now = o.now or core.now, pairs = {},
        drafting = function() return model.engine:drafting() end,
    }, Turns)
    for side = 1, 2 do
        w[side] = { count = 0, before = 0, beside = 0, time = 0, tokens = 0, turn = { time = 0, tokens = 0 } }
    end
    local jobs = {}
    for i = 1, o.n do
        for side = 1, 2 do jobs[#jobs + 1] = { side, i } end
    end
    model:use({
        name = "turns", schedule = function(_, step) w:schedule(step) end, token = function(_, r) w:token(r) end,
    }, nil, { seconds = 1 })
    local ok, err = pcall(llm.map, jobs, function(job) start(job[1], job[2]) end)
    w:charge(w.now())
    w:end_pair()
    local failed = model.policy_status.last_error
    model:use(nil)
    if not ok then error(err, 0) end
    if failed then error(failed, 0) end
    return { w[1], w[2] }, w.pairs
end

--- How many times as fast the second side is, of rounds (lists of { sides, pairs } as M.run returns them); the standard
--- error of that, from how much pairs of turns differ; and tokens a second of both.
function M.ratio(rounds)
    local time, beside, tokens = { 0, 0 }, { 0, 0 }, { 0, 0 }
    for _, r in ipairs(rounds) do
        for side, s in ipairs(r.sides) do
            time[side], beside[side] = time[side] + s.time, beside[side] + s.beside
            tokens[side] = tokens[side] + s.tokens
        end
    end
    local sum, n = 0, 0
    for _, r in ipairs(rounds) do
        for _, p in ipairs(r.pairs) do
            local off = {}
            for side = 1, 2 do off[side] = p[side].time / time[side] - p[side].tokens / tokens[side] end
            sum, n = sum + (off[1] - off[2]) ^ 2, n + 1
        end
    end
    local rates = { tokens[1] / (time[1] + beside[1]), tokens[2] / (time[2] + beside[2]) }
    local by = rates[2] / rates[1]
    return by, n > 1 and by * math.sqrt(sum * n / (n - 1)) or 0, rates
end

return M
