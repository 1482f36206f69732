--- Any bytes as what a server answers to our HTTP client, in pieces of sizes that the first byte says: an answer, or an
--- error, never an error raised; its body, too, as server-sent events.

local net = require "llmrun.net"

local CODES = { io = true, format = true, limit = true, state = true }

--- A socket that has these bytes to give.
local function socket(text, size)
    local at = 1
    return {
        fd = function() return -1 end, close = function() end,
        send = function(_, out, from) return #out - (from or 0) end,
        recv = function()
            local piece = text:sub(at, at + size - 1)
            at = at + #piece
            return piece
        end,
    }
end

return function(text)
    local size, way = (text:byte(1) or 0) % 64 + 1, (text:byte(2) or 0) % 3
    local conn = net.over(socket(text:sub(3), size), "127.0.0.1", 80)
    local events, got = {}, 0
    local feed = net.events(function(data) events[#events + 1] = data end)
    local r, err, code = net.request(conn, {
        path = "/", method = way == 0 and "HEAD" or nil, body = way == 1 and "{}" or nil, on_data = function(piece)
            got = got + #piece
            feed(piece)
        end,
    })
    assert(got <= #text, "more than there is")
    if not r then
        assert(type(err) == "string" and CODES[code], tostring(err))
        return code
    end
    assert(math.type(r.status) == "integer" and type(r.headers) == "table")
    for _, data in ipairs(events) do assert(type(data) == "string") end
    return "ok"
end
