"""What a bundle holds, in plain data: for the card, for `python -m artifacts show` and for the report."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from artifacts.format import Format, to_json
from artifacts.geometry import PageGeometry

if TYPE_CHECKING:
    from artifacts.bundle import Bundle

LENGTHS = (4096, 32768, 131072)  # tokens at which sizes are stated
FULL_BITS = 16


def summarize(bundle: Bundle) -> dict[str, Any]:
    """Model, formats by layers, sizes, tensors, provenance and evaluation, as plain JSON data.

    Sizes: `bits` per cached number with everything counted (`CacheGeometry.bits`), `bytes` of the cache of one
    sequence, `page_bits` per number inside pages, `bytes_per_token` of pages, all layers.
    """
    geometry = bundle.geometry
    return {
        "recipe": bundle.recipe,
        "model": asdict(bundle.model),
        "formats": layer_groups(bundle),
        "sizes": [
            {"tokens": n, "bits": geometry.bits(n), "bytes": geometry.cache_bytes(n)} for n in LENGTHS
        ],
        "bytes_per_token": sum(_per_token(side) for pair in geometry.layers for side in pair),
        "tensors": {
            "count": len(bundle.tensors),
            "bytes": sum(tensor.nbytes for tensor in bundle.tensors.values()),
        },
        "calibration": bundle.calibration,
        "evaluation": bundle.evaluation,
    }  # fmt: skip


def layer_groups(bundle: Bundle) -> list[dict[str, Any]]:
    """Neighbouring layers of one format together: first and last layer, and both sides' formats and sizes."""
    groups = []
    for formats, members in groupby(range(bundle.model.l), key=lambda layer: bundle.layers[layer]):
        layers = list(members)
        geometry = dict(zip(("key", "value"), bundle.geometry.layers[layers[0]], strict=True))
        sides = {
            name: {
                "format": to_json(side.format),
                "page_bits": side.bits,
                "bytes_per_token": _per_token(side),
                "words": words(side.format),
            }
            for name, side in geometry.items()
        }
        assert (formats.key, formats.value) == tuple(side.format for side in geometry.values())
        groups.append({"first": layers[0], "last": layers[-1]} | sides)
    return groups


def words(fmt: Format) -> str:
    """A format on one line: its transforms and parts with the parameters that are not the usual ones."""
    named = [*fmt.transforms.items(), *fmt.parts.items()]
    return " + ".join(" ".join([name, *_parameters(part)]) for name, part in named)


def _parameters(part: Any) -> list[str]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    usual = {field.name: field.default for field in fields(part)}
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items() if value != usual[name]]  # fmt: skip


def _per_token(side: PageGeometry) -> float:
    return side.page_bytes / side.shape.t


def layer_range(group: dict[str, Any]) -> str:
    """`0-31`, or `7` where it is one layer."""
    return str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}"
