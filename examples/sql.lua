-- SQL that runs: a grammar whose holes ask a live database which tables and columns there are at that moment.
--
--   llmrun examples/sql.lua [MODEL]
--
-- <table> and <column> in the grammar are holes: places where a Lua function says what may stand. The functions see the
-- text so far, so the columns are those of the table that the model has just chosen. They are called between two tokens
-- and cannot wait; that is why they read the database at once (io.popen), where other code would use llm.exec.
--
-- test-args: {smollm2}
-- test-expect: SELECT .- FROM planes WHERE
-- test-expect: SELECT .- FROM gliders WHERE
-- test-expect: 3 queries, 3 ran

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })

local file = os.tmpname()
local remove <close> = setmetatable({}, { __close = function() os.remove(file) end }) -- luacheck: ignore 211

--- Lines of what the database answers.
local function sqlite(sql)
    local pipe <close> = assert(io.popen(("sqlite3 -batch %s \"%s\""):format(file, sql)))
    local lines = {}
    for line in pipe:lines() do lines[#lines + 1] = line end
    return lines
end

local grammar = [[
root   ::= "SELECT " what " FROM " <table> " WHERE " <column> op number ";"
what   ::= "COUNT(*)" | "*"
op     ::= " > " | " < " | " = "
number ::= [0-9]{1,4}
]]

local holes = {
    table = function() return sqlite "SELECT name FROM sqlite_master WHERE type = 'table'" end,
    column = function(text)
        local name = text:match "FROM ([%w_]+) WHERE $"
        return sqlite(("SELECT name FROM pragma_table_info('%s')"):format(name))
    end,
}

sqlite [[CREATE TABLE planes (id INTEGER, seats INTEGER, year INTEGER);
    INSERT INTO planes VALUES (1, 180, 1998), (2, 220, 2011), (3, 19, 2004);]]

local ran, questions = 0, {
    "How many planes have more than 100 seats?",
    "List the planes built before the year 2000.",
    "How many gliders have a span above 18?",
}
for i, question in ipairs(questions) do
    if i == 3 then -- the database changes; the next query may use what is new
        sqlite "DROP TABLE planes; CREATE TABLE gliders (id INTEGER, span INTEGER); INSERT INTO gliders VALUES (1, 20);"
    end
    local s <close> = model:session()
    s:system "You write one SQL query for SQLite."
    s:user(question)
    local query = s:gen { grammar = grammar, holes = holes, temperature = 0, max_tokens = 60 }.text
    local r = llm.exec({ "sqlite3", file, query })
    print(query .. "  ->  " .. r.stdout:gsub("\n", "; "))
    if r.status == 0 then ran = ran + 1 end
end
print(("%d queries, %d ran"):format(#questions, ran))
