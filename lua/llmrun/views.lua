--- What an engine is doing, as text for a console: queue, batch, blocks, the prefix tree, metrics. Between steps; each
--- looks at everything that it shows.

local core = require "llmrun.core"

local M = {}

--- Rows of equal keys as columns. columns: { { key, title } ... }; numbers go to the right.
function M.columns(rows, columns, most)
    local widths, lines, n = {}, {}, math.min(#rows, most or 200)
    local cells = {}
    for c, col in ipairs(columns) do widths[c] = #col[2] end
    for i = 1, n do
        cells[i] = {}
        for c, col in ipairs(columns) do
            local v = rows[i][col[1]]
            local text = v == nil and "" or math.type(v) == "float" and ("%.3f"):format(v) or tostring(v)
            text = text:gsub("[%c\127]", "?") -- tenants' names come from outside
            cells[i][c] = { text, type(v) == "number" }
            widths[c] = math.max(widths[c], utf8.len(text) or #text)
        end
    end
    local function line(get)
        local parts = {}
        for c in ipairs(columns) do
            local text, right = get(c)
            local pad = (" "):rep(widths[c] - (utf8.len(text) or #text))
            parts[c] = right and pad .. text or text .. pad
        end
        return (table.concat(parts, "  "):gsub("%s+$", ""))
    end
    lines[1] = line(function(c) return columns[c][2], n > 0 and cells[1][c][2] end)
    for i = 1, n do lines[#lines + 1] = line(function(c) return cells[i][c][1], cells[i][c][2] end) end
    if #rows > n then lines[#lines + 1] = ("... and %d more"):format(#rows - n) end
    return table.concat(lines, "\n")
end

local function sequences(engine)
    local list = core.look(engine, { blocks = 0, sequences = 100000 }).sequences
    for _, s in ipairs(list) do s.held = #s.blocks end
    table.sort(list, function(a, b) return (a.request or a.id) < (b.request or b.id) end)
    return list
end

local function of_state(engine, state)
    local list = {}
    for _, s in ipairs(sequences(engine)) do
        if s.state == state then list[#list + 1] = s end
    end
    return list
end

local request_columns = {
    { "request", "request" }, { "tenant", "tenant" }, { "priority", "prio" }, { "prompt", "prompt" },
    { "cached", "cached" }, { "generated", "drawn" }, { "pending", "pending" }, { "held", "blocks" },
    { "preempted", "preempted" }, { "len", "length" },
}

--- Requests that wait.
function M.queue(engine)
    local list = of_state(engine, "waiting")
    if #list == 0 then return "nobody waits" end
    return ("%d wait\n%s"):format(#list, M.columns(list, request_columns))
end

--- Requests that run.
function M.batch(engine)
    local list = of_state(engine, "running")
    if #list == 0 then return "nobody runs" end
    return ("%d run\n%s"):format(#list, M.columns(list, request_columns))
end

--- KV blocks: how many, and who holds most.
function M.blocks(engine)
    local info, lines = engine:info(), {}
    for g, kv in ipairs(info.kv) do
        local words = "group %d: %d blocks of %d tokens: %d used, %d cached, %d free; evicted %d, copied %d"
        lines[#lines + 1] = words:format(g, kv.total, info.block_size, kv.used, kv.cached, kv.free, kv.evicted,
            kv.copied)
    end
    lines[#lines + 1] = ("pinned %d, swapped %d bytes"):format(info.pinned, info.swapped)
    local list = {}
    for _, s in ipairs(sequences(engine)) do
        if s.held > 0 then list[#list + 1] = s end
    end
    table.sort(list, function(a, b) return a.held > b.held or (a.held == b.held and a.id < b.id) end)
    if #list > 0 then
        lines[#lines + 1] = M.columns(list, {
            { "id", "sequence" }, { "state", "state" }, { "request", "request" }, { "len", "length" },
            { "computed", "computed" }, { "held", "blocks" },
        }, 20)
    end
    return table.concat(lines, "\n")
end

--- The prefix tree: one line a chain of blocks without branches.
function M.tree(engine, most)
    local look = core.look(engine, { blocks = 1 << 20, sequences = 0 })
    local children, by_block, roots = {}, {}, {}
    for _, b in ipairs(look.blocks) do
        if b.depth then by_block[b.block] = b end
    end
    for _, b in ipairs(look.blocks) do
        if b.depth then
            local list = by_block[b.parent] and (children[b.parent] or {}) or roots
            if list ~= roots then children[b.parent] = list end
            list[#list + 1] = b
        end
    end
    if #roots == 0 then return "the tree is empty" end
    local lines, left = {}, most or 60
    local function walk(list, indent)
        table.sort(list, function(a, b) return a.hits > b.hits or (a.hits == b.hits and a.block < b.block) end)
        for _, b in ipairs(list) do
            local n, refs, last = 1, b.refs, b
            while #(children[last.block] or {}) == 1 do
                last = children[last.block][1]
                n, refs = n + 1, math.max(refs, last.refs)
            end
            left = left - 1
            if left >= 0 then
                lines[#lines + 1] = ("%sblock %d%s, depth %d, %d hits, held by %d"):format(indent, b.block,
                    n > 1 and (" to %d (%d blocks)"):format(last.block, n) or "", last.depth, b.hits, refs)
            end
            if children[last.block] then walk(children[last.block], indent .. "  ") end
        end
    end
    walk(roots, "")
    if left < 0 then lines[#lines + 1] = ("... and %d more"):format(-left) end
    return table.concat(lines, "\n")
end

--- Counters and times.
function M.metrics(engine)
    local m, lines = engine:metrics(), {}
    local names = {}
    for name, v in pairs(m) do
        if type(v) == "number" then names[#names + 1] = name end
    end
    table.sort(names)
    for _, name in ipairs(names) do
        if m[name] ~= 0 then lines[#lines + 1] = ("%-24s %s"):format(name, m[name]) end
    end
    local rows = {}
    for _, name in ipairs { "ttft", "tpot", "itl", "queue", "e2e", "step", "hook", "results" } do
        local h = m[name]
        if h and h.n > 0 then
            rows[#rows + 1] = { name = name, n = h.n, mean = h.mean * 1e3, p50 = h.p50 * 1e3, p90 = h.p90 * 1e3,
                p99 = h.p99 * 1e3 }
        end
    end
    if #rows > 0 then
        lines[#lines + 1] = M.columns(rows, {
            { "name", "ms" }, { "n", "n" }, { "mean", "mean" }, { "p50", "p50" }, { "p90", "p90" }, { "p99", "p99" },
        })
    end
    return #lines > 0 and table.concat(lines, "\n") or "nothing has been done yet"
end

return M
