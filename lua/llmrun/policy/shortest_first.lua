--- The shortest prompt first: lowers the mean time to the first token, since short work does not queue behind long
--- work. So that a long prompt is not put off for ever, each second of waiting makes it count as that much shorter.

local params = {
    aging = { 200, min = 0, search = { 1, 20000 }, log = true,
        help = "tokens by which a prompt counts as shorter for each second of waiting" },
}

local function make(options)
    local aging = options.aging
    local function order(r) return r.pending - aging * r.queue_time end
    return {
        name = "shortest_first",
        steady = true,
        schedule = function(_, step) step:serve(order) end,
    }
end

return { params = params, make = make }
