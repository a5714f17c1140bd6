"""How long attention takes with each pair of candidates on a GPU: what a choice may be bounded by beside bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts import ModelFingerprint
from artifacts.errors import SignpostError
from artifacts.fields import SideName
from artifacts.format import to_json
from calib.allocation.candidates import SIDES, Candidates
from calib.allocation.solve import Pace

_OUT = "measure again (python -m benchmarks.pair_speed), or leave speed= out"


class SpeedError(SignpostError, ValueError):
    """A file of times cannot be read, or is of other candidates or another model's shape."""


@dataclass(frozen=True)
class Speed:
    """Times of one layer's attention in a decode step, by pair of candidates.

    path   the file, for messages
    us     float64 [page formats of keys, of values] in microseconds, in the order of `page_formats`
    shape  h_q, h_kv, d, b (sequences) and tokens of each, as they were measured
    gpu    its name
    most   microseconds that all layers together may take; None: no bound
    """

    path: str
    us: NDArray[np.float64]
    shape: Mapping[str, int]
    gpu: str
    most: float | None

    @classmethod
    def load(cls, path: Path, most: float | None, candidates: Candidates) -> "Speed":
        """A file that `benchmarks.pair_speed` wrote. Raises SpeedError where it is damaged or lacks a pair."""
        try:
            record = json.loads(path.read_bytes())
            known = {(r["key"], r["key_t"], r["value"], r["value_t"]): float(r["us"]) for r in record["rows"]}
            formats = {side: dict(record["formats"][side]) for side in SIDES}
            shape, gpu = {n: int(x) for n, x in record["shape"].items()}, record["gpu"]
            missing = {"h_q", "h_kv", "d", "b", "tokens"} - shape.keys()
            if missing or not all(isfinite(us) and us > 0 for us in known.values()):
                raise ValueError(f"shape lacks {sorted(missing)}" if missing else "times must be above 0")
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SpeedError(f"speed={path} cannot be read ({str(error).splitlines()[0][:200]}): {_OUT}") from error
        for side in SIDES:
            for name, settings in described(candidates, side).items():
                if formats[side].get(name) != settings:
                    raise SpeedError(f"speed={path} has no times of the {side} candidate {name} as it is now: {_OUT}")
        keys, values = (page_formats(candidates, side) for side in SIDES)
        lacking = [(k, v) for k in keys for v in values if (*k, *v) not in known]
        if lacking:
            (key, key_t), (value, value_t) = lacking[0]
            raise SpeedError(
                f"speed={path} has no time of keys {key} in pages of {key_t} with values {value} in pages of "
                f"{value_t}: {_OUT}"
            )
        us = np.array([[known[(*k, *v)] for v in values] for k in keys])
        return cls(str(path), us, shape, str(gpu), most)

    def require(self, model: ModelFingerprint) -> None:
        """Raises SpeedError for times of other heads than a model has."""
        self.require_heads(model.h_q, model.h_kv, model.d)

    def require_heads(self, h_q: int, h_kv: int, d: int) -> None:
        """As `require`, for a model with h_q query heads, h_kv kv heads and head dimension d."""
        measured = tuple(self.shape[name] for name in ("h_q", "h_kv", "d"))
        if measured != (h_q, h_kv, d):
            raise SpeedError(
                f"speed={self.path} was measured for {measured[0]} query heads, {measured[1]} kv heads and head "
                f"dimension {measured[2]}, the model has {h_q}, {h_kv} and {d}: {_OUT}"
            )

    def pace(self, candidates: Candidates) -> Pace:
        """For the solver: the times, and which of them a candidate's are."""
        rows = []
        for side in SIDES:
            places = {found: i for i, found in enumerate(page_formats(candidates, side))}
            names = candidates.names(side)
            rows.append(np.array([places[name, filling.t] for name in names for filling in candidates.fillings]))
        return Pace(self.us, (rows[0], rows[1]), self.most)

    @property
    def origin(self) -> dict[str, Any]:
        """Plain data of what was measured, for provenance."""
        return {"gpu": self.gpu, "shape": dict(self.shape), "most_us": self.most}


def page_formats(candidates: Candidates, side: SideName) -> list[tuple[str, int]]:
    """Variants of a side with the page sizes that fillings give them. Windows make no difference to pages."""
    sizes = dict.fromkeys(filling.t for filling in candidates.fillings)
    return [(name, t) for name in candidates.names(side) for t in sizes]


def described(candidates: Candidates, side: SideName) -> dict[str, Any]:
    """Variants of a side as plain data without page size and window."""
    first = candidates.fillings[0]
    found = {name: to_json(candidates.format(side, name, first)) for name in candidates.names(side)}
    return {name: {n: x for n, x in fmt.items() if n not in ("t", "window")} for name, fmt in found.items()}
