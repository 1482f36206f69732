--- Plots as SVG files: lines, points, steps and bars, with axes, a grid and a legend. For programs that show what
--- they measured.
---
---   plot.save("ttft.svg", {
---       title = "Time to first token", x = { label = "request" }, y = { label = "seconds", min = 0 },
---       series = { { name = "fcfs", x = { 1, 2, 3 }, y = { 0.1, 0.4, 0.9 }, kind = "points" } },
---   })
---
--- x and y: label, min, max (else what the values need), log = true. kind: "line" (unless told otherwise), "points",
--- "steps" (a value holds until the next one), or "bars": then x is left out, and categories has the names along the
--- axis. A series may have low and high, lists like y, drawn as error bars; marks = true puts points on a line; titles
--- has what is shown when one points at a point. theme: colors { ink, grid, axis, back } of a page that the plot is
--- part of (CSS values; else those of a white sheet).

local files = require "llmrun.files"

local M = {}

local colors = { "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000" }
local FONT = 13
local paper = { ink = "#222", grid = "#e0e0e0", axis = "#444", back = "white" }

local function escape(text)
    return (tostring(text):gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

local function text_width(text) return (utf8.len(text) or #text) * FONT * 0.56 end

--- A number as short as it can be told.
local function show(v)
    if v ~= 0 and (math.abs(v) >= 1e6 or math.abs(v) < 1e-3) then return (("%.3g"):format(v)) end
    return (("%.4f"):format(v):gsub("0+$", ""):gsub("%.$", ""))
end

--- The step between marks: 1, 2 or 5 times a power of ten, so that there are about n.
local function nice_step(range, n)
    local rough = range / n
    local power = 10 ^ math.floor(math.log(rough, 10))
    for _, m in ipairs { 1, 2, 5 } do
        if m * power >= rough * 0.999 then return m * power end
    end
    return 10 * power
end

local function linear_axis(a, low, high, n)
    if low == high then
        local room = low == 0 and 1 or math.abs(low) / 2
        low, high = low - room, high + room
    end
    local step = nice_step(high - low, n)
    local from = a.min or math.floor(low / step + 1e-9) * step
    local to = a.max or math.ceil(high / step - 1e-9) * step
    local marks = {}
    for i = math.ceil(from / step - 1e-9), math.floor(to / step + 1e-9) do marks[#marks + 1] = i * step end
    return from, to, marks
end

local function log_axis(a, low, high)
    local from = a.min or 10 ^ math.floor(math.log(low, 10) + 1e-9)
    local to = a.max or 10 ^ math.ceil(math.log(high, 10) - 1e-9)
    if from == to then to = from * 10 end
    local marks = {}
    local few = math.log(to / from, 10) < 2.5 -- then 2 and 5 are marked too
    for i = math.floor(math.log(from, 10)), math.floor(math.log(to, 10) + 1e-9) do
        for _, m in ipairs(few and { 1, 2, 5 } or { 1 }) do
            local v = m * 10 ^ i
            if v >= from * 0.999 and v <= to * 1.001 then marks[#marks + 1] = v end
        end
    end
    return from, to, marks
end

--- Range and marks of an axis, and the function from a value to 0..1 along it.
local function make_axis(a, values, n)
    local low, high = a.min, a.max
    for _, v in ipairs(values) do
        if v == v and math.abs(v) < math.huge and (not a.log or v > 0) then
            low, high = math.min(low or v, v), math.max(high or v, v)
        end
    end
    low, high = low or 0, high or 1
    if a.log then
        local from, to, marks = log_axis(a, math.max(low, 1e-300), math.max(high, 1e-300))
        local scale = math.log(to / from)
        return { marks = marks, at = function(v) return math.log(math.max(v, from) / from) / scale end }
    end
    local from, to, marks = linear_axis(a, low, high, n)
    return { from = from, marks = marks, at = function(v) return (v - from) / (to - from) end }
end

local function check(spec)
    if type(spec) ~= "table" or type(spec.series) ~= "table" or #spec.series == 0 then
        error("plot: a table with a list of series expected", 3)
    end
    for i, s in ipairs(spec.series) do
        if type(s.y) ~= "table" then error(("plot: series %d has no list y"):format(i), 3) end
        if s.kind == "bars" and not spec.categories then error("plot: bars need categories", 3) end
        if s.kind ~= "bars" and (type(s.x) ~= "table" or #s.x ~= #s.y) then
            error(("plot: series %d: lists x and y of the same length expected"):format(i), 3)
        end
        if (s.low == nil) ~= (s.high == nil) or (s.low and (#s.low ~= #s.y or #s.high ~= #s.y)) then
            error(("plot: series %d: lists low and high of the length of y expected"):format(i), 3)
        end
    end
end

local Page = {}
Page.__index = Page

function Page:add(...) self[#self + 1] = string.format(...) end

function Page:text(x, y, text, attributes)
    self:add('<text x="%.1f" y="%.1f" %s>%s</text>', x, y, attributes or "", escape(text))
end

local function draw_axes(page, box, spec, xa, ya)
    for _, v in ipairs(ya.marks) do
        local y = box.y(v)
        page:add('<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>', box.left, y, box.right, y,
            box.theme.grid)
        page:text(box.left - 8, y + FONT * 0.35, show(v), 'text-anchor="end"')
    end
    for _, v in ipairs(xa.marks) do
        local x = box.x(v)
        page:add('<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>', x, box.bottom, x, box.bottom + 5,
            box.theme.axis)
        page:text(x, box.bottom + FONT + 8, show(v), 'text-anchor="middle"')
    end
    for i, name in ipairs(spec.categories or {}) do
        page:text(box.x(i), box.bottom + FONT + 8, name, 'text-anchor="middle"')
    end
    page:add('<path d="M%.1f %.1fV%.1fH%.1f" fill="none" stroke="%s"/>', box.left, box.top, box.bottom,
        box.right, box.theme.axis)
    local middle = (box.left + box.right) / 2
    if spec.x and spec.x.label then
        page:text(middle, box.bottom + 2 * FONT + 16, spec.x.label, 'text-anchor="middle"')
    end
    if spec.y and spec.y.label then
        local y = (box.top + box.bottom) / 2
        page:text(18, y, spec.y.label, ('text-anchor="middle" transform="rotate(-90 18 %.1f)"'):format(y))
    end
    if spec.title then
        page:text(middle, 24, spec.title, ('text-anchor="middle" font-size="%d" font-weight="bold"'):format(FONT + 3))
    end
end

--- Where the legend's entries stand, and how many lines they take.
local function place_legend(series, left, right)
    local places, x, line = {}, left, 1
    for i, s in ipairs(series) do
        local name = s.name or ("series %d"):format(i)
        local width = 40 + text_width(name)
        if x > left and x + width > right then x, line = left, line + 1 end
        places[i] = { name = name, x = x, line = line }
        x = x + width
    end
    return places, line
end

local function draw_legend(page, box, series, places, lines)
    for i, p in ipairs(places) do
        local y = box.top - 14 - (lines - p.line) * (FONT + 5)
        page:add('<rect x="%.1f" y="%.1f" width="14" height="10" fill="%s"/>', p.x, y - 9, series[i].color)
        page:text(p.x + 20, y, p.name)
    end
end

--- Error bars: from low to high, with a short line across each end.
local function draw_errors(page, box, s, x_of)
    local path = {}
    for i = 1, #s.y do
        if s.low[i] < s.high[i] then
            local x, a, b = x_of(i), box.y(s.low[i]), box.y(s.high[i])
            path[#path + 1] = ("M%.1f %.1fH%.1fM%.1f %.1fV%.1fM%.1f %.1fH%.1f"):format(x - 4, a, x + 4, x, a, b, x - 4,
                b, x + 4)
        end
    end
    if #path > 0 then
        page:add('<path d="%s" fill="none" stroke="%s"/>', table.concat(path), s.kind == "bars" and box.theme.axis
            or s.color)
    end
end

local function draw_bars(page, box, s, place, count)
    local width = box.bar * 0.8 / count
    for i, v in ipairs(s.y) do
        local x = box.x(i) - box.bar * 0.4 + (place - 1) * width
        local y, zero = box.y(v), box.y(box.base)
        page:add('<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>%s: %s</title></rect>', x,
            math.min(y, zero), width * 0.92, math.abs(zero - y), s.color, escape(s.name or ""), show(v))
        page:text(x + width * 0.46, math.min(y, zero) - 4, show(tonumber(("%.3g"):format(v))),
            'text-anchor="middle" font-size="11"')
    end
    if s.low then
        draw_errors(page, box, s, function(i) return box.x(i) - box.bar * 0.4 + (place - 0.5) * width end)
    end
end

local function draw_series(page, box, s)
    if s.low then draw_errors(page, box, s, function(i) return box.x(s.x[i]) end) end
    if s.kind == "points" or s.marks then
        for i = 1, #s.y do
            local said = s.titles and s.titles[i] or show(s.x[i]) .. ", " .. show(s.y[i])
            page:add('<circle cx="%.1f" cy="%.1f" r="4" fill="%s" fill-opacity="0.75"><title>%s</title></circle>',
                box.x(s.x[i]), box.y(s.y[i]), s.color, escape(said))
        end
        if s.kind == "points" then return end
    end
    local path = {}
    for i = 1, #s.y do
        local x, y = box.x(s.x[i]), box.y(s.y[i])
        path[#path + 1] = i == 1 and ("M%.1f %.1f"):format(x, y)
            or s.kind == "steps" and ("H%.1fV%.1f"):format(x, y) or ("L%.1f %.1f"):format(x, y)
    end
    page:add('<path d="%s" fill="none" stroke="%s" stroke-width="2"/>', table.concat(path), s.color)
end

local function flatten(series, field, also)
    local all = { also }
    for _, s in ipairs(series) do table.move(s[field] or {}, 1, #(s[field] or {}), #all + 1, all) end
    return all
end

--- The plot as the text of an SVG file.
---@param spec table
---@return string
function M.svg(spec)
    check(spec)
    local width, height = spec.width or 720, spec.height or 420
    local bars = 0
    local series = {}
    for i, s in ipairs(spec.series) do
        series[i] = setmetatable({ color = s.color or colors[(i - 1) % #colors + 1] }, { __index = s })
        if s.kind == "bars" then bars = bars + 1 end
    end
    local x_spec, y_spec = spec.x or {}, spec.y or {}
    local xa
    if spec.categories then
        local n = #spec.categories
        xa = { marks = {}, at = function(i) return (i - 0.5) / n end }
    else
        xa = make_axis(x_spec, flatten(series, "x"), width / 90)
    end
    local values = flatten(series, "y", bars > 0 and not y_spec.log and 0 or nil)
    for _, name in ipairs { "low", "high" } do
        local ends = flatten(series, name)
        table.move(ends, 1, #ends, #values + 1, values)
    end
    local ya = make_axis(y_spec, values, height / 60)
    local widest = 0
    for _, v in ipairs(ya.marks) do widest = math.max(widest, text_width(show(v))) end
    local box = { left = 44 + widest, right = width - 32, bottom = height - 56 }
    local places, lines = place_legend(series, box.left, box.right)
    box.top = (spec.title and 64 or 40) + (lines - 1) * (FONT + 5)
    box.x = function(v) return box.left + xa.at(v) * (box.right - box.left) end
    box.y = function(v) return box.bottom - ya.at(v) * (box.bottom - box.top) end
    box.bar = spec.categories and (box.right - box.left) / #spec.categories
    box.theme = setmetatable({}, { __index = function(_, name) return (spec.theme or paper)[name] or paper[name] end })
    box.base = ya.marks[1] and math.max(0, ya.from or ya.marks[1]) or 0
    local page = setmetatable({}, Page)
    page:add('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" '
        .. 'font-family="sans-serif" font-size="%d" fill="%s"%s>', width, height, width, height, FONT, box.theme.ink,
        spec.title and (' role="img" aria-label="%s"'):format(escape(spec.title)) or "")
    page:add('<rect width="%d" height="%d" fill="%s"/>', width, height, box.theme.back)
    draw_axes(page, box, spec, xa, ya)
    draw_legend(page, box, series, places, lines)
    local place = 0
    for _, s in ipairs(series) do
        if s.kind == "bars" then
            place = place + 1
            draw_bars(page, box, s, place, bars)
        else
            draw_series(page, box, s)
        end
    end
    page:add("</svg>\n")
    return table.concat(page, "\n")
end

--- Writes the plot to a file: true, or nil and a text.
---@param path string
---@param spec table
function M.save(path, spec)
    return files.save(path, M.svg(spec))
end

return M
