--- llmrun bench --spec: decoding with and without speculation, side by side, next to what the formula predicts.
---
--- Tasks: "code" (short programs to be written) and "edit" (a program to be printed again with one name changed). In
--- each round the same requests are decoded with and without, in short turns within one engine (bench_turns.lua), so
--- that what else the machine does hits both alike; what a draft model makes of the prompts counts too. Each row begins
--- with an engine that knows no times and owes nothing, so the first round is what the first requests have; turns
--- without speculation teach it nothing. The method "off" is a control: it must give 1.00.
---
--- The formula: a draft of K tokens that are right with probability a each gives (1 - a^(K+1)) / (1 - a) tokens for the
--- time of K draft passes (c each) and a step of K + 1 rows (v), in units of a step of one row. K and a (of the first
--- place) are those measured, as are c and v.

local args = require "llmrun.cli.args"
local turns = require "llmrun.cli.bench_turns"
local common = require "llmrun.cli.common"

local M = {}

M.flags = {
    { "spec", help = "speculation: with and without, side by side" },
    { "draft", arg = "MODEL", help = "--spec: a draft model" },
    { "shortlist", arg = "N", type = "integer", range = { 0 },
        help = "--spec: first tokens of what drafts of a large vocabulary are chosen from; 0: from all" },
    { "task", arg = "LIST", default = "code,edit", help = "--spec: code, edit" },
    { "draft-layers", arg = "N", type = "integer", range = { 1 },
        help = "--spec: of the model's layers, those of early_exit" },
    { "heads", arg = "FILE", help = "--spec: Medusa heads (scripts/train_heads)" },
    { "eagle", arg = "FOLDER", help = "--spec: an EAGLE head (scripts/train_heads)" },
    { "temperature", arg = "T", type = "number", range = { 0 }, default = 0, help = "--spec: 0 = greedy" },
    { "method", arg = "LIST", help = "--spec: ngram, suffix, draft, distribution (draft, judged), early_exit, heads, "
        .. "eagle, off (a control); with =K always that many, with xN up to N ways at a place; e.g. "
        .. "draft,draft=4,draft=4x3" },
}

local CODE = {
    "Write a Python function that reads a CSV file and returns the mean of each numeric column.",
    "Write a C function that reverses a singly linked list in place, with a short test program.",
    "Write a Python class for a bank account with deposit, withdraw and a history of transactions.",
    "Write a JavaScript function that groups a list of objects by a key and counts the groups.",
}

local PROGRAM = [[
class Inventory:
    def __init__(self, name):
        self.name = name
        self.items = {}
        self.history = []

    def add(self, item, count=1):
        if count < 1:
            raise ValueError("count must be positive")
        self.items[item] = self.items.get(item, 0) + count
        self.history.append(("add", item, count))

    def remove(self, item, count=1):
        have = self.items.get(item, 0)
        if have < count:
            raise ValueError("not enough of " + item)
        self.items[item] = have - count
        if self.items[item] == 0:
            del self.items[item]
        self.history.append(("remove", item, count))

    def total(self):
        return sum(self.items.values())

    def report(self):
        lines = [self.name]
        for item in sorted(self.items):
            lines.append("  %s: %d" % (item, self.items[item]))
        return "\n".join(lines)
]]

local TASKS = {
    code = function(i) return CODE[(i - 1) % #CODE + 1] end,
    edit = function()
        return "Print this program again, with the class renamed to Stock. Only the code.\n```python\n" .. PROGRAM ..
            "```"
    end,
}

local function list(text)
    local t = {}
    for word in text:gmatch "[^,%s]+" do t[#t + 1] = word end
    return t
end

--- "draft=4x2" -> what gen takes
local function option(name, o)
    if name == "off" then return "off" end
    local method, k, wide = name:match "^([%a_]+)=?(%d*)x?(%d*)$"
    return {
        method = method == "distribution" and "draft" or method, k = math.tointeger(tonumber(k)), fixed = k ~= "",
        branches = math.tointeger(tonumber(wide)), layers = method == "early_exit" and o.draft_layers or nil,
        accept = method == "distribution" and "distribution" or nil,
    }
end

--- Tokens of a request between two turns: few, but steps enough that caches are the side's own.
local function stride_of(batch) return batch <= 4 and 4 or 2 end

--- One round of `batch` requests of both sides: their times, texts, and the counts of drafts.
local function run_round(llm, model, row, o, round)
    local sum = { drafts = 0, drafted = 0, accepted = 0, steps = 0, draft_time = 0, tried = 0, right = 0 }
    local texts = { {}, {} }
    local sides, pairs_of = turns.run(llm, model, {
        n = row.batch, stride = stride_of(row.batch) * row.batch,
        on_side = function(side) model.engine:pace_hold(side == 1) end,
    }, function(side, i)
        local s <close> = model:session { salt = ("%s %d %d"):format(row.key, round, side) }
        local number = (round - 1) * row.batch + i
        s:user(TASKS[row.task](number))
        local r = s:gen { tag = side, max_tokens = o.decode, temperature = o.temperature, seed = number,
            speculate = side == 1 and "off" or option(row.name, o) }
        texts[side][i] = table.concat(r.tokens, " ")
        if side == 1 then return end
        local sp = r.speculation
        sum.steps = sum.steps + r.usage.completion_tokens - (sp and sp.accepted or 0)
        if not sp then return end
        for _, k in ipairs { "drafts", "drafted", "accepted", "draft_time" } do sum[k] = sum[k] + sp[k] end
        sum.tried, sum.right = sum.tried + (sp.tried_at[1] or 0), sum.right + (sp.accepted_at[1] or 0)
    end)
    model.engine:pace_hold(false)
    return { sides = sides, pairs = pairs_of, sum = sum,
        same = table.concat(texts[1], "\0") == table.concat(texts[2], "\0") }
end

--- What the formula says of the drafts counted; 1 without any.
local function predict(model, sum, batch, branched)
    if sum.drafts == 0 then return 1 end
    if branched then return nil end -- the formula knows no branches
    local k, a = sum.drafted / sum.drafts, math.min(sum.right / sum.tried, 0.999)
    local one, pass = model.engine:pace(batch)
    pass = sum.draft_time > 0 and pass or 0
    local low = math.floor(k)
    local t0, t1 = model.engine:pace(batch * (low + 1)), model.engine:pace(batch * (low + 2))
    local verify = t0 + (t1 - t0) * (k - low)
    if not (one > 0 and verify > 0) then return nil end
    local plain = sum.steps - sum.drafts
    local tokens = sum.drafts * (1 - a ^ (k + 1)) / (1 - a) + plain
    return tokens / (sum.drafts * (verify + k * pass) / one + plain)
end

local function methods_of(o)
    local t = list(o.method or "ngram,suffix" .. (o.draft and ",draft" or "") ..
        (o.draft_layers and ",early_exit" or "") .. (o.heads and ",heads" or "") .. (o.eagle and ",eagle" or ""))
    local needs = { off = true, ngram = true, suffix = true, draft = o.draft, distribution = o.draft,
        early_exit = o.draft_layers, heads = o.heads, eagle = o.eagle }
    local flag = { draft = "draft MODEL", distribution = "draft MODEL", early_exit = "draft-layers N",
        heads = "heads FILE", eagle = "eagle FOLDER" }
    for _, name in ipairs(t) do
        local m = name:match "^([%a_]+)=?%d*x?%d*$"
        if not needs[m] and not flag[m] then
            args.fail(("--method: '%s' is none of ngram, suffix, draft, distribution, early_exit, heads, eagle, off"):
                format(name), 2)
        elseif not needs[m] then
            args.fail(("--method %s needs --%s"):format(m, flag[m]), 2)
        end
    end
    return t
end

--- A row of the table: its rounds, and the counts of all.
local function measure(llm, model, row, o)
    local rounds, sum, same = {}, {}, true
    model.engine:pace_forget()
    for round = 1, o["repeat"] do
        local r = run_round(llm, model, row, o, round)
        rounds[round], same = r, same and r.same
        for k, v in pairs(r.sum) do sum[k] = (sum[k] or 0) + v end
    end
    return rounds, sum, same
end

local function record_of(model, row, rounds, s, same)
    local by, error_of, rates = turns.ratio(rounds)
    local each, name = {}, row.name
    for i, r in ipairs(rounds) do each[i] = turns.ratio { r } end
    return {
        task = row.task, batch = row.batch, method = name, tps = rates[2], off_tps = rates[1], speedup = by,
        error = error_of, rounds = each, same_text = same,
        predicted = predict(model, s, row.batch, name:find "x" or name:find "^heads" or name:find "^early_exit"),
        length = s.drafts > 0 and s.accepted / s.drafts or 0, drafted = s.drafts > 0 and s.drafted / s.drafts or 0,
        acceptance = s.drafted > 0 and s.accepted / s.drafted or 0, part = s.steps > 0 and s.drafts / s.steps or 0,
    }
end

local function print_row(r)
    local each = {}
    for i, v in ipairs(r.rounds) do each[i] = ("%.2f"):format(v) end
    print(("%-5s %5d  %-13s %7.1f %6.1f %8.2fx +- %.2f %7s %10.1f %6.1f %8.0f%%  %-9s  %s"):format(r.task, r.batch,
        r.method, r.tps, r.off_tps, r.speedup, r.error, r.predicted and ("%.2fx"):format(r.predicted) or "-", r.drafted,
        r.length, 100 * r.part, r.same_text and "yes" or "NO", table.concat(each, " ")))
end

local function print_costs(model)
    local costs = {}
    for _, n in ipairs { 1, 2, 3, 4, 5, 8, 16 } do
        local step, pass = model.engine:pace(n)
        costs[#costs + 1] = ("%d: %.1f%s"):format(n, step * 1e3, pass > 0 and (" (%.1f)"):format(pass * 1e3) or "")
    end
    print("ms of a step (a draft pass) by rows, measured or interpolated: " .. table.concat(costs, ", "))
end

--- Runs the benchmark; the exit status.
function M.run(o, sizes)
    local llm = require "llmrun"
    local names = methods_of(o)
    local most = math.max(table.unpack(sizes))
    for _, task in ipairs(list(o.task)) do
        if not TASKS[task] then args.fail(("--task: '%s' is none of code, edit"):format(task), 2) end
    end
    if o.decode < 2 then args.fail("--decode: with --spec at least 2", 2) end
    local ctx = o.ctx or 512 + o.decode
    local model <close> = common.load(o, {
        ctx = ctx, max_seqs = math.max(64, 2 * most),
        kv = { type = o.kv_type, blocks = (ctx // 16 + 2) * (2 * most + 1) },
        speculate = { method = "off", heads = o.heads, eagle = o.eagle,
            draft = o.draft and { model = o.draft, shortlist = o.shortlist } },
    })
    if not o.json then
        print(("%s, %s, %d tokens, rounds: %d%s"):format(model.info.name, model.info.backend, o.decode, o["repeat"],
            o.draft and ", draft " .. o.draft or ""))
        print("task  batch  method        tokens/s    off       speed-up  formula  drafts of  taken  in steps  "
            .. "same text  each round")
    end
    local status = 0
    for _, task in ipairs(list(o.task)) do
        for _, batch in ipairs(sizes) do
            for k, name in ipairs(names) do
                local row = { task = task, batch = batch, name = name, key = ("%s %d %d"):format(task, batch, k) }
                local r = record_of(model, row, measure(llm, model, row, o))
                if not r.same_text and not name:find "^distribution" then status = 1 end
                if o.json then print(require("cjson").encode(r)) else print_row(r) end
                io.stdout:flush()
            end
        end
    end
    if not o.json then print_costs(model) end
    return status
end

return M
