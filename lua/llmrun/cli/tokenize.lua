--- llmrun tokenize: text to ids and back.

local common = require "llmrun.cli.common"
local args = require "llmrun.cli.args"

local M = {
    summary = "shows a text's tokens, or the text of tokens",
    usage = "[-m MODEL] [-p TEXT | --decode IDS] [FLAGS...]",
    help = "Without -p the text is read from standard input. Loads the vocabulary only.",
    examples = [[
        llmrun tokenize -p "In 2026: 3.14159"
        llmrun tokenize -m qwen-0.5b --ids -p @file.txt
        llmrun tokenize --decode "788 216 34"]],
    flags = {
        { "model", short = "m", arg = "MODEL", default = "smollm2", help = "a GGUF file or a name" },
        { "prompt", short = "p", arg = "TEXT", help = "the text; @FILE reads a file" },
        { "decode", arg = "IDS", help = "prints the text of these ids instead" },
        { "ids", help = "prints ids only, on one line" },
        { "special", help = "names of special tokens in the text count as such; --decode shows them" },
        { "bos", help = "with what the model wants at a text's beginning" },
        { "count", help = "prints the number of tokens only" },
    },
}

local function shown(piece) return (("%q"):format(piece):gsub("\\\n", "\\n"):gsub("\r", "\\r")) end

function M.run(o)
    local file, err = require("llmrun.loader").file(common.find(o.model))
    if not file then args.fail(err) end
    local vocab, verr = file:vocab()
    if not vocab then args.fail(("%s: %s"):format(o.model, verr)) end
    if o.decode then
        local ids = {}
        for word in o.decode:gmatch("[^%s,]+") do
            local id = math.tointeger(tonumber(word))
            if not id or id < 0 or id >= #vocab then
                args.fail(("'%s' is no id of this vocabulary (0 to %d)"):format(word, #vocab - 1))
            end
            ids[#ids + 1] = id
        end
        print((vocab:decode(ids, o.special or false)))
        return 0
    end
    local text = o.prompt and common.text_of(o.prompt) or common.read_stdin()
    local ids, why = vocab:encode(text, { special = o.special, bos = o.bos })
    if not ids then args.fail(why) end
    if o.count then
        print(#ids)
    elseif o.ids then
        print(table.concat(ids, " "))
    else
        for _, id in ipairs(ids) do
            local kind = vocab:kind(id)
            print(("%7d  %s%s"):format(id, shown((vocab:piece(id))), kind == "normal" and "" or "  " .. kind))
        end
        print(("%d tokens"):format(#ids))
    end
    return 0
end

return M
