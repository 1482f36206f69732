-- llm.http against a listener of our own: answers, streams, limits, redirects, what goes wrong.
local llm = require "llmrun"
local core = require "llmrun.core"
local loop = require "llmrun.loop"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
    return err
end

--- A listener that gives each request to handle(method, target, request) in a task of its own.
local function listen(handle)
    local h = assert(core.http_new { port = 0 })
    loop.watch(h:fd(), "r", function()
        h:poll()
        local r, _, what = h:next()
        while r do
            local req = r
            if what & 1 ~= 0 then
                llm.spawn(function()
                    pcall(handle, req:method(), req:target(), req) -- the client may be gone
                    req:close()
                end)
            end
            r, _, what = h:next()
        end
    end)
    return setmetatable({ base = ("http://127.0.0.1:%d"):format(h:port()), h = h }, {
        __close = function()
            loop.unwatch(h:fd())
            h:close()
        end,
    })
end

local busy, busiest = 0, 0 -- requests for /slow that are being answered: now, at most

local function echo(method, target, r)
    if target == "/redirect" then return r:answer(302, { Location = "/final" }, "") end
    if target == "/loop" then return r:answer(302, { Location = "/loop" }, "") end
    if target == "/elsewhere" then return r:answer(302, { Location = "file:///etc/hostname" }, "") end
    if target == "/slow" then
        busy = busy + 1
        busiest = math.max(busiest, busy)
        llm.sleep(0.1)
        busy = busy - 1
    end
    if target == "/hang" then llm.sleep(500) end
    if target == "/big" then return r:answer(200, {}, ("x"):rep(100000)) end
    if target == "/404" then return r:answer(404, { ["X-Why"] = "gone" }, "nothing here") end
    if target == "/stream" then
        r:begin(200, { ["Content-Type"] = "text/event-stream" })
        for i = 1, 3 do
            r:write("piece " .. i .. "\n")
            llm.sleep(0.03)
        end
        return r:finish()
    end
    local h = r:headers()
    local type, mine = h["content-type"] or "none", h["x-mine"] or "none"
    r:answer(200, { ["X-Method"] = method, ["X-Type"] = type, ["X-Mine"] = mine },
        method == "HEAD" and "" or target .. " " .. r:body())
end

describe("llm.http", function()
    it("gets and posts", function()
        local s <close> = listen(echo)
        local r = llm.http.get(s.base .. "/a?b=c")
        assert.same({ 200, "/a?b=c ", s.base .. "/a?b=c", "GET" }, { r.status, r.body, r.url, r.headers["x-method"] })
        assert.is_true(r.seconds > 0)
        r = llm.http.post(s.base .. "/p", "hello\0world")
        assert.same({ "/p hello\0world", "POST" }, { r.body, r.headers["x-method"] })
        r = llm.http.post(s.base .. "/p", nil, { json = { a = { 1, 2 } } })
        assert.equal('/p {"a":[1,2]}', r.body)
        assert.equal("application/json", r.headers["x-type"])
        r = llm.http.request { url = s.base .. "/x", method = "PUT", body = "b", headers = { ["X-Mine"] = "me" } }
        assert.same({ "PUT", "me", "/x b" }, { r.headers["x-method"], r.headers["x-mine"], r.body })
        r = llm.http.request { url = s.base .. "/x", method = "DELETE" }
        assert.equal("DELETE", r.headers["x-method"])
        r = llm.http.request { url = s.base .. "/x", method = "HEAD" }
        assert.same({ 200, "" }, { r.status, r.body })
    end)

    it("a status is an answer; redirects are followed", function()
        local s <close> = listen(echo)
        local r = llm.http.get(s.base .. "/404")
        assert.same({ 404, "nothing here", "gone" }, { r.status, r.body, r.headers["x-why"] })
        r = llm.http.get(s.base .. "/redirect")
        assert.same({ 200, "/final ", s.base .. "/final" }, { r.status, r.body, r.url })
        local _, err, code = llm.http.get(s.base .. "/loop", { redirects = 3 })
        assert.equal("limit", code)
        assert.matches("^llm.http.get: ", err)
        _, _, code = llm.http.get(s.base .. "/elsewhere")
        assert.equal("invalid", code)
    end)

    it("many at once, with the engine in between", function()
        local s <close> = listen(echo)
        local m <close> = llm.scripted { next = function() return 65 end }
        local list = {}
        for i = 1, 20 do list[i] = i end
        local r = llm.map(list, function(i)
            if i == 20 then
                local q <close> = m:session()
                q:append "x"
                return q:gen({ max_tokens = 5 }).text
            end
            return llm.http.get(s.base .. "/slow").body
        end)
        assert.equal("/slow ", r[1])
        assert.equal("AAAAA", r[20])
        assert.is_true(busiest > 1)
    end)

    it("is bounded in time and size", function()
        local s <close> = listen(echo)
        local began = core.now()
        local r, err, code = llm.http.get(s.base .. "/hang", { timeout = 0.05 })
        assert.is_nil(r)
        assert.equal("limit", code)
        assert.matches("timed out", err)
        assert.is_true(core.now() - began < 100)
        r, err, code = llm.http.get(s.base .. "/big", { max_bytes = 5000 })
        assert.is_nil(r)
        assert.equal("limit", code)
        assert.matches("over the limit of 5000 bytes", err)
        assert.equal(100000, #llm.http.get(s.base .. "/big").body)
    end)

    it("is ended with its branch", function()
        local s <close> = listen(echo)
        local _, _, code = llm.timeout(0.05, llm.http.get, s.base .. "/hang")
        assert.equal("limit", code)
        assert.equal(200, llm.http.get(s.base .. "/after").status)
    end)

    it("streams", function()
        local s <close> = listen(echo)
        local pieces, at, status = {}, {}, nil
        for piece, answer in llm.http.stream { url = s.base .. "/stream" } do
            pieces[#pieces + 1], at[#at + 1], status = piece, core.now(), answer.status
            assert.equal("text/event-stream", answer.headers["content-type"])
        end
        assert.equal("piece 1\npiece 2\npiece 3\n", table.concat(pieces))
        assert.equal(200, status)
        assert.is_true(#at >= 2 and at[#at] - at[1] > 0.02)
        for _ in llm.http.stream { url = s.base .. "/stream" } do break end -- luacheck: ignore 512
        raises("llm.http.stream: ", function()
            for _ in llm.http.stream { url = s.base .. "/hang", timeout = 0.05 } do error("none expected") end
        end)
    end)

    it("says what goes wrong on the way", function()
        local s = listen(echo)
        local base = s.base
        getmetatable(s).__close()
        local r, err, code = llm.http.get(base .. "/x")
        assert.is_nil(r)
        assert.equal("io", code)
        assert.matches("^llm.http.get: ", err)
        for _, url in ipairs { "file:///etc/hostname", "gopher://x/", "not a url", "ftp://127.0.0.1/" } do
            r, err, code = llm.http.get(url)
            assert.is_nil(r)
            assert.is_string(err)
            assert.equal("invalid", code)
        end
    end)

    it("names what is wrong", function()
        raises("llm.http.get: url expected", llm.http.get)
        raises("llm.http.request: table of options expected, got string", llm.http.request, "x")
        raises("llm.http.get: table of options expected, got number", llm.http.get, "http://x", 5)
        raises("llm.http.get: unknown option 'timeot' (did you mean 'timeout'?)", llm.http.get, "http://x",
            { timeot = 1 })
        raises("llm.http.post: body or json, not both", llm.http.post, "http://x", "b", { json = 1 })
        raises("headers: 'A: b' is no name", llm.http.get, "http://x", { headers = { ["A: b"] = "x" } })
        raises("headers['A']: more than one line", llm.http.get, "http://x", { headers = { A = "x\r\nB: y" } })
        raises("headers['A']: text expected, got table", llm.http.get, "http://x", { headers = { A = {} } })
        raises("method: capital letters expected", llm.http.request, { url = "http://x", method = "get it" })
        raises("timeout: a number above 0", llm.http.get, "http://x", { timeout = 0 })
        raises("llm.http.get: can't wait for the engine inside table.sort", table.sort, { 2, 1 },
            function() llm.http.get("http://127.0.0.1:1/") end)
    end)

    it("leaves no descriptor behind", function()
        local function open_files()
            local n = 0
            for _ in pairs(core.list("/proc/self/fd")) do n = n + 1 end
            return n
        end
        local s <close> = listen(echo)
        llm.http.get(s.base .. "/a")
        local before = open_files()
        llm.map({ 1, 2, 3, 4, 5 }, function() llm.timeout(0.03, llm.http.get, s.base .. "/hang") end)
        llm.sleep(0.05)
        assert.is_true(open_files() <= before + 1)
    end)
end)
