#!/usr/bin/env python3
"""Writes tests/data/template/{chats,snippets}.json: what Jinja itself makes of the templates and snippets there.

Usage: python3 scripts/gen_template_ref.py [--gguf FILE=NAME ...]   (from the repository root; needs the package jinja2)

The environment is set up as Hugging Face Transformers does for chat templates: immutable sandbox, trim_blocks and
lstrip_blocks, loop controls, a generation block, a tojson that escapes no HTML, raise_exception, strftime_now (here a fixed
time), namespaces without underscore names; tools and documents are None unless given.

Inputs: *.jinja (templates), conversations.json (name -> variables), snippets.txt (small templates, one
a line, with a pilcrow for each newline in it), snippets_vars.json (their variables). --gguf reads the chat template of a model file into
real_NAME.jinja first (needs the package gguf).

Outputs hold the text, or an error's class and message where Jinja raises.
"""
import copy
import datetime
import glob
import json
import os

import usage

GGUFS, = usage.arguments("[--gguf] [FILE=NAME...]", flags=("--gguf",))[1:]
for word in GGUFS:
    if "=" not in word:
        usage.refuse(f"FILE=NAME expected, got '{word}'")

import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
import jinja2.sandbox  # noqa: E402

DIR = "tests/data/template"
NOW = datetime.datetime(2026, 3, 5, 8, 7, 9)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


class Generation(jinja2.ext.Extension):
    """The block around what the model says; it changes nothing in the text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("inner"), [], [], body).set_lineno(line)

    def inner(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    def __setitem__(self, name, value):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError("underscore name")
        super().__setitem__(name, value)


def namespace(*args, **kwargs):
    made = Namespace()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: NOW.strftime(fmt)
    env.globals["namespace"] = namespace
    env.globals["dict"] = lambda *a, **k: dict(*a, **k)
    return env


def outcome(env, source, variables):
    try:
        return {"text": env.from_string(source).render(**copy.deepcopy(variables))}
    except Exception as e:  # whatever Jinja or Python raises is the expected outcome
        return {"error": type(e).__name__, "message": str(e)}


def dump(name, rows):
    with open(f"{DIR}/{name}", "w") as f:
        f.write("[\n")
        f.write(",\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
        f.write("\n]\n")
    print(name, len(rows), "rows,", sum("error" in r for r in rows), "errors")


def main():
    for item in GGUFS:
        from gguf import GGUFReader

        path, name = item.rsplit("=", 1)
        field = GGUFReader(path).fields.get("tokenizer.chat_template")
        if field:
            with open(f"{DIR}/real_{name}.jinja", "w") as f:
                f.write(field.contents())
    env = environment()
    chats = json.load(open(f"{DIR}/conversations.json"))
    rows = []
    for path in sorted(glob.glob(f"{DIR}/*.jinja")):
        source = open(path, newline="").read()
        for name, chat in chats.items():
            variables = {"tools": None, "documents": None, "add_generation_prompt": False, **TOKENS, **chat}
            rows.append({"template": os.path.basename(path), "chat": name, **outcome(env, source, variables)})
    dump("chats.json", rows)

    variables = json.load(open(f"{DIR}/snippets_vars.json"))
    rows = []
    for line in open(f"{DIR}/snippets.txt", newline="").read().splitlines():
        if not line or line.startswith("## "):
            continue
        source = line.replace("\u00b6", "\n")
        rows.append({"source": source, **outcome(env, source, {"tools": None, "documents": None, **TOKENS, **variables})})
    dump("snippets.json", rows)


main()
