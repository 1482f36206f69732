#!/usr/bin/env python3
"""Reference data of JSON Schema for tests/spec/grammar_schema_spec.lua, judged by the jsonschema package (PyPI).

    gen_grammar_ref.py write OUT.jsonl    schemas with instances, each judged valid or not

Each line of OUT: {"schema": text, "tests": [{"texts": [...], "valid": bool}]}. The texts of a test are the same value
with the keys of its objects in several orders: a valid value must be accepted in one of them, an invalid one in none.
The schemas of `write` are this file's own; instances are made by changing valid ones at random (fixed seed).
Needs: pip install "jsonschema[format]"
"""
import itertools
import json
import random

import usage

if __name__ == "__main__":
    COMMAND, OUT = usage.arguments("write OUT.jsonl")

from jsonschema import Draft202012Validator

SCHEMAS = [
    # types
    {"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"type": "string"},
    {"type": ["integer", "null"]}, {"type": ["string", "boolean"]}, True, {},
    # numbers
    {"type": "integer", "minimum": -3, "maximum": 17}, {"type": "integer", "exclusiveMinimum": 0},
    {"type": "integer", "maximum": -5}, {"type": "integer", "minimum": 95, "maximum": 1205},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "minimum": 0.05}, {"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 0.25},
    {"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 42}, {"type": "number", "multipleOf": 3},
    # strings
    {"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}, {"type": "string", "minLength": 1, "maxLength": 2},
    {"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "string", "pattern": "b"},
    {"type": "string", "pattern": "^a", "maxLength": 3}, {"type": "string", "pattern": "^(\\d{3}-)?\\d{4}$"},
    {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}, {"pattern": "^\\w+$"}]},
    {"type": "string", "pattern": "^[^\"\\\\]*$"}, {"type": "string", "pattern": "\\\\"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}, {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"}, {"type": "string", "format": "time"},
    {"enum": ["red", "green", 3, None, 1.5, [1], {"a": 2}]}, {"const": "a\"b\\c\n"}, {"enum": ["a", "ab", "abc"]},
    {"type": "string", "enum": ["x", 1, "y"]},
    # arrays
    {"type": "array"}, {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "boolean"}, "minItems": 2},
    {"type": "array", "contains": {"const": 5}}, {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
    {"type": "array", "contains": {"type": "string"}, "maxContains": 1, "items": {"type": ["string", "integer"]}},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    # objects
    {"type": "object"}, {"type": "object", "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"r": {"type": "integer"}, "o": {"type": "string"}}, "required": ["r"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}, "required": ["b"],
     "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]},
    {"type": "object", "properties": {"a": False, "b": {}}},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 1,
     "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {"xa": {"maximum": 5}}, "patternProperties": {"^x": {"type": "integer"}, "a$": {}},
     "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "maxProperties": 2}, {"type": "object", "minProperties": 1},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}, "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "properties": {"in": {"type": "object", "properties": {"deep": {"type": "array", "items":
     {"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"], "additionalProperties": False}}},
     "required": ["deep"], "additionalProperties": False}}, "additionalProperties": False},
    # combinations
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
    {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"oneOf": [{"type": "number", "minimum": 5}, {"type": "number", "maximum": 7}, {"type": "string"}]},
    {"oneOf": [{"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "integer"}}, "required": ["t", "x"]},
               {"type": "object", "properties": {"t": {"const": "b"}, "y": {"type": "string"}}, "required": ["t"]}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"properties": {"b": {"type": "string"}, "a": {"minimum": 2}}}]},
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object", "unevaluatedProperties": False},
    {"type": ["integer", "string"], "not": {"enum": [1, 2, "a"]}}, {"not": {"type": "object"}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
    {"type": "integer", "not": {"minimum": 3, "maximum": 6}},
    {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": {}}, "required": ["k"],
     "if": {"properties": {"k": {"const": "x"}}}, "then": {"properties": {"v": {"type": "integer"}}},
     "else": {"properties": {"v": {"type": "string"}}}},
    {"type": "string", "if": {"pattern": "^a"}, "then": {"minLength": 3}, "else": {"maxLength": 2}},
    # references
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer"}, "kids":
     {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["v"], "additionalProperties": False}}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"$defs": {"pos": {"type": "integer", "minimum": 1}}, "type": "array", "items": {"$ref": "#/$defs/pos", "maximum": 9}},
    {"$id": "https://example.org/a.json", "$defs": {"s": {"$anchor": "str", "type": "string"}}, "items": {"$ref": "#str"},
     "type": "array"},
]

ATOMS = [None, True, False, 0, 1, 2, 3, 5, 6, 7, 9, -1, -5, 17, 95, 100, 0.5, 1.5, -0.25, 2.25, 0.05, 42, 35, "", "a", "b",
         "ab", "abc", "abcd", "x", "y", "é", "\U0001F600", "\n", "\"", "\\", "a\"b\\c\n", "555-1234", "1234", "red", "green",
         "2024-02-29", "2023-02-29", "1.2.3.4", "1.2.3.256", "a@b.org", "12:30:00Z", "25:00:00Z",
         "123e4567-e89b-12d3-a456-426614174000", "ba", "a_b", [], {}]
KEYS = ["a", "b", "c", "r", "o", "t", "x", "y", "z", "k", "v", "xa", "xb", "in", "deep", "n", "next", "kids", "é", ""]


def random_value(rng, depth):
    kind = rng.random()
    if depth <= 0 or kind < 0.5:
        return rng.choice(ATOMS)
    if kind < 0.72:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): random_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def guided(rng, schema, root, depth):
    """A value that has a good chance to be valid."""
    if not isinstance(schema, dict) or depth <= 0 or rng.random() < 0.06:
        return random_value(rng, min(depth, 2))
    if "$ref" in schema:
        ref = schema["$ref"]
        target = root if ref == "#" else root.get("$defs", {}).get(ref.split("/")[-1].replace("#str", "s"), {})
        return guided(rng, {**target, **{k: v for k, v in schema.items() if k != "$ref"}}, root, depth)
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return guided(rng, {**{k: v for k, v in schema.items() if k != word}, **rng.choice(schema[word])}, root, depth)
    if "allOf" in schema:
        joined = {k: v for k, v in schema.items() if k != "allOf"}
        for s in schema["allOf"]:
            for k, v in s.items():
                joined[k] = {**joined.get(k, {}), **v} if isinstance(v, dict) else joined.get(k, []) + v if k == "required" else v
        return guided(rng, joined, root, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "object":
        out, props = {}, schema.get("properties", {})
        for name in list(props) + [n for n in schema.get("required", []) if n not in props]:
            if name in schema.get("required", []) or rng.random() < 0.5:
                out[name] = guided(rng, props.get(name, True), root, depth - 1)
        while rng.random() < 0.25:
            extra = schema.get("additionalProperties", True)
            out[rng.choice(KEYS)] = guided(rng, extra, root, depth - 1)
        return out
    if kind == "array":
        head = schema.get("prefixItems", [])
        n = rng.randrange(schema.get("minItems", 0), schema.get("minItems", 0) + 4)
        return [guided(rng, head[i] if i < len(head) else schema.get("items", True), root, depth - 1) for i in range(n)]
    if kind in ("integer", "number") and ("minimum" in schema or "maximum" in schema or rng.random() < 0.6):
        low = int(schema.get("minimum", schema.get("exclusiveMinimum", schema.get("maximum", 3) - 4)))
        v = low + rng.randrange(-1, 12)
        return v + rng.choice([0, 0.25, 0.5]) if kind == "number" else v
    fit = [a for a in ATOMS if Draft202012Validator({"type": kind} if kind else {}).is_valid(a)]
    return rng.choice(fit or ATOMS)


def orders(value, most):
    """Spellings of a value: its objects' keys in several orders."""
    if isinstance(value, dict):
        keys = list(value)
        subs = {k: list(itertools.islice(orders(value[k], 6), 6)) for k in keys}
        for order in itertools.islice(itertools.permutations(keys), most):
            for combo in itertools.islice(itertools.product(*[subs[k] for k in order]), 12):
                yield "{" + ",".join(json.dumps(k, ensure_ascii=False) + ":" + c for k, c in zip(order, combo)) + "}"
    elif isinstance(value, list):
        subs = [list(itertools.islice(orders(v, 6), 6)) for v in value]
        for combo in itertools.islice(itertools.product(*subs), most):
            yield "[" + ",".join(combo) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def fixed_number(v):
    """Whether all its numbers are written as a grammar writes them (1.0 is not: it is written 1)."""
    if isinstance(v, float):
        return not v.is_integer()
    if isinstance(v, list):
        return all(map(fixed_number, v))
    return not isinstance(v, dict) or all(map(fixed_number, v.values()))


def validator(schema):
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def write(out):
    rng = random.Random(20260305)
    with open(out, "w", encoding="utf-8") as f:
        for schema in SCHEMAS:
            v, seen, tests = validator(schema), set(), []
            counts = {True: 0, False: 0}
            for _ in range(400):
                value = guided(rng, schema, schema if isinstance(schema, dict) else {}, 4)
                key = json.dumps(value, sort_keys=True)
                if key in seen or not fixed_number(value) or len(key) > 120:
                    continue
                seen.add(key)
                valid = v.is_valid(value)
                if counts[valid] >= 14:
                    continue
                counts[valid] += 1
                tests.append({"texts": list(itertools.islice(orders(value, 6), 6 if valid else 3)), "valid": valid})
            f.write(json.dumps({"schema": json.dumps(schema), "tests": tests}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if COMMAND != "write":
        usage.refuse(f"unknown argument '{COMMAND}'")
    write(OUT)
