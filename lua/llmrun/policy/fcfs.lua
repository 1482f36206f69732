--- First come, first served: decides as the built-in rule does, and is the plainest policy there is.

local function make()
    return {
        name = "fcfs",
        steady = true,
        schedule = function(_, step) step:serve() end,
    }
end

return { params = {}, make = make }
