"""From samples to the bundle's tensors: passes over the samples, each feeding the fits that are ready for it."""

from collections.abc import Iterator
from typing import Protocol

from rich.progress import Progress
from torch import Tensor

from artifacts import Format, LayerFormat
from artifacts.errors import SignpostError
from calib.config import MethodConfig
from calib.fits.dense import RangeFit, SignpostFit, ranges
from calib.fits.sparse import ThresholdFit
from calib.tap import Activations, Tap
from runtime.parts import sparse
from artifacts.fields import PageShape


class Fit(Protocol):
    """A fit of one part; see `calib.fits`."""

    gradients: bool

    def observe(self, pages: Tensor, outliers: Tensor | None, gradient: Tensor | None) -> None: ...

    def result(self) -> dict[str, Tensor]: ...


class SideFits:
    """The fits of one side of one layer, one after the other: thresholds, ranges, signposts."""

    def __init__(self, fmt: Format, side: str, method: MethodConfig, tokens: int):
        self.format, self.side, self.method, self.tokens = fmt, side, method, tokens
        self.tables: dict[str, Tensor] = {}
        self.fit: Fit | None = None

    def prepare(self, h_kv: int, d: int) -> Fit | None:
        """The next fit that the tables found so far allow, or None when all are there."""
        part, dense = self.format.sparse, self.format.dense
        if part and part.thresholds == "bundle" and "lower" not in self.tables:
            return ThresholdFit(part, self.tokens, h_kv, d)
        if dense.scales == "bundle" and "scale" not in self.tables:
            if not part or part.axis != "channel":
                return RangeFit()
            # Thresholds of a channel are the first numbers inside: exactly the ends of its range.
            self.tables |= ranges(self.tables["lower"], self.tables["upper"])
        if dense.codebook == "nuq" and "signposts" not in self.tables:
            return SignpostFit(dense, self.method.weights, self.method.bins, self.tables)
        return None

    def observe(self, activations: Activations) -> None:
        """Feeds the current fit the sample's tokens behind the sinks, in whole pages."""
        assert self.fit is not None
        if self.side == "value":
            x, gradient = activations.value, activations.value_gradient
        elif self.format.domain == "pre_rope":
            x, gradient = activations.key, activations.key_gradient
        else:
            x, gradient = activations.rotated_key, activations.rotated_key_gradient
        pages, gradient_pages = self._pages(x), None if gradient is None else self._pages(gradient)
        part = self.format.sparse
        ready = part and not isinstance(self.fit, ThresholdFit)
        outliers = sparse.select(part, PageShape(*pages.shape[1:]), pages, self.tables) if part and ready else None
        self.fit.observe(pages, outliers, gradient_pages)

    def _pages(self, x: Tensor) -> Tensor:
        """[n, h_kv, d] as pages [p, t, h_kv, d]; sinks and what does not fill a page are left out."""
        behind = x[self.format.window.sinks :]
        count = behind.shape[0] // self.format.t
        return behind[: count * self.format.t].unflatten(0, (count, self.format.t))


def collect(
    tap: Tap, ids: Tensor, formats: tuple[LayerFormat, ...], method: MethodConfig, h_kv: int, d: int, progress: Progress
) -> dict[str, Tensor]:
    """Fits everything that `formats` want from the bundle. ids int64 [samples, seqlen].

    Returns tensors by bundle name. Passes without gradients come first, so that at most one pass pays for gradients.
    Raises SignpostError where the samples are shorter than one page behind the sinks.
    """
    sides = list(_sides(formats, method, ids))
    for number in range(1, 8):
        for side in sides:
            side.fit = side.prepare(h_kv, d)
        waiting = [s for s in sides if s.fit]
        if not waiting:
            break
        cheap = [s for s in waiting if s.fit and not s.fit.gradients]
        _run_pass(tap, ids, cheap or waiting, sides, f"pass {number}: {'ranges' if cheap else 'signposts'}", progress)
    names = [f"layers.{layer}.{side}" for layer in range(len(formats)) for side in ("key", "value")]
    return {f"{name}.{key}": t for name, s in zip(names, sides, strict=True) for key, t in s.tables.items()}


def _sides(formats: tuple[LayerFormat, ...], method: MethodConfig, ids: Tensor) -> Iterator[SideFits]:
    samples, seqlen = ids.shape
    for layer in formats:
        for name, fmt in (("key", layer.key), ("value", layer.value)):
            pages = (seqlen - fmt.window.sinks) // fmt.t
            if pages < 1:
                raise SignpostError(
                    f"seqlen={seqlen} does not fill one page of {fmt.t} tokens behind {fmt.window.sinks} sinks: "
                    f"set seqlen to at least {fmt.t + fmt.window.sinks}"
                )
            yield SideFits(fmt, name, method, samples * pages * fmt.t)


def _run_pass(
    tap: Tap, ids: Tensor, active: list[SideFits], sides: list[SideFits], title: str, progress: Progress
) -> None:
    task = progress.add_task(title, total=ids.shape[0])
    gradients = any(s.fit.gradients for s in active if s.fit)
    chosen = {id(s) for s in active}
    for sample in ids:
        for activations in tap.run(sample, gradients):
            for side in sides[2 * activations.layer : 2 * activations.layer + 2]:
                if id(side) in chosen:
                    side.observe(activations)
        progress.advance(task)
    for side in active:
        assert side.fit is not None
        side.tables |= side.fit.result()
