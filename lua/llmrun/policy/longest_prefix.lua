--- The longest cached prefix first: requests whose prompt the cache holds run while it still does, so more is reused.
---
--- Of new prompts that begin alike only the first starts; the others wait until it has computed what they share. With
--- many waiting requests the search would cost more than it saves, and arrival decides. (SGLang's "lpm" goes by these
--- rules.)

local params = {
    alike = { 32, min = 1, search = { 8, 1024 }, integer = true, log = true,
        help = "tokens that two prompts share to count as alike" },
    many = { 128, min = 0, search = { 16, 1024 }, integer = true, log = true,
        help = "waiting requests above which arrival decides" },
}

local function make(options)
    local alike, many = options.alike, options.many

    local function order(r)
        r.known = r:prefix()
        return -r.known
    end

    return {
        name = "longest_prefix",
        steady = true,
        schedule = function(_, step)
            if step.slots == 0 or #step.waiting > many then return step:serve() end
            local computing = {} -- beginnings of prompts that are being computed
            for _, r in ipairs(step.running) do
                if r.pending > 1 then computing[r:head(alike)] = true end
            end
            local start = {}
            for _, r in ipairs(step:sorted(step.waiting, order)) do
                local new = r.known < alike and r.prompt_tokens > alike
                local head = new and r:head(alike)
                if not new or not computing[head] then start[#start + 1] = r end
                if new then computing[head] = true end
            end
            step:serve(start)
        end,
    }
end

return { params = params, make = make }
