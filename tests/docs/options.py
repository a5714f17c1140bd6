"""Whether programs know the options that commands give them. Commands on standard input, one a line; nothing is run.

    echo "python -m benchmarks.factors --windows 2" | python -m tests.docs.options

Exits with 2, and what argparse says, at the first command whose options are wrong.
"""

import argparse
import importlib.util
import runpy
import shlex
import sys
from typing import Any


class Parsed(Exception):
    """The options are right, and the program ends here."""


def check(command: str) -> None:
    """Starts the command's program as far as its options are parsed."""
    words = shlex.split(command)
    module, *options = words[words.index("-m") + 1 :]
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None or spec.origin is None:
        sys.exit(f"{command}: there is no {module}")
    with open(spec.origin) as file:
        takes = "argparse" in file.read()
    if not takes:
        assert not options, f"{command}: {module} takes no options"
        return
    sys.argv = [module, *options]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Parsed:
        return
    sys.exit(f"{command}: {module} parses no options")


def main() -> None:
    """All commands."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(parser, *given, **named)
        raise Parsed

    # For all parsers of this process, which ends here.
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign,assignment]
    for line in sys.stdin:
        check(line.strip())


if __name__ == "__main__":
    main()
