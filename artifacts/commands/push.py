"""`push`: a bundle to a hub."""

import argparse
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from artifacts.hub import TIMEOUT, push

HELP = "verify a bundle and put it on Hugging Face's hub, in one commit"
EXITS = {0: "pushed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bundle, the repository."""
    parser.add_argument("path", metavar="PATH", help="folder of a bundle")
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository, made if it is new")
    parser.add_argument("--private", action="store_true", help="if the repository is new, only its owner sees it")
    parser.add_argument("--message", default="Bundle", help="of the commit")
    hub_arguments(parser)


def hub_arguments(parser: argparse.ArgumentParser) -> None:
    """What `push` and `pull` share."""
    parser.add_argument("--endpoint", metavar="URL", help="another hub (default: HF_ENDPOINT, or huggingface.co)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="S", help=f"seconds for everything; default: {TIMEOUT:g}"
    )


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """Where it is now."""
    o = options
    return {"commit": push(o.path, o.repo, o.private, o.message, o.endpoint, o.timeout)}, 0


def render(result: dict[str, Any]) -> RenderableType:
    """A line."""
    return Text(f"pushed: {result['commit']}")
