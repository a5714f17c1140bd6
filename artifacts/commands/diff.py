"""`diff`: two bundles, field by field and tensor by tensor."""

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from artifacts.commands.show import printable, titled
from artifacts.diff import field_changes, tensor_changes
from artifacts.loading import load

HELP = "two bundles, field by field and tensor by tensor; dates and cards do not count"
EXITS = {0: "the same", 1: "different"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two bundles."""
    parser.add_argument("old", metavar="PATH", help="folder of a bundle")
    parser.add_argument("new", metavar="OTHER", help="folder of the bundle to compare with it")


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """All changes."""
    old, new = load(options.old), load(options.new)
    fields = [asdict(change) for change in field_changes(old, new)]
    tensors = [asdict(change) for change in tensor_changes(old, new)]
    same = not fields and not tensors
    return {"same": same, "fields": fields, "tensors": tensors}, int(not same)


def render(result: dict[str, Any]) -> RenderableType:
    """A line, or a table of fields and one of tensors."""
    if result["same"]:
        return Text("the same")
    fields = titled(f"{len(result['fields'])} entries differ", "entry", "old", "new")
    for change in result["fields"]:
        fields.add_row(*(Text(printable(change[name])) for name in ("path", "old", "new")))
    columns = ("tensor", "old", "new", "numbers", "largest", "relative")
    tensors = titled(f"{len(result['tensors'])} tensors differ", *columns)
    for change in result["tensors"]:
        tensors.add_row(*(Text(_cell(change[name])) for name in change))
    return Group(fields, tensors)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
