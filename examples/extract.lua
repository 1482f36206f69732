-- Data out of prose: a JSON schema is the answer's form, so what comes can be used as it is, by a model of any size.
--
--   llmrun examples/extract.lua [MODEL]
--
-- The notes are read side by side, on one copy of the instructions. What the schema leaves no choice about (names of
-- fields, brackets) is written without asking the model.
--
-- test-args: {smollm2}
-- test-expect: 1  .-"city"
-- test-expect: 4 notes, 4 valid records
-- test-expect: %d+ of %d+ tokens were no choice
-- test-expect: computed %d+ tokens, %d+ came from the cache

local json = require "llmrun.json"
local llm = require "llmrun"
local validate = require "llmrun.validate"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })

-- as text, so that the fields keep their order
local schema = [[{
    "type": "object", "additionalProperties": false, "required": ["city", "kind", "degrees", "wind"],
    "properties": {
        "city": { "type": "string", "pattern": "^[A-Z][a-z]+$", "maxLength": 16 },
        "kind": { "enum": ["sun", "rain", "snow", "storm"] },
        "degrees": { "type": "integer", "minimum": -60, "maximum": 60 },
        "wind": { "type": "string", "pattern": "^(no|weak|strong)$" }
    }
}]]

local notes = {
    "Oslo woke up under fresh snow, at minus 4 degrees, without any wind.",
    "It poured with rain all day in Bergen. The gauge said 11 degrees; the wind was strong.",
    "Sun and 31 degrees in Sevilla, hardly a breeze.",
    "A storm crosses Reykjavik tonight: 3 degrees, strong wind.",
}

local s <close> = model:session()
s:system "You turn weather notes into JSON with city, kind (sun, rain, snow or storm), degrees and wind."
s:user "Paris had sun and 24 degrees, with weak wind."
s:assistant '{"city": "Paris", "kind": "sun", "degrees": 24, "wind": "weak"}'

local records = llm.map(notes, function(note)
    local branch <close> = s:fork()
    branch:user(note)
    return branch:gen { json = schema, temperature = 0, max_tokens = 80 }
end)

local valid, forced, drawn, cached = 0, 0, 0, 0
for i, r in ipairs(records) do
    print(i .. "  " .. r.text)
    if validate.check(json.decode(schema), r.value) then valid = valid + 1 end
    forced, drawn = forced + r.usage.forced_tokens, drawn + r.usage.completion_tokens
    cached = cached + r.usage.cached_tokens
end
print(("%d notes, %d valid records"):format(#notes, valid))
print(("%d of %d tokens were no choice"):format(forced, drawn))
print(("computed %d tokens, %d came from the cache"):format(model:metrics().computed_tokens, cached))
