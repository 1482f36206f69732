--- Random numbers that follow from a seed: same seed, same numbers, on every machine and whoever else draws. For loads
--- and traces that must come out the same again (the seeds of requests are seeds.lua's).

---@class llmrun.Random
local Random = {}
Random.__index = Random

--- A source for a seed, any integer.
---@param seed integer
---@return llmrun.Random
local function new(seed)
    -- a state of zero would stay zero, and small seeds are to lie far apart
    local x = seed * 2862933555777941757 + 3037000493
    return setmetatable({ x = x ~= 0 and x or 88172645463325252 }, Random)
end

--- 0 <= u < 1
function Random:uniform()
    self.x = self.x ~ (self.x << 13)
    self.x = self.x ~ (self.x >> 7)
    self.x = self.x ~ (self.x << 17)
    return (self.x >> 11) * 2.0 ^ -53
end

--- An integer from 1 to n.
function Random:integer(n) return math.floor(self:uniform() * n) + 1 end

--- Mean 0, variance 1.
function Random:normal()
    return math.sqrt(-2 * math.log(1 - self:uniform())) * math.cos(2 * math.pi * self:uniform())
end

--- Exponentially distributed with mean 1.
function Random:exponential() return -math.log(1 - self:uniform()) end

--- Gamma-distributed with this shape and mean 1 (Marsaglia and Tsang's method).
function Random:gamma(shape)
    if shape < 1 then return self:gamma(shape + 1) * (1 + shape) * (1 - self:uniform()) ^ (1 / shape) / shape end
    local d = shape - 1 / 3
    local c = 1 / math.sqrt(9 * d)
    while true do
        local x = self:normal()
        local v = (1 + c * x) ^ 3
        if v > 0 and math.log(1 - self:uniform()) < 0.5 * x * x + d - d * v + d * math.log(v) then
            return d * v / shape
        end
    end
end

--- Log-normally distributed with mean 1; sigma: standard deviation of the logarithm.
function Random:lognormal(sigma)
    if sigma == 0 then return 1.0 end
    return math.exp(sigma * self:normal() - sigma * sigma / 2)
end

--- How many tries there are when each but the last goes on with the same chance: 1, 2, ..., with this mean (1 or more).
function Random:geometric(mean)
    if mean <= 1 then return 1 end
    return 1 + math.floor(math.log(1 - self:uniform()) / math.log(1 - 1 / mean))
end

return { new = new }
