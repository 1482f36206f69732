-- Plots: well-formed SVG whose marks lie where the values say.
local plot = require "llmrun.plot"

-- Every tag is closed, every attribute quoted, nothing is unescaped.
local function well_formed(svg)
    local open = {}
    for close, name, attributes, empty in svg:gmatch("<(/?)(%a+)([^<>]-)(/?)>") do
        if close == "/" then
            assert.equal(name, table.remove(open))
        else
            local rest = attributes:gsub("%s+[%w%-:]+=\"[^\"<>]*\"", "")
            assert.equal("", (rest:gsub("%s", "")), name)
            if empty == "" then open[#open + 1] = name end
        end
    end
    assert.same({}, open)
    assert.is_nil(svg:gsub("<[^<>]*>", ""):find("[<>]"))
    assert.is_nil(svg:find("&[^alqg]"))
    assert.is_nil(svg:find("nan") or svg:find("inf"))
    return svg
end

describe("plot", function()
    it("draws lines, points and steps to scale", function()
        local svg = well_formed(plot.svg {
            title = "a < b & \"c\"", x = { label = "x" }, y = { label = "y", min = 0 },
            series = {
                { name = "line", x = { 0, 10 }, y = { 0, 4 } },
                { name = "points", x = { 0, 5, 10 }, y = { 0, 2, 4 }, kind = "points" },
                { name = "steps", x = { 0, 10 }, y = { 4, 1 }, kind = "steps" },
            },
        })
        assert.matches("a &lt; b &amp; &quot;c&quot;", svg)
        local x1, y1, x2, y2 = svg:match('d="M([%d.]+) ([%d.]+)L([%d.]+) ([%d.]+)"')
        local points = {}
        for x, y in svg:gmatch('cx="([%d.]+)" cy="([%d.]+)"') do points[#points + 1] = { x, y } end
        assert.same({ x1, y1 }, points[1])
        assert.same({ x2, y2 }, points[3])
        assert.is_true(math.abs((x1 + x2) / 2 - points[2][1]) < 0.11)
        assert.is_true(math.abs((y1 + y2) / 2 - points[2][2]) < 0.11)
        assert.is_true(tonumber(y1) > tonumber(y2))
        assert.matches(('d="M%s %sH%s'):format(x1, y2, x2):gsub("%.", "%%."), svg)
        for _, mark in ipairs { "0", "2", "4", "10" } do assert.matches(">" .. mark .. "</text>", svg) end
    end)

    it("draws bars in groups, with their values", function()
        local svg = well_formed(plot.svg {
            categories = { "short", "long" },
            series = {
                { name = "one", y = { 1, 4 }, kind = "bars" }, { name = "two", y = { 2, -2 }, kind = "bars" },
            },
        })
        local heights = {}
        for h in svg:gmatch('height="([%d.]+)" fill="#%x+"><title>') do heights[#heights + 1] = tonumber(h) end
        assert.equal(4, #heights)
        assert.is_true(math.abs(heights[2] / heights[1] - 4) < 0.05)
        assert.is_true(math.abs(heights[3] - heights[4]) < 0.2)
        assert.matches(">short</text>", svg)
    end)

    it("has a logarithmic scale, and copes with odd values", function()
        local data = { { x = { 1, 100 }, y = { 0, 1e5 } } }
        local svg = well_formed(plot.svg { x = { log = true }, y = { log = true }, series = data })
        for _, mark in ipairs { "1", "10", "100" } do assert.matches(">" .. mark .. "</text>", svg) end
        well_formed(plot.svg { series = { { x = {}, y = {} } } })
        well_formed(plot.svg { series = { { x = { 3 }, y = { 7 } } } })
        well_formed(plot.svg { series = { { x = { 0, 0 }, y = { -1e-9, 1e12 } } } })
        assert.has_error(function() plot.svg { series = { { x = { 1 }, y = {} } } } end)
        assert.has_error(function() plot.svg { series = {} } end)
        assert.has_error(function() plot.svg { series = { { y = { 1 }, kind = "bars" } } } end)
    end)

    it("writes a file, or says why not", function()
        local path = os.tmpname()
        local spec = { series = { { x = { 1, 2 }, y = { 3, 4 } } } }
        assert.is_true(plot.save(path, spec))
        local f <close> = assert(io.open(path))
        assert.equal(plot.svg(spec), f:read("a"))
        os.remove(path)
        local ok, err = plot.save("/no/such/folder/x.svg", spec)
        assert.is_nil(ok)
        assert.matches("/no/such/folder", err)
    end)
end)
