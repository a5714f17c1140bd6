"""What a bundle holds, in plain data: for the card, for `python -m artifacts show` and for the report."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from artifacts.format import Format, to_json
from artifacts.geometry import CacheGeometry, PageGeometry

if TYPE_CHECKING:
    from artifacts.bundle import Bundle

LENGTHS = (4096, 32768, 131072)  # tokens at which sizes are stated
FULL_BITS = 16


def summarize(bundle: Bundle) -> dict[str, Any]:
    """Model, formats by layers, sizes, tensors, provenance and evaluation, as plain JSON data.

    Sizes: `bits` per cached number with everything counted (`CacheGeometry.bits`), `bytes` of the cache of one
    sequence, `page_bits` per number inside pages, `bytes_per_token` that the cache grows by, all layers. A layer in
    full precision has `format` None.
    """
    geometry, groups = bundle.geometry, layer_groups(bundle)
    return {
        "recipe": bundle.recipe,
        "model": bundle.model.to_json(),
        "formats": groups,
        "sizes": [
            {"tokens": n, "bits": geometry.bits(n), "bytes": geometry.cache_bytes(n)} for n in LENGTHS
        ],
        "bytes_per_token": sum(
            side["bytes_per_token"] * (group["last"] - group["first"] + 1)
            for group in groups for side in (group["key"], group["value"])
        ),
        "tensors": {
            "count": len(bundle.tensors),
            "bytes": sum(tensor.nbytes for tensor in bundle.tensors.values()),
        },
        "calibration": bundle.calibration,
        "evaluation": bundle.evaluation,
    }  # fmt: skip


def layer_groups(bundle: Bundle) -> list[dict[str, Any]]:
    """Neighbouring layers of one format and window together: first and last, and both sides' formats and sizes."""
    model, geometry, groups = bundle.model, bundle.geometry, []
    for (_, window), members in groupby(range(model.l), key=lambda i: (bundle.layers[i], model.window(i))):
        layers = list(members)
        pair = geometry.layers[layers[0]]
        sides = [_side(side, window) for side in pair] if pair else 2 * [_exact_side(geometry, window)]
        groups.append({"first": layers[0], "last": layers[-1], "key": sides[0], "value": sides[1]})
    return groups


def _side(side: PageGeometry, window: int) -> dict[str, Any]:
    return {
        "format": to_json(side.format),
        "page_bits": side.bits,
        "bytes_per_token": side.page_bytes / side.shape.t,
        "words": words(side.format) + (f", sees {window} tokens" if window else ""),
    }


def _exact_side(geometry: CacheGeometry, window: int) -> dict[str, Any]:
    """Keys or values in full precision; those of a layer that slides do not grow any more."""
    return {
        "format": None,
        "page_bits": float(FULL_BITS),
        "bytes_per_token": 0.0 if window else geometry.h_kv * geometry.d * FULL_BITS / 8,
        "words": "full precision" + (f", the newest {window} tokens" if window else ""),
    }


def words(fmt: Format) -> str:
    """A format on one line: its transforms and parts with the parameters that are not the usual ones."""
    named = [*fmt.transforms.items(), *fmt.parts.items()]
    return " + ".join(" ".join([name, *_parameters(part)]) for name, part in named)


def _parameters(part: Any) -> list[str]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    usual = {field.name: field.default for field in fields(part)}
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items() if value != usual[name]]  # fmt: skip


def layer_range(group: dict[str, Any]) -> str:
    """`0-31`, or `7` where it is one layer."""
    return str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}"
