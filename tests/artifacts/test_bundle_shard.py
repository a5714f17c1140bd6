"""Slices of a bundle for ranks that share its kv heads: what is cut, what pages hold then, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts import (
    Banded,
    Bundle,
    BundleError,
    BundleMismatchError,
    Format,
    FormatError,
    LayerFormat,
    PageGeometry,
    Rotate,
    Split,
)
from tests.artifacts.samples import mixed_bundle, sample_bundle
from tests.formats import CASES, kvquant, random_bundle

HEADS = 4
# By name, which tensors belong to heads; written out from docs/bundle-format.md.
BY_HEAD = {"mean", "scale", "zero", "widths", "outlier_mask"}
SHARED = {"sketch", "outlier_sketch", "edges", "spacing"}


BANDED = LayerFormat(Format(32, banded=Banded(2.5)), Format(32, banded=Banded(2.0), rotate=Rotate("learned")))
FORMATS = {case.name: LayerFormat(case.key, case.value) for case in CASES} | {"banded": BANDED}
every_format = pytest.mark.parametrize("layer", FORMATS.values(), ids=FORMATS)


def bundle_of(layer: LayerFormat) -> Bundle:
    return random_bundle([layer], 2 * HEADS, HEADS, 64)


def is_by_head(name: str, bundle: Bundle) -> bool:
    if name == "rope.inv_freq":
        return False
    _, _, side, tensor = name.split(".")
    fmt = getattr(bundle.layers[0], side)
    if tensor in ("lower", "upper"):
        return fmt.sparse.axis == "channel"
    if tensor == "rotation":
        return fmt.rotate.kind == "learned"
    if tensor == "signposts":
        return fmt.banded is not None
    assert tensor in BY_HEAD | SHARED
    return tensor in BY_HEAD


@pytest.mark.parametrize("world", [2, 4])
@every_format
def test_slices_are_the_heads_in_their_order(layer, world):
    whole = bundle_of(layer)
    slices = [whole.shard(rank, world) for rank in range(world)]
    for rank, part in enumerate(slices):
        assert (part.split, part.layers) == (Split(rank, world), whole.layers)
        assert part.model == replace(whole.model, h_q=2 * HEADS // world, h_kv=HEADS // world)
    for name, tensor in whole.tensors.items():
        if is_by_head(name, whole):
            np.testing.assert_array_equal(np.concatenate([part.tensors[name] for part in slices]), tensor)
            assert len({part.tensors[name].shape for part in slices}) == 1
        else:
            assert all(np.array_equal(part.tensors[name], tensor) for part in slices)


@every_format
def test_pages_of_a_slice_are_those_of_a_model_with_fewer_heads(layer):
    part = bundle_of(layer).shard(1, 2)
    for side, geometry in zip(("key", "value"), part.geometry.pairs[0], strict=True):
        fmt = getattr(layer, side)
        assert geometry == PageGeometry.of(fmt, HEADS // 2, 64, side)
        whole = PageGeometry.of(fmt, HEADS, 64, side)
        assert (geometry.head_bytes, geometry.segment_bytes) == (whole.head_bytes, whole.segment_bytes)


def test_outliers_of_a_slice_are_counted_over_its_heads():
    """Slots: ceil(1.5 * 0.01 * n) for a page of n keys; 2 * ceil(0.005 * n) for each token of n values."""
    whole = random_bundle([kvquant(3)], 8, 4, 128)
    slots = [[side.fields["index"].field.shape for side in b.geometry.pairs[0]] for b in (whole, whole.shard(0, 2))]
    assert slots == [[(492,), (64 * 2 * 3,)], [(246,), (64 * 2 * 2,)]]


def test_layers_in_full_precision_stay():
    part = mixed_bundle().shard(1, 2)
    assert part.layers == mixed_bundle().layers
    assert (part.model.sliding, part.model.softcap) == (mixed_bundle().model.sliding, 50.0)


def test_a_slice_keeps_no_memory_of_the_whole():
    whole = sample_bundle()
    part = whole.shard(0, 2)
    assert not np.shares_memory(part.tensors["layers.0.key.scale"], whole.tensors["layers.0.key.scale"])


def test_a_slice_is_itself_but_no_other():
    whole = sample_bundle()
    part = whole.shard(1, 2)
    assert whole.shard(0, 1) is whole
    assert part.shard(1, 2) is part
    for other in ((0, 2), (0, 1), (1, 4)):
        wanted = r"this bundle is the slice for rank 1 of 2, and the slice for rank {} of {} is wanted: pass the whole"
        with pytest.raises(BundleMismatchError, match=wanted.format(*other)):
            part.shard(*other)


@pytest.mark.parametrize("rank, world", [(2, 2), (-1, 2), (0, 0), (1, 1), (0, -1)])
def test_ranks_that_there_are_not(rank, world):
    with pytest.raises(FormatError, match=f"rank={rank} of world={world}: ranks count from 0 to world - 1"):
        sample_bundle().shard(rank, world)


@pytest.mark.parametrize("world", [3, 4])
def test_heads_that_cannot_be_shared(world):
    message = f"h_kv=2 kv heads cannot be shared evenly by world={world} ranks: start as many as divide 2"
    with pytest.raises(FormatError, match=message):
        sample_bundle().shard(0, world)


def test_a_slice_is_not_saved(tmp_path):
    with pytest.raises(BundleError, match="this bundle is the slice for rank 0 of 2: save the whole one"):
        sample_bundle().shard(0, 2).save(tmp_path / "b")
    assert not list(tmp_path.iterdir())
