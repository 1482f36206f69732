--- Earliest deadline first: requests start, and keep their memory, in the order of their deadlines; those without one
--- come last. A running request with a later deadline gives its place up if there is no other.
---
--- Options: drop = true ends requests whose deadline has passed (what they have generated so far stays with the
--- caller); under overload that is what keeps the others in time. displace = false leaves running requests alone.

local function order(r) return r.deadline end

return function(options)
    return {
        name = "deadline",
        schedule = function(_, step)
            if options.drop then
                local now = step.now
                for _, r in ipairs(step.running) do
                    if r.deadline < now then r:cancel() end
                end
                for _, r in ipairs(step.waiting) do
                    if r.deadline < now then r:cancel() end
                end
            end
            if options.displace ~= false then step:displace(order) end
            step:serve(order)
        end,
        preempt = function(_, step) return step:last(order) end,
    }
end
