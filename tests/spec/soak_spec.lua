-- A short run of tests/bench/soak.lua: mixed load through the server with random faults.
describe("some seconds of clients and faults of all kinds", function()
    it("leave right answers right, and nothing behind", function()
        local slow = os.getenv "LLMRUN_TEST_SANITIZE"
        local run = dofile("tests/bench/soak.lua").run { seconds = 3, clients = slow and 6 or 12, allocations = true }
        assert.same({}, run.wrong)
        assert.same({}, run.left)
        assert.is_true((run.answers["chat, done"] or 0) >= 3, "too few answers")
        for what in pairs(run.answers) do
            assert.is_nil(what:match "^%w+: " and what, what)
        end
    end)
end)
