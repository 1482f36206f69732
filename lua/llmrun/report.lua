--- Pages of measurements: one HTML file that needs nothing else, light or dark as the reader's system is, with tables
--- and plots (plot.lua) in it.
---
---   report.save("r.html", report.page { title = "...", lead = "...", sections = {
---       { title = "Times", report.table { caption = "...", heads = {...}, rows = {...} }, report.plot {...} } } })

local files = require "llmrun.files"
local plot = require "llmrun.plot"

local M = {}

local colors = 8 -- series with a color of their own

local style = [[
:root{color-scheme:light dark;--ink:#1b1b1b;--soft:#5c5c5c;--back:#fff;--raised:#f5f5f4;--grid:#e2e2e0;--axis:#8a8a88;
--focus:#0b57d0;--good:#0a6b3d;--bad:#a32414;--s1:#0072b2;--s2:#d55e00;--s3:#00845f;--s4:#b0578d;--s5:#a97400;
--s6:#3a8fc4;--s7:#444;--s8:#7a4fc4}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e6;--soft:#a9a9a6;--back:#161616;--raised:#212121;--grid:#343432;
--axis:#8a8a88;--focus:#8ab4f8;--good:#6fd19a;--bad:#ff9483;--s1:#5db4ea;--s2:#ff9550;--s3:#3ccda1;--s4:#e59cc8;
--s5:#ecb340;--s6:#8fd0f5;--s7:#d0d0d0;--s8:#b79bf0}}
*{box-sizing:border-box}
body{margin:0;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back)}
main,header{max-width:76rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.5rem}h1{font-size:1.6rem;margin:0 0 .4rem}h2{font-size:1.2rem;margin:2.2rem 0 .6rem}
p{max-width:46rem}
p,dd{overflow-wrap:anywhere}.soft,figcaption,caption{color:var(--soft)}nav{margin:.8rem 0}nav a{margin-right:1rem}
a{color:var(--focus)}:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
.scroll{overflow-x:auto;margin:.6rem 0 1.2rem}table{border-collapse:collapse;font-size:.92rem;
font-variant-numeric:tabular-nums}caption{text-align:left;padding:.2rem 0}th,td{padding:.25rem .7rem;text-align:right;
border-bottom:1px solid var(--grid);white-space:nowrap}th:first-child,td:first-child{text-align:left}
thead th{background:var(--raised);vertical-align:bottom}td.best{font-weight:700}td.good{color:var(--good)}
td.bad{color:var(--bad)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.2rem}
figure{margin:0;min-width:0}figure svg{width:100%;height:auto;display:block}
pre{background:var(--raised);padding:.7rem;overflow-x:auto;white-space:pre-wrap}dl{display:grid;
grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.6rem 0}dt{color:var(--soft)}dd{margin:0}
@media print{nav{display:none}body{font-size:12px}}
]]

--- Text as HTML.
---@param text any
---@return string
function M.escape(text)
    return (tostring(text):gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

local escape = M.escape

--- The color of the i-th thing that is compared, the same in all plots of a page.
function M.color(i) return ("var(--s%d)"):format((i - 1) % colors + 1) end

--- A table. heads: texts; rows: lists of cells, texts or { text, class } (best, good, bad); the first of each row is
--- its head.
---@param t { caption: string, heads: string[], rows: table[] }
---@return string
function M.table(t)
    local out = {
        ('<div class="scroll" tabindex="0" role="region" aria-label="%s">'):format(escape(t.caption)),
        ("<table><caption>%s</caption><thead><tr>"):format(escape(t.caption)),
    }
    for _, h in ipairs(t.heads) do out[#out + 1] = ('<th scope="col">%s</th>'):format(escape(h)) end
    out[#out + 1] = "</tr></thead><tbody>\n"
    for _, row in ipairs(t.rows) do
        out[#out + 1] = "<tr>"
        for i, cell in ipairs(row) do
            local text, class = cell, nil
            if type(cell) == "table" then text, class = cell[1], cell[2] end
            if i == 1 then
                out[#out + 1] = ('<th scope="row">%s</th>'):format(escape(text))
            else
                out[#out + 1] = ("<td%s>%s</td>"):format(class and (' class="%s"'):format(class) or "", escape(text))
            end
        end
        out[#out + 1] = "</tr>\n"
    end
    out[#out + 1] = "</tbody></table></div>\n"
    return table.concat(out)
end

--- A list of names and what they stand for.
---@param list table[] { name, text }
---@return string
function M.facts(list)
    local out = { "<dl>" }
    for _, f in ipairs(list) do
        out[#out + 1] = ("<dt>%s</dt><dd>%s</dd>"):format(escape(f[1]), escape(f[2]))
    end
    out[#out + 1] = "</dl>\n"
    return table.concat(out)
end

--- A plot (see plot.svg) in the page's colors; note: a line below it.
---@param spec table
---@param note? string
---@return string
function M.plot(spec, note)
    local s = { theme = { ink = "var(--ink)", grid = "var(--grid)", axis = "var(--axis)", back = "none" }, series = {} }
    for k, v in pairs(spec) do
        if k ~= "series" then s[k] = v end
    end
    for i, one in ipairs(spec.series) do
        s.series[i] = setmetatable({ color = one.color or M.color(i) }, { __index = one })
    end
    return "<figure>" .. plot.svg(s) .. (note and ("<figcaption>%s</figcaption>"):format(escape(note)) or "")
        .. "</figure>\n"
end

--- Plots side by side, as the width allows.
---@param list string[]
---@return string
function M.plots(list) return '<div class="plots">\n' .. table.concat(list) .. "</div>\n" end

function M.text(text) return ("<p>%s</p>\n"):format(escape(text)) end

function M.pre(text) return ("<pre>%s</pre>\n"):format(escape(text)) end

--- The whole page. sections: { title = text, HTML, ... } each.
---@param p { title: string, lead: string?, sections: table[] }
---@return string
function M.page(p)
    local out = {
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        ("<title>%s</title>\n<style>%s</style></head>\n<body>\n<header><h1>%s</h1>\n"):format(escape(p.title), style,
            escape(p.title)),
    }
    if p.lead then out[#out + 1] = M.text(p.lead) end
    out[#out + 1] = '<nav aria-label="Sections">'
    for i, s in ipairs(p.sections) do out[#out + 1] = ('<a href="#s%d">%s</a>'):format(i, escape(s.title)) end
    out[#out + 1] = "</nav></header>\n<main>\n"
    for i, s in ipairs(p.sections) do
        out[#out + 1] = ('<section aria-labelledby="s%d"><h2 id="s%d">%s</h2>\n'):format(i, i, escape(s.title))
        for _, html in ipairs(s) do out[#out + 1] = html end
        out[#out + 1] = "</section>\n"
    end
    out[#out + 1] = "</main></body></html>\n"
    return table.concat(out)
end

--- Writes a text to a file: true, or nil and a text.
---@param path string
---@param text string
M.save = files.save

return M
