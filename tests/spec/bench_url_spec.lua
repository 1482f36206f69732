-- llmrun bench --url against a server of ours: what it counts, shapes of load, limits, reports.
local core = require "llmrun.core"
local json = require "llmrun.json"
local llm = require "llmrun"
local S = dofile "tests/spec/serve_support.lua"

describe("llmrun bench --url", function()
    local server, most
    local function watch(model)
        local base = model.session
        local now = 0
        model.session = function(...)
            local s = base(...)
            now = now + 1
            most = math.max(most, now)
            local close = s.close
            s.close = function(self)
                if not self.counted then now, self.counted = now - 1, true end
                return close(self)
            end
            return s
        end
        return model
    end
    setup(function()
        local m = S.teller({ "a", "b" }, { ctx = 8192, kv = { blocks = 4096 } }, function()
            return { [0] = 1, default = 0 }
        end)
        server = S.start { models = { watch(m) }, api_keys = { "k" } }
    end)
    teardown(function() server:close() end)
    before_each(function() most = 0 end)

    local function bench(flags)
        return llm.exec({ core.executable(), "bench", "--url", server:url(), "--api-key", "k",
            table.unpack(flags) }, { timeout = 60 })
    end
    local function measured(...)
        local r = bench { "--json", ... }
        assert.equal(0, r.status, r.stderr)
        return assert(json.decode(r.stdout))
    end

    it("counts requests, tokens and times", function()
        local r = measured("--requests", "10", "--prompt", "20", "--output", "8")
        assert.equal(10, r.completed)
        assert.equal(0, r.failed)
        assert.equal(80, r.output_tokens)
        assert.is_true(r.prompt_tokens > 10 * 20)
        for _, name in ipairs { "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms" } do
            local s = r[name]
            assert.is_true(s.mean > 0 and s.median <= s.p90 and s.p90 <= s.p99, name)
        end
        assert.near(r.output_tokens / r.duration, r.output_rate, 1e-6)
        assert.is_nil(r.goodput)
    end)

    it("keeps to a concurrency and a rate", function()
        local r = measured("--requests", "12", "--concurrency", "3", "--prompt", "20", "--output", "6")
        assert.equal(12, r.completed)
        assert.is_true(most <= 3, most)
        r = measured("--requests", "10", "--rate", "50", "--burstiness", "100", "--prompt", "5", "--output", "2")
        assert.is_true(r.duration > 0.12, r.duration)
    end)

    it("draws lengths, and the same again for a seed", function()
        local function total(shape, seed)
            return measured("--requests", "8", "--shape", shape, "--prompt", "30", "--output", "10", "--load-seed", seed)
        end
        local a, b, c = total("chat", "3"), total("chat", "3"), total("chat", "4")
        assert.equal(a.output_tokens, b.output_tokens)
        assert.equal(a.prompt_tokens, b.prompt_tokens)
        assert.not_equal(a.prompt_tokens, c.prompt_tokens)
        assert.not_equal(80, total("uniform", "5").output_tokens)
    end)

    it("holds conversations, whose turns send what was said before", function()
        local before = server.models[1]:metrics()
        local r = measured("--requests", "2", "--shape", "conversation", "--turns", "4", "--prompt", "20", "--output", "6")
        local after = server.models[1]:metrics()
        assert.equal(8, r.completed)
        local hits = after.prefix_hits - before.prefix_hits
        assert.is_true(hits > 0.4 * r.prompt_tokens, ("%d of %d tokens from the cache"):format(hits, r.prompt_tokens))
    end)

    it("tells goodput, and writes a report", function()
        local path = os.tmpname() .. ".html"
        local r = bench { "--requests", "4", "--prompt", "10", "--output", "4", "--goodput", "ttft:60000,e2e:60000",
            "--report", path }
        assert.equal(0, r.status, r.stderr)
        assert.matches("4 requests answered, 0 failed", r.stdout, 1, true)
        assert.matches("goodput %d", r.stdout)
        local f <close> = assert(io.open(path))
        local page = f:read "a"
        os.remove(path)
        local _, n = page:gsub("<svg", "")
        assert.equal(4, n)
        assert.equal(0, measured("--requests", "3", "--output", "2", "--goodput", "ttft:0.000001").goodput)
    end)

    it("takes a new connection where the server has closed the old one", function()
        local own <close> = S.start { models = { S.teller({ "a" }, nil, function() return 0 end) }, idle_timeout = 1 }
        local r = llm.exec({ core.executable(), "bench", "--url", own:url(), "--json", "--requests", "3", "--rate", "0.6",
            "--burstiness", "100", "--prompt", "5", "--output", "2" }, { timeout = 60 })
        assert.equal(0, r.status, r.stderr)
        assert.equal(3, json.decode(r.stdout).completed)
        assert.is_true(own.core:stats().accepted >= 3)
    end)

    it("says what is wrong", function()
        local function fails(status, pattern, ...)
            local r = llm.exec({ core.executable(), "bench", ... }, { timeout = 60 })
            assert.equal(status, r.status)
            assert.matches(pattern, r.stderr .. r.stdout)
        end
        local url = server:url()
        fails(1, "401", "--url", url)
        fails(1, "401", "--url", url, "--served-model", "x", "--requests", "2")
        fails(1, "there is no model", "--url", url, "--api-key", "k", "--served-model", "nope", "--requests", "2")
        fails(2, "http://HOST:PORT expected", "--url", "ftp://x")
        fails(2, "goodput", "--url", url, "--goodput", "fast")
        fails(1, "refused", "--url", "http://127.0.0.1:1")
    end)
end)
