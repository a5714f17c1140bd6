"""Queries of a decode step times the matrices of rotated or sketched keys, before attention (cuda/project.cuh)."""

import ctypes
from collections.abc import Iterable, Mapping
from itertools import product

import torch
from torch import Tensor

from artifacts import Bundle, PageGeometry
from runtime.fragments import of_heads, pieces_of_matrix
from runtime.jit import Module, Unit
from runtime.pack_units import INPUTS
from runtime.parts import rotate
from runtime.units import side_struct

TILE = 16  # query rows that a block takes at once
SHARERS = 2  # blocks of a multiprocessor, where there is enough to do
INTEGERS = ("project_threads", "project_shared", "project_slices")


class _Project(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "to", "rotation", "sketch", "outlier_sketch", "outlier_mask")),
        *((name, ctypes.c_longlong) for name in ("q_sequence", "q_token", "q_head")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("b", "h_kv", "g", "m", "follows")),
    ]


def columns(key: PageGeometry) -> int:
    """Numbers that keys of such pages need of a query beside itself; 0: none, and nothing is launched."""
    fmt = key.format
    signs = fmt.sketch.m + fmt.sketch.outlier_m if fmt.sketch else 0
    return (key.shape.d if fmt.rotate else 0) + signs


def project_unit(key: PageGeometry, dtype: torch.dtype) -> Unit:
    """The unit for queries of `dtype` over pages of such keys, which are rotated or sketched; its entry is `project`.

    `project_threads`, `project_shared` and `project_slices` of the module are threads and bytes of a block, and blocks
    that share the columns.
    """
    model = f"{'' if dtype == torch.float32 else 'signpost::'}{INPUTS[dtype]}"
    source = f"""#include "project.cuh"
{side_struct("Key", key, None)}
struct Plan {{
    static constexpr int D = {key.shape.d};
    using Model = {model};
}};
using Layers = signpost::ProjectParams;
using Work = signpost::Project<Key, Plan>;
static_assert(Work::COLUMNS == {columns(key)}, "runtime/project.py counts alike");
static_assert(sizeof(Layers) == {ctypes.sizeof(_Project)}, "runtime/project.py has the same parameters");
extern "C" __device__ int project_threads = Work::THREADS, project_shared = Work::BYTES;
extern "C" __device__ int project_slices = Work::SLICES;
extern "C" __global__ void __launch_bounds__(Work::THREADS)
project(const __grid_constant__ Layers layers) {{ Work(layers, signpost::shared_memory()).run(); }}
"""
    return Unit("project", source, ("project",), INTEGERS, beside=True)


def units(bundle: Bundle, dtypes: Iterable[torch.dtype] = (torch.float16, torch.bfloat16)) -> list[Unit]:
    """What projects queries of a bundle's layers, for models of these types, each unit once."""
    keys = dict.fromkeys(key for key, _ in bundle.geometry.pairs if columns(key))
    return [project_unit(key, dtype) for key, dtype in product(keys, dtypes)]


def matrices(key: PageGeometry, tables: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the kernel for queries of `dtype` reads of a layer's tables of keys, by its parameters' names; matrices as
    fragments."""
    fmt, found = key.format, {}
    pieces = pieces_of_matrix(fmt.rotate, dtype)
    if fmt.rotate:
        found["rotation"] = of_heads(rotate.inverse_matrix(rotate.prepared(dict(tables))).mT, pieces)
    if fmt.sketch:
        found["sketch"] = of_heads(tables["sketch"].mT, pieces)
    if fmt.sketch and fmt.sketch.outliers:
        found["outlier_sketch"] = of_heads(tables["outlier_sketch"].mT, pieces)
        found["outlier_mask"] = tables["outlier_mask"]
    return {name: x.contiguous() for name, x in found.items()}


class Projection:
    """What projects the queries of a planned step.

    found: what `matrices` made; module: of `project_unit`; to: float32 of at least b h_q m `columns` numbers;
    processors: multiprocessors
    """

    def __init__(
        self, found: Mapping[str, Tensor], module: Module, to: Tensor, scale: float, sizes: tuple[int, int, int, int],
        processors: int,
    ):  # fmt: skip
        b, h_kv, g, m = sizes
        self._kernel, self._kept = module.kernel("project"), (found, to)
        self._threads, self._shared = module.integers["project_threads"], module.integers["project_shared"]
        slices = module.integers["project_slices"]
        tiles = -(-b * g * m // TILE)
        parts = min(tiles, max(1, SHARERS * processors // (h_kv * slices)))
        self._grid = (h_kv * parts, slices, 1)
        pointers = {name: tensor.data_ptr() for name, tensor in found.items()}
        self.params = _Project(to=to.data_ptr(), scale=scale, b=b, h_kv=h_kv, g=g, m=m, **pointers)

    def run(self, q: Tensor, follows: bool, stream: int) -> None:
        """Of q [b, h_q, m, d]; follows: as of `runtime.attention.Step.run`."""
        params = self.params
        params.q, params.follows = q.data_ptr(), int(follows)
        params.q_sequence, params.q_head, params.q_token, _ = q.stride()
        self._kernel.launch(self._grid, self._threads, self._shared, params, stream, overlap=True)
