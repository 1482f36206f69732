-- Checks what an example printed: build/llmrun scripts/expect.lua EXAMPLE OUTPUT
-- Each "-- test-expect: PATTERN" line of the example is a Lua pattern that its standard output must hold, in the given
-- order, each after the end of the one before. Prints the first one that isn't there; status 1 then.
--
-- example:
--   build/llmrun scripts/expect.lua examples/hello.lua output.txt

local example, output = require "usage".arguments "EXAMPLE OUTPUT"
local at, n = 1, 0
local file = assert(io.open(output, "rb"))
local text = file:read "a"
file:close()
for line in io.lines(example) do
    local pattern = line:match "^%-%- test%-expect: (.+)$"
    if pattern then
        n = n + 1
        local first, last = text:find(pattern, at)
        if not first then
            print(("expected and not found%s: %s"):format(n > 1 and " after the ones before" or "", pattern))
            os.exit(1)
        end
        at = last + 1
    end
end
if n == 0 then
    print "the example has no '-- test-expect:' line"
    os.exit(1)
end
