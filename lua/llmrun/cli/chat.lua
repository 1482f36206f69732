--- llmrun chat: a conversation on the terminal.

local core = require "llmrun.core"
local files = require "llmrun.files"
local loop = require "llmrun.loop"
local common = require "llmrun.cli.common"
local errors = require "llmrun.errors"

local M = {
    summary = "talks with a model on the terminal",
    usage = "[-m MODEL] [FLAGS...]",
    model = true,
    help = [[
Lines are messages; the model's answers are streamed. Ctrl-C stops an answer and keeps the chat, Ctrl-D ends it. Without
a terminal each line of standard input is a message. Lines that begin with / are commands; /help lists them.]],
    examples = [[
        llmrun chat
        llmrun chat -m qwen-1.5b --system "You are terse." --temperature 0
        printf 'Hello\nWhat did I say?\n' | llmrun chat]],
    flags = common.flags({
        { "system", short = "s", arg = "TEXT", help = "system message" },
        common.template_flag,
        common.record_flag,
        { "stats", help = "prints tokens and times after each answer" },
    }, common.sampling_flags),
}

local commands = {}
local help = {
    { "/help", "this list" },
    { "/quit", "ends the chat (also Ctrl-D)" },
    { "/reset", "forgets the conversation" },
    { "/undo", "takes the last message and its answer back" },
    { "/again", "answers the last message anew" },
    { "/system TEXT", "begins anew with this system message" },
    { "/stats", "tokens, times and memory of the last answer" },
    { "/save FILE", "writes the conversation as JSON" },
}

function commands.help()
    for _, h in ipairs(help) do print(("  %-14s %s"):format(h[1], h[2])) end
end

function commands.quit(chat) chat.over = true end
commands.exit = commands.quit

function commands.reset(chat)
    chat.session:close()
    chat.session = chat.model:session()
    if chat.system then chat.session:system(chat.system) end
end

function commands.system(chat, text)
    chat.system = text ~= "" and text or nil
    commands.reset(chat)
end

--- A new session with the messages up to (without) the last user message; that message.
local function step_back(chat)
    local messages = chat.session.messages
    local last = #messages
    while last > 0 and messages[last].role ~= "user" do last = last - 1 end
    if last == 0 then return nil end
    local text = messages[last].content
    local session = chat.model:session()
    for i = 1, last - 1 do session:message(messages[i]) end
    chat.session:close()
    chat.session = session
    return text
end

function commands.undo(chat)
    if not step_back(chat) then print("nothing to take back") end
end

function commands.again(chat)
    local text = step_back(chat)
    if text then chat:answer(text) else print("nothing to answer") end
end

function commands.stats(chat)
    local result = chat.session.result
    print(result and common.stats_line(chat.model, result) or "no answer yet")
end

function commands.save(chat, path)
    if path == "" then return print("/save needs a file") end
    local ok, err = files.save(path, require("cjson").encode(chat.session.messages) .. "\n")
    if not ok then print(err) end
end

local Chat = {}
Chat.__index = Chat

--- Sends a message and streams the answer. Ctrl-C meanwhile ends the answer only.
function Chat:answer(text)
    local s = self.session
    loop.on_interrupt = function() s:cancel() end
    local ok, err = pcall(function()
        s:user(text)
        for piece in s:stream(self.sampling) do
            io.stdout:write(piece)
            io.stdout:flush()
        end
    end)
    loop.on_interrupt = nil
    core.interrupted(true) -- one that came too late for it is no other's
    io.stdout:write("\n")
    if not ok then
        if not errors.is(err) then error(err, 0) end
        io.stderr:write((err.message:gsub("^s:%a+: ", "")), "\n")
        step_back(self)
    elseif s.result.finish_reason == "cancelled" then
        io.stdout:write("(stopped)\n")
    end
    if ok and self.stats then io.stderr:write(common.stats_line(self.model, s.result), "\n") end
    io.stdout:flush()
end

local function history_path()
    local folder = require("llmrun.catalog").folder()
    return core.stat(folder) == "folder" and folder .. "/chat_history" or nil
end

function M.run(o)
    local model <close> = common.load(o, { template = common.template(o.template), speculate = common.drafts(o) })
    common.check_chat(model)
    local lines = require("llmrun.cli.lineedit").new(core.isatty(0) and history_path() or nil)
    local chat = setmetatable({
        model = model, session = model:session(), system = o.system, stats = o.stats,
        sampling = common.sampling(o, model),
    }, Chat)
    if o.system then chat.session:system(o.system) end
    if lines.tty then print(("%s, %s; /help for help"):format(model.info.name, model.info.backend)) end
    core.catch_interrupts("flag")
    while not chat.over do
        local line, why = lines:line("> ")
        if why == "eof" or why == "signal" and not lines.tty then break end
        core.interrupted(true)
        if line and line:sub(1, 1) == "/" then
            local name, rest = line:match("^/(%S*)%s*(.-)%s*$")
            local command = commands[name]
            if command then command(chat, rest) else print("no command /" .. name .. "; /help lists them") end
            lines:remember(line)
        elseif line and line:find("%S") then
            lines:remember(line)
            chat:answer(line)
        end
    end
    return 0
end

return M
