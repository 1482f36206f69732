--- What a simulation adds up: latencies, goodput, shares of tenants, and the time line.

local errors = require "llmrun.errors"

local M = {}

local Results = {}
Results.__index = Results

local function new_tenant()
    return {
        requests = 0, ttft = {}, tpot = {}, e2e = {}, output_tokens = 0, work = 0, inside = 0, busy = 0,
        since = 0, due = 0, met = 0,
    }
end

---@param o { slo: table, rows: boolean, sample: number|nil }
function M.new(o)
    return setmetatable({
        slo = o.slo or {}, records = o.rows and {} or nil, ttft = {}, tpot = {}, e2e = {}, tenants = {},
        requests = 0, finished = 0, failed = 0, good = 0, prompt_tokens = 0, cached_tokens = 0, output_tokens = 0,
        preemptions = 0, last_end = 0, due = 0, met = 0, timeline = {},
        every = o.sample or 1, next_sample = 0, fixed = o.sample ~= nil,
    }, Results)
end

function Results:tenant(row)
    local name = row.tenant or ""
    local t = self.tenants[name]
    if not t then
        t = new_tenant()
        self.tenants[name] = t
    end
    return t
end

--- A request arrives.
function Results:arrive(row, at)
    self.requests = self.requests + 1
    local t = self:tenant(row)
    t.requests = t.requests + 1
    if row.deadline then self.due, t.due = self.due + 1, t.due + 1 end
    if t.inside == 0 then t.since = at end
    t.inside = t.inside + 1
end

local function leave(t, at)
    t.inside = t.inside - 1
    if t.inside == 0 then t.busy = t.busy + math.max(0, at - t.since) end
end

--- A request was refused, or failed. why: for its record.
function Results:fail(row, at, why)
    self.failed = self.failed + 1
    leave(self:tenant(row), at)
    if self.records then
        self.records[#self.records + 1] = { number = row.number, at = row.at, tenant = row.tenant, failed = why }
    end
end

--- A request has ended well: what fleet:next gave.
function Results:finish(row, replica, first, last, ended, cached, generated, preempted)
    local ttft, e2e = first - row.at, ended - row.at
    local tpot = generated > 1 and (last - first) / (generated - 1) or nil
    local t, slo = self:tenant(row), self.slo
    self.finished = self.finished + 1
    self.ttft[#self.ttft + 1], self.e2e[#self.e2e + 1] = ttft, e2e
    t.ttft[#t.ttft + 1], t.e2e[#t.e2e + 1] = ttft, e2e
    if tpot then
        self.tpot[#self.tpot + 1] = tpot
        t.tpot[#t.tpot + 1] = tpot
    end
    local late = row.deadline and e2e > row.deadline
    if row.deadline and not late then self.met, t.met = self.met + 1, t.met + 1 end
    local good = ttft <= (slo.ttft or math.huge) and (tpot or 0) <= (slo.tpot or math.huge)
    if good then self.good = self.good + 1 end
    self.prompt_tokens, self.cached_tokens = self.prompt_tokens + row.prompt, self.cached_tokens + cached
    self.output_tokens = self.output_tokens + generated
    self.preemptions = self.preemptions + preempted
    t.output_tokens = t.output_tokens + generated
    t.work = t.work + row.prompt + 2 * generated -- as policy/fair.lua weighs them
    leave(t, ended)
    if ended > self.last_end then self.last_end = ended end
    if self.records then
        self.records[#self.records + 1] = {
            number = row.number, at = row.at, replica = replica, ttft = ttft, tpot = tpot, e2e = e2e,
            prompt = row.prompt, cached = cached, output = generated, preempted = preempted, tenant = row.tenant,
            session = row.session, good = good, late = late,
        }
    end
end

--- A point of the time line. Without a fixed distance it is kept below 512 points, by doubling the distance.
function Results:sample(at, running, waiting, used, total)
    local line = self.timeline
    if #line >= 1e6 then
        errors.raise("simulate", ("a point each %g s makes more than a million: more seconds between them are needed")
            :format(self.every))
    end
    line[#line + 1] = { t = at, running = running, waiting = waiting, kv = total > 0 and used / total or 0 }
    if not self.fixed and #line >= 512 then
        for i = 1, #line // 2 do line[i] = line[2 * i - 1] end
        for i = #line, #line // 2 + 1, -1 do line[i] = nil end
        self.every = self.every * 2
    end
    self.next_sample = line[#line].t + self.every
end

local quantile = require("llmrun.statistics").quantile
local tables = require("llmrun.tables")

--- { mean, p50, p90, p99, max } of a list of seconds, which is sorted.
local function summary(list)
    if #list == 0 then return { n = 0 } end
    table.sort(list)
    local sum = 0
    for _, v in ipairs(list) do sum = sum + v end
    return { n = #list, mean = sum / #list, p50 = quantile(list, 0.5), p90 = quantile(list, 0.9),
        p99 = quantile(list, 0.99), max = list[#list] }
end

--- Requests that had a deadline, and the share of them that ended in time; nil if none had one.
local function deadlines(t) return t.due > 0 and { requests = t.due, met = t.met / t.due } or nil end

--- Jain's index of a list: 1 = all equal, 1 / n = one has all.
local function jain(list)
    local sum, squares = 0, 0
    for _, v in ipairs(list) do sum, squares = sum + v, squares + v * v end
    return squares > 0 and sum * sum / (#list * squares) or 1
end

function Results:of_tenants()
    local out, rates, all = {}, {}, 0
    for _, t in pairs(self.tenants) do all = all + t.work end
    for _, name in ipairs(tables.sorted_keys(self.tenants)) do
        local t = self.tenants[name]
        if t.busy > 0 then rates[#rates + 1] = t.work / t.busy end
        out[name] = {
            requests = t.requests, ttft = summary(t.ttft), tpot = summary(t.tpot), e2e = summary(t.e2e),
            output_tokens = t.output_tokens, share = all > 0 and t.work / all or 0,
            service = t.busy > 0 and t.work / t.busy or 0, deadlines = deadlines(t),
        }
    end
    return out, jain(rates)
end

--- The table that simulate.run returns, but for what only the fleet knows.
function Results:report(seconds)
    local tenants, fairness = self:of_tenants()
    local s = seconds > 0 and seconds or 1
    return {
        requests = self.requests, finished = self.finished, failed = self.failed, seconds = seconds,
        prompt_tokens = self.prompt_tokens, output_tokens = self.output_tokens,
        tokens_per_s = self.output_tokens / s, requests_per_s = self.finished / s,
        ttft = summary(self.ttft), tpot = summary(self.tpot), e2e = summary(self.e2e),
        goodput = self.requests > 0 and self.good / self.requests or 0, goodput_per_s = self.good / s,
        hit_rate = self.prompt_tokens > 0 and self.cached_tokens / self.prompt_tokens or 0,
        preemptions = self.preemptions, tenants = tenants, fairness = fairness, timeline = self.timeline,
        records = self.records, deadlines = deadlines(self),
    }
end

return M
