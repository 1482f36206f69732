--- The rules of chess: positions, their legal moves, and what a move makes of them. Squares are 1 (a8) to 64 (h1);
--- moves are written as "e2e4", "e7e8q".

local Board = {}
Board.__index = Board

local START = "rnbqkbnrpppppppp" .. (" "):rep(32) .. "PPPPPPPPRNBQKBNR"

local STEPS = {
    n = { { 1, 2 }, { 2, 1 }, { -1, 2 }, { -2, 1 }, { 1, -2 }, { 2, -1 }, { -1, -2 }, { -2, -1 } },
    b = { { 1, 1 }, { 1, -1 }, { -1, 1 }, { -1, -1 } },
    r = { { 1, 0 }, { -1, 0 }, { 0, 1 }, { 0, -1 } },
}
STEPS.q = table.move(STEPS.r, 1, 4, 5, table.move(STEPS.b, 1, 4, 1, {}))
STEPS.k = STEPS.q
local SLIDES = { b = true, r = true, q = true }

local function square(file, rank) return (8 - rank) * 8 + file end
local function file_of(s) return (s - 1) % 8 + 1 end
local function rank_of(s) return 8 - (s - 1) // 8 end
local function name_of(s) return ("abcdefgh"):sub(file_of(s), file_of(s)) .. rank_of(s) end

--- The position at the start of a game.
local function new()
    local b = { white = true, castle = "KQkq" }
    for s = 1, 64 do b[s] = START:sub(s, s) end
    return setmetatable(b, Board)
end

--- Whether a piece belongs to whites (true) or blacks.
local function is_of(piece, white)
    return piece ~= " " and (piece == piece:upper()) == white
end

--- Whether a square is attacked by one side.
function Board:attacked(s, by_white)
    local f, r = file_of(s), rank_of(s)
    local function is(df, dr, kinds)
        local x, y = f + df, r + dr
        if x < 1 or x > 8 or y < 1 or y > 8 then return false end
        local p = self[square(x, y)]
        return is_of(p, by_white) and kinds:find(p:lower(), 1, true) ~= nil
    end
    local back = by_white and -1 or 1
    if is(-1, back, "p") or is(1, back, "p") then return true end
    for _, d in ipairs(STEPS.n) do
        if is(d[1], d[2], "n") then return true end
    end
    for _, d in ipairs(STEPS.q) do
        if is(d[1], d[2], "k") then return true end
        local kinds, n = d[1] * d[2] == 0 and "rq" or "bq", 1
        while true do
            local x, y = f + n * d[1], r + n * d[2]
            if x < 1 or x > 8 or y < 1 or y > 8 then break end
            if is(n * d[1], n * d[2], kinds) then return true end
            if self[square(x, y)] ~= " " then break end
            n = n + 1
        end
    end
    return false
end

--- Whether a side's king is attacked.
function Board:in_check(white)
    local king = white and "K" or "k"
    for s = 1, 64 do
        if self[s] == king then return self:attacked(s, not white) end
    end
end

--- The position after a move, which is taken to be possible.
function Board:after(move)
    local b = setmetatable(table.move(self, 1, 64, 1, {}), Board)
    local from = square(move:byte(1) - 96, move:byte(2) - 48)
    local to = square(move:byte(3) - 96, move:byte(4) - 48)
    local piece, promoted = self[from], move:sub(5, 5)
    b.white, b.castle = not self.white, self.castle
    b[from], b[to] = " ", piece
    if promoted ~= "" then b[to] = self.white and promoted:upper() or promoted end
    if piece:lower() == "p" then
        if to == self.passant then b[to + (self.white and 8 or -8)] = " " end
        if math.abs(to - from) == 16 then b.passant = (from + to) // 2 end
    elseif piece:lower() == "k" and math.abs(to - from) == 2 then
        local corner = to > from and to + 1 or to - 2
        b[(from + to) // 2], b[corner] = b[corner], " "
    end
    for at, right in pairs { [61] = "KQ", [5] = "kq", [57] = "Q", [64] = "K", [1] = "q", [8] = "k" } do
        if from == at or to == at then b.castle = b.castle:gsub("[" .. right .. "]", "") end
    end
    return b
end

--- Calls add(from, to) for all moves that the pieces could make, check or not.
local function each_move(self, add)
    local white = self.white
    for from = 1, 64 do
        local piece = self[from]
        if is_of(piece, white) then
            local kind, f, r = piece:lower(), file_of(from), rank_of(from)
            if kind == "p" then
                local up = white and -8 or 8
                if self[from + up] == " " then
                    add(from, from + up)
                    if r == (white and 2 or 7) and self[from + 2 * up] == " " then add(from, from + 2 * up) end
                end
                for df = -1, 1, 2 do
                    local to = from + up + df
                    if f + df >= 1 and f + df <= 8 and (is_of(self[to], not white) or to == self.passant) then
                        add(from, to)
                    end
                end
            else
                for _, d in ipairs(STEPS[kind]) do
                    local n, x, y = 1, f + d[1], r + d[2]
                    while x >= 1 and x <= 8 and y >= 1 and y <= 8 and not is_of(self[square(x, y)], white) do
                        add(from, square(x, y))
                        if not SLIDES[kind] or self[square(x, y)] ~= " " then break end
                        n = n + 1
                        x, y = f + n * d[1], r + n * d[2]
                    end
                end
            end
        end
    end
end

--- Calls add(from, to) for the castlings that are possible.
local function each_castling(self, add)
    local king = self.white and 61 or 5
    for right, way in pairs { k = { 1, 2 }, q = { -1, 3 } } do
        local step, empty = way[1], true
        for n = 1, way[2] do empty = empty and self[king + n * step] == " " end
        if empty and self.castle:find(self.white and right:upper() or right, 1, true)
            and not self:attacked(king, not self.white) and not self:attacked(king + step, not self.white) then
            add(king, king + 2 * step)
        end
    end
end

--- The legal moves, in alphabetic order.
function Board:moves()
    local list = {}
    local function add(from, to)
        local move = name_of(from) .. name_of(to)
        local last = self[from]:lower() == "p" and (rank_of(to) == 8 or rank_of(to) == 1)
        if self:after(move):in_check(self.white) then return end
        for p in (last and "qrbn" or " "):gmatch "." do list[#list + 1] = move .. (last and p or "") end
    end
    each_move(self, add)
    each_castling(self, add)
    table.sort(list)
    return list
end

--- Positions that so many moves lead to: known numbers, with which a move generator is checked.
function Board:perft(depth)
    if depth == 0 then return 1 end
    local n = 0
    for _, m in ipairs(self:moves()) do n = n + self:after(m):perft(depth - 1) end
    return n
end

return { new = new }
