--- Methods of a step for policies that are "the built-in rule, in another order".
---
--- The rule: every running request draws its next token; then prompts that have begun go on, and new requests start
--- as long as their whole prompt finds room, each with at most half of the rows that are left (so that a short prompt
--- gets by a long one); what remains goes to unfinished prompts in the same order.
---
--- An order is a function(request) -> number, least first; those with the same number keep their order of arrival.

local step = require("llmrun.core").policy_step

local function share(self) return math.max(64, self.budget // 2) end

--- The rule. order: of requests (a function), or the list of those that may start, in order; without it, by arrival.
---@param order? function|table
function step:serve(order)
    local prompts = {}
    local running = self.running
    for i = 1, #running do
        local r = running[i]
        if r.pending > 1 then
            prompts[#prompts + 1] = r
        else
            self:run(r, 1)
        end
    end
    if type(order) == "function" and #prompts > 1 then prompts = self:sorted(prompts, order) end
    local unfinished = {}
    for _, r in ipairs(prompts) do
        if self.budget <= 0 then return end
        if self:run(r, share(self)) then unfinished[#unfinished + 1] = r end
    end
    if self.slots > 0 and self.budget > 0 then
        local waiting = order
        if type(order) ~= "table" then waiting = self.waiting end
        if type(order) == "function" then waiting = self:sorted(waiting, order) end
        for _, r in ipairs(waiting) do
            if self.budget <= 0 or self.slots <= 0 then break end
            if self.active > 0 and not self:fits(r) then break end
            if not self:run(r, share(self)) then break end
            unfinished[#unfinished + 1] = r
        end
    end
    for _, r in ipairs(unfinished) do
        if self.budget <= 0 then return end
        local granted = r.granted
        if granted > 0 and granted < r.pending then self:run(r) end
    end
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
