--- Patterns of the formats of JSON Schema. Each matches only texts that the format allows; some leave rare ones out
--- (leap seconds, comments and quoted names in mail addresses, "--" in host names, IPv6 in URIs and IPv6 zones,
--- characters beyond ASCII in iri, idn-email and idn-hostname, expressions in uri-template). Formats that are not here
--- say nothing about the text, as the standard has it.

local M = {}

local year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
local leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
local month_day = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)" ..
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
local date = "(?:" .. year .. "-" .. month_day .. "|" .. leap .. "-02-29)"
local clock = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
local zone = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

local label = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}" -- never "--"
local host = label .. "(?:\\." .. label .. "){0,3}"
local atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
local email = atom .. "(?:\\." .. atom .. "){0,2}@" .. host

local byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
local ipv4 = byte .. "(?:\\." .. byte .. "){3}"

local function ipv6()
    local h = "[0-9A-Fa-f]{1,4}"
    local low = "(?:" .. h .. ":" .. h .. "|" .. ipv4 .. ")"
    local out = { "(?:" .. h .. ":){6}" .. low }
    for n = 0, 5 do -- n groups before "::", 5 - n and fewer behind it, then the low 32 bits
        local before = n == 0 and "" or h .. ("(?::" .. h .. "){%d}"):format(n - 1)
        for after = 0, 5 - n do
            if after + n <= 5 then
                out[#out + 1] = before .. "::" .. (after == 0 and "" or ("(?:" .. h .. ":){%d}"):format(after)) .. low
            end
        end
    end
    for n = 0, 7 do -- "::" at the end, or before one group
        local before = n == 0 and "" or h .. ("(?::" .. h .. "){%d}"):format(n - 1)
        out[#out + 1] = before .. "::"
        if n < 7 then out[#out + 1] = before .. "::" .. h end
    end
    return table.concat(out, "|")
end

local escaped = "%[0-9A-Fa-f]{2}"
local pchar = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|" .. escaped .. ")"
local segment_start = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|" .. escaped .. ")" -- no ":"
local tail = "(?:\\?(?:" .. pchar .. "|[/?])*)?(?:#(?:" .. pchar .. "|[/?])*)?"
local authority = "//(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|" .. escaped .. ")*@)?(?:[A-Za-z0-9._~-]|" .. escaped ..
    ")*(?::[0-9]{0,5})?(?:/" .. pchar .. "*)*"
local path_absolute = "/(?:" .. pchar .. "+(?:/" .. pchar .. "*)*)?"
local scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
local uri = scheme .. "(?:" .. authority .. "|" .. path_absolute .. "|" .. pchar .. "+(?:/" .. pchar .. "*)*|)" .. tail
local relative = "(?:" .. authority .. "|" .. path_absolute .. "|" .. segment_start .. "+(?:/" .. pchar .. "*)*|)" ..
    tail
local uri_reference = "(?:" .. uri .. "|" .. relative .. ")"

local pointer = "(?:/(?:[^/~]|~[01])*)*"
local duration = (function()
    local d, h, m, s = "[0-9]+D", "[0-9]+H", "[0-9]+M", "[0-9]+S"
    local time = "T(?:" .. h .. "(?:" .. m .. "(?:" .. s .. ")?)?|" .. m .. "(?:" .. s .. ")?|" .. s .. ")"
    local day = "(?:[0-9]+Y(?:[0-9]+M(?:" .. d .. ")?)?|[0-9]+M(?:" .. d .. ")?|" .. d .. ")"
    return "P(?:" .. day .. "(?:" .. time .. ")?|" .. time .. "|[0-9]+W)"
end)()

M.patterns = {
    date = date,
    time = clock .. zone,
    ["date-time"] = date .. "T" .. clock .. zone,
    duration = duration,
    email = email,
    ["idn-email"] = email,
    hostname = host,
    ["idn-hostname"] = host,
    ipv4 = ipv4,
    ipv6 = ipv6(),
    uri = uri,
    iri = uri,
    ["uri-reference"] = uri_reference,
    ["iri-reference"] = uri_reference,
    ["uri-template"] = uri_reference,
    uuid = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    ["json-pointer"] = pointer,
    ["relative-json-pointer"] = "(?:0|[1-9][0-9]?)(?:#|" .. pointer .. ")",
    regex = "[A-Za-z0-9 _-]*(?:\\[[A-Za-z0-9_]+\\][*+?]?)?",
}

return M
