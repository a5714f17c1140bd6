"""`show`: what is in a bundle."""

import argparse
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from artifacts.loading import load
from artifacts.summary import FULL_BITS, layer_range, summarize

HELP = "formats per layer, bits, bytes per token, provenance"
EXITS = {0: "shown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bundle."""
    parser.add_argument("path", metavar="PATH", help="folder of a bundle")


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """`summarize` of the bundle."""
    return summarize(load(options.path)), 0


def render(facts: dict[str, Any]) -> RenderableType:
    """Tables. Texts of the bundle are shown as they are: nothing in them is markup."""
    return Group(_model(facts), _formats(facts), _sizes(facts), _provenance(facts))


def _model(facts: dict[str, Any]) -> Table:
    model, rope = facts["model"], facts["model"]["rope"]
    rows = {
        "recipe": facts["recipe"],
        "model": f"{model['name']} ({model['architecture']})",
        "shape": f"{model['l']} layers, {model['h_q']} query heads, {model['h_kv']} kv heads of {model['d']} channels",
        "rotary embedding": f"{rope['kind']}, {rope['dim']} channels, {rope['layout']}, factor {rope['scaling']:g}",
        "configuration": model["config_hash"],
        "weights' names and shapes": model["weights_hash"],
        "tensors": f"{facts['tensors']['count']}, {facts['tensors']['bytes'] / 1024:.1f} KiB",
        "pages": f"{facts['bytes_per_token']:g} bytes per token, all layers",
    }
    return pairs("Bundle", rows | _attention(model))


def _attention(model: dict[str, Any]) -> dict[str, str]:
    """What only some models do."""
    rows = {}
    if windows := sorted({window for window in model.get("sliding", ()) if window}):
        count = sum(window > 0 for window in model["sliding"])
        rows["sliding windows"] = f"{', '.join(map(str, windows))} tokens in {count} of {model['l']} layers"
    if "softcap" in model:
        rows["attention logits"] = f"capped at {model['softcap']:g}"
    return rows


def _formats(facts: dict[str, Any]) -> Table:
    # Broken by hand, so that a narrow screen leaves its width to the parts.
    sizes = ("bits in\npages", "bytes\na token", "tokens\na page")
    table = titled("Formats", "layers", "side", *sizes, "window", "parts")
    for group in facts["formats"]:
        for side in ("key", "value"):
            shown, fmt = group[side], group[side]["format"]
            paged = ("", "all", shown["words"])
            if fmt:
                window = f"{fmt['window']['sinks']} first,\n{fmt['window']['recent']} last"
                paged = (str(fmt["t"]), window, f"{fmt['domain']}: {shown['words']}")
            bits, grows = f"{shown['page_bits']:.3f}", f"{shown['bytes_per_token']:g}"
            table.add_row(*map(Text, (layer_range(group), side, bits, grows, *paged)))
    return table


def _sizes(facts: dict[str, Any]) -> Table:
    columns = ("tokens", "bits per number", "MiB", "less than 16 bits")
    table = titled("Cache of one sequence, everything counted", *columns, justify="right")
    for size in facts["sizes"]:
        bits = size["bits"]
        table.add_row(str(size["tokens"]), f"{bits:.3f}", f"{size['bytes'] / 2**20:.1f}", f"{FULL_BITS / bits:.2f}x")
    return table


def _provenance(facts: dict[str, Any]) -> RenderableType:
    return Group(
        pairs("Calibration", dict(flat(facts["calibration"])) or {"": "nothing is known of it"}),
        pairs("Evaluation", dict(flat(facts["evaluation"] or {})) or {"": "not evaluated"}),
    )


def titled(title: str, *columns: str, justify: JustifyMethod = "left") -> Table:
    """An empty table. Where a screen is too narrow, cells go on below: no name or hash loses its end."""
    table = Table(title=Text(title), title_justify="left")
    for name in columns:
        table.add_column(name, justify=justify, overflow="fold")
    return table


def pairs(title: str, rows: dict[str, Any]) -> Table:
    """A table of names and values."""
    table = titled(title, "name", "value")
    table.show_header = False
    for name, value in rows.items():
        table.add_row(Text(printable(name)), Text(printable(value)))
    return table


def printable(value: Any) -> str:
    """Text for a terminal: no control characters, which could move its cursor or change its title."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def flat(data: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested JSON data with their dotted paths; lists count as leaves."""
    if not isinstance(data, dict):
        return [(path, data)]
    return [leaf for name, value in data.items() for leaf in flat(value, f"{path}.{name}" if path else name)]
