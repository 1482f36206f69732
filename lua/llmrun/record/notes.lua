--- What came from outside while a program ran (results of tools, answers over HTTP, output of other programs): told to
--- whoever listens, which recordings do. Costs nothing when nobody does.

local M = {}

local listeners = {}

--- fn(kind, fields) from now on.
function M.listen(fn) listeners[#listeners + 1] = fn end

function M.unlisten(fn)
    for i = #listeners, 1, -1 do
        if listeners[i] == fn then table.remove(listeners, i) end
    end
end

--- kind: "tool", "http", "exec"; fields: texts and numbers. Of addresses without what may hold a key.
function M.put(kind, fields)
    for i = 1, #listeners do listeners[i](kind, fields) end
end

--- A URL without user, query and fragment.
function M.address(url) return (url:gsub("[?#].*$", ""):gsub("^(%a[%w+.-]*://)[^/@]*@", "%1")) end

return M
