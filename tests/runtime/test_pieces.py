"""Views as kernels take them."""

import pytest
import torch

from runtime import pieces


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_strides_in_pieces(dtype):
    """Where an entry is, counted in pieces of 16 bytes; dimensions of one entry have none."""
    each = pieces.PIECE // dtype.itemsize
    x = torch.zeros(2, 5, 3, 64, dtype=dtype)
    for view in (x, x.transpose(1, 2), x[:, 1:], x[:1, :, 2:], x[..., each:], x[..., 8:8]):
        found = pieces.strides(view)
        assert found == tuple(
            y // each if size > 1 else 0 for y, size in zip(view.stride()[:3], view.shape[:3], strict=True)
        )
    assert pieces.strides(torch.zeros(1, 7, dtype=dtype)) == (0,)  # whatever the stride of one entry


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_views_that_kernels_do_not_take(dtype):
    x = torch.zeros(2, 5, 3, 64, dtype=dtype)
    flat = torch.zeros(1000, dtype=dtype)
    views = (x.transpose(2, 3), x[..., ::2], x[..., 1:], flat[2:130].view(2, 64), flat[:132].view(2, 66)[:, :64])
    assert [pieces.strides(view) for view in views] == [None] * 5
