"""The choice itself: one candidate for every side of every layer, least damage within the budget. Solved exactly."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from artifacts.errors import SignpostError


class BudgetError(SignpostError, ValueError):
    """No choice among the candidates fits the budget."""


class Choice(NamedTuple):
    """Candidate int64 [sides] of every side, its damage and its bytes in all."""

    candidates: NDArray[np.int64]
    damage: float
    size: int


def solve(
    damage: NDArray[np.float64], size: NDArray[np.int64], group: NDArray[np.int64], allowed: int, gap: float = 1e-4
) -> Choice:
    """The candidates of least summed damage whose bytes add up to at most `allowed`.

    damage, size  [sides, candidates]; of a candidate that a side does not have the damage is infinite
    group         int64 [sides, candidates]: the two sides of a layer (2 i and 2 i + 1) must choose of the same group
    gap           of what is returned to the optimum, at most, relative
    An integer program with a binary variable for every side and candidate (HiGHS, by scipy). Raises BudgetError where
    nothing fits, naming the least that does.
    """
    sides, count = damage.shape
    some = np.isfinite(damage)
    _require(_least(size, group, some), allowed)
    index = np.arange(sides * count).reshape(sides, count)
    one = csr_array((np.ones(sides * count), (np.repeat(np.arange(sides), count), index.ravel())))
    unit = max(1.0, allowed / 1e6)  # so that the solver's numbers are of moderate size
    constraints = [
        LinearConstraint(one, 1, 1),
        LinearConstraint(csr_array(size.reshape(1, -1) / unit), -np.inf, allowed / unit),
        *_alike(group, index),
    ]
    cost = np.where(some, damage, 0.0).ravel()
    found = milp(
        cost / max(cost.max(), np.finfo(float).tiny),
        integrality=np.ones(cost.size),
        bounds=Bounds(0, some.ravel().astype(float)),
        constraints=constraints,
        options={"mip_rel_gap": gap},
    )
    if found.x is None:
        raise BudgetError(f"the solver found no choice of at most {allowed} bytes ({found.message}): raise the budget")
    chosen = found.x.reshape(sides, count).argmax(1)
    rows = np.arange(sides)
    return Choice(chosen, float(damage[rows, chosen].sum()), int(size[rows, chosen].sum()))


def require_room(layers: int, sides: Sequence[tuple[Sequence[int], Sequence[int]]], allowed: int) -> None:
    """Raises BudgetError as `solve` would, before anything is measured.

    sides: bytes and groups of the candidates of keys and of values, alike in all of so many layers.
    """
    width = max(len(sizes) for sizes, _ in sides)
    size, group = np.zeros((2, width), np.int64), np.zeros((2, width), np.int64)
    some = np.zeros((2, width), np.bool_)
    for row, (sizes, groups) in enumerate(sides):
        size[row, : len(sizes)], group[row, : len(sizes)], some[row, : len(sizes)] = sizes, groups, True
    _require(layers * _least(size, group, some), allowed)


def _require(least: int, allowed: int) -> None:
    if least > allowed:
        raise BudgetError(
            f"the smallest of the candidates take {least} bytes together, the budget allows {allowed}: "
            "raise the budget, or add candidates with fewer bits"
        )


def _least(size: NDArray[np.int64], group: NDArray[np.int64], some: NDArray[np.bool_]) -> int:
    """The least bytes of all sides together."""
    total = 0
    for layer in range(0, size.shape[0], 2):
        pair: list[dict[int, int]] = []
        for side in (layer, layer + 1):
            names = np.unique(group[side][some[side]])
            pair.append({int(g): int(size[side][(group[side] == g) & some[side]].min()) for g in names})
        common = pair[0].keys() & pair[1].keys()
        if not common:
            raise BudgetError(
                f"layer {layer // 2}: no candidate of its keys goes with one of its values (sinks differ)"
            )
        total += min(pair[0][g] + pair[1][g] for g in common)
    return total


def _alike(group: NDArray[np.int64], index: NDArray[np.int64]) -> list[LinearConstraint]:
    """Both sides of a layer choose of the same group."""
    names = np.unique(group)
    if len(names) == 1:
        return []
    rows = []
    for layer in range(0, group.shape[0], 2):
        for name in names[1:]:
            row = np.zeros(index.size)
            row[index[layer][group[layer] == name]] = 1
            row[index[layer + 1][group[layer + 1] == name]] = -1
            rows.append(row)
    return [LinearConstraint(csr_array(np.array(rows)), 0, 0)]
