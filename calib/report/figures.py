"""The report's pictures. Each function takes plain data and gives a matplotlib figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from artifacts import Bundle
from calib.report.observe import Floats, Observation, SideFacts, shares

KEY, VALUE, QUIET, MARK = "tab:blue", "tab:orange", "0.55", "tab:red"
FULL_BYTES = 2  # float16
SHOWN_LAYERS = 12  # small pictures in a grid
LENGTHS = [1 << n for n in range(10, 21)]
plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False})


def loss_against_bits(bundle: Bundle, others: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss increase against bits: this bundle, and rows of `benchmarks.quality` for comparison."""
    figure, axes = _new(7.5, 4.2)
    names = []
    for row in others:
        at = row["bits"], row["loss_increase"]
        axes.plot(*at, "o", color=QUIET, markersize=4)
        names.append(
            axes.annotate(row["recipe"], at, xytext=(4, 2), textcoords="offset points", fontsize=7, color="0.35")
        )
    own = dict(bundle.evaluation or {})
    if others and "bits" in own:  # they depend on the length
        own["bits"] = bundle.geometry.bits(others[0]["context"])
    increases = [row["loss_increase"] for row in others]
    if isinstance(own.get("loss_increase"), float) and isinstance(own.get("bits"), float):
        increases.append(own["loss_increase"])
        axes.plot(own["bits"], own["loss_increase"], "*", color=MARK, markersize=14, label="this bundle", zorder=3)
        axes.legend(frameon=False)
    scale = "log" if increases and min(increases) > 0 else "linear"
    axes.set(yscale=scale, xlabel="bits per number, everything counted", ylabel="loss increase, nats per token")
    axes.grid(alpha=0.25, which="both")
    _without_overlaps(figure, names)
    return figure


def _without_overlaps(figure: Figure, names: Sequence[Annotation]) -> None:
    """Leaves out names that would stand in earlier ones."""
    figure.draw_without_rendering()
    taken: list[Bbox] = []
    for name in names:
        box = name.get_window_extent()
        if any(box.overlaps(other) for other in taken):
            name.set_visible(False)
        else:
            taken.append(box)


def sensitivity(observation: Observation) -> Figure:
    """Fisher mass and share of the predicted error, by layer."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    titles = ("Fisher mass: what an error of one unit costs", "Predicted cost of this bundle's errors")
    for axes, field, title in zip(panels, ("fisher", "error"), titles, strict=True):
        layers = observation.layers
        parts = shares([getattr(side, field) for side in (*(k for k, _ in layers), *(v for _, v in layers))])
        place, count = np.arange(len(layers)), len(layers)
        axes.bar(place - 0.2, parts[:count], 0.4, color=KEY, label="keys")
        axes.bar(place + 0.2, parts[count:], 0.4, color=VALUE, label="values")
        axes.set(title=title, xlabel="layer", ylabel="share of all layers")
        _layer_ticks(axes, observation.numbers)
    panels[0].legend(frameon=False)
    return figure


def magnitudes(observation: Observation) -> Figure:
    """Mean absolute value of every channel, layers by channels: keys before and after RoPE, and values."""
    layers = observation.layers
    panels: dict[str, list[Floats | None]] = {
        "keys before RoPE": [k.unrotated for k, _ in layers],
        "keys after RoPE": [k.magnitude for k, _ in layers],
        "values": [v.magnitude for _, v in layers],
    }
    figure, rows = plt.subplots(3, 1, figsize=(9, 1.1 + 3 * (0.9 + 0.12 * len(layers))), layout="constrained")
    for axes, (title, found) in zip(rows, panels.items(), strict=True):
        table = np.array([x.reshape(-1) for x in found if x is not None])
        image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
        heads, d = layers[0][0].magnitude.shape
        for head in range(1, heads):
            axes.axvline(head * d - 0.5, color="white", linewidth=0.8)
        axes.set(title=title, ylabel="layer", xlabel=f"channel ({heads} heads of {d})")
        _layer_ticks(axes, observation.numbers, vertical=True)
        figure.colorbar(image, ax=axes, label="mean |x|", pad=0.01)
    return figure


def thresholds(bundle: Bundle) -> Figure | None:
    """Ranges of key channels that the bundle itself holds, layers by channels; None where it holds none."""
    rows = {}
    for layer in range(bundle.model.l):
        tables = bundle.side_tensors(layer, "key")
        if "scale" in tables:
            rows[layer] = tables["scale"].reshape(-1)
    if not rows:
        return None
    figure, axes = _new(9, 1.6 + 0.12 * len(rows))
    image = axes.imshow(np.array(list(rows.values())), aspect="auto", cmap="magma", interpolation="nearest", vmin=0)
    axes.set(xlabel=f"channel ({bundle.model.h_kv} heads of {bundle.model.d})", ylabel="layer")
    axes.set_yticks(range(len(rows)), [str(layer) for layer in rows], fontsize=7)
    figure.colorbar(image, ax=axes, label="half the range", pad=0.01)
    return figure


def signposts(observation: Observation, side: int) -> Figure | None:
    """Codebook values over the weighted histogram of normalized numbers, layer by layer; None without codes."""
    layers = zip(observation.numbers, observation.layers, strict=True)
    found = [(number, pair[side]) for number, pair in layers if pair[side].histogram is not None]
    if not found:
        return None
    chosen = [found[i] for i in _spread(len(found))]
    columns = min(4, len(chosen))
    lines = -(-len(chosen) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(9, 1.7 * lines + 0.4), layout="constrained", squeeze=False)
    for axes in panels.flat[len(chosen) :]:
        axes.set_axis_off()
    for axes, (layer, facts) in zip(panels.flat, chosen, strict=False):
        _histogram(axes, facts, KEY if side == 0 else VALUE)
        axes.set_title(f"layer {layer}")
    return figure


def _histogram(axes: Axes, facts: SideFacts, color: str) -> None:
    assert facts.histogram is not None
    assert facts.codebook is not None
    weight = facts.histogram.weight / max(facts.histogram.weight.sum(), np.finfo(float).tiny)
    edges = np.linspace(-1, 1, facts.histogram.bins + 1)
    # Where most of the weight lies; the few numbers beyond are drawn as far as the signposts reach.
    axes.stairs(weight, edges, fill=True, color=color, alpha=0.5)
    axes.vlines(facts.codebook, 0, 1, transform=axes.get_xaxis_transform(), color="black", linewidth=0.7)
    top = np.quantile(weight, 0.995) * 1.3
    axes.set(yticks=[], xlim=(-1.05, 1.05), ylim=(0, top or 1))


def spectra(observation: Observation) -> Figure:
    """Share of the residual's energy that factors of so many ranks leave."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(observation.layers)))
    for side, (axes, title) in enumerate(zip(panels, ("keys", "values"), strict=True)):
        for layer, pair in enumerate(observation.layers):
            left = _left(pair[side].spectrum)
            axes.plot(range(len(left)), left, color=colors[layer], linewidth=1)
        axes.set(title=title, xlabel="rank of the factors", ylim=(0, 1.02), xlim=(0, len(left) - 1))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("share of the energy that is left")
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, max(1, len(observation.layers) - 1)), "viridis")
    figure.colorbar(scale, ax=panels, label="layer", pad=0.01)
    return figure


def _left(spectrum: Floats) -> Floats:
    total = spectrum.sum()
    kept = np.concatenate([[0.0], np.cumsum(spectrum)])
    return 1 - kept / total if total else np.zeros_like(kept)


def memory(bundle: Bundle) -> Figure:
    """Bytes of the cache of one sequence against its length, beside float16."""
    figure, axes = _new(7.5, 3.6)
    geometry = bundle.geometry
    full = [FULL_BYTES * geometry.numbers(n) / 2**20 for n in LENGTHS]
    axes.plot(LENGTHS, full, color=QUIET, label="float16")
    axes.plot(LENGTHS, [geometry.cache_bytes(n) / 2**20 for n in LENGTHS], color=MARK, label="this bundle")
    axes.set(xlabel="tokens", ylabel="MiB of one sequence")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = LENGTHS[::2]
    axes.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def _layer_ticks(axes: Axes, numbers: Sequence[int], vertical: bool = False) -> None:
    step = max(1, -(-len(numbers) // 16))
    places = range(0, len(numbers), step)
    (axes.set_yticks if vertical else axes.set_xticks)(places, [str(numbers[i]) for i in places])


def _spread(count: int) -> list[int]:
    """Numbers of layers that are shown: all, or the first, the last and some evenly between."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, SHOWN_LAYERS))})
