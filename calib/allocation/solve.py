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
    """Candidate int64 [sides] of every side; in all: damage, bytes and, where a pace was given, microseconds."""

    candidates: NDArray[np.int64]
    damage: float
    size: int
    us: float | None = None


class Pace(NamedTuple):
    """How long a layer takes with the candidates of its two sides.

    us    float64 [kinds of keys, kinds of values], microseconds
    of    the kind of each candidate, int64 [candidates] of keys and of values
    most  that all layers together may take; None: no bound
    """

    us: NDArray[np.float64]
    of: tuple[NDArray[np.int64], NDArray[np.int64]]
    most: float | None

    def taken(self, chosen: NDArray[np.int64]) -> float:
        """Microseconds of a choice, int64 [sides]."""
        return float(self.us[self.of[0][chosen[0::2]], self.of[1][chosen[1::2]]].sum())


Rows = tuple[csr_array, float, float]  # of a linear program: coefficients, and what sums may be


def solve(
    damage: NDArray[np.float64],
    size: NDArray[np.int64],
    group: NDArray[np.int64],
    allowed: int,
    gap: float = 1e-4,
    pace: Pace | None = None,
) -> Choice:
    """The candidates of least summed damage whose bytes add up to at most `allowed`, and microseconds to `pace.most`.

    damage, size  [sides, candidates]; of a candidate that a side does not have the damage is infinite
    group         int64 [sides, candidates]: the two sides of a layer (2 i and 2 i + 1) must choose of the same group
    gap           of what is returned to the optimum, at most, relative
    An integer program with a binary variable for every side and candidate (HiGHS, by scipy). Raises BudgetError where
    nothing fits, naming the least that does.
    """
    some = np.isfinite(damage)
    _require(_least(size, group, some), allowed)
    rows, cost = _within(size, group, allowed), np.where(some, damage, 0.0).ravel()
    bounded = pace if pace is not None and pace.most is not None else None
    if bounded:
        rows += [*_kinds(bounded, damage.shape), (_times(bounded, damage.shape), -np.inf, bounded.most or 0.0)]
    chosen, message = _search(cost, some, rows, gap)
    if chosen is not None:
        # HiGHS also stops at a gap of 1e-6 of the largest cost. What alone costs more than what was found is no choice.
        found = damage[np.arange(len(chosen)), chosen].sum()
        if 1e-6 * cost.max() > gap * found:
            some &= damage <= found
            chosen, message = _search(np.where(some, damage, 0.0).ravel(), some, rows, gap)
    if chosen is None and bounded:
        _require_time(size, group, some, allowed, bounded)
    if chosen is None:
        raise BudgetError(f"the solver found no choice of at most {allowed} bytes ({message}): raise the budget")
    at = np.arange(len(chosen))
    taken = None if pace is None else pace.taken(chosen)
    return Choice(chosen, float(damage[at, chosen].sum()), int(size[at, chosen].sum()), taken)


def _search(
    cost: NDArray[np.float64], some: NDArray[np.bool_], rows: Sequence[Rows], gap: float
) -> tuple[NDArray[np.int64] | None, str]:
    """The candidate of every side, int64 [sides], at least cost, or None, and what the solver says.

    Variables are binary [sides, candidates], 0 where there is none; behind them real ones, as many as `rows` have.
    """
    width = max(coefficients.shape[1] for coefficients, _, _ in rows)
    for coefficients, _, _ in rows:
        coefficients.resize(coefficients.shape[0], width)
    upper = np.ones(width)
    upper[: some.size] = some.ravel()
    costs = np.zeros(width)
    costs[: cost.size] = cost / max(cost.max(), np.finfo(float).tiny)
    found = milp(
        costs,
        integrality=np.arange(width) < some.size,
        bounds=Bounds(0, upper),
        constraints=[LinearConstraint(*row) for row in rows],
        options={"mip_rel_gap": gap},
    )
    return None if found.x is None else found.x[: some.size].reshape(some.shape).argmax(1), found.message


def _within(size: NDArray[np.int64], group: NDArray[np.int64], allowed: int) -> list[Rows]:
    """One candidate for each side, alike for the sides of a layer, and so many bytes in all."""
    index = np.arange(size.size).reshape(size.shape)
    one = csr_array((np.ones(size.size), (np.repeat(np.arange(size.shape[0]), size.shape[1]), index.ravel())))
    unit = max(1.0, allowed / 1e6)  # so that the solver's numbers are of moderate size
    return [(one, 1, 1), (csr_array(size.reshape(1, -1) / unit), -np.inf, allowed / unit), *_alike(group, index)]


def _pairs(pace: Pace, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Variables of the pairs of kinds, [layers, kinds of keys, of values]: behind those of [sides, candidates]."""
    layers = shape[0] // 2
    return shape[0] * shape[1] + np.arange(layers * pace.us.size).reshape(layers, *pace.us.shape)


def _times(pace: Pace, shape: tuple[int, ...]) -> csr_array:
    """Microseconds of all variables, one row."""
    pairs = _pairs(pace, shape)
    return csr_array((np.tile(pace.us.ravel(), len(pairs)), (np.zeros(pairs.size, np.int64), pairs.ravel())))


def _kinds(pace: Pace, shape: tuple[int, ...]) -> list[Rows]:
    """A layer's pair is of the kinds that its sides choose: of each kind the pairs add up to what the candidates do.

    Where each side has one candidate, only the pair of their kinds can be 1, and that without being told to be whole.
    """
    index, rows = np.arange(shape[0] * shape[1]).reshape(shape), []
    for side in range(2):
        pairs = np.moveaxis(_pairs(pace, shape), 1 + side, 1)  # kinds of this side, then of the other
        first = np.arange(len(pairs))[:, None] * pairs.shape[1]
        kind = np.zeros(shape[1], np.int64)  # of candidates that a side does not have: they are not chosen
        kind[: len(pace.of[side])] = pace.of[side]
        up = np.broadcast_to(first + kind, (len(pairs), shape[1])), index[side::2]
        down = np.broadcast_to((first + np.arange(pairs.shape[1]))[:, :, None], pairs.shape), pairs
        signs = np.concatenate([np.ones(up[1].size), -np.ones(down[1].size)])
        at = tuple(np.concatenate([a.ravel(), b.ravel()]) for a, b in zip(up, down, strict=True))
        rows.append((csr_array((signs, at)), 0.0, 0.0))
    return rows


def require_room(
    layers: int, sides: Sequence[tuple[Sequence[int], Sequence[int]]], allowed: int, pace: Pace | None = None
) -> None:
    """Raises BudgetError as `solve` would, before anything is measured.

    sides: bytes and groups of the candidates of keys and of values, alike in all of so many layers.
    """
    width = max(len(sizes) for sizes, _ in sides)
    size, group = np.zeros((2, width), np.int64), np.zeros((2, width), np.int64)
    some = np.zeros((2, width), np.bool_)
    for row, (sizes, groups) in enumerate(sides):
        size[row, : len(sizes)], group[row, : len(sizes)], some[row, : len(sizes)] = sizes, groups, True
    size, group, some = np.tile(size, (layers, 1)), np.tile(group, (layers, 1)), np.tile(some, (layers, 1))
    _require(_least(size, group, some), allowed)
    if pace is not None and pace.most is not None:
        _require_time(size, group, some, allowed, pace)


def _require_time(
    size: NDArray[np.int64], group: NDArray[np.int64], some: NDArray[np.bool_], allowed: int, pace: Pace
) -> None:
    times, rows = _times(pace, size.shape).toarray().ravel(), _within(size, group, allowed)
    fastest, _ = _search(times, some, [*rows, *_kinds(pace, size.shape)], 1e-6)
    if fastest is not None and pace.most is not None and pace.taken(fastest) > pace.most * (1 + 1e-9):
        raise BudgetError(
            f"most_us={pace.most:g}: the fastest choice of at most {allowed} bytes takes {pace.taken(fastest):.1f} "
            "microseconds by the file of times: raise most_us or the budget"
        )


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


def _alike(group: NDArray[np.int64], index: NDArray[np.int64]) -> list[Rows]:
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
    return [(csr_array(np.array(rows)), 0, 0)]
