"""The difference of two bundles: field by field and tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.bundle import Bundle, Tensor
from artifacts.format import to_json

ABSENT, FULL = "absent", "full precision"


@dataclass(frozen=True)
class FieldChange:
    """An entry that differs: its dotted path and both values as JSON data (`absent` where there is none)."""

    path: str
    old: Any
    new: Any


@dataclass(frozen=True)
class TensorChange:
    """A tensor that differs. old, new: dtype and shape, or `absent`. Where both are there and of one shape: `count`
    numbers differ, by at most `largest`, and `relative` is the norm of the difference over that of the old one."""

    name: str
    old: str
    new: str
    count: int | None = None
    largest: float | None = None
    relative: float | None = None


def field_changes(old: Bundle, new: Bundle) -> list[FieldChange]:
    """Entries that differ, in the order of the old bundle, then what only the new one has."""
    return list(_changes("", _fields(old), _fields(new)))


def tensor_changes(old: Bundle, new: Bundle) -> list[TensorChange]:
    """Tensors that differ in a bit, by name."""
    names = sorted(old.tensors.keys() | new.tensors.keys())
    changes = (_tensor_change(name, old.tensors.get(name), new.tensors.get(name)) for name in names)
    return [change for change in changes if change]


def _fields(bundle: Bundle) -> dict[str, Any]:
    return {
        "recipe": bundle.recipe,
        "model": bundle.model.to_json(),
        "layers": {str(layer): to_json(formats) if formats else FULL for layer, formats in enumerate(bundle.layers)},
        "calibration": bundle.calibration,
        "evaluation": bundle.evaluation if bundle.evaluation is not None else ABSENT,
    }


def _changes(path: str, old: Any, new: Any) -> Iterator[FieldChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            below = f"{path}.{name}" if path else name
            yield from _changes(below, old.get(name, ABSENT), new.get(name, ABSENT))
    elif type(old) is not type(new) or old != new:
        yield FieldChange(path, old, new)


def _tensor_change(name: str, old: Tensor | None, new: Tensor | None) -> TensorChange | None:
    kinds = [ABSENT if t is None else f"{t.dtype} {list(t.shape)}" for t in (old, new)]
    if old is None or new is None or kinds[0] != kinds[1]:
        return TensorChange(name, kinds[0], kinds[1])
    if old.tobytes() == new.tobytes():
        return None
    one, other = old.astype(np.float64), new.astype(np.float64)
    norm, off = float(np.linalg.norm(one)), float(np.linalg.norm(other - one))
    return TensorChange(
        name,
        kinds[0],
        kinds[1],
        count=int((one != other).sum()),
        largest=float(np.abs(other - one).max()),
        relative=off / norm if norm else None,
    )
