--- GET /health and GET /metrics of a server.

local tables = require "llmrun.tables"

local M = {}

local function health(server)
    if server.ending then return { status = "ending" }, 503 end
    for _, model in ipairs(server.models) do
        if model.closed then
            return { status = "failed", reason = ("the model '%s' is closed"):format(server.names[model]) }, 503
        end
    end
    return { status = "ok" }
end

--- Prometheus texts of several models in one: the lines of a metric stand together.
local function merge(texts)
    local order, groups = {}, {}
    for _, text in ipairs(texts) do
        for line in text:gmatch("[^\n]+") do
            local name = line:match("^# %u+ (%S+)") or line:match("^[^{%s]+")
            local base = groups[name] and name or name:gsub("_bucket$", ""):gsub("_sum$", ""):gsub("_count$", "")
            local group = groups[base]
            if not group then
                group = { seen = {} }
                groups[base] = group
                order[#order + 1] = group
            end
            if line:sub(1, 1) ~= "#" or not group.seen[line] then
                group.seen[line] = true
                group[#group + 1] = line
            end
        end
    end
    local out = {}
    for _, group in ipairs(order) do out[#out + 1] = table.concat(group, "\n") end
    return table.concat(out, "\n") .. "\n"
end

local function quote(text) return (text:gsub('[\\"\n]', { ["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n" })) end

local function http_metrics(server)
    local s, lines = server.core:stats(), {}
    local function add(name, kind, help, value)
        lines[#lines + 1] = ("# HELP llmrun:%s %s\n# TYPE llmrun:%s %s\nllmrun:%s %d"):format(name, help, name, kind,
            name, value)
    end
    add("http_connections", "gauge", "Open connections", s.connections)
    add("http_requests_active", "gauge", "Requests being answered", s.requests)
    add("http_connections_total", "counter", "Connections accepted", s.accepted)
    add("http_refused_total", "counter", "Requests refused before they reached a route", s.refused)
    add("http_clients_gone_total", "counter", "Clients that left before their answer was complete", s.gone)
    add("http_slow_total", "counter", "Connections cut off because they were too slow", s.slow)
    lines[#lines + 1] = "# HELP llmrun:http_requests_total Requests answered\n# TYPE llmrun:http_requests_total counter"
    for _, key in ipairs(tables.sorted_keys(server.counts)) do
        local route, status = key:match("^(.*)\0(%d+)$")
        lines[#lines + 1] = ('llmrun:http_requests_total{route="%s",status="%s"} %d'):format(quote(route), status,
            server.counts[key])
    end
    return table.concat(lines, "\n") .. "\n"
end

--- Adds the routes to a server.
function M.add(server)
    server.routes:add("GET /health", function() return health(server) end)
    server.routes:add("GET /metrics", function(_, res)
        local texts = {}
        for _, model in ipairs(server.models) do
            texts[#texts + 1] = not model.closed and (assert(model.engine:prometheus(server.names[model]))) or nil
        end
        texts[#texts + 1] = http_metrics(server)
        res:answer(200, merge(texts), "text/plain; version=0.0.4; charset=utf-8")
    end)
end

return M
