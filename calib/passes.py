"""One pass over the samples: observed by all ranks, then merged and fitted by one rank for each layer."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rich.progress import Progress
from torch import Tensor

from calib.fits import Fit
from calib.memory import within_memory
from calib.progress import track
from calib.ranks import Ranks
from calib.statistics import lane_of
from calib.store import Store
from calib.tap import Activations, Tap

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """With whom a run shares its work, and where it keeps what it has.

    inputs  everything that activations depend on: model, weights, samples, versions; plain data
    every   seconds between saves of a pass that is running
    """

    ranks: Ranks = field(default_factory=Ranks)
    store: Store | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    every: float = 60.0


ALONE = Work()


class Observer(Protocol):
    """One side of one layer, see `calib.collect.SideFits`."""

    fit: Fit | None

    def sees(self) -> dict[str, Any] | None: ...
    def observe(self, activations: Activations, lane: int) -> None: ...
    def finish(self, found: Tensors) -> None: ...


Layer = Sequence[Observer]  # keys and values, of several recipes in turn; nothing where a layer stays in full precision


def run_pass(tap: Tap, ids: Tensor, layers: Sequence[Layer], title: str, work: Work, progress: Progress | None) -> None:
    """Lets the fits of all layers see all samples, ids int64 [samples, seqlen], and finish.

    Raises MemoryExhaustedError, RankError, StageError, OSError of the store, and what the tap and the fits raise.
    """
    seen = [[side.sees() for side in sides] for sides in layers]
    # Sides that see the same (of recipes that differ in their codebooks, say) share what the first of them collects.
    first = [[row.index(one) for one in row] for row in seen]
    watching = [[sides[i] for i in sorted(set(row))] for sides, row in zip(layers, first, strict=True)]
    key = dict(work.inputs) | {"sees": [[side.sees() for side in sides] for sides in watching]}
    stored = work.store.get(key) if work.store and work.ranks.first else None
    collected = work.ranks.share(stored)
    if collected is None:
        _observe(tap, ids, watching, title, work, key, progress)
        collected = _merged(watching, work.ranks)
        if work.store:
            if work.ranks.first:
                work.store.put(key, collected)
            work.store.drop_parts(key, _who(work.ranks))
    places = [[sorted(set(row)).index(i) for i in row] for row in first]
    _fit(layers, places, collected, work.ranks)


def _observe(
    tap: Tap,
    ids: Tensor,
    layers: Sequence[Layer],
    title: str,
    work: Work,
    key: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Shows this rank's samples to the fits, from where an earlier run had come."""
    samples, mine = ids.shape[0], work.ranks.samples(ids.shape[0])
    gradients = any(side.fit.gradients for sides in layers for side in sides if side.fit)
    done, saved = 0, time.monotonic()
    if work.store and (part := work.store.get_part(key, _who(work.ranks))):
        done = part[0]
        _split(layers, part[1])
    report = track(progress, title, len(mine), done)
    for sample in mine[done:]:
        with within_memory(*_too_long(ids.shape[1])):
            tap.run(ids[sample], gradients, partial(_see, layers, lane_of(sample, samples)))
        report()
        done += 1
        if work.store and sample != mine[-1] and time.monotonic() - saved >= work.every:
            work.store.put_part(key, _who(work.ranks), done, [_joined(sides) for sides in layers])
            saved = time.monotonic()


def _see(layers: Sequence[Layer], lane: int, activations: Activations) -> None:
    for side in layers[activations.layer]:
        side.observe(activations, lane)


def _merged(layers: Sequence[Layer], ranks: Ranks) -> list[Tensors]:
    """What all ranks have seen, by layer, ready to be fitted; on every rank."""
    mine: dict[int, Tensors] = {}
    for layer, sides in enumerate(layers):
        owner = ranks.owner(layer)
        others = ranks.bring(_joined(sides), owner)
        if ranks.rank == owner:
            for other in others:
                _split([sides], [other])
            mine[layer] = {
                f"{side}.{name}": tensor
                for side, observer in enumerate(sides)
                if observer.fit
                for name, tensor in observer.fit.collected().items()
            }
    of_all = {layer: found for part in ranks.gather(mine) for layer, found in part.items()}
    return [of_all[layer] for layer in range(len(layers))]


def _fit(layers: Sequence[Layer], places: Sequence[Sequence[int]], collected: Sequence[Tensors], ranks: Ranks) -> None:
    """Fits every layer on the rank that owns it, and hands the tables to all. places: whose collection a side reads."""
    mine: dict[int, list[Tensors]] = {}
    for layer, sides in enumerate(layers):
        if ranks.owner(layer) == ranks.rank:
            mine[layer] = _tables(sides, places[layer], collected[layer])
    for part in ranks.gather(mine):
        for layer, tables in part.items():
            for observer, found in zip(layers[layer], tables, strict=True):
                observer.finish(found)


def _tables(sides: Layer, places: Sequence[int], collected: Tensors) -> list[Tensors]:
    """Tables of one layer's sides. What is the same for those that read one collection is found once."""
    common: dict[int, Mapping[str, Tensor]] = {}
    for place, observer in zip(places, sides, strict=True):
        if observer.fit and place not in common:
            common[place] = observer.fit.common(_of_side(collected, place))
    return [
        observer.fit.fit(common[place]) if observer.fit else {} for place, observer in zip(places, sides, strict=True)
    ]


def _joined(sides: Layer) -> Tensors:
    """State of all statistics of one layer: `<side>.<statistic>.<tensor>`."""
    return {
        f"{side}.{name}": tensor
        for side, observer in enumerate(sides)
        if observer.fit
        for name, tensor in observer.fit.tensors().items()
    }


def _split(layers: Sequence[Layer], states: Sequence[Tensors]) -> None:
    """Merges states, as `_joined` gave them, into the fits."""
    for sides, state in zip(layers, states, strict=True):
        for side, observer in enumerate(sides):
            if observer.fit:
                observer.fit.absorb(_of_side(state, side))


def _of_side(tensors: Mapping[str, Tensor], side: int) -> Tensors:
    prefix = f"{side}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _who(ranks: Ranks) -> str:
    return f"rank{ranks.rank}of{ranks.world}"


def _too_long(seqlen: int) -> tuple[str, str]:
    """What to say where a sample does not fit: what was done, and the way out."""
    return (
        f"on a sample of seqlen={seqlen} tokens",
        f"set seqlen={seqlen // 2} (and samples to twice as many, for as much text), or device=split to spread the "
        "model over all GPUs",
    )
