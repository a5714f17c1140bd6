"""`pull`: a bundle from a hub."""

import argparse
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from artifacts.commands.push import hub_arguments
from artifacts.commands.show import printable
from artifacts.hub import pull

HELP = "fetch a bundle from Hugging Face's hub, verify it, and only then put it into place"
EXITS = {0: "fetched"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The repository, the folder."""
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository")
    parser.add_argument("out", metavar="FOLDER", help="where to put the bundle; one that is there is replaced")
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    hub_arguments(parser)


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """What came."""
    o = options
    bundle = pull(o.repo, o.out, o.revision, o.endpoint, o.timeout)
    return {"path": o.out, "recipe": bundle.recipe, "model": bundle.model.name}, 0


def render(result: dict[str, Any]) -> RenderableType:
    """A line."""
    return Text(f"{result['path']}: {printable(result['recipe'])} for {printable(result['model'])}, verified")
