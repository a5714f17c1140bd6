"""What mutated inputs start from: bundles that between them hold every part."""

from pathlib import Path

from artifacts import Banded, Bundle, Center, Dense, Format, LayerFormat, LowRank, Rotate, Sketch, Sparse, Window
from tests.artifacts.samples import kvquant, mixed_bundle, sample_bundle

Files = dict[str, bytes]


def bundles() -> dict[str, Bundle]:
    """By name: the papers' recipes, small."""
    window, token = Window(2, 64), Dense(2, "token", 32)
    layers = {
        "kvquant": (kvquant(3), kvquant(4)),
        "even": (LayerFormat(Format(64, Dense(2, "token", 32)), Format(64, Dense(3, "token", 0, "uniform-fit"))),),
        "kivi": (LayerFormat(Format(64, Dense(2, "channel", 32), window=window), Format(64, token, window=window)),)
        * 2,
        "gear": (
            LayerFormat(
                Format(64, Dense(4, "channel", 64), Sparse(0.02, "channel", "online"), lowrank=LowRank(4, 2)),
                Format(64, Dense(4, "token"), Sparse(0.02, "token", "online"), lowrank=LowRank(4, 2)),
            ),
        ),
        "qjl": (LayerFormat(Format(64, sketch=Sketch(64, "orthogonal", 4, 32)), Format(64, token)),),
        "rotated": (
            LayerFormat(
                Format(64, Dense(3, "head", 0, "lloyd", "online", "norm"), center=Center(), rotate=Rotate("hadamard")),
                Format(64, Dense(8, "head", 0, "nuq-qnorm", "online", "range"), rotate=Rotate("haar")),
            ),
        ),
        "banded": (
            LayerFormat(
                Format(32, banded=Banded(2.5), domain="pre_rope"),
                Format(32, banded=Banded(1.5, 3), rotate=Rotate("learned")),
            ),
        ),
    }
    return {name: sample_bundle(i, formats) for i, (name, formats) in enumerate(layers.items())} | {
        "mixed": mixed_bundle(len(layers))
    }


def saved(folder: Path) -> dict[str, Files]:
    """The files of every bundle, by its name."""
    return {
        name: {path.name: path.read_bytes() for path in bundle.save(folder / name).iterdir()}
        for name, bundle in bundles().items()
    }
