"""From samples to formats and the bundle's tensors: passes over the samples, each feeding the fits that are ready."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from rich.progress import Progress
from torch import Tensor

from artifacts import LayerFormat
from artifacts.errors import SignpostError
from artifacts.fields import PageShape, SideName
from calib.choices import LayerRecipe
from calib.config import MethodConfig
from calib.fits import Fit, Side, banded, center, dense, lowrank, rotate, sketch, sparse
from calib.passes import ALONE, Work, run_pass
from calib.tap import Activations, Tap
from runtime.parts import MODULES

PENDING = (
    center.pending,
    rotate.pending,
    sparse.pending,
    dense.pending,
    banded.pending,
    lowrank.pending,
    sketch.pending,
)  # in the order in which parts need each other
CHOSEN = (lowrank.chosen, sketch.chosen)
MANY = 1 << 30  # tokens, where nothing depends on how many


class SideFits:
    """The fits of one side of one layer, one after the other."""

    def __init__(self, side: Side, is_key: bool):
        self.side, self.is_key = side, is_key
        self.fit: Fit | None = None

    def prepare(self) -> None:
        """Takes up the next fit that the tables found so far allow, or None when all are there."""
        self.fit = next((fit for pending in PENDING if (fit := pending(self.side))), None)

    def postpone_gradients(self) -> None:
        """Sits out a pass without gradients if the fit needs them."""
        if self.fit and self.fit.gradients:
            self.fit = None

    def sees(self) -> dict[str, Any] | None:
        """Everything besides the samples that the fit's statistics depend on, as plain data; None without a fit."""
        if self.fit is None:
            return None
        fmt = self.side.format
        return {
            "side": "key" if self.is_key else "value",
            "fit": type(self.fit).__name__,
            "settings": self.fit.sees(),
            "sinks": fmt.window.sinks,
            "t": fmt.t,
            "domain": fmt.domain,
            "transforms": {name: asdict(part) for name, part in fmt.transforms.items()},
            "sparse": asdict(fmt.sparse) if fmt.sparse else None,
            "tables": _digest(self.side.tables),
        }

    def observe(self, activations: Activations, lane: int = 0) -> None:
        """Feeds the fit the sample's tokens behind the sinks, in whole pages."""
        if self.fit is None:
            return
        device = activations.value.device
        self.side.tables.update({name: table.to(device) for name, table in self.side.tables.items()})
        a, before_rope = activations, self.side.format.domain == "pre_rope"
        if not self.is_key:
            x, gradient = a.value, a.value_gradient
        elif before_rope:
            x, gradient = a.key, a.key_gradient
        else:
            x, gradient = a.rotated_key, a.rotated_key_gradient
        pages, gradient = self._pages(x), None if gradient is None else self._pages(gradient)
        for name, part in self.side.format.transforms.items():
            if part.bundle_tensors(self.side.shape).keys() <= self.side.tables.keys():
                pages = MODULES[name].forward(pages, self.side.tables)
                gradient = None if gradient is None else MODULES[name].forward_gradient(gradient, self.side.tables)
        self.fit.observe(pages, self._outliers(pages), gradient, lane)

    def finish(self, found: dict[str, Tensor]) -> None:
        """Keeps what the fit found, on the CPU until the next numbers come."""
        self.side.tables.update({name: table.cpu() for name, table in (self.side.tables | found).items()})
        self.fit = None

    def _pages(self, x: Tensor) -> Tensor:
        """[n, h_kv, d] as pages [p, t, h_kv, d]; sinks and what does not fill a page are left out."""
        fmt = self.side.format
        behind = x[fmt.window.sinks :]
        pages = behind.shape[0] // fmt.t
        return behind[: pages * fmt.t].unflatten(0, (pages, fmt.t))

    def _outliers(self, pages: Tensor) -> Tensor | None:
        """Numbers that a part takes away from the others, as soon as that part's own tensors are known."""
        for name, part in self.side.format.parts.items():
            module, needs = MODULES[name], part.bundle_tensors(self.side.shape).keys()
            if hasattr(module, "select") and needs <= self.side.tables.keys():
                return module.select(part, self.side.shape, pages, self.side.tables)
        return None


def collect(
    tap: Tap,
    ids: Tensor,
    recipes: Sequence[LayerRecipe | None],
    method: MethodConfig,
    h_kv: int,
    d: int,
    progress: Progress | None = None,
    work: Work = ALONE,
) -> tuple[tuple[LayerFormat | None, ...], dict[str, Tensor]]:
    """Chooses what `recipes` leave open and fits everything that the formats want from the bundle.

    Returns the formats of all layers (None where the recipe is) and tensors by bundle name; otherwise as `collect_all`.
    """
    return collect_all(tap, ids, [recipes], method, h_kv, d, progress, work)[0]


def collect_all(
    tap: Tap,
    ids: Tensor,
    recipes: Sequence[Sequence[LayerRecipe | None]],
    method: MethodConfig,
    h_kv: int,
    d: int,
    progress: Progress | None = None,
    work: Work = ALONE,
) -> list[tuple[tuple[LayerFormat | None, ...], dict[str, Tensor]]]:
    """What `collect` finds for each of several recipes, in the same passes over the samples.

    ids int64 [samples, seqlen], the same on every rank; without samples only what needs no observation can be fitted.
    Passes without gradients come first, so that at most one pass pays for gradients, and one more where ranks are
    chosen by gradients behind signposts that are fitted by them. Every rank of `work` gets the same result, bit for
    bit, however many there are.
    Raises SignpostError where the samples are shorter than one page behind the sinks, FormatError where a format does
    not fit the model, and what `Tap.run` and the fits raise.
    """
    many = [_sides(each, method, h_kv, d, *ids.shape) for each in recipes]
    layers = [[side for pair in pairs for side in pair] for pairs in zip(*many, strict=True)]
    sides = [side for layer in layers for side in layer]
    for number in count(1):
        for side in sides:
            side.prepare()
        if any(side.fit and not side.fit.gradients for side in sides):
            for side in sides:
                side.postpone_gradients()
        titles = sorted({side.fit.title for side in sides if side.fit})
        if not titles:
            break
        run_pass(tap, ids, layers, f"pass {number}: {', '.join(titles)}", work, progress)
    return [_found(pairs) for pairs in many]


def _found(layers: Sequence[Sequence[SideFits]]) -> tuple[tuple[LayerFormat | None, ...], dict[str, Tensor]]:
    """What the fits of one recipe have come to."""
    found, tensors = _chosen([[observer.side for observer in pair] for pair in layers if pair])
    formats = iter(found)
    return tuple(next(formats) if pair else None for pair in layers), tensors


def observes(recipes: Sequence[LayerRecipe | None], method: MethodConfig, h_kv: int, d: int) -> bool:
    """Whether anything has to be observed for these recipes: the bundles of tuning-free formats need no text."""
    sides = [side for layer in _sides(recipes, method, h_kv, d, 1, MANY) for side in layer]
    for side in sides:
        side.prepare()
    return any(side.fit for side in sides)


def _chosen(pairs: Sequence[Sequence[Side]]) -> tuple[tuple[LayerFormat, ...], dict[str, Tensor]]:
    """Formats with every number that was left open, and the tensors that they declare, of keys and values by layer."""
    keys, values = ([pair[side] for pair in pairs] for side in range(2))
    for choose in CHOSEN:
        keys, values = list(choose(keys)), list(choose(values))
    formats = tuple(LayerFormat(key.format, value.format) for key, value in zip(keys, values, strict=True))
    tensors = {
        f"{side.name}.{name}": side.tables[name]
        for layer in zip(keys, values, strict=True)
        for side in layer
        for name in side.format.bundle_tensors(side.shape)
    }
    return formats, tensors


def _sides(
    recipes: Sequence[LayerRecipe | None], method: MethodConfig, h_kv: int, d: int, samples: int, seqlen: int
) -> list[Sequence[SideFits]]:
    """Keys and values of every layer with nothing fitted yet; nothing for layers in full precision.

    Raises SignpostError for samples without a page, FormatError where a format does not fit the model.
    """

    def side(layer: int, name: SideName, recipe: LayerRecipe) -> SideFits:
        fmt = getattr(recipe.formats, name)
        pages = (seqlen - fmt.window.sinks) // fmt.t
        if pages < 1:
            raise SignpostError(
                f"samples of {seqlen} tokens do not fill a page of {fmt.t} behind {fmt.window.sinks} sinks: "
                f"set seqlen to at least {fmt.t + fmt.window.sinks}"
            )
        shape, tokens = PageShape(fmt.t, h_kv, d, name), samples * pages * fmt.t
        fmt.check(shape)
        known = Side(f"layers.{layer}.{name}", fmt, shape, tokens, method, {}, getattr(recipe, name))
        return SideFits(known, name == "key")

    return [
        (side(layer, "key", recipe), side(layer, "value", recipe)) if recipe else ()
        for layer, recipe in enumerate(recipes)
    ]


def _digest(tables: dict[str, Tensor]) -> str:
    """SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name in sorted(tables):
        digest.update(name.encode())
        digest.update(tables[name].cpu().numpy().tobytes())
    return digest.hexdigest()
