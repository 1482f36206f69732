--- The shortest prompt first: lowers the mean time to the first token, since short work does not queue behind long
--- work. So that a long prompt is not put off for ever, each second of waiting makes it count as that much shorter.
---
--- Options: aging = tokens a second (200; 0 = none).

return function(options)
    local aging = options.aging or 200
    local function order(r) return r.pending - aging * r.queue_time end
    return {
        name = "shortest_first",
        schedule = function(_, step) step:serve(order) end,
    }
end
