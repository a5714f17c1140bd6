"""`verify`: whether a bundle is whole and its numbers make sense."""

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from artifacts.checks import findings
from artifacts.commands.show import printable, titled
from artifacts.loading import load

HELP = "hashes, schema, shapes, finiteness, order of signposts, orthogonality, masks"
EXITS = {0: "sound", 1: "whole, but with numbers that no calibration finds"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bundle."""
    parser.add_argument("path", metavar="PATH", help="folder of a bundle")


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """All findings, not only the first."""
    bundle = load(options.path)
    found = [asdict(finding) for finding in findings(bundle)]
    result = {"path": options.path, "sound": not found, "tensors": len(bundle.tensors), "findings": found}
    return result, int(bool(found))


def render(result: dict[str, Any]) -> RenderableType:
    """A line, or a table of findings."""
    if result["sound"]:
        return Text(f"{result['path']}: sound ({result['tensors']} tensors)")
    table = titled(f"{printable(result['path'])}: calibrate again", "tensor", "problem")
    for finding in result["findings"]:
        table.add_row(Text(finding["name"]), Text(finding["problem"]))
    return table
