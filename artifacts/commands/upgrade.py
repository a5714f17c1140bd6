"""`upgrade`: writes a bundle anew, in the newest schema and with its card."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from artifacts.bundle import MANIFEST_LIMIT, SCHEMA_VERSION
from artifacts.card import CARD, bundle_card
from artifacts.loading import load, read_manifest
from artifacts.reader import FolderReader

HELP = "write a bundle in the newest schema, with its card; in place unless --out is given"
EXITS = {0: "upgraded, or up to date already"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bundle, and where to."""
    parser.add_argument("path", metavar="PATH", help="folder of a bundle")
    parser.add_argument("--out", metavar="FOLDER", help="where to write; the bundle itself stays as it is")


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """Whatever `load` reads, `save` writes as the newest schema. A bundle that is up to date is not touched."""
    bundle, out = load(options.path), options.out or options.path
    with FolderReader(Path(options.path)) as folder:
        version = read_manifest(folder)["schema_version"]
        card = folder.read(CARD, MANIFEST_LIMIT) if folder.holds(CARD) else b""
    current = version == SCHEMA_VERSION and bytes(card) == bundle_card(bundle).encode()
    if options.out or not current:
        out = str(bundle.save(out))
    return {
        "path": str(out),
        "from_version": version,
        "to_version": SCHEMA_VERSION,
        "written": bool(options.out) or not current,
    }, 0


def render(result: dict[str, Any]) -> RenderableType:
    """A line."""
    versions = f"schema {result['from_version']} -> {result['to_version']}, with card"
    return Text(f"{result['path']}: {versions if result['written'] else 'up to date already'}")
