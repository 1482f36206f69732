--- Earliest deadline first: requests start, and keep their memory, in the order of their deadlines; those without one
--- come last. A running request with a later deadline gives its place up if there is no other.
--- Under overload `drop` is what keeps the others in time; what dropped requests have generated stays with the caller.

local params = {
    drop = { false, help = "ends requests whose deadline has passed" },
    displace = { true, help = "takes running requests' places; false leaves them alone" },
}

local function order(r) return r.deadline end

local function make(options)
    return {
        name = "deadline",
        steady = not options.drop,
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
            if options.displace then step:displace(order) end
            step:serve(order)
        end,
        preempt = function(_, step) return step:last(order) end,
    }
end

return { params = params, make = make }
