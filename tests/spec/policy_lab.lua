-- What the specs of policies share: a scripted model whose every token depends on all tokens before it, with an engine
-- that is stepped by hand; the same model without an engine; a generator of random numbers; what policies log.
local llm = require "llmrun"
local policy = require "llmrun.policy"

local function next_token(tokens)
    local h = #tokens
    for i = 1, #tokens do h = (h * 31 + tokens[i] + 7) % 65521 end
    return h % 200
end

-- What the model says after the prompt, without any engine.
local function reference(prompt, n)
    local t = table.move(prompt, 1, #prompt, 1, {})
    for _ = 1, n do t[#t + 1] = next_token(t) end
    return table.move(t, #prompt + 1, #t, 1, {})
end

local function generator(seed)
    local x = seed * 2654435761 % 2147483647 + 1
    return function(n)
        x = x * 48271 % 2147483647
        return x % n + 1
    end
end

-- An engine, with submit(prompt length or ids, request options) -> request, and its sequence.
local function lab(opts)
    local o = { vocab = "bytes", ctx = 512, next = next_token }
    for k, v in pairs(opts or {}) do o[k] = v end
    local model = llm.scripted(o)
    local self = { model = model, engine = model.engine, requests = {}, prompts = {} }
    function self.submit(prompt, options)
        if type(prompt) == "number" then
            local ids = {}
            for i = 1, prompt do ids[i] = (i * 7 + #self.requests * 13) % 190 end
            prompt = ids
        end
        options = options or {}
        local seq = assert(self.engine:seq { tag = options.seq_tag })
        assert(seq:append(prompt))
        options.seq_tag = nil
        options.ignore_eos = true
        local r, err = self.engine:request(seq, options)
        if not r then return nil, err end
        self.requests[#self.requests + 1] = r
        self.prompts[r] = prompt
        return r, seq
    end
    -- One step: rows, and invariants hold.
    function self.step()
        local rows = assert(self.engine:step())
        assert(self.engine:check())
        while self.engine:next_event() do end
        return rows
    end
    function self.finish(most)
        local n = 0
        while self.engine:busy() > 0 do
            self.step()
            n = n + 1
            assert(n < (most or 5000), "requests do not end")
        end
        return n
    end
    -- Requests in the order in which they ended.
    function self.order(names)
        local left, order = {}, {}
        for i, r in ipairs(self.requests) do left[i] = r end
        while next(left) do
            for i = 1, #self.requests do
                if left[i] and not left[i]:active() then
                    order[#order + 1] = names and names[i] or i
                    left[i] = nil
                end
            end
            if next(left) then self.step() end
        end
        return order
    end
    return self
end

-- Log lines of policies during fn().
local function logged(fn)
    local lines, old = {}, policy.log
    policy.log = function(text) lines[#lines + 1] = text end
    local ok, err = pcall(fn)
    policy.log = old
    if not ok then error(err, 0) end
    return lines
end

return { lab = lab, next_token = next_token, reference = reference, generator = generator, logged = logged }
