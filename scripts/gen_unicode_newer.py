#!/usr/bin/env python3
"""Writes src/text/unicode_newer.h: characters newer than Unicode 14, with the class that the tokenizers library gives
them. Needs a Python whose unicodedata is of version 14 (3.11) and `pip install tokenizers`; run clang-format -i on it
afterwards."""
import sys
import unicodedata

import usage

if __name__ == "__main__":
    usage.arguments("")

from tokenizers import Regex, pre_tokenizers

CLASSES = ["Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "P", "S"]


def old_class(cp):
    c = unicodedata.category(chr(cp))
    return c if c in CLASSES else c[0] if c[0] in CLASSES else ""


def new_classes(cps):
    found = {}
    for name in CLASSES:
        split = pre_tokenizers.Split(Regex("\\p{%s}" % name), "removed")
        for i in range(0, len(cps), 50000):
            part = cps[i : i + 50000]
            kept = set()
            for _, (a, b) in split.pre_tokenize_str("".join(map(chr, part))):
                kept.update(range(a, b))
            found.update((cp, name) for j, cp in enumerate(part) if j not in kept)
    return found


def main():
    assert unicodedata.unidata_version.startswith("14.")
    cps = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    new, ranges = new_classes(cps), []
    for cp in cps:
        name = new.get(cp, "")
        if name == old_class(cp):
            continue
        if ranges and ranges[-1][1] == cp - 1 and ranges[-1][2] == name:
            ranges[-1][1] = cp
        else:
            ranges.append([cp, cp, name])
    path = "src/text/unicode_newer.h"
    head = open(path).read().split("newer[] = {")[0] + "newer[] = {\n"
    line, out = "   ", ""
    for a, b, name in ranges:
        item = " {0x%X, 0x%X, LR_UC_%s}," % (a, b, name.upper())
        if len(line) + len(item) > 118:
            out, line = out + line + "\n", "   "
        line += item
    with open(path, "w") as f:
        f.write(head + out + line + "\n};\n")


if __name__ == "__main__":
    sys.exit(main())
