#!/usr/bin/env python3
"""The Python side of scripts/conformance_schemas.

    conformance_schemas.py suite FOLDER OUT.jsonl     schemas and instances of the JSON Schema test suite's draft2020-12
    conformance_schemas.py store CACHE.sqlite OUT.jsonl    the schemas that the package schemastore brings
    conformance_schemas.py report NAME ROWS.jsonl RESULTS.jsonl [-v]     judges what conformance_schemas.lua found

A line of rows: {"name", "schema": text, "tests": [{"texts": [...], "valid": bool, "name"}]}. The texts of a test are one
value with its objects' keys in several orders. A schema is honoured if it compiles; it is violated if an instance that
the suite calls invalid can be written under it, or if a generated text is no JSON, repeats a name in an object, or is
not valid for the jsonschema package.
"""
import collections
import io
import itertools
import json
import pickle
import re
import sqlite3
import sys
from pathlib import Path

import usage

COMMAND, ARGS = usage.arguments("COMMAND [ARGS...]", flags=("-v",))

from gen_grammar_ref import orders


def utf8(text):
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False


def suite(folder, out):
    with open(out, "w", encoding="utf-8") as f:
        for path in sorted(Path(folder).glob("*.json")) + sorted(Path(folder).glob("optional/format/*.json")):
            if path.name == "format.json":
                continue  # says that formats are not held to; they are here
            for group in json.loads(path.read_text(encoding="utf-8")):
                tests = []
                for t in group["tests"]:
                    texts = list(itertools.islice(orders(t["data"], 24), 48))
                    if all(map(utf8, texts)):
                        tests.append({"texts": texts, "valid": t["valid"], "name": t["description"]})
                f.write(json.dumps({"name": f"{path.name}: {group['description']}", "schema": json.dumps(group["schema"]),
                                    "tests": tests}, ensure_ascii=False) + "\n")


class Plain:
    """Stands for every class that a stored answer names."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.state = state


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return Plain


def store(cache, out):
    """Schemas as the package stored them: answers of web servers, of which only the text is taken."""
    with open(out, "w", encoding="utf-8") as f:
        for key, value in sqlite3.connect(cache).execute("select key, value from responses order by key"):
            answer = Reader(io.BytesIO(value)).load()
            answer = answer if isinstance(answer, dict) else getattr(answer, "state", {})
            try:
                schema = json.loads(answer["_content"])
            except (ValueError, KeyError):
                continue
            words = ("type", "properties", "$ref", "oneOf", "anyOf", "allOf", "items", "definitions")
            if isinstance(schema, dict) and any(w in schema for w in words):
                f.write(json.dumps({"name": str(answer.get("url", key)), "schema": json.dumps(schema), "tests": []}) + "\n")


def once(pairs):
    names = [k for k, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name comes twice")
    return dict(pairs)


SPACE = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # \s of ECMAScript, which Python's is not


def ecma(pattern):
    """A pattern with ECMAScript's \\s and \\S (Python's know no U+FEFF)."""
    out, in_class = "", False
    for piece in re.findall(r"\\.|.", pattern, re.S):
        if piece == r"\s":
            piece = SPACE if in_class else f"[{SPACE}]"
        elif piece == r"\S" and not in_class:
            piece = f"[^{SPACE}]"
        elif piece in "[]":
            in_class = piece == "["
        out += piece
    return re.compile(out, re.ASCII)


def pattern_word(validator, pattern, instance, schema):
    import jsonschema
    if isinstance(instance, str) and not ecma(pattern).search(instance):
        yield jsonschema.ValidationError(f"{instance[-80:]!r} does not match {pattern!r}")


def fault(validator, text):
    try:
        value = json.loads(text, object_pairs_hook=once)
        error = next(iter(validator.iter_errors(value)), None)
        return None if error is None else error.message[:120]
    except ValueError as e:
        return str(e)


def general(text):
    """A refusal without what belongs to its place."""
    text = re.sub(r"^(json: )?#.*?: ", "", text)
    text = re.sub(r"^'[^']*'", "'...'", text)
    return re.sub(r"\d+", "N", text)[:90]


def report(name, rows_path, results_path, verbose):
    import jsonschema
    counts, reasons, times = collections.Counter(), collections.Counter(), []
    for line, result_line in zip(open(rows_path, encoding="utf-8"), open(results_path, encoding="utf-8")):
        row, result = json.loads(line), json.loads(result_line)
        counts["schemas"] += 1
        if result.get("refused"):
            if result["code"] == "invalid" and row["tests"] and not any(t["valid"] for t in row["tests"]):
                counts["of no value, refused"] += 1
                continue
            counts["refused"] += 1
            reasons[general(result["refused"])] += 1
            if verbose:
                print("refused:", row["name"], result["refused"][:200])
            continue
        counts["honoured"] += 1
        times.append(result["ms"])
        bad = False
        for t, verdict in zip(row["tests"], result["verdicts"]):
            counts["instances"] += 1
            if verdict["bytes"] != verdict["tokens"]:
                counts["instances that bytes and tokens disagree on"] += 1
                bad = True
                print("DISAGREE:", row["name"], t["name"], t["texts"][0])
            if verdict["bytes"] and not t["valid"]:
                bad = True
                print("VIOLATED:", row["name"], t["name"], t["texts"][0])
            if t["valid"] and not verdict["bytes"]:
                counts["valid instances that can't be written"] += 1
                if verbose:
                    print("narrower:", row["name"], t["name"], t["texts"][0][:150])
        schema = json.loads(row["schema"])
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        judge = jsonschema.validators.extend(kind, {"pattern": pattern_word})(schema, format_checker=kind.FORMAT_CHECKER)
        for text in result["samples"]:
            try:
                why = fault(judge, text)
            except Exception as e:  # the validator itself fails: on its regular expressions, on references
                counts["texts that the validator could not judge"] += 1
                if verbose:
                    print("not judged:", row["name"], repr(e)[:150])
                continue
            counts["texts generated"] += 1
            if why:
                bad = True
                print("VIOLATED:", row["name"], why, "in", text[:300])
        counts["ended without a text"] += result["stuck"]
        counts["accepted yet violated"] += bad
    n = counts["schemas"] - counts["of no value, refused"]
    times.sort()
    print(f"{name}: {counts['schemas']} schemas; honoured {counts['honoured']} ({100 * counts['honoured'] / n:.1f} %), "
          f"refused {counts['refused']}, accepted yet violated {counts['accepted yet violated']}")
    for key in ("of no value, refused", "instances", "instances that bytes and tokens disagree on",
                "valid instances that can't be written", "texts generated", "texts that the validator could not judge",
                "ended without a text"):
        if counts[key]:
            print(f"    {key}: {counts[key]}")
    print(f"    compiled in {times[len(times) // 2]:.2f} ms (median), {times[int(0.95 * len(times))]:.1f} ms (95 %)")
    for reason, count in reasons.most_common(8):
        print(f"    refused {count:4d}: {reason}")
    return counts["accepted yet violated"]


def main():
    if len(ARGS) == 2 and COMMAND == "suite":
        suite(*ARGS)
    elif len(ARGS) == 2 and COMMAND == "store":
        store(*ARGS)
    elif len(ARGS) >= 3 and COMMAND == "report":
        sys.exit(1 if report(*ARGS[:3], "-v" in ARGS) else 0)
    else:
        usage.refuse(f"unknown command '{COMMAND}', or not its arguments")


main()
