-- A game of chess in which every move is legal, by a model that does not know the rules: a Lua function sees the text
-- so far and says what may come next.
--
--   llmrun examples/chess.lua [MODEL] [MOVES] [SEED]
--
-- Two games are drawn side by side; the second must begin with a pawn's move to the fourth rank.
--
-- test-args: {smollm2} 12 5
-- test-expect: 8902 positions after three moves
-- test-expect: 1%. %l%d%l%d %l%d%l%d 2%. %l%d%l%d
-- test-expect: 2 games, 24 moves, 0 illegal

local llm = require "llmrun"
local chess = require "chess.board"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
local n_moves, seed = tonumber(arg[2]) or 20, tonumber(arg[3]) or 1

print(("%d positions after three moves"):format(chess.new():perft(3))) -- 8902, if the rules are right

--- What may come behind a list of moves "1. e2e4 e7e5 2. g1f3 ...": nil when it is long enough or the game has ended.
local function next_move(allowed)
    local board, played, at = chess.new(), 0, 0
    return function(text)
        for move in text:sub(at + 1):gmatch "%l%d%l%d[qrbn]?" do -- those since the last time
            board, played = board:after(move), played + 1
        end
        at = #text
        if played == n_moves then return nil end
        local options, before = {}, played > 0 and " " or ""
        if played % 2 == 0 then before = before .. played // 2 + 1 .. ". " end
        for _, m in ipairs(board:moves()) do
            if played > 0 or allowed(m) then options[#options + 1] = before .. m end
        end
        return #options > 0 and options or nil
    end
end

local s <close> = model:session()
s:user "Write down a game of chess as a list of moves like 1. e2e4 e7e5 2. g1f3 b8c6"
local function any() return true end
local function pawn_to_fourth(m) return m:find "^(%l)2%14$" ~= nil end

local games = llm.map({ any, pawn_to_fourth }, function(allowed, i)
    local branch <close> = s:fork()
    return branch:gen { lua = next_move(allowed), temperature = 0.8, seed = seed + i, max_tokens = 400 }.text
end)

local moves, illegal = 0, 0
for _, text in ipairs(games) do
    print(text)
    local board = chess.new()
    for move in text:gmatch "%l%d%l%d[qrbn]?" do
        local legal = {}
        for _, m in ipairs(board:moves()) do legal[m] = true end
        moves, illegal = moves + 1, illegal + (legal[move] and 0 or 1)
        board = board:after(move)
    end
end
print(("%d games, %d moves, %d illegal"):format(#games, moves, illegal))
