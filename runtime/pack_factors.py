"""Low-rank factors on the GPU: the unit over `cuda/pack_factors.cuh`, how its work is cut, and its three launches."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from artifacts import PageGeometry
from artifacts.geometry import SEGMENT_PAGES
from runtime.jit import Kernel, KernelError, Module, Unit
from runtime.pack_params import LAYERS_AT_ONCE, Params
from runtime.parts.lowrank import ITERATIONS, SPARE
from runtime.units import side_struct

ENTRIES = ("gram", "directions", "project")
MOST_RANK = 8  # columns of a matrix instruction
PROJECTED = 256  # tokens of a CTA: `Project::TOKENS`
ROOM = 640 << 20  # bytes of work space: what is packed at once is what fits
LAYERS_ROOM = 288 << 20  # bytes of it that several layers of prompts take at most: of few tokens they share launches
CTAS = 768  # that sum up products at least, if there are tokens enough: some for each multiprocessor
LEAST_TOKENS, MOST_SPLITS = 256, 16  # of a CTA, of a matrix


@dataclass(frozen=True)
class Launch:
    """How an entry is launched: threads and shared bytes of a CTA, and how many of them registers are divided by."""

    threads: int
    shared: int
    blocks: int


def columns(geometry: PageGeometry) -> int:
    """Columns that are iterated."""
    assert geometry.format.lowrank is not None
    return geometry.format.lowrank.rank + SPARE


def launches(geometry: PageGeometry) -> dict[str, Launch]:
    """Of each entry. The unit asserts that the kernels count threads and shared memory alike."""
    d = geometry.shape.d
    sketched = d * 32 if geometry.format.sketch else 0
    wide = -(-columns(geometry) // 8)  # blocks of eight columns
    stages = 8 * 16 * (d + 8) * 2
    kept = d // 16 * (d // 32 + 1) * 1024 if _resident(d) else 0
    eigen = 4 * 8 * wide * (8 * wide + 1)
    directions = max(d // 16 * wide * 512 + d * wide**2 * 16 + eigen + kept, stages)
    # Of `directions` as many as have shared memory and leave it registers enough: nothing spills.
    return {
        "gram": Launch(d, stages, {64: 6, 128: 3, 256: 1}[d]),
        "directions": Launch(d, directions, {64: 8 if wide == 1 else 6, 128: 4 if wide == 1 else 2, 256: 1}[d]),
        "project": Launch(128, 64 * d + sketched, 4),
    }


def _resident(d: int) -> bool:
    """Whether `directions` has what it multiplies with in shared memory, not in the work space of `gram`."""
    return d <= 128


def _gram_numbers(d: int, parts: int) -> int:
    """Numbers of work space of a matrix for its products, summed up in so many parts."""
    return 0 if parts == 1 and _resident(d) else parts * d**2


def splits(matrices: int, tokens: int) -> int:
    """Among how many CTAs the tokens of each matrix are divided: depends on shapes alone, so that sums do."""
    return max(1, min(MOST_SPLITS, tokens // LEAST_TOKENS, -(-CTAS // matrices)))


def fit(geometry: PageGeometry, others: int, pages: int) -> int:
    """How many segments of so many pages have work space within ROOM, each for so many others (sequences or layers); at
    least one."""
    shape = geometry.shape
    each = shape.h_kv * shape.d * (2 * pages * shape.t + 4 * (shape.d + 8))
    return max(1, ROOM // (each * max(others, 1)))


def work_bytes(geometry: PageGeometry, layers: int, b: int, pages: int) -> int:
    """Bytes of work space that packing takes: so many pages of b sequences, in each of so many layers, at once."""
    shape = geometry.shape
    matrices = layers * b * -(-pages // SEGMENT_PAGES) * shape.h_kv
    parts = splits(matrices, min(pages, SEGMENT_PAGES) * shape.t)
    left = 2 * layers * b * pages * shape.t * shape.h_kv * shape.d
    return left + 4 * matrices * (_gram_numbers(shape.d, parts) + 8 * shape.d)


def layers_together(geometry: PageGeometry, layers: int, b: int, pages: int) -> int:
    """How many of these layers are packed at once, so many pages of prompts in b sequences: at least one."""
    most = 1  # fewer layers may take more than some more do, whose products are summed up in fewer parts
    while most < min(layers, LAYERS_AT_ONCE) and work_bytes(geometry, most + 1, b, pages) <= LAYERS_ROOM:
        most += 1
    return -(-layers // -(-layers // most))  # as many launches, alike


def most_work_bytes(geometry: PageGeometry, layers: int, b: int, pages: int) -> tuple[int, int]:
    """Bytes of work space that a step takes at most, which packs a page of each of up to b sequences in all these
    layers, and prompts of up to so many pages of each; as `Packer.step` and `Packer.prompts` divide them."""
    step, prompt = _most(geometry, layers * b, 1), _most(geometry, b, pages)
    return step, max(prompt, min(LAYERS_ROOM, layers * prompt))


def _most(geometry: PageGeometry, others: int, pages: int) -> int:
    """As `work_bytes`, at most, of up to so many pages for up to so many others, as many at once as `fit`."""
    shape, segments = geometry.shape, -(-pages // SEGMENT_PAGES)
    tokens, matrices = min(pages, SEGMENT_PAGES) * shape.t, others * segments * shape.h_kv
    of_one = shape.h_kv * shape.d * (2 * tokens + 4 * (shape.d + 8))
    whole = others * shape.h_kv * shape.d * (2 * pages * shape.t + 4 * segments * (shape.d + 8))
    # Of a matrix there are no more parts than its tokens are worth, and of all together CTAS more than matrices.
    parts = min(matrices * (splits(1, tokens) - 1), CTAS)
    return min(whole, max(ROOM, of_one)) + 4 * parts * shape.d**2 if pages else 0


def factor_unit(name: str, geometry: PageGeometry, layers: int = 1) -> Unit:
    """The unit that finds the factors of one side of at most `layers` layers at once.

    Raises KernelError for a rank above 8 and for more than LAYERS_AT_ONCE layers.
    """
    part, shape = geometry.format.lowrank, geometry.shape
    assert part is not None
    if part.rank > MOST_RANK:
        raise KernelError(f"lowrank.rank={part.rank}: the kernels take at most {MOST_RANK}, or use the torch codec")
    if layers > LAYERS_AT_ONCE:
        raise KernelError(f"{layers} layers in one launch: parameters of {LAYERS_AT_ONCE} fit")
    numbers = {
        "H": shape.h_kv,
        "D": shape.d,
        "BLOCK_RANK": part.block_rank,
        "COLUMNS": columns(geometry),
        "ITERATIONS": ITERATIONS,
        "SEGMENT_PAGES": SEGMENT_PAGES,
    }
    lines = [
        '#include "pack_factors.cuh"',
        side_struct("Side", geometry, None),
        "struct Plan {",
        *(f"    static constexpr int {key} = {value};" for key, value in numbers.items()),
        "};",
        f"static_assert(sizeof(signpost::PackParams) == {ctypes.sizeof(Params)}, "
        '"runtime/pack_params.py has the same parameters");',
        f"struct Layers {{ signpost::PackParams layer[{layers}]; }};",
    ]
    at = "blockIdx.z" if layers > 1 else "0"
    for entry, launch in launches(geometry).items():
        kernel = f"signpost::{entry.capitalize()}<Side, Plan>"
        lines += [
            f"static_assert({kernel}::THREADS == {launch.threads} && {kernel}::BYTES == {launch.shared}, "
            '"runtime/pack_factors.py counts alike");',
            f'extern "C" __global__ void __launch_bounds__({launch.threads}, {launch.blocks})',
            f"{entry}(const __grid_constant__ Layers layers) {{ {kernel}::run(layers.layer[{at}]); }}",
        ]
    return Unit(name, "\n".join(lines) + "\n", ENTRIES)


class Factors:
    """Finds the factors of what the pack kernel left; `run` only launches."""

    def __init__(self, geometry: PageGeometry, module: Module, device: torch.device):
        self.geometry, self.device = geometry, device
        self._launches = launches(geometry)
        self._kernels = {entry: module.kernel(entry) for entry in ENTRIES}

    def fit(self, others: int, pages: int) -> int:
        """As the function `fit`."""
        return fit(self.geometry, others, pages)

    def run(
        self,
        layers: Sequence[Params],
        b: int,
        pages: int,
        launch: Callable[[Kernel, Launch, Sequence[Params], tuple[int, int, int]], None],
    ) -> None:
        """Factors of `residual` [b, pages, t, h_kv, d] of each of these layers' parameters, which the pack kernel has
        had; what a sketch follows loses their product. launch: queues a kernel with a grid. Work space is torch's.
        """
        shape = self.geometry.shape
        segments, tokens = -(-pages // SEGMENT_PAGES), min(pages, SEGMENT_PAGES) * shape.t
        matrices = segments * shape.h_kv
        parts = splits(len(layers) * b * matrices, tokens)
        gram = torch.empty(len(layers), b * matrices, _gram_numbers(shape.d, parts), device=self.device)
        directions = torch.empty(len(layers), b * matrices, shape.d, 8, device=self.device)
        for i, params in enumerate(layers):
            params.gram, params.directions = gram[i].data_ptr(), directions[i].data_ptr()
            params.pages, params.splits = pages, parts
        # As `Project::run` counts them.
        chunks = min(-(-SEGMENT_PAGES * shape.t // PROJECTED), -(-pages * shape.t // PROJECTED))
        for entry, each in (("gram", parts if parts > 1 else 0), ("directions", 1), ("project", chunks)):
            if not each:
                continue  # `directions` sums up by itself
            grid = (matrices * each, b, len(layers))
            launch(self._kernels[entry], self._launches[entry], layers, grid)
