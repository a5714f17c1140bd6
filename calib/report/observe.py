"""What the report shows and bundles do not hold: how the model's own keys and values look, and what is lost of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Bundle, PageGeometry
from artifacts.errors import SignpostError
from artifacts.geometry import SEGMENT_PAGES
from calib.config import WEIGHTS, MethodConfig
from calib.data import Tokens
from calib.fits import Side
from calib.fits.dense import SignpostFit
from calib.fits.lowrank import SpectrumFit
from calib.histograms import histogram
from calib.pipeline import positions
from calib.progress import track
from calib.signposts import WeightedHistogram
from calib.tap import Activations, Tap
from runtime.codec import Codec
from runtime.hf_model import require_fit, text_config
from runtime.parts import MODULES, dense

BINS = 400  # of histograms: about as many as a picture has columns

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SideFacts:
    """Keys or values of one layer over the observed text, sinks left out.

    magnitude   mean absolute value of every channel, [h_kv, d]; of keys after RoPE
    unrotated   the same of keys before RoPE; None for values
    fisher      sum of squared gradients of the summed loss
    error       sum of squared gradients times squared errors of decoding, over two: what the errors cost to second
                order if they are independent, nats
    relative    root of the sum of squared errors over that of squared numbers
    histogram   normalized numbers, weighted as the signposts' fit weights them; None without a dense part
    codebook    values of the codes on the same axis, or None
    spectrum    squared singular values of what the parts before factors leave, prompts' segments, mean over heads and
                segments added up, [d], descending
    """

    magnitude: Floats
    unrotated: Floats | None
    fisher: float
    error: float
    relative: float
    histogram: WeightedHistogram | None
    codebook: Floats | None
    spectrum: Floats


@dataclass(frozen=True)
class Observation:
    """Layers with a format, (keys, values) each, their numbers, and the text that was looked at."""

    layers: tuple[tuple[SideFacts, SideFacts], ...]
    numbers: tuple[int, ...]
    text: Tokens
    weights: str


def check(model: PreTrainedModel, bundle: Bundle, seqlen: int) -> None:
    """Raises BundleMismatchError for another model than the bundle's, SignpostError where there is nothing to look at
    and for windows that are shorter than a page or longer than the model's positions."""
    require_fit(model, bundle)
    sides = [side for pair in bundle.geometry.layers for side in pair or ()]
    if not sides:
        raise SignpostError("this bundle keeps all layers in full precision: there is nothing to look at")
    needed, limit = max(side.format.window.sinks + side.shape.t for side in sides), positions(text_config(model))
    if seqlen < needed:
        raise SignpostError(f"--seqlen {seqlen} does not fill a page behind the sinks: at least {needed}")
    if limit and seqlen > limit:
        raise SignpostError(f"--seqlen {seqlen} is above the model's {limit} positions: {limit} at most")


def observe(
    model: PreTrainedModel, bundle: Bundle, tokens: Tokens, progress: Progress | None = None
) -> Observation:  # fmt: skip
    """One pass with gradients over `tokens`. Raises what `check` and `Tap.run` raise."""
    check(model, bundle, tokens.ids.shape[1])
    weights = _weights(bundle)
    watchers = {
        layer: tuple(_Watcher(side, bundle, layer, weights, model.device) for side in pair)
        for layer, pair in enumerate(bundle.geometry.layers)
        if pair
    }
    report = track(progress, "looking at keys and values", tokens.ids.shape[0])

    def see(activations: Activations) -> None:
        for watcher in watchers.get(activations.layer, ()):
            watcher.observe(activations)

    tap = Tap(model)
    for sample in tokens.ids:
        tap.run(sample, True, see)
        report()
    facts = tuple((key.facts(), value.facts()) for key, value in watchers.values())
    return Observation(facts, tuple(watchers), tokens, weights)


def _weights(bundle: Bundle) -> str:
    """How calibration weighted numbers; KVQuant's way where the bundle does not say."""
    settings = bundle.calibration.get("settings")
    method = settings.get("method") if isinstance(settings, dict) else None
    weights = method.get("weights") if isinstance(method, dict) else None
    return weights if weights in WEIGHTS else "fisher_scaled"


class _Watcher:
    """Sums over the samples for one side of one layer."""

    def __init__(self, geometry: PageGeometry, bundle: Bundle, layer: int, weights: str, device: torch.device):
        self.geometry, self.name = geometry, f"layers.{layer}.{geometry.shape.side}"
        self.codec = Codec(geometry, bundle.side_tensors(layer, geometry.shape.side), device)
        side = Side(
            self.name,
            geometry.format,
            geometry.shape,
            0,
            MethodConfig(name="", key={}, value={}, weights="none"),
            self.codec.tables,
        )
        self.spectra = SpectrumFit(side)
        part = geometry.format.dense
        self.signposts = SignpostFit(part, weights, BINS, self.codec.tables, self.name) if part else None
        self.absolute = self.unrotated = torch.zeros((), dtype=torch.float64)
        self.tokens = 0
        self.fisher = self.cost = self.lost = self.energy = 0.0

    def observe(self, a: Activations) -> None:
        """Takes in one sample of this layer."""
        fmt = self.geometry.format
        if self.geometry.shape.side == "value":
            x, gradient = a.value, a.value_gradient
        elif fmt.domain == "pre_rope":
            x, gradient = a.key, a.key_gradient
        else:
            x, gradient = a.rotated_key, a.rotated_key_gradient
        assert gradient is not None
        self._add_magnitudes(a)
        pages, slopes = self._pages(x), self._pages(gradient)
        error = self.codec.encode(pages, SEGMENT_PAGES)[1] - pages
        self.fisher += float(slopes.double().square().sum())
        self.cost += 0.5 * float((slopes.double() * error).square().sum())
        self.lost += float(error.double().square().sum())
        self.energy += float(pages.double().square().sum())
        self._fit(pages, slopes)

    def _add_magnitudes(self, a: Activations) -> None:
        sinks = self.geometry.format.window.sinks
        is_key = self.geometry.shape.side == "key"
        shown = a.rotated_key if is_key else a.value
        self.absolute = self.absolute + shown[sinks:].double().abs().sum(0).cpu()
        if is_key:
            self.unrotated = self.unrotated + a.key[sinks:].double().abs().sum(0).cpu()
        self.tokens += shown.shape[0] - sinks

    def _fit(self, pages: Tensor, gradient: Tensor) -> None:
        """Histogram and spectrum, of what the parts themselves see."""
        fmt, tables = self.geometry.format, self.codec.tables
        for name in fmt.transforms:
            pages = MODULES[name].forward(pages, tables)
            gradient = MODULES[name].forward_gradient(gradient, tables)
        masks = [
            MODULES[name].select(part, self.geometry.shape, pages, tables)
            for name, part in fmt.parts.items()
            if hasattr(MODULES[name], "select")
        ]
        outliers = masks[0] if masks else None
        if self.signposts:
            self.signposts.observe(pages, outliers, gradient)
        self.spectra.observe(pages, outliers, None)

    def _pages(self, x: Tensor) -> Tensor:
        fmt = self.geometry.format
        behind = x[fmt.window.sinks :]
        return behind[: behind.shape[0] // fmt.t * fmt.t].unflatten(0, (-1, fmt.t))

    def facts(self) -> SideFacts:
        """What was seen."""
        part, d = self.geometry.format.dense, self.geometry.shape.d
        values = dense.codebook(part, d, self.codec.tables, self.codec.device) if part else None
        return SideFacts(
            magnitude=(self.absolute / self.tokens).numpy(),
            unrotated=(self.unrotated / self.tokens).numpy() if self.geometry.shape.side == "key" else None,
            fisher=self.fisher,
            error=self.cost,
            relative=(self.lost / self.energy) ** 0.5 if self.energy else 0.0,
            histogram=histogram(self.signposts.collected()["weighted"]) if self.signposts else None,
            codebook=None if values is None else values.double().cpu().numpy(),
            spectrum=self.spectra.collected()["spectrum"].mean(0).numpy(),
        )


def shares(numbers: Sequence[float]) -> list[float]:
    """Numbers as shares of their sum; zeros where that is nothing."""
    total = sum(numbers)
    return [number / total if total else 0.0 for number in numbers]
