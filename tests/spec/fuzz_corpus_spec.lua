-- The corpora of the fuzz targets that are Lua (tests/fuzz/*.lua), replayed: nothing may raise, each text is done in
-- bounded time.

local core = require "llmrun.core"
local patience = os.getenv "LLMRUN_TEST_SANITIZE" and 100 or 10

-- folder -> file of the target, and its further argument; how many of its texts must get through
local targets = {
    regex = { "grammar_walk", "regex", ok = 3 }, json_schema = { "grammar_walk", "json", ok = 3 },
    gbnf = { "grammar_walk", "grammar", ok = 3 }, lark = { "grammar_walk", "lark", ok = 3 },
    tokenizer = { "tokenizer", ok = 10 }, template = { "template", ok = 30 }, openai = { "openai", ok = 15, of = 200 },
    client = { "client", ok = 4 }, lora = { "lora", ok = 2 }, trace = { "trace", ok = 2 },
}

for folder, target in pairs(targets) do
    describe("corpus of " .. folder, function()
        it("passes", function()
            local run = dofile(("tests/fuzz/%s.lua"):format(target[1]))
            local n, done = 0, {}
            for _, name in ipairs(assert(core.list("tests/fuzz/corpus/" .. folder))) do
                local file = io.open("tests/fuzz/corpus/" .. folder .. "/" .. name, "rb")
                local text = file and file:read "a"
                if text then
                    file:close()
                    n = n + 1
                    local start = os.clock()
                    local ok, result = pcall(run, text, target[2])
                    assert.is_true(ok, name .. ": " .. tostring(result))
                    assert.is_true(os.clock() - start < patience, name .. " took too long")
                    done[result] = (done[result] or 0) + 1
                end
            end
            assert.is_true((done[target.of or "ok"] or 0) >= target.ok, ("%d of %d"):format(done[target.of or "ok"] or 0, n))
        end)
    end)
end
