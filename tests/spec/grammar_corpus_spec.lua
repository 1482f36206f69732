-- The corpora of the grammar fuzz targets (tests/fuzz/corpus), replayed: each text compiles or is refused cleanly, in
-- bounded time, and masks hold what is accepted.

local core = require "llmrun.core"
local walk = dofile "tests/fuzz/grammar_walk.lua"
local patience = os.getenv "LLMRUN_TEST_SANITIZE" and 100 or 10

for folder, kind in pairs { regex = "regex", json_schema = "json", gbnf = "grammar", lark = "lark" } do
    describe("corpus of " .. folder, function()
        it("passes", function()
            local n, done = 0, {}
            for _, name in ipairs(assert(core.list("tests/fuzz/corpus/" .. folder))) do
                local file = io.open("tests/fuzz/corpus/" .. folder .. "/" .. name, "rb")
                local text = file and file:read "a"
                if text then
                    n = n + 1
                    local start = os.clock()
                    local ok, result = pcall(walk, kind, text)
                    assert.is_true(ok, name .. ": " .. tostring(result))
                    assert.is_true(os.clock() - start < patience, name .. " took too long")
                    done[result] = (done[result] or 0) + 1
                end
            end
            assert.is_true(n >= 9 and (done.ok or 0) > 2, n .. " texts")
        end)
    end)
end
