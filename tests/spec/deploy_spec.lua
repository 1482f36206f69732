-- examples/deploy: what its files name is there.
local json = require "llmrun.json"
local S = dofile "tests/spec/serve_support.lua"

local FOLDER = "examples/deploy/"

local function text_of(name)
    local f <close> = assert(io.open(FOLDER .. name))
    return f:read "a"
end

describe("examples/deploy", function()
    local server, metrics
    setup(function()
        server = S.start { models = { S.teller { "x" } } }
        S.post(server, "/v1/completions", { prompt = ">" })
        metrics = S.get(server, "/metrics").body
    end)
    teardown(function() server:close() end)

    it("draws figures that the server has", function()
        local board = assert(json.decode(text_of "dashboard.json"))
        local n, source = 0, nil
        for _, v in ipairs(board.templating.list) do
            if v.type == "datasource" then source = { type = v.query, uid = "${" .. v.name .. "}" } end
        end
        for _, panel in ipairs(board.panels) do
            assert.is_true(#panel.targets > 0, panel.title)
            assert.same(source, panel.datasource, panel.title)
            for _, target in ipairs(panel.targets) do
                for name in target.expr:gmatch "llmrun:[%w_]+" do
                    n = n + 1
                    assert.is_truthy(metrics:find("\n" .. name .. "[ {]"), name)
                end
                local labels = target.expr:match "{(.-)}"
                assert.is_truthy(labels:find("instance=~", 1, true), target.expr)
            end
        end
        assert.is_true(n >= 30)
        for _, v in ipairs(board.templating.list) do
            if v.type == "query" then
                local name, label = v.query:match "^label_values%((.-), (.-)%)$"
                assert.is_truthy(metrics:find("\n" .. name .. "{", 1, true), name)
                -- instance is the scraper's own label
                assert.is_truthy(label == "instance" or metrics:find(name .. "{" .. label .. "=", 1, true), label)
            end
        end
    end)

    it("starts the server with flags and paths that there are", function()
        local args = require "llmrun.cli.args"
        local cmd = require "llmrun.cli.serve"
        local unit = text_of "llmrun.service"
        local line = unit:match "\nExecStart=%S+ serve ([^\n]+)"
        local words = {}
        for w in line:gmatch "%S+" do words[#words + 1] = w end
        local o = assert(args.parse(cmd, "serve", words))
        assert.equal("smollm2", o.model[1])
        assert.equal(8081, o.port)
        for port in text_of("haproxy.cfg"):gmatch "server %w+ 127%.0%.0%.1:(%d+)" do
            assert.is_truthy(text_of("prometheus.yml"):find("127.0.0.1:" .. port, 1, true))
        end
        assert.is_truthy(text_of("haproxy.cfg"):find("httpchk GET /health", 1, true))
        assert.equal(200, S.get(server, "/health").status)
    end)

    it("knows the flags that people know", function()
        local args = require "llmrun.cli.args"
        local cmd = require "llmrun.cli.serve"
        local words = {}
        for w in ("-m a -m b --host 0.0.0.0 --port 9 --api-key k --max-model-len 512 --max-num-seqs 8 "
            .. "--max-num-batched-tokens 256 --block-size 32 --enable-prefix-caching --no-enable-chunked-prefill "
            .. "--kv-cache-dtype q8_0 --served-model-name x --speculative-model c --policy fair --routes r.lua "
            .. "--allow-scripts --script-limit seconds=2 --compute bf16"):gmatch "%S+" do words[#words + 1] = w end
        local o = assert(args.parse(cmd, "serve", words))
        assert.same({ "a", "b" }, o.model)
        assert.same({ "0.0.0.0", 9, "k", 512, 8, 256, 32, "q8_0", "x", "c", "fair", "r.lua", "bf16" }, { o.host, o.port,
            o.api_key[1], o.max_model_len, o.max_num_seqs, o.max_num_batched_tokens, o.block_size, o.kv_cache_dtype,
            o.served_model_name[1], o.speculative_model, o.policy, o.routes, o.compute })
        assert.is_true(o.enable_prefix_caching and o.no_enable_chunked_prefill and o.allow_scripts)
    end)

    it("ends well when it is told to: what has begun is answered", function()
        local llm, core, net = require "llmrun", require "llmrun.core", require "llmrun.net"
        local path = os.tmpname()
        local pid
        local task = llm.spawn(function()
            return llm.exec({ "sh", "-c", ("echo $$ >%s.pid; exec \"$0\" serve -m smollm2 --port 0 --no-page "
                .. "--routes %sroutes.lua 2>%s"):format(path, FOLDER, path), core.executable() }, { timeout = 120 })
        end)
        local port
        S.eventually(function()
            local f <close> = io.open(path)
            port = f and tonumber(f:read("a"):match "http://127%.0%.0%.1:(%d+)")
            return port
        end, 60)
        local f = assert(io.open(path .. ".pid"))
        pid = f:read "n"
        f:close()
        local c <close> = assert(net.connect("127.0.0.1", port))
        local n, events = 0, {}
        local feed = net.events(function(data)
            n = n + 1
            events[n] = data
            if n == 3 then os.execute("kill -HUP " .. pid) end -- as SIGTERM: orderly
        end)
        local r = assert(net.request(c, { path = "/v1/completions", on_data = feed, body = json.encode { prompt = "Once",
            stream = true, max_tokens = 24, ignore_eos = true } }))
        assert.equal(200, r.status)
        assert.equal("[DONE]", events[#events])
        assert.is_true(#events > 15, #events)
        assert.is_nil(net.connect("127.0.0.1", port, 1))
        assert.equal(0, task:wait().status)
        os.remove(path)
        os.remove(path .. ".pid")
    end)

    it("has routes that answer", function()
        local routes = dofile(FOLDER .. "routes.lua")
        local list = { "low", "normal", "high", " it", " burns" }
        local model = S.teller(list, { ctx = 1024 }, function(_, n, m)
            return { [n == 0 and 2 or n < 20 and 4 or m.info.eos] = 0, default = -20 }
        end)
        local own <close> = S.start { models = { model }, routes = routes }
        local r = S.post(own, "/triage", { text = "fire" })
        assert.equal(200, r.status, r.body)
        assert.equal("high", r.json.urgency)
        assert.is_number(r.json.scores.low)
        r = S.post(own, "/both-sides", { text = "cats" })
        local sides = {}
        for i = 1, #r.events - 1 do sides[r.events[i].side] = true end
        assert.same({ ["For:"] = true, ["Against:"] = true }, sides)
        for _, path in ipairs { "/triage", "/both-sides" } do
            for _, body in ipairs { json.object(), json.array(), { text = 5 }, { text = "" } } do
                r = S.post(own, path, body)
                assert.equal(400, r.status)
                assert.equal("text", r.json.error.param)
            end
        end
    end)
end)
