-- An agent with tools: functions in Lua with a JSON schema each. The model's own template tells it of them; its calls
-- are parsed, checked against the schema, run (side by side where they wait), and their results given back.
--
--   llmrun examples/agent.lua [MODEL] [QUESTION]
--
-- test-args: {qwen-0.5b}
-- test-expect: weather.-Rome.-%-> .-heavy rain
-- test-expect: answer: .-[Rr]ain
-- test-expect: %d turns, computed %d+ tokens, %d+ came from the session

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "qwen-0.5b", { ctx = 2048 })

-- A conversation to learn from: small models need to be shown how an answer follows a result.
local s <close> = model:session()
s:system "You are a helpful assistant. Answer in one short sentence."
s:user "How is the weather in Oslo?"
s:message { role = "assistant", content = "", tool_calls = {
    { type = "function", ["function"] = { name = "weather", arguments = { city = "Oslo" } } },
} }
s:message { role = "tool", content = '{"city": "Oslo", "degrees": -3, "sky": "snow"}' }
s:assistant "In Oslo it snows, at -3 degrees."

local agent <close> = llm.agent {
    session = s,
    tools = {
        weather = {
            description = "The weather in a city now.",
            parameters = {
                properties = { city = { type = "string", description = "Name of the city" } }, required = { "city" },
            },
            run = function(args)
                llm.sleep(0.01) -- as a request to a server would: other agents go on meanwhile
                return { city = args.city, sky = args.city:find("Rome") and "heavy rain" or "sun", degrees = 14 }
            end,
        },
        time = { description = "The time now.", run = function() return os.date("%H:%M") end },
    },
    gen = { temperature = 0, max_tokens = 48 }, tool_choice = "required",
    max_turns = 4, timeout = 100,
    on_result = function(call)
        print(("%s -> %s"):format(call.raw:gsub("\n", " "), call.result or "error: " .. call.error))
    end,
}

local r = agent:run(arg[2] or "How is the weather in Rome?")
print("answer: " .. r.text:gsub("\n", " "))
print(("%d turns, computed %d tokens, %d came from the session"):format(r.turns, r.usage.computed_tokens,
    r.usage.cached_tokens))
