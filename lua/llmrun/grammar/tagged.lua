--- Free text in which values of a JSON schema stand between two marks, as models write calls of tools.
---
---   tagged = { open = "<tool_call>\n", close = "\n</tool_call>", json = schema, most = n }
---
--- The free text may be anything that does not hold the first mark's first line; most: so many values at most (no
--- bound), after which the text ends.

local core = require "llmrun.core"
local refuse = require "llmrun.grammar.refuse"

local M = {}

--- Texts without `mark`.
local function without(b, mark)
    local pattern = mark:gsub("[%^%$%.%*%+%?%(%)%[%]{}|\\/]", "\\%0")
    local with = refuse.check("tagged.open", core.regex(pattern, { search = true }))
    return b:regex(refuse.check("tagged.open", with:none()), "raw")
end

--- Defines the rule in builder b.
function M.rule(b, spec, opts)
    for _, name in ipairs { "open", "close" } do
        if type(spec[name]) ~= "string" or spec[name] == "" then
            refuse.raise("format", "tagged.%s: a text expected", name)
        end
    end
    local value = require("llmrun.grammar.json_schema").rule(b, spec.json, opts)
    local mark = spec.open:match "^[^\n]+" or spec.open
    local free = without(b, mark)
    b:mark(mark)
    local call = b:seq { b:lit(spec.open), b:ref(value), b:lit(spec.close) }
    local rule = b:rule "tagged"
    if spec.most then
        b:define(rule, b:seq { free, b:rep(call, 0, spec.most) })
    else
        b:define(rule, b:seq { free, b:rep(b:seq { call, free }, 0, -1) })
    end
    return rule
end

return M
