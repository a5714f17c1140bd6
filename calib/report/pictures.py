"""Which pictures a report has, in what order, and what stands beside them."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from artifacts import Bundle
from calib.report import figures
from calib.report.observe import Observation
from calib.report.page import Picture

DPI = 130
NEEDS_MODEL = "Bundles do not hold what this needs: give --model (and --text)."
WEIGHTS = {
    "none": "every number counts the same",
    "fisher": "numbers count by their squared gradient",
    "fisher_scaled": "numbers count by their squared gradient times the squared scale",
}


@dataclass(frozen=True)
class _Wanted:
    """A picture to be: file name, heading, what it shows, why it may be missing, and who draws it."""

    name: str
    title: str
    note: str
    missing: str
    draw: Callable[[], Figure | None]


def pictures(bundle: Bundle, seen: Observation | None, others: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """All pictures in their order. others: rows of `benchmarks.quality` to compare with."""
    wanted = [_loss(bundle, others), *_of_the_model(seen), _ranges(bundle), _memory(bundle)]
    found = []
    for picture in wanted:
        figure = picture.draw()
        png = None if figure is None else _png(figure)
        found.append(Picture(picture.name, picture.title, picture.note if png else picture.missing, png))
    return found


def _loss(bundle: Bundle, others: Sequence[Mapping[str, Any]]) -> _Wanted:
    compared = " Grey: other recipes, from the files given to --compare; their text may differ." if others else ""
    return _Wanted(
        "loss",
        "Loss against bits",
        f"Lower left is better; names that would overlap are left out.{compared}",
        "This bundle was not evaluated, and there are no results to --compare.",
        lambda: figures.loss_against_bits(bundle, others) if bundle.evaluation or others else None,
    )


def _of_the_model(seen: Observation | None) -> list[_Wanted]:
    """Pictures of numbers that only the model has."""
    text = f" Text: {seen.text.source}, {seen.text.ids.numel()} tokens." if seen else ""

    def wanted(name: str, title: str, note: str, draw: Callable[[Observation], Figure | None], none: str) -> _Wanted:
        return _Wanted(
            name, title, note + text, none if seen else NEEDS_MODEL, lambda: None if seen is None else draw(seen)
        )

    how = WEIGHTS[seen.weights] if seen else ""
    over = f"Lines: values of the codes. Behind them: normalized numbers without outliers; {how}. Heights are clipped."
    return [
        wanted(
            "sensitivity",
            "Where errors cost",
            "Squared gradients of the loss, summed over a layer's keys or values; and the same times the squared "
            "errors of decoding: what this bundle's errors cost to second order, if they are independent.",
            figures.sensitivity,
            "",
        ),
        wanted(
            "magnitudes",
            "Channels",
            "Mean absolute value of every channel. Where one is large for all tokens, its numbers need a scale of "
            "their own; RoPE mixes each pair of channels.",
            figures.magnitudes,
            "",
        ),
        wanted(
            "signposts-keys",
            "Signposts of keys",
            over,
            lambda seen: figures.signposts(seen, 0),
            "Keys have no codes in this format.",
        ),
        wanted(
            "signposts-values",
            "Signposts of values",
            over,
            lambda seen: figures.signposts(seen, 1),
            "Values have no codes in this format.",
        ),
        wanted(
            "spectrum",
            "What factors would save",
            "Energy of what the parts before factors leave, after the best factors of so many ranks per head and "
            "segment of a prompt: GEAR's residual.",
            figures.spectra,
            "",
        ),
    ]


def _ranges(bundle: Bundle) -> _Wanted:
    return _Wanted(
        "ranges",
        "Ranges of key channels, as calibrated",
        "Half the range of each channel, outliers left out. From the bundle alone.",
        "This bundle's keys have no scales of channels: they are found online, or belong to tokens.",
        lambda: figures.thresholds(bundle),
    )


def _memory(bundle: Bundle) -> _Wanted:
    note = "Cache of one sequence, everything counted."
    return _Wanted("memory", "Memory against context", note, "", lambda: figures.memory(bundle))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()
