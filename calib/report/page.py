"""The report's page: one HTML file that needs nothing else. Foreign texts are escaped, and the page can run nothing."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from artifacts import Bundle
from artifacts.summary import FULL_BITS, layer_range, summarize

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2330; background: #f6f7f9; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: .5rem 0; overflow-wrap: anywhere; }
section { background: #fff; border: 1px solid #e1e4ea; border-radius: 8px; padding: 1rem 1.25rem; margin: 1rem 0; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .4rem 0; }
.quiet { color: #5a6375; }
.missing { border-style: dashed; color: #5a6375; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #eceef2; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: break-word; max-width: 34rem; }
img { max-width: 100%; height: auto; display: block; margin: .5rem auto; }
code { font-size: .88em; background: #f0f1f5; padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Picture:
    """A picture with its heading and what it shows; png is None where it is missing, and then `note` says why."""

    name: str
    title: str
    note: str
    png: bytes | None = None


def page(bundle: Bundle, pictures: Sequence[Picture]) -> str:
    """The whole page."""
    facts = summarize(bundle)
    title = escape(f"{bundle.recipe} for {bundle.model.name}")
    sections = [
        _section("Quality", _quality(facts["evaluation"])),
        _section("Formats", _formats(facts)),
        _section("Size", _sizes(facts)),
        *map(_picture, pictures),
        _section("Made from", _provenance(facts)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{title}</h1>\n<p class=quiet>{_shape(facts)}</p>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str, kind: str = "") -> str:
    return f"<section{kind}>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _picture(picture: Picture) -> str:
    note = f"<p class=quiet>{escape(picture.note)}</p>"
    if picture.png is None:
        return _section(picture.title, note, " class=missing")
    data = base64.b64encode(picture.png).decode()
    return _section(picture.title, f'{note}\n<img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">')


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of numbers to the right, texts escaped."""
    numeric = [any(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]

    def line(tag: str, cells: Sequence[Any]) -> str:
        shown = (f"{value:.5g}" if isinstance(value, float) else str(value) for value in cells)
        marked = ((f"{tag} class=n" if n else tag, text) for n, text in zip(numeric, shown, strict=True))
        return "<tr>" + "".join(f"<{opening}>{escape(text)}</{tag}>" for opening, text in marked) + "</tr>"

    head = line("th", header)
    body = "\n".join(line("td", row) for row in rows)
    top = f"{head}\n" if any(header) else ""
    return f"<div class=scroll><table>\n{top}{body}\n</table></div>"


def _shape(facts: dict[str, Any]) -> str:
    model = facts["model"]
    return escape(
        f"{model['architecture']}: {model['l']} layers, {model['h_q']} query heads, {model['h_kv']} kv heads of "
        f"{model['d']} channels; {facts['tensors']['count']} tensors, {facts['tensors']['bytes'] / 1024:.0f} KiB"
    )


def _quality(evaluation: Any) -> str:
    """The evaluation's figures in full precision and compressed."""
    if not evaluation:
        return "<p>Not evaluated: run <code>python -m calib</code> without <code>eval=none</code>.</p>"
    pairs = [
        (title, evaluation.get(f"{key}_full", ""), evaluation.get(key, ""))
        for key, title in (("loss", "loss, nats per token"), ("perplexity", "perplexity"))
    ]
    single = [
        (title, "", evaluation[key])
        for key, title in (
            ("loss_increase", "loss increase"),
            ("kl_mean", "KL divergence, mean"),
            ("kl_p999", "KL divergence, 99.9% of tokens below"),
            ("top1", "share of tokens with the same most probable next one"),
        )
        if key in evaluation
    ]
    text = evaluation.get("text")
    source = text.get("source", "") if isinstance(text, dict) else ""
    where = f"{source}; {evaluation.get('tokens', '?')} tokens in windows of {evaluation.get('context', '?')}"
    table = _table(("", "full precision", "with this bundle"), [*pairs, *single])
    return f"<p class=quiet>Text: {escape(where)}.</p>\n{table}"


def _formats(facts: dict[str, Any]) -> str:
    rows = [
        (layer_range(group), side, group[side]["page_bits"], group[side]["words"])
        for group in facts["formats"]
        for side in ("key", "value")
    ]
    return _table(("layers", "side", "bits in pages", "format"), rows)


def _sizes(facts: dict[str, Any]) -> str:
    rows = [
        (size["tokens"], round(size["bits"], 3), round(size["bytes"] / 2**20, 1), round(FULL_BITS / size["bits"], 2))
        for size in facts["sizes"]
    ]
    note = "<p class=quiet>One sequence; codes, scales, outliers, window, tables and the bundle itself counted.</p>"
    return note + _table(("tokens", "bits per number", "MiB", "times less than 16 bits"), rows)


def _provenance(facts: dict[str, Any]) -> str:
    calibration, rows = facts["calibration"], []
    for name in ("data", "packages"):
        table = calibration.get(name)
        if isinstance(table, dict):
            rows += [(f"{name}: {key}", str(value)) for key, value in table.items()]
    rows += [
        ("configuration", facts["model"]["config_hash"]),
        ("weights' names and shapes", facts["model"]["weights_hash"]),
    ]
    return _table(("", ""), rows)
