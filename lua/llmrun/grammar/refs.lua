--- Where a JSON schema's references lead: $id, $anchor, JSON pointers. Only inside the document.

local json = require "llmrun.json"
local loop = require "llmrun.loop"
local refuse = require "llmrun.grammar.refuse"

local MAX_URI = 2048      -- bytes of a reference with its base
local MAX_BYTES = 64 << 20 -- of all places and names, which begin with those of what they are in

local Refs = {}
Refs.__index = Refs

-- Words whose value is a schema, a list of schemas, or an object of schemas.
local ONE = {
    additionalItems = true, additionalProperties = true, contains = true, ["else"] = true, ["if"] = true, items = true,
    ["not"] = true, propertyNames = true, ["then"] = true, unevaluatedItems = true, unevaluatedProperties = true,
}
local LIST = { allOf = true, anyOf = true, oneOf = true, prefixItems = true, items = true }
local MAP = {
    ["$defs"] = true, definitions = true, dependentSchemas = true, patternProperties = true, properties = true,
    dependencies = true,
}

local function escape(name) return (tostring(name):gsub("~", "~0"):gsub("/", "~1")) end

--- The pointer of a place inside another.
function Refs.at(at, ...)
    local out = { at }
    for _, part in ipairs { ... } do out[#out + 1] = escape(part) end
    return table.concat(out, "/")
end

local function split(uri)
    local base, fragment = uri:match "^([^#]*)#?(.*)$"
    return base, fragment
end

-- A reference against a base, as RFC 3986 has it but for "." and ".." in the middle.
local function join(base, ref)
    if ref == "" then return base end
    if #base + #ref > MAX_URI then refuse.raise("limit", "a reference or $id of more than %d bytes", MAX_URI) end
    if ref:find "^[A-Za-z][A-Za-z0-9+.-]*:" then return ref end
    local scheme = base:match "^[A-Za-z][A-Za-z0-9+.-]*:" or ""
    if ref:find "^//" then return scheme .. ref end
    local authority, path = base:sub(#scheme + 1):match "^(//[^/]*)(.*)$"
    if not authority then authority, path = "", base:sub(#scheme + 1) end
    if ref:sub(1, 1) == "/" then return scheme .. authority .. ref end
    local folder = path:match "^(.*/)" or (authority ~= "" and "/" or "")
    ref = ref:gsub("^%./", "")
    while ref:sub(1, 3) == "../" do
        ref = ref:sub(4)
        folder = folder:match "^(.*/)[^/]+/$" or "/"
    end
    return scheme .. authority .. folder .. ref
end

local function is_schema(v) return type(v) == "boolean" or type(v) == "table" end

-- Notes ids and anchors of a schema and all in it. Pure data (enum, const) is not looked into.
function Refs:walk(schema, base, at, depth)
    if type(schema) ~= "table" or self.base_of[schema] then return end
    if depth > 1000 then refuse.raise("limit", "%s: nested too deeply", at) end
    loop.breathe()
    self.bytes = self.bytes + #at
    if self.bytes > MAX_BYTES then
        refuse.raise("limit", "names of properties and of schemas are too long, or nested too deeply")
    end
    local id = schema["$id"] or (schema["$ref"] == nil and schema.id)
    if type(id) == "string" and id:sub(1, 1) ~= "#" then
        base = join(base, (split(id)))
        self.bytes = self.bytes + #base
        self.resource[base] = self.resource[base] or { schema = schema, at = at }
    end
    self.base_of[schema] = base
    self.place_of[schema] = at
    for _, word in ipairs { "$anchor", "$dynamicAnchor" } do
        local name = schema[word]
        if type(name) == "string" then
            self.bytes = self.bytes + #base + #name
            self.anchor[base .. "#" .. name] = { schema = schema, at = at }
            if word == "$dynamicAnchor" then self.dynamic[name] = (self.dynamic[name] or 0) + 1 end
        end
    end
    if type(id) == "string" and id:sub(1, 1) == "#" then self.anchor[base .. id] = { schema = schema, at = at } end
    for word, v in pairs(schema) do
        if type(v) == "table" and type(word) == "string" then
            if LIST[word] and json.is_array(v) then
                for i, s in ipairs(v) do self:walk(s, base, Refs.at(at, word, i - 1), depth + 1) end
            elseif ONE[word] then
                self:walk(v, base, Refs.at(at, word), depth + 1)
            elseif MAP[word] then
                for name, s in pairs(v) do self:walk(s, base, Refs.at(at, word, name), depth + 1) end
            end
        end
    end
end

local function unescape(part)
    part = part:gsub("%%(%x%x)", function(h) return string.char(tonumber(h, 16)) end)
    return (part:gsub("~1", "/"):gsub("~0", "~"))
end

local function child(v, part)
    if type(v) ~= "table" then return nil end
    if json.is_array(v) then
        return part:find "^%d+$" and v[math.tointeger(tonumber(part)) + 1]
    end
    return v[part]
end

--- What a reference in the schema at `from` means. -> schema, its place.
function Refs:resolve(ref, from, at)
    if type(ref) ~= "string" then refuse.raise("format", "%s: a string expected", at) end
    local target, fragment = split(ref)
    local base = join(self.base_of[from] or "", target)
    local found = self.resource[base]
    if not found then refuse.raise("unsupported", "%s: '%s' is not in this schema", at, ref) end
    if fragment == "" then return found.schema, found.at end
    if fragment:sub(1, 1) ~= "/" then
        local a = self.anchor[base .. "#" .. unescape(fragment)]
        if not a then refuse.raise("format", "%s: '%s' does not exist", at, ref) end
        return a.schema, a.at
    end
    local v, place = found.schema, found.at
    for part in fragment:gmatch "/([^/]*)" do
        part = unescape(part)
        v, place = child(v, part), Refs.at(place, part)
        if v == nil then refuse.raise("format", "%s: '%s' does not exist", at, ref) end
    end
    if not is_schema(v) then refuse.raise("format", "%s: '%s' is no schema", at, ref) end
    self:walk(v, base, place, 0) -- it may stand where no schema is expected
    return v, place
end

--- Whether a $dynamicRef means the same wherever it is reached from.
function Refs:is_static(ref)
    local name = type(ref) == "string" and ref:match "^[^#]*#([^/]+)$"
    return not name or (self.dynamic[name] or 0) <= 1
end

--- The references of a document.
local function new(root)
    local r = setmetatable({ resource = {}, anchor = {}, base_of = {}, place_of = {}, dynamic = {}, bytes = 0 }, Refs)
    r.resource[""] = { schema = root, at = "#" }
    r:walk(root, "", "#", 0)
    return r
end

return { new = new, at = Refs.at }
