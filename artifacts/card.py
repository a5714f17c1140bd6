"""The bundle card: `README.md` inside a bundle, with the front matter that Hugging Face's hub reads.

A bundle's texts (names of models, recipes, sources of data) may come from anybody. They only ever stand in code spans,
where Markdown knows neither HTML nor links, and in the front matter only where they look like a hub's model id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from artifacts.summary import FULL_BITS, layer_range, summarize

if TYPE_CHECKING:
    from artifacts.bundle import Bundle

CARD = "README.md"
MARK = "<!-- card of a Signpost bundle: written anew whenever the bundle is saved -->"
TEXT_LIMIT = 200  # characters of a foreign text
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

import artifacts
from runtime.hf import SignpostCache

model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
cache = SignpostCache(model, artifacts.load(FOLDER))
# Before transformers 5.24 the argument is called past_key_values.
ids = model.generate(**tokenizer("The history of", return_tensors="pt"), cache=cache, max_new_tokens=100)
```"""


def bundle_card(bundle: Bundle) -> str:
    """The card's text, Markdown. It depends on nothing but the bundle."""
    facts = summarize(bundle)
    sections = [
        _front_matter(bundle.model.name),
        MARK,
        f"# KV cache of {code(bundle.model.name)} by recipe {code(bundle.recipe)}",
        "What calibration learned about this model's keys and values: Signpost keeps its KV cache in packed pages.",
        "## Formats",
        _formats(facts),
        "## Sizes",
        _sizes(facts),
        "## Quality",
        _quality(facts["evaluation"]),
        "## Made from",
        _provenance(bundle),
        "## Use",
        "With Signpost installed, its extra `hf` too, fetch the bundle with `python -m artifacts pull`, and:",
        _USE,
        "The bundle is of this model: one of another architecture or shape is refused. Fine-tuned weights of the same "
        "shape are not, but what calibration learned is of the ones above. It holds no text and no weights.",
    ]
    return "\n\n".join(sections) + "\n"


def code(text: Any) -> str:
    """Foreign text as a Markdown code span: one line, printable, of bounded length; nothing in it is interpreted."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: TEXT_LIMIT + 1])
    shown = shown[:TEXT_LIMIT] + "…" if len(shown) > TEXT_LIMIT else shown
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    space = " " if len(fence) > 1 else ""  # a backtick at the end would lengthen the fence
    return f"{fence}{space}{shown if shown.strip() else '(empty)'}{space}{fence}"


def _front_matter(model: str) -> str:
    lines = ["---", "library_name: signpost-kv", "tags:", "- kv-cache", "- quantization", "- signpost"]
    if _HUB_ID.fullmatch(model):
        lines += [f'base_model: "{model}"', "base_model_relation: quantized"]
    return "\n".join([*lines, "---"])


def _formats(facts: dict[str, Any]) -> str:
    rows = ["| layers | side | bits in pages | format |", "|---|---|---|---|"]
    for group in facts["formats"]:
        rows += [
            f"| {layer_range(group)} | {side} | {group[side]['page_bits']:.3f} | {group[side]['words']} |"
            for side in ("key", "value")
        ]
    return "\n".join(rows)


def _sizes(facts: dict[str, Any]) -> str:
    rows = ["| tokens | bits per number, everything counted | cache, MiB | less than 16 bits |", "|---|---|---|---|"]
    rows += [
        f"| {size['tokens']} | {size['bits']:.3f} | {size['bytes'] / 2**20:.1f} | {FULL_BITS / size['bits']:.2f}x |"
        for size in facts["sizes"]
    ]
    return "\n".join(rows)


def _quality(evaluation: Any) -> str:
    """Figures of `calib.evaluate` as far as they are there: an evaluation is open data."""
    rows = {
        "loss, nats per token": "loss",
        "full precision": "loss_full",
        "increase": "loss_increase",
        "KL divergence, mean": "kl_mean",
        "KL divergence, 99.9%": "kl_p999",
        "same top token": "top1",
    }
    found = {name: (evaluation or {}).get(key) for name, key in rows.items()}
    numbers = [f"* {name}: {value:.5g}" for name, value in found.items() if isinstance(value, (int, float))]
    if not numbers:
        return "Not evaluated."
    text = (evaluation or {}).get("text")
    source = text.get("source") if isinstance(text, dict) else None
    return "\n".join([*numbers, *([f"* text: {code(source)}"] if source else [])])


def _provenance(bundle: Bundle) -> str:
    data, packages = bundle.calibration.get("data"), bundle.calibration.get("packages")
    lines = [f"* architecture: {code(bundle.model.architecture)}", f"* configuration: {code(bundle.model.config_hash)}"]
    for title, table in (("calibration text", data), ("packages", packages)):
        if isinstance(table, dict) and table:
            lines.append(f"* {title}: " + ", ".join(code(f"{name}: {value}") for name, value in table.items()))
    return "\n".join(lines)
