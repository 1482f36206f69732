-- bench --spec: two sides in turns are compared fairly on a machine whose speed changes, on a clock of the spec's own.
local llm = require "llmrun"
local turns = require "llmrun.cli.bench_turns"

local LENGTH = 60

-- A scripted model whose rows take time, and a clock that shows it. slow(t): how many times as long, of the time and
-- the side.
local function machine(slow, speculate)
    local w = { time = 0, side = 0, runs = {} } -- runs: steps of a side in a row
    w.model = llm.scripted {
        ctx = 512, max_seqs = 16, speculate = speculate,
        next = function(tokens)
            w.time = w.time + 0.01 * slow(w.time, w.side)
            return 97 + (#tokens * 7 + tokens[1]) % 20
        end,
    }
    return w
end

local function compare(w, n, speculate)
    local texts = { {}, {} }
    local sides, list = turns.run(llm, w.model, {
        n = n, stride = 4 * n, now = function() return w.time end,
        on_side = function(side)
            if side ~= w.side then w.runs[#w.runs + 1] = 0 end
            w.side, w.runs[#w.runs] = side, w.runs[#w.runs] + 1
            w.model.engine:pace_hold(side == 1)
        end,
    }, function(side, i)
        local s <close> = w.model:session { salt = side .. "" }
        s:append(("hello %d"):format(i))
        local r = s:gen { tag = side, max_tokens = LENGTH, temperature = 0, speculate = side == 2 and speculate or "off" }
        texts[side][i] = r.text
    end)
    w.model:check()
    return { sides = sides, pairs = list }, texts
end

-- Phases of 0.3 to 1.7 s, twice as slow or not, that know nothing of turns.
local function moody(t) return (t % 1.1 < 0.3 or t % 2.9 < 1.7) and 2 or 1 end

describe("two sides in turns", function()
    it("that do the same are as fast, however the machine's speed changes", function()
        for n = 1, 5, 2 do
            local w = machine(moody)
            local round, texts = compare(w, n)
            local by, about = turns.ratio { round }
            assert.is_true(math.abs(by - 1) < 0.01 + 2 * about and about < 0.1, ("%d: %.3f +- %.3f"):format(n, by, about))
            assert.same(texts[1], texts[2])
            for side = 1, 2 do assert.equal(n * (LENGTH - 1), round.sides[side].tokens) end
            assert.is_true(#w.runs >= LENGTH / 4, "short turns")
            w.model:close()
        end
    end)

    it("show which one is faster, by how much", function()
        for _, factor in ipairs { 0.5, 0.97, 1.03, 2 } do
            local w = machine(function(t, side) return moody(t) * (side == 2 and factor or 1) end)
            local by, about = turns.ratio { (compare(w, 2)), (compare(w, 2)), (compare(w, 2)) }
            assert.is_true(math.abs(by * factor - 1) < 0.005 + 2 * about and about < 0.06, ("%.2f: %.3f +- %.3f"):format(factor, by, about))
            w.model:close()
        end
    end)

    it("take turns that change places, each as far as the other", function()
        local w = machine(function() return 1 end)
        local round = compare(w, 1)
        assert.same({ 1, 5, 8, 8, 8 }, table.move(w.runs, 1, 5, 1, {}))
        for i, p in ipairs(round.pairs) do
            assert.equal(p[1].tokens, p[2].tokens, i)
            assert.is_true(p[1].tokens <= 4)
        end
        w.model:close()
    end)

    it("count what one of them does beside its tokens, whole", function()
        local once = false
        local w = machine(function(t, side)
            local dear = side == 2 and t > 0.5 and not once
            once = once or dear
            return dear and 101 or 1
        end)
        local by = turns.ratio { (compare(w, 1)) }
        assert.is_true(once)
        assert.is_true(math.abs(by - 0.59 / 1.59) < 1e-6, by)
        w.model:close()
    end)

    it("count what a draft model does before the first token", function()
        local w = machine(function() return 1 end, { draft = { next = function() return 97 end } })
        local round = compare(w, 2, { method = "draft", k = 2, fixed = true })
        assert.equal(0, round.sides[1].beside)
        assert.is_true(round.sides[2].beside > 0)
        local _, _, rates = turns.ratio { round }
        assert.is_true(rates[2] < round.sides[2].tokens / round.sides[2].time)
        w.model:close()
    end)

    it("leave no trace: the side that is held teaches nothing, what was learned is forgotten", function()
        local w = machine(function() return 1 end)
        local engine = w.model.engine
        compare(w, 1, "ngram")
        engine:pace_forget()
        assert.equal(0, (engine:pace(1)))
        engine:pace_hold(true)
        local s <close> = w.model:session()
        s:append "abcabc"
        s:gen { max_tokens = 8, temperature = 0, speculate = "ngram" }
        assert.equal(0, (engine:pace(1)))
        engine:pace_hold(false)
        s:gen { max_tokens = 8, temperature = 0, speculate = "ngram" }
        assert.is_true(engine:pace(1) > 0)
        assert.equal("default", w.model.policy_status.name)
        w.model:close()
    end)
end)
