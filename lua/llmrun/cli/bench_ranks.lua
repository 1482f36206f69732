--- llmrun bench on several processes: the share of exchanges and bubbles in a step.

local M = {}

--- What a model on several ranks did between two readings of stats().ranks: fields for a record and a line.
function M.share(before, after)
    if not after then return nil end
    local d = {}
    for _, k in ipairs { "passes", "micro_batches", "gathers", "gather_bytes", "forward_seconds", "gather_seconds",
        "busy_seconds" } do
        d[k] = after[k] - before[k]
    end
    if d.passes == 0 then return nil end
    local share = {
        tp = after.tp, pp = after.pp,
        gather_share = d.gather_seconds / d.forward_seconds,
        bubble_share = after.pp > 1 and math.max(0, 1 - d.busy_seconds / (after.pp * d.forward_seconds)) or nil,
    }
    local line = ("tp %d, pp %d: exchanges %.1f %% of a step"):format(after.tp, after.pp, 100 * share.gather_share)
    if share.bubble_share then
        line = ("%s, bubbles %.1f %% (%.1f micro-batches a step)"):format(line, 100 * share.bubble_share,
            d.micro_batches / d.passes)
    end
    return share, line
end

return M
