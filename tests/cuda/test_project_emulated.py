"""Projected queries on the CPU (tests/cuda/emulator.h) against float64. Needs g++, no GPU."""

import shutil

import pytest
import torch

from artifacts import Dense, Format, PageGeometry, Rotate, Sketch
from runtime.parts import rotate
from runtime.parts.sketch import unbiasing
from runtime.project import Projection, columns, matrices, project_unit
from tests.cuda.emulated import Module
from tests.formats import cache_numbers, random_tensors

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

LLOYD = Dense(3, "head", codebook="lloyd", normalize="norm")
FORMATS = {
    "sketch": Format(64, sketch=Sketch(256, "orthogonal")),
    "outliers": Format(64, sketch=Sketch(96, "orthogonal", 8, 32)),
    "haar": Format(64, LLOYD, rotate=Rotate("haar")),
    "learned": Format(64, LLOYD, rotate=Rotate("learned")),
    "haar-sketch": Format(64, LLOYD, sketch=Sketch(64), rotate=Rotate("haar")),
    "learned-outliers": Format(64, LLOYD, sketch=Sketch(160, "gaussian", 5, 64), rotate=Rotate("learned")),
}
# What an error is at most, relative to the sum of a product's terms without signs. Numbers of models in halves and of
# matrices are two pieces of 8 bits, rounded, so each is off by 2^-16, and products of the second ones are left out; in
# float there are three pieces, and roundings of the sum.
BOUNDS = {torch.float16: 3 * 2**-16, torch.bfloat16: 3 * 2**-16, torch.float32: 2**-20}


def expected(
    key: PageGeometry, tables: dict[str, torch.Tensor], q: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """float64 [b, h_kv, m * g, columns] of q [b, h_q, m, d], and the same of sums without signs."""
    fmt, h_kv = key.format, key.shape.h_kv
    rows = q.double().unflatten(1, (h_kv, -1)).transpose(2, 3).flatten(2, 3) * scale
    size, found = rows.abs(), []
    if fmt.rotate:
        matrix = rotate.inverse_matrix(rotate.prepared(tables)).mT.double()
        rows, size = rows @ matrix, size @ matrix.abs()
        found.append((rows, size))
    if fmt.sketch:
        c = unbiasing(fmt.sketch, key.shape.d)
        kept = 1 - tables["outlier_mask"].double()[:, None] if fmt.sketch.outliers else torch.ones(1)
        for name, m, some in (("sketch", fmt.sketch.m, kept), ("outlier_sketch", fmt.sketch.outlier_m, 1 - kept)):
            if m:
                s = tables[name].double().mT * c / m
                found.append(((rows * some) @ s, (size * some) @ s.abs()))
    return tuple(torch.cat(x, -1) for x in zip(*found, strict=True))


def check(fmt: Format, dtype: torch.dtype, sizes: tuple[int, int, int, int], d: int = 128, view: bool = False) -> None:
    b, h_kv, g, m = sizes
    key = PageGeometry.of(fmt, h_kv, d, "key")
    tables = {name: torch.as_tensor(x) for name, x in random_tensors(fmt, h_kv, d, 1).items()}
    q = torch.from_numpy(cache_numbers((b, m, h_kv * g, d + 1), 2)).to(dtype)
    q = (q[..., 1:] if view else q[..., :d].contiguous()).transpose(1, 2)  # views begin at odd numbers
    count = b * h_kv * g * m * columns(key)
    to = torch.full((count + 4,), torch.nan)
    module = Module(project_unit(key, dtype))
    Projection(matrices(key, tables, dtype), module, to, 0.3, sizes, 3).run(q, follows=True, stream=0)
    assert torch.isnan(to[count:]).all()
    found, (wanted, size) = to[:count].view(b, h_kv, g * m, -1).double(), expected(key, tables, q, 0.3)
    assert wanted.shape == found.shape
    assert ((found - wanted).abs() <= BOUNDS[dtype] * size).all(), ((found - wanted).abs() / size).max()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_queries_of_formats(name, dtype):
    """More rows than a tile has, and some of a second one."""
    check(FORMATS[name], dtype, (5, 2, 4, 1))


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("name", ["outliers", "learned", "haar-sketch", "learned-outliers"])
def test_head_dimensions(name, d):
    check(FORMATS[name], torch.float16, (3, 2, 1, 2), d)


def test_one_query_several_new_tokens_and_views():
    check(FORMATS["haar"], torch.float16, (1, 1, 1, 1))
    check(FORMATS["outliers"], torch.bfloat16, (2, 3, 3, 3), view=True)


def test_blocks_take_several_tiles():
    """Of seven, three multiprocessors' blocks of two heads have some each."""
    check(FORMATS["haar"], torch.float16, (100, 2, 1, 1))


def test_columns_are_those_of_rotations_and_sketches():
    of = {name: columns(PageGeometry.of(fmt, 2, 128, "key")) for name, fmt in FORMATS.items()}
    assert of == {
        "sketch": 256, "outliers": 128, "haar": 128, "learned": 128, "haar-sketch": 192, "learned-outliers": 352,
    }  # fmt: skip
    assert columns(PageGeometry.of(Format(64, Dense(2, "token")), 2, 128, "key")) == 0
