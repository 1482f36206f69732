-- Templates as code: segments with cache hints, pinned prefixes that stay.
local llm = require "llmrun"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
end

--- [tools, pinned] [messages, shared] [clock, volatile] [beginning of the answer]
local function template(rules)
    return function(v)
        local out = { { text = rules or "Rules: be brief.\n", literal = true, cache = "pinned" } }
        for i, msg in ipairs(v.messages) do
            out[#out + 1] = { text = msg.role .. ": " .. msg.content .. "\n", cache = i == 1 and "shared" or nil }
        end
        out[#out + 1] = { text = "clock " .. tostring(v.clock) .. "\n", cache = "volatile" }
        out[#out + 1] = { text = "answer: ", literal = true }
        return out
    end
end

local function model(o)
    o = o or {}
    o.next = function() return 65 end
    o.template = o.template or template()
    o.kv = o.kv or { block_size = 1 }
    return llm.scripted(o)
end

local function ask(s, text, clock)
    s.vars = { clock = clock }
    s:user(text)
    return s:gen { max_tokens = 2 }
end

describe("cache hints", function()
    it("what changes at the end costs its own tokens only", function()
        local m <close> = model()
        local s <close> = m:session()
        ask(s, "one", "12:00")
        local r = ask(s, "two", "12:01")
        assert.equal(#"Rules: be brief.\nuser: one\n", r.usage.cached_tokens)
        assert.equal("Rules: be brief.\nuser: one\nassistant: AA\nuser: two\nclock 12:01\nanswer: AA", s.text)
    end)

    it("a pinned prefix is computed once for all sessions, and outlives the prefix cache", function()
        local m <close> = model { kv = { block_size = 1, prefix_cache = false } }
        local n = #"Rules: be brief.\n"
        do
            local s <close> = m:session()
            assert.equal(0, ask(s, "one", 1).usage.cached_tokens)
        end
        assert.equal(n, m:stats().pinned)
        assert.equal(1, m:stats().sequences)
        local cached <close> = model()
        local first = cached:session()
        ask(first, "one", 1)
        first:close()
        -- everything but the pinned prefix is evicted by others
        local s2 <close> = cached:session()
        s2:user "two"
        assert.equal(n, s2:gen({ max_tokens = 1 }).usage.cached_tokens - #"user: ")
        assert.equal(n, cached:stats().pinned)
        cached:drop_cached()
        assert.equal(0, cached:stats().pinned)
    end)

    it("survives when memory is short", function()
        local m <close> = model { ctx = 64, kv = { block_size = 1, blocks = 100 } }
        local n = #"Rules: be brief.\n"
        local s = m:session()
        ask(s, "one", 1)
        s:close()
        for i = 1, 4 do -- fills the pool with other things
            local other <close> = m:session()
            other:append((string.char(96 + i)):rep(60))
            other:gen { max_tokens = 2 }
        end
        local again <close> = m:session()
        assert.is_true(ask(again, "zzz", 1).usage.cached_tokens >= n)
        assert.is_true(m:check())
    end)

    it("keeps a few prefixes, the last used", function()
        local m <close> = model()
        local anchors = require "llmrun.anchors"
        for i = 1, anchors.most + 3 do
            local s <close> = m:session { template = template(("rules %02d "):format(i)) }
            ask(s, "x", 1)
        end
        assert.equal(anchors.most, #m.anchors)
        assert.equal(anchors.most * 9, m:stats().pinned)
        local s <close> = m:session { template = template "rules 05 " }
        ask(s, "x", 1)
        assert.equal(anchors.most, #m.anchors)
        assert.matches("^ 114 117", m.anchors[1].key:gsub("%z", " "))
    end)

    it("sessions with other salts have pins of their own", function()
        local m <close> = model()
        for _, salt in ipairs { "a", "b" } do
            local s <close> = m:session { salt = salt }
            ask(s, "x", 1)
        end
        assert.equal(2, #m.anchors)
    end)

    it("pins that have no room are left out", function()
        local m <close> = model { max_pinned = 4 }
        local s <close> = m:session()
        assert.equal("AA", ask(s, "x", 1).text)
        assert.equal(0, m:stats().pinned)
        assert.equal(1, m:stats().sequences)
    end)

    it("select keeps them, too", function()
        local m <close> = model()
        local s <close> = m:session()
        s:user "x"
        s:select("pick", { "A", "B" })
        assert.equal(#"Rules: be brief.\n", m:stats().pinned)
    end)

    it("text is tokenized for itself on both sides of a border", function()
        local m <close> = llm.scripted {
            vocab = { "ab", "bc", "a", "b", "c" }, next = function() return 0 end,
            template = function(v)
                return { { text = "a", cache = v.hint and "shared" or nil },
                    { text = "b", cache = v.hint and "volatile" or nil } }
            end,
        }
        local function ids(hint)
            local _, list = m:apply_template({ { role = "user", content = "" } }, { hint = hint })
            return list
        end
        assert.same({ 0 }, ids(nil))
        assert.same({ 2, 3 }, ids(true))
    end)

    it("in the wrong order are refused, by name", function()
        local m <close> = model { template = function()
            return { { text = "a", cache = "shared" }, { text = "b", cache = "volatile" }, { text = "c" },
                { text = "d", cache = "pinned" } }
        end }
        local s <close> = m:session()
        s:user "x"
        raises("s:gen: chat template: segment 4: it is pinned, but stands behind segment 2, which is volatile", s.gen, s)
        for pattern, r in pairs {
            ["segment 1: cache: \"pinned\", \"shared\" or \"volatile\" expected, got 'forever'"] =
                { { text = "x", cache = "forever" } },
            ["segment 2: a table { text = string"] = { { text = "x" }, "y" },
            ["segment 1: unknown option 'hint'"] = { { text = "x", hint = "pinned" } },
            ["segment 1: option 'literal': boolean expected, got integer"] = { { text = "x", literal = 1 } },
            ["it must return a string or a list of segments, not a table with names"] = { text = "x" },
        } do
            local t <close> = m:session { template = function() return r end }
            t:user "x"
            raises("s:gen: chat template: " .. pattern, t.gen, t)
        end
    end)
end)
