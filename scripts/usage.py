"""What the Python scripts share at their start: --help prints a script's own words, wrong arguments are told with them, and
a package that is missing is named. It stands before the imports of packages:

    import usage
    first, second, rest = usage.arguments("FIRST [SECOND] [MORE...]")

An argument in brackets may be left out, and is None then; one with dots is the list of all others.
"""
import os
import sys

ME = "scripts/" + os.path.basename(sys.argv[0])


def refuse(why):
    """Ends with status 2."""
    print(f"{ME}: {why} (see {ME} --help)", file=sys.stderr)
    sys.exit(2)


def arguments(names, flags=()):
    """The values of the arguments that are named. flags: words with a dash that may be among them."""
    names, given = names.split(), sys.argv[1:]
    if "-h" in given or "--help" in given:
        print(f"usage: {ME} {' '.join(names)}".rstrip() + "\n\n" + sys.modules["__main__"].__doc__.strip())
        sys.exit(0)
    for word in given:
        if word == "" or word.startswith("-") and word not in flags:
            refuse(f"unknown argument '{word}'")
    values = []
    for name in names:
        if "..." in name:
            values.append(given)
            given = []
        elif given:
            values.append(given.pop(0))
        elif name.startswith("["):
            values.append(None)
        else:
            refuse(f"{name} is missing")
    if given:
        refuse(f"unexpected argument '{given[0]}'")
    return values


def named(kind, error, trace):
    """In place of a traceback where a package is missing."""
    if not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"{ME}: the Python package {error.name} is not installed; the head of the script says what it needs",
          file=sys.stderr)


sys.excepthook = named
