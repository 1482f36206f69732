--- First come, first served: decides as the built-in rule does, and is the plainest policy there is.

return function()
    return {
        name = "fcfs",
        schedule = function(_, step) step:serve() end,
    }
end
