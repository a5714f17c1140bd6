"""`python -m artifacts show|verify|diff|upgrade|push|pull`: a bundle on the command line."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from rich.console import Console, RenderableType

from artifacts.commands import diff, pull, push, show, upgrade, verify
from artifacts.errors import SignpostError

ERROR = 2  # like a wrong command line
INTERRUPTED = 130
WIDTH = 160


class Command(Protocol):
    """What a file of `artifacts.commands` offers."""

    HELP: str
    EXITS: dict[int, str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]: ...

    def render(self, result: dict[str, Any]) -> RenderableType: ...


COMMANDS: dict[str, Any] = {
    "show": show, "verify": verify, "diff": diff, "upgrade": upgrade, "push": push, "pull": pull,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m artifacts", description="Looks at bundles, compares, shares them.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        exits = ", ".join(f"{code} {meaning}" for code, meaning in command.EXITS.items())
        sub = commands.add_parser(
            name, help=command.HELP, description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
            epilog=f"Exit codes: {exits}, {ERROR} with one line on what is wrong.",
        )  # fmt: skip
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON on standard output instead of tables")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    options = parser().parse_args(arguments)
    command: Command = COMMANDS[options.command]
    errors = Console(stderr=True)
    try:
        result, code = command.run(options, errors)
        _print(command, result, options.json)
    except (SignpostError, OSError) as error:
        return _fail(str(error), options.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _print(command: Command, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
        return
    # Where no terminal says how wide it is, tables need not be broken to 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    Console(width=width).print(command.render(result), soft_wrap=True)


def _fail(message: str, as_json: bool) -> int:
    line = "".join(c if c.isprintable() else " " for c in message)
    if as_json:
        with suppress(OSError):  # it may be what failed
            print(json.dumps({"error": line}))
    print(f"error: {line}", file=sys.stderr)
    return ERROR


def script() -> None:
    """Entry point of the command `signpost`."""
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
