-- ReAct (arXiv:2210.03629): thought, action, observation, again, until the model finishes. The action is chosen by
-- log-probability among the tools there are (s:select), so that it can't be misspelt; its argument is generated.
--
--   llmrun examples/react.lua [MODEL] [QUESTION]
--
-- All of it is one session: each turn computes only its new tokens.
--
-- test-args: {smollm2} "How many people live in France and Italy together?"
-- test-expect: Thought: %S
-- test-expect: Action: %a+%[%S
-- test-expect: Observation: %S
-- test-expect: answer: %S
-- test-expect: computed %d+ tokens; %d+ without a session

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
local question = arg[2] or "How many people live in France and Italy together?"

local facts = { france = "68 million people", italy = "59 million people", spain = "48 million people" }

local tools = {
    Lookup = function(what)
        for name, fact in pairs(facts) do
            if what:lower():find(name, 1, true) then return fact end
        end
        return "nothing is known about " .. what
    end,
    Add = function(what)
        local sum, n = 0, 0
        for number in what:gmatch("%d+") do sum, n = sum + tonumber(number), n + 1 end
        if n == 0 then error("two numbers are needed", 0) end
        return tostring(sum)
    end,
}

local prompt = [[
Question: How many people live in Spain and Italy together?
Thought: I need the population of Spain.
Action: Lookup[Spain]
Observation: 48 million people
Thought: I need the population of Italy.
Action: Lookup[Italy]
Observation: 59 million people
Thought: I add 48 and 59.
Action: Add[48 + 59]
Observation: 107
Thought: Now I know the answer.
Action: Finish[107 million people]

Question: ]]

local s <close> = model:session()
s:append(prompt .. question .. "\n")

--- The text of a stop string may be part of the session's last token already.
local function ensure(session, ending)
    if session.text:sub(-#ending) ~= ending then session:append(ending) end
end

--- An answer may come once something was looked up, and has to come in the last turn.
local function choices(turn)
    if turn == 1 then return { " Lookup[", " Add[" } end
    if turn == 6 then return { " Finish[" } end
    return { " Lookup[", " Add[", " Finish[" }
end

local answer
for turn = 1, 6 do
    s:append("Thought:")
    local thought = s:gen({ temperature = 0, max_tokens = 30, stop = "\n" }).text
    ensure(s, "\n")
    s:append("Action:")
    local action = s:select("action", choices(turn)):match("%a+")
    local argument = s:gen({ temperature = 0, max_tokens = 24, stop = { "]", "\n" } }).text
    print("Thought:" .. thought)
    print(("Action: %s[%s]"):format(action, argument))
    if action == "Finish" then
        answer = argument
        break
    end
    local ok, result = pcall(tools[action], argument)
    local observation = ok and result or "error: " .. result
    print("Observation: " .. observation)
    ensure(s, "]")
    s:append("\nObservation: " .. observation .. "\n")
end

print("answer: " .. answer)
local m = model:metrics()
print(("computed %d tokens; %d without a session"):format(m.computed_tokens, m.prompt_tokens + m.generation_tokens))
