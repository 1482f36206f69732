--- A fair share for every tenant: however many requests one sends, each gets the same amount of work done while it
--- has any waiting. (The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024.)
---
--- Each tenant has a counter of the work it was given: 1 for a prompt token, 2 (`generated`) for a generated one,
--- divided by its weight. Whoever has the lowest counter is served next. A tenant that comes back after a pause starts
--- from the lowest counter of those that are at work, so nobody saves up a right to block the others.

local params = {
    weights = { type = "table", help = "tenant -> share, 1 unless given" },
    generated = { 2, min = 0, max = 1000, search = { 0.25, 16 }, log = true,
        help = "work of a generated token, that of a prompt token being 1" },
}

local function make(options)
    local weights, generated = options.weights or {}, options.generated
    local served = {} -- tenant -> counter
    local active = {} -- tenants with requests, in the last step

    local function charge(counters, tenant, work)
        counters[tenant] = (counters[tenant] or 0) + work / (weights[tenant] or 1)
    end

    --- Tenants that come back catch up with those at work.
    local function catch_up(step)
        local now_active, lowest = {}, nil
        for _, r in ipairs(step.waiting) do now_active[r.tenant] = true end
        for _, r in ipairs(step.running) do now_active[r.tenant] = true end
        for t in pairs(now_active) do
            if active[t] then lowest = math.min(lowest or math.huge, served[t]) end
        end
        for t in pairs(now_active) do
            if not active[t] then served[t] = math.max(served[t] or 0, lowest or 0) end
        end
        active = now_active
    end

    --- The first n in the order in which waiting requests are to start: always the oldest one of the tenant that would
    --- then have had the least.
    local function next_ones(waiting, n)
        local list, counters, queues = {}, {}, {}
        if n == 0 then return list end
        for _, r in ipairs(waiting) do
            local t = r.tenant
            local q = queues[t]
            if not q then
                q = { first = 1 }
                queues[t], counters[t] = q, served[t]
            end
            q[#q + 1] = r
        end
        while #list < n and next(counters) do
            local least
            for t, c in pairs(counters) do
                if not least or c < counters[least] or (c == counters[least] and t < least) then least = t end
            end
            local q = queues[least]
            local r = q[q.first]
            list[#list + 1] = r
            charge(counters, least, r.prompt_tokens)
            q.first = q.first + 1
            if not q[q.first] then counters[least] = nil end
        end
        return list
    end

    return {
        name = "fair",
        steady = true,
        schedule = function(_, step)
            catch_up(step)
            local list = next_ones(step.waiting, step.slots)
            step:serve(list)
            for _, r in ipairs(list) do
                if r.state == "running" and not r.charged then
                    r.charged = true
                    charge(served, r.tenant, r.prompt_tokens)
                end
            end
        end,
        preempt = function(_, step) return step:last(function(r) return served[r.tenant] or 0 end) end,
        token = function(_, r) charge(served, r.tenant, generated) end,
    }
end

return { params = params, make = make }
