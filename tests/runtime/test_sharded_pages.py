"""Pages of a rank: where no number of a format spans heads, those of one process that has all heads.

To the bit, but for products (rotations, factors): a library may add up fewer heads' products in another order."""

from dataclasses import replace

import pytest
import torch

from artifacts import LayerFormat, PageGeometry
from runtime.codec import Codec
from tests.formats import SIDES, cache_numbers, kivi, random_bundle

HEADS, D = 4, 64


def spans_heads(fmt):
    """A scale of all heads of a token, outliers of all of them, or a list of outliers that all of them may fill."""
    return bool(fmt.dense and fmt.dense.axis == "token" and not fmt.dense.group) or bool(
        fmt.sparse and (fmt.sparse.axis != "channel" or fmt.sparse.thresholds == "bundle")
    )


WITHIN = [(name, fmt, side) for name, fmt, _, _, side in SIDES if not spans_heads(fmt)]


def cut(fmt, side):
    """Tensors of the whole side, and of both halves of its heads, through a bundle."""
    other = replace(kivi(2, fmt.t).value, window=fmt.window)
    whole = random_bundle([LayerFormat(*((fmt, other) if side == "key" else (other, fmt)))], HEADS, HEADS, D)
    return whole.side_tensors(0, side), [whole.shard(rank, 2).side_tensors(0, side) for rank in range(2)]


@pytest.mark.parametrize("name, fmt, side", WITHIN, ids=[name for name, _, _ in WITHIN])
def test_ranks_make_the_pages_of_one(name, fmt, side):
    x = torch.from_numpy(cache_numbers((2, fmt.t, HEADS, D), 1))
    tensors, halves = cut(fmt, side)
    expected = Codec(PageGeometry.of(fmt, HEADS, D, side), tensors).encode(x)[1]
    codecs = [Codec(PageGeometry.of(fmt, HEADS // 2, D, side), own) for own in halves]
    found = [codec.encode(x[:, :, 2 * rank : 2 * rank + 2])[1] for rank, codec in enumerate(codecs)]
    if fmt.rotate or fmt.lowrank:
        apart = (torch.cat(found, 2) - expected).abs() > 1e-5 * expected.abs().max()
        assert apart.float().mean() < 0.005  # a number that was rounded the other way, and its code with it
    else:
        assert torch.equal(torch.cat(found, 2), expected)
    assert not torch.equal(expected, x)


def test_formats_of_all_kinds_are_among_them():
    kinds = {kind for _, fmt, _ in WITHIN for kind in (*fmt.parts, *fmt.transforms)}
    assert kinds == {"dense", "banded", "sparse", "lowrank", "sketch", "center", "rotate"}
