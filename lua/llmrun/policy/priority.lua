--- The more urgent first: requests with a higher priority start earlier, and take the place of running ones with a
--- lower priority if there is no other. When memory runs short the least urgent gives way.

local params = { displace = { true, help = "takes running requests' places; false leaves them alone" } }

local function order(r) return -r.priority end

local function make(options)
    return {
        name = "priority",
        steady = true,
        schedule = function(_, step)
            if options.displace then step:displace(order) end
            step:serve(order)
        end,
        preempt = function(_, step) return step:last(order) end,
    }
end

return { params = params, make = make }
