--- Methods of a step for policies that are "the built-in rule, in another order".
---
--- The rule (src/engine/rule.c tells why): every running request draws its next token; then prompts that have begun
--- go on, and new requests start as long as there is memory for their whole prompt. Prompts are computed one after
--- another: a step begins another one as long as it has fewer than step.prompt_least rows of them, and takes up to
--- step.prompt_rows together; the first that is longer than what is left of these gets half, so that short ones get by
--- it, and what remains goes to those with the least to do.
---
--- An order is a function(request) -> number, least first; those with the same number keep their order of arrival.

local step = require("llmrun.core").policy_step

--- Rows for the next prompt: all of it if there is room, half of what is left for the first that is too long; none if
--- the step has enough.
local function rows_of(p, r)
    local n = r.wants
    if p.fresh <= 0 then return 0 end
    if r.pending <= p.left then return n end
    if p.cut then return 0 end
    p.cut = true
    return math.min(n, (p.left + 1) // 2)
end

--- Runs n rows of it; nil if it can't.
local function run(self, p, r, n)
    local got = self:run(r, n)
    p.left, p.fresh = p.left - (got or 0), p.fresh - (got or 0)
    return got
end

--- Of a list and the least so far: the request with the least to do, and how much that is.
local function least_of(list, may_start, least, todo)
    for _, r in ipairs(list) do
        local n = r.pending - r.granted
        if (not todo or n < todo) and r.wants > 0 and (may_start or r.state == "running") then least, todo = r, n end
    end
    return least, todo
end

--- What is left goes to the prompts that have the least to do: those that run, and those that may start.
local function use_rest(self, p, prompts, waiting)
    while p.left > 0 and (p.cut or p.fresh > 0) do
        local r, n = least_of(prompts, false)
        if self.slots > 0 then r = least_of(waiting, true, r, n) end
        if not r or (run(self, p, r, p.left) or 0) == 0 then return end
    end
end

--- The prompts among the requests that run; all others draw their next token.
local function running_prompts(self)
    local prompts, running = {}, self.running
    for i = 1, #running do
        local r = running[i]
        local n = r.pending
        if n == 1 or r.writing then
            self:run(r, n)
        else
            prompts[#prompts + 1] = r
        end
    end
    return prompts
end

--- Starts waiting requests in order, as long as there is memory for a whole one. Adds them to prompts; returns those
--- that it looked at and that did not start.
local function start_waiting(self, p, prompts, waiting)
    local rest = {}
    for i = 1, math.min(#waiting, self.slots + self.active) do
        local r = waiting[i]
        if p.left <= 0 or self.slots <= 0 or p.fresh <= 0 and not p.cut then break end
        if not self:fits(r) and self.active > 0 then break end
        local n = rows_of(p, r)
        if n > 0 and not run(self, p, r, n) then break end
        local list = n > 0 and prompts or rest
        list[#list + 1] = r
    end
    return rest
end

--- The rule. order: of requests (a function), or the list of those that may start, in order; without it, by arrival.
---@param order? function|table
function step:serve(order)
    local prompts = running_prompts(self)
    if #prompts == 0 and (self.slots <= 0 or #self.waiting == 0) then return end
    if type(order) == "function" and #prompts > 1 then prompts = self:sorted(prompts, order) end
    local p = { left = math.min(self.prompt_rows, self.budget), fresh = self.prompt_least, cut = false }
    for _, r in ipairs(prompts) do
        if p.left <= 0 then return end
        local n = r.state == "running" and rows_of(p, r) or 0
        if n > 0 then run(self, p, r, n) end
    end
    if p.left <= 0 then return end
    local waiting = type(order) == "table" and order or self.waiting
    if type(order) == "function" and self.slots > 0 then waiting = self:sorted(waiting, order) end
    use_rest(self, p, prompts, start_waiting(self, p, prompts, waiting))
end

--- The running request that an order puts last: who gives way. The youngest of equals; nil if none runs.
---@param order function
function step:last(order)
    local last, most
    for _, r in ipairs(self.running) do
        if r.state == "running" then
            local n = order(r)
            if not most or n >= most then last, most = r, n end
        end
    end
    return last
end

--- Makes room for the first of the waiting requests, if it has none: running ones that the order puts behind it give
--- way.
---@param order function
---@param how? "recompute"|"swap"
function step:displace(order, how)
    local first, least
    for _, r in ipairs(self.waiting) do
        local n = order(r)
        if not least or n < least then first, least = r, n end
    end
    while first and (self.slots == 0 or not self:fits(first)) do
        local last = self:last(order)
        if not last or order(last) <= least then return end
        self:preempt(last, how)
    end
end

return step
