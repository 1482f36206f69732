--- Any bytes as a tokenizer.json: what is taken encodes texts, among them its own tokens, and gives texts back.

local json = require "llmrun.json"
local tokenizer = require "llmrun.hf.tokenizer"

local CODES = { format = true, unsupported = true, limit = true, invalid = true, no_memory = true }
local TEXTS = { "", "Hello, world! 12 34\n\n\tit's", "\0\255\u{FFFD}\u{65E5}\u{672C} \u{2581}a  b", ("ab "):rep(20) }

local function refused(e)
    assert(type(e) == "table" and CODES[e.code] and type(e.message) == "string" and #e.message < 2000,
        type(e) == "table" and tostring(e.message) or tostring(e))
end

return function(text)
    local value = json.decode(text, { max_values = 100000 })
    if not json.is_object(value) then return "no object" end
    local ok, v = pcall(tokenizer.vocab, "", {
        read = function() end, read_json = function(_, name) return name == "tokenizer.json" and value or nil end,
        config = {},
    })
    if not ok then
        refused(v)
        return v.code
    end
    local texts = table.move(TEXTS, 1, #TEXTS, 1, {})
    for id = 0, math.min(#v, 8) - 1 do texts[#texts + 1] = v:piece(id) .. " " .. (v:piece(#v - 1 - id) or "") end
    for i, t in ipairs(texts) do
        local ids, err, code = v:encode(t, { special = i % 2 == 0, bos = true })
        if ids then
            for _, id in ipairs(ids) do assert(id >= 0 and id < #v) end
            assert(type(v:decode(ids)) == "string")
        else
            assert(CODES[code], err)
        end
    end
    return "ok"
end
