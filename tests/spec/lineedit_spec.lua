-- The line editor of llmrun chat, fed with keys.
local lineedit = require "llmrun.cli.lineedit"
local core = require "llmrun.core"

local raw
before_each(function()
    raw = core.raw
    core.raw = function() return true end
end)
after_each(function() core.raw = raw end)

-- Types keys (a string, or a list of what single reads give); the line and why there is none, the editor.
local function typed(keys, editor)
    if type(keys) == "string" then keys = { keys } end
    local i = 0
    local function read()
        i = i + 1
        return keys[i] or ""
    end
    editor = editor or lineedit.new(nil, read)
    editor.read = read
    editor.screen = {}
    editor.write = function(s) editor.screen[#editor.screen + 1] = s end
    local line, why = editor:line("> ")
    return line, why, editor
end

describe("the line editor", function()
    it("takes what is typed, cut anywhere", function()
        assert.equal("hello", (typed "hello\r"))
        assert.equal("caf\u{E9} \u{65E5}\u{672C} \u{1F600}", (typed "caf\u{E9} \u{65E5}\u{672C} \u{1F600}\r"))
        assert.equal("\u{65E5}x", (typed { ("\u{65E5}"):sub(1, 1), ("\u{65E5}"):sub(2), "x", "\r" }))
        assert.equal("", (typed "\r"))
    end)

    it("moves and removes by characters and words", function()
        assert.equal("heXllo", (typed "hello\27[D\27[D\27[DX\r"))
        assert.equal("Xhello", (typed "hello\1X\r"))
        assert.equal("helloX", (typed "hello\27[H\27[FX\r"))
        assert.equal("helo", (typed "hello\2\127\r"))
        assert.equal("hllo", (typed "hello\27[H\27[C\27[3~\r"))
        assert.equal("one ", (typed "one two\23\r"))
        assert.equal("one Xtwo", (typed "one two\27bX\r"))
        assert.equal("oneX two", (typed "one two\27[H\27fX\r"))
        assert.equal("one X", (typed "one two\27[1;5D\11X\r"))
        assert.equal("two", (typed "one two\27b\21\r"))
        assert.equal("\u{65E5}", (typed "\u{65E5}\u{672C}\8\r"))
        assert.equal("ab", (typed "ab\127\127\127\127ab\27[D\27[D\27[D\27[D\r"))
    end)

    it("ends at Ctrl-C, Ctrl-D, end of input, a signal", function()
        assert.same({ nil, "interrupt" }, { (select(1, typed "abc\3")), (select(2, typed "abc\3")) })
        assert.equal("eof", (select(2, typed "\4")))
        assert.equal("bc", (typed "abc\1\4\r"))
        assert.equal("eof", (select(2, typed { "abc" })))
        local editor = lineedit.new(nil, function() return nil end)
        editor.write = function() end
        assert.equal("signal", (select(2, editor:line("> "))))
        editor = lineedit.new(nil, function() return nil, "standard input: Input/output error", "io" end)
        editor.write = function() end
        assert.equal("eof", (select(2, editor:line("> ")))) -- a terminal that is gone
    end)

    it("reads plain lines where there is no terminal", function()
        local pieces = { "one\ntw", "o\n\nlast", " one" }
        local editor = lineedit.new(nil, function() return table.remove(pieces, 1) or "" end)
        editor.tty = false
        local lines = {}
        for line in function() return editor:line("> ") end do lines[#lines + 1] = line end
        assert.same({ "one", "two", "", "last one" }, lines)
        assert.equal("eof", (select(2, editor:line("> "))))
    end)

    it("goes through the history and comes back to the draft", function()
        local _, _, editor = typed "\r"
        editor:remember "first"
        editor:remember "second"
        editor:remember "second"
        editor:remember ""
        assert.same({ "first", "second" }, editor.history)
        assert.equal("second", (typed("\27[A\r", editor)))
        assert.equal("first", (typed("\16\16\16\r", editor)))
        assert.equal("draft!", (typed("draft\27[A\27[A\27[B\27[B!\r", editor)))
        assert.equal("first x", (typed("\27[A\27[A x\r", editor)))
    end)

    it("keeps pasted line ends", function()
        assert.equal("a\nb\nc!", (typed "\27[200~a\r\nb\nc\27[201~!\r"))
    end)

    it("keeps history in a file, line ends too", function()
        local path = os.tmpname()
        local editor = lineedit.new(path, function() return "" end)
        editor:remember "one"
        editor:remember "two\nlines"
        assert.same({ "one", "two\nlines" }, lineedit.new(path).history)
        os.remove(path)
        assert.same({}, lineedit.new("/no/such/folder/file").history)
    end)

    it("scrolls a long line so that the cursor is in sight", function()
        local _, _, editor = typed(("x"):rep(200) .. "END\r")
        local last = editor.screen[#editor.screen - 1]
        assert.matches("END", last)
        assert.is_true(#last < core.term_width() + 30)
    end)

    it("passes over keys it does not know", function()
        assert.equal("ab", (typed "a\27[99~\27[1;2P\27Oz\27q\0\2\6b\r"))
    end)
end)
