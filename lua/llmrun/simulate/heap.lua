--- A heap of values by time; equal times keep their order.

local Heap = {}
Heap.__index = Heap

local M = {}

function M.new() return setmetatable({ n = 0, count = 0 }, Heap) end

local function before(a, b) return a.at < b.at or a.at == b.at and a.order < b.order end

function Heap:push(at, value)
    self.n, self.count = self.n + 1, self.count + 1
    local item, i = { at = at, value = value, order = self.count }, self.n
    while i > 1 and before(item, self[i // 2]) do
        self[i] = self[i // 2]
        i = i // 2
    end
    self[i] = item
end

--- The earliest time and its value; nil if there is none.
function Heap:peek()
    local top = self[1]
    if top then return top.at, top.value end
end

function Heap:pop()
    local top, last = self[1], self[self.n]
    self[self.n] = nil
    self.n = self.n - 1
    if self.n > 0 then
        local i = 1
        while 2 * i <= self.n do
            local child = 2 * i
            if child < self.n and before(self[child + 1], self[child]) then child = child + 1 end
            if not before(self[child], last) then break end
            self[i] = self[child]
            i = child
        end
        self[i] = last
    end
    return top.at, top.value
end

return M
