--- Prefixes that stay: what a template marks as pinned (chat.lua) is kept in memory by a sequence of its own, so that
--- it is computed once for all sessions of a model, whatever else comes and goes.
---
--- A model keeps a few of them; the one that was used longest ago gives way, and so do all where pinned blocks are
--- short.

local M = {}

--- How many a model keeps.
M.most = 8

local function key_of(session, n)
    return (session.salt or "") .. "\0" .. table.concat(session.seq:tokens(), " ", 1, n)
end

local function close_oldest(list)
    local anchor = table.remove(list)
    list[anchor.key] = nil
    anchor.seq:close()
end

--- Keeps the first n tokens of a session, which are computed.
function M.keep(session, n)
    local list, key = session.model.anchors, key_of(session, n)
    local anchor = list[key]
    if anchor then
        for i = 1, #list do
            if list[i] == anchor then table.remove(list, i) end
        end
        table.insert(list, 1, anchor)
        return
    end
    local seq = session.seq:fork()
    if not seq then return end
    local kept = seq:truncate(n) and seq:pin(true)
    while not kept and #list > 0 do
        close_oldest(list)
        kept = seq:pin(true)
    end
    if not kept then return seq:close() end -- no room for pinned blocks: it may stay in the prefix cache
    anchor = { key = key, seq = seq }
    list[key] = anchor
    table.insert(list, 1, anchor)
    while #list > M.most do close_oldest(list) end
end

--- Lets go of all.
function M.drop(model)
    while #model.anchors > 0 do close_oldest(model.anchors) end
end

return M
