"""One step of a few formats over short sequences: small enough for compute-sanitizer.

compute-sanitizer --tool racecheck python -m tests.gpu.small_scenes
"""

from dataclasses import replace
from unittest.mock import patch

import torch

from artifacts import Dense, Format, LayerFormat, Rotate, Sketch
from runtime.attention import PagedAttention
from runtime.units import ONE_BLOCK, Scoring, Sharing
from tests.formats import kivi, kvquant, turned, without_outliers
from tests.gpu.paged import Scene
from tests.gpu.test_attention import BANDED, with_formats

ALONE = Sharing(1, alone=True)
SKETCHED = LayerFormat(Format(64, sketch=Sketch(256, "orthogonal", 8, 64)), kivi(2).value)
LLOYD = Format(64, Dense(3, "head", codebook="lloyd", normalize="norm"), rotate=Rotate("haar"))
EVEN = without_outliers(kvquant(2, 32, codebook="uniform-fit"))
ROTATED = LayerFormat(replace(LLOYD, sketch=Sketch(64)), LLOYD)


def full_precision() -> None:
    """Layers in full precision, windows and caps."""
    for scene in (
        Scene.unpaged((8, 2, 128), [300, 65], scoring=Scoring(100, 5.0)),
        Scene.unpaged((4, 2, 256), [300, 65]),
        Scene.of(with_formats(kvquant(3), 8, 2), [300, 65], scoring=Scoring(100, 5.0)),
    ):
        assert torch.isfinite(scene.run(scene.query())).all()


def pages() -> None:
    """Pages by bytes with one and two query rows a kv head, by tiles with one, four and eight; keys that are sketched
    and rotated; warps of a block, and alone."""
    for how in (ONE_BLOCK, ALONE):
        with patch.object(PagedAttention, "sharing", return_value=how):
            by_bytes = ((kvquant(2), 2), (kvquant(3), 4), (EVEN, 2))
            by_tiles = ((kvquant(4), 8), (kvquant(2), 16))
            for formats, h_q in (*by_bytes, *by_tiles, (kivi(2), 2), (kivi(2), 8), (SKETCHED, 8), (ROTATED, 2)):
                scene = Scene.of(with_formats(formats, h_q, 2), [300, 65])
                assert torch.isfinite(scene.run(scene.query())).all()


def rotations() -> None:
    """Blocks that multiply queries and results by rotations themselves."""
    with patch.object(PagedAttention, "sharing", return_value=Sharing(1, multiplies=True)):
        for h_q in (2, 8, 16):
            scene = Scene.of(with_formats(turned(3), h_q, 2), [300, 65])
            assert torch.isfinite(scene.run(scene.query())).all()


def shared() -> None:
    """Two blocks on a multiprocessor, of four warps and of six; kernels for short steps."""
    for how in (Sharing(2), Sharing(1, beside=True)):
        with patch.object(PagedAttention, "sharing", return_value=how):
            for formats, h_q in ((kvquant(2), 8), (kvquant(3), 16), (BANDED, 8), (kivi(2), 2)):
                scene = Scene.of(with_formats(formats, h_q, 2), [300, 65])
                assert torch.isfinite(scene.run(scene.query())).all()


def whole() -> None:
    """Blocks that take two heads each of sequences that are as long."""
    with patch.object(PagedAttention, "sharing", return_value=ONE_BLOCK):
        heads = (2 * torch.cuda.get_device_properties("cuda").multi_processor_count - 1) // 4
        for formats, g in ((kvquant(2), 4), (kivi(2), 1), (BANDED, 1)):
            scene = Scene.of(with_formats(formats, heads * g, heads), [130] * 4)
            assert torch.isfinite(scene.run(scene.query())).all()


if __name__ == "__main__":
    full_precision()
    pages()
    rotations()
    shared()
    whole()
