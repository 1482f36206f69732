--- Multi-level feedback: short work gets through quickly though nobody says which work is short.
---
--- A request starts on the level that its prompt's length deserves, and falls one level each time the work done for
--- it doubles. Lower levels are served first, and take the place of running requests on higher ones, which keep what
--- they computed in host memory. Who has waited too long begins anew: the work done so far is forgotten.

local params = {
    quantum = { 64, min = 1, max = 1 << 20, search = { 8, 65536 }, integer = true, log = true,
        help = "tokens of work on the first level" },
    levels = { 6, min = 1, max = 20, search = { 2, 10 }, integer = true, help = "how many there are" },
    patience = { 10, min = 0, search = { 0.5, 100 }, log = true,
        help = "seconds of waiting after which a request begins anew" },
}

local function make(options)
    local quantum, levels, patience = options.quantum, options.levels, options.patience
    local looked = 0 -- when, after who has waited too long

    local function find_level(r)
        local work = r.prompt_tokens + r.generated_tokens - (r.forgiven or 0)
        local n = 0
        while work > quantum << n and n < levels - 1 do n = n + 1 end
        r.level = n
        return n
    end

    local function level(r) return r.level or find_level(r) end

    local function forgive(r)
        if r.queue_time - (r.waited or 0) > patience then
            r.waited, r.forgiven = r.queue_time, r.prompt_tokens + r.generated_tokens
            find_level(r)
        end
    end

    return {
        name = "mlfq",
        steady = true,
        schedule = function(_, step)
            if step.now - looked > patience / 10 then
                looked = step.now
                for _, r in ipairs(step.waiting) do forgive(r) end
            end
            for _, r in ipairs(step.running) do find_level(r) end
            step:displace(level, "swap")
            step:serve(level)
        end,
        preempt = function(_, step) return step:last(level), "swap" end,
    }
end

return { params = params, make = make }
