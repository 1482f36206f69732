#!/usr/bin/env python3
"""Writes lua/llmrun/template/unicode.lua: the case mappings and classes that Python's str methods use.

Usage: python3 scripts/gen_template_unicode.py  (from the repository root)
"""
import unicodedata

import usage

OUT = "lua/llmrun/template/unicode.lua"
ALL = [c for c in range(0x80, 0x110000) if not 0xD800 <= c < 0xE000]


def mapping(fn):
    """Runs of code points mapped by one distance, and those mapped to several characters."""
    one, many = {}, {}
    for c in ALL:
        to = fn(chr(c))
        if to != chr(c):
            (one if len(to) == 1 else many)[c] = to
    keys, runs, i = sorted(one), [], 0
    while i < len(keys):
        delta = ord(one[keys[i]]) - keys[i]
        best = (i, 1)
        for step in (1, 2):
            j = i
            while j + 1 < len(keys) and keys[j + 1] == keys[j] + step and ord(one[keys[j + 1]]) - keys[j + 1] == delta:
                j += 1
            if j > best[0]:
                best = (j, step)
        runs.append((keys[i], keys[best[0]], best[1], delta))
        i = best[0] + 1
    return runs, many


def ranges(test):
    out = []
    for c in ALL:
        if test(c):
            if out and out[-1][1] == c - 1:
                out[-1][1] = c
            else:
                out.append([c, c])
    return out


def wrap(words, width=116):
    lines, line = [], ""
    for w in words:
        if len(line) + len(w) + 1 > width:
            lines.append(line)
            line = w
        else:
            line = f"{line} {w}".strip()
    return "\n".join("    " + x for x in lines + [line])


def numbers(name, flat):
    return f"M.{name} = {{\n{wrap([f'{n},' for n in flat])}\n}}\n"


def text(s):
    return '"' + "".join(f"\\u{{{ord(c):x}}}" for c in s) + '"'


def main():
    out = [
        "-- Unicode facts for str methods; written by scripts/gen_template_unicode.py, not by hand.\n"
        f"-- Unicode {unicodedata.unidata_version}, code points from 128 up. upper, lower: runs of (first, last, step, distance);\n"
        "-- upper_many, lower_many: code point -> several characters; alpha, unprintable: pairs (first, last).\n"
        "-- unprintable leaves out code points that are not assigned.\n"
        "local M = {}\n"
    ]
    for name, fn in (("upper", str.upper), ("lower", str.lower)):
        runs, many = mapping(fn)
        out.append(numbers(name, [n for r in runs for n in r]))
        out.append(f"M.{name}_many = {{\n{wrap([f'[{c}] = {text(s)},' for c, s in sorted(many.items())])}\n}}\n")
    out.append(numbers("alpha", [n for r in ranges(lambda c: chr(c).isalpha()) for n in r]))
    out.append(
        numbers(
            "unprintable",
            [n for r in ranges(lambda c: not chr(c).isprintable() and unicodedata.category(chr(c)) != "Cn") for n in r],
        )
    )
    with open(OUT, "w") as f:
        f.write("\n".join(out) + "\nreturn M\n")


usage.arguments("")
main()
