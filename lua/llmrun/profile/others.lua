--- How much of the machine others take: processor time that other processes used and that a hypervisor kept for
--- itself. Times that were measured beside other work say little; with this they can be told.

local core = require "llmrun.core"

local M = {}

local Watch = {}
Watch.__index = Watch

--- Seconds of processor time that were spent in all, but for this process; nil where the system doesn't say (the ticks
--- of /proc/stat are hundredths).
local function spent()
    local file <close> = io.open("/proc/stat", "r")
    local line = file and file:read("l")
    local user, nice, system, _, _, irq, softirq, steal = (line or ""):match(
        "^cpu%s+(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)")
    return user and (user + nice + system + irq + softirq + steal) / 100 - os.clock() or nil
end

--- Begins to watch; call :look() now and then.
function M.watch() return setmetatable({ at = {}, spent = {} }, Watch) end

--- Notes how things stand; at most every 20 ms.
function Watch:look()
    local n, now = #self.at, core.now()
    if n > 0 and now < self.at[n] + 0.02 then return end
    local s = spent()
    if s then self.at[n + 1], self.spent[n + 1] = now, s end
end

--- Processors that others kept busy between two times, on average; 0 where that isn't known. Taken from the looks
--- before and after, at least `least` seconds apart (0.3: ticks are coarse).
function Watch:share(from, to, least)
    local at, n = self.at, #self.at
    if n < 2 then return 0 end
    local wider = math.max(0, (least or 0.3) - (to - from)) / 2
    from, to = from - wider, to + wider
    local lo, hi = 1, n -- the last look at or before `from`
    while lo < hi do
        local mid = (lo + hi + 1) // 2
        if at[mid] <= from then lo = mid else hi = mid - 1 end
    end
    local i = lo
    lo, hi = i, n -- the first one at or after `to`
    while lo < hi do
        local mid = (lo + hi) // 2
        if at[mid] >= to then hi = mid else lo = mid + 1 end
    end
    local j = math.max(lo, math.min(n, i + 1))
    if j == i then i = i - 1 end
    return math.max(0, self.spent[j] - self.spent[i]) / (at[j] - at[i])
end

return M
