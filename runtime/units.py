"""Generated CUDA units: a format as compile-time constants over the `.cuh` files of cuda/.

A unit states the two sides of a layer as structs of constants (`Key`, `Value`: what pages hold and at which offsets,
all from `artifacts.geometry`), the model's dimensions, and wraps the kernels of one `.cuh` file in extern "C" entries.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from artifacts import Bundle, Dense, Format, LayerFormat, PageGeometry, Rope
from artifacts.bundle import SIDES
from artifacts.codes import RUN
from artifacts.order import TILE
from artifacts.parts.dense import GRID
from runtime.jit import Unit
from runtime.parts import banded
from runtime.parts.dense import codebook, signpost_steps
from runtime.parts.sketch import unbiasing
from runtime.smooth import is_smooth
from runtime.unpaged import unpaged

SHORT, ANY = 2048, 1 << 31  # tokens of a sequence
# Sequences' kv heads a multiprocessor:
ROOMY, ROOMY_BY_TILES = 1 / 4, 1 / 8  # at most, where blocks leave room for the merge; by tiles, for one with a matrix
ENOUGH_GROUPED, ENOUGH = 2 / 3, 1  # more, where two blocks share it: of grouped queries in short contexts, and else
MANY, MANY_BY_TILES = 7, 12  # where warps are alone
MANY_UNSHARED, MANY_SKETCHED = 3.5, 36  # the same by tiles, if two blocks do not fit, and if keys are sketched
LITTLE = 2048  # tokens of all sequences' kv heads, for a multiprocessor
MOST_ALONE = 8192  # sequences of a batch: `Layout::MOST_CHUNKS` in cuda/layout.cuh, 32 each
MOST_ROWS = 16  # query rows per kv head that one block takes
WRITE_THREADS = 512
# What a module of attention says of itself: see `attend_unit`.
INTEGERS = (
    "attend_threads", "attend_shared", "attend_blocks", "attend_rows", "attend_workers", "attend_turns",
    "attend_projects", "attend_restores",
    "merge_threads", "merge_sequences", "merge_most", "merge_slices",
)  # fmt: skip


def scale_kind(geometry: PageGeometry) -> str:
    """Which of `sides.cuh`'s kinds of scales the codes have."""
    part = geometry.format.dense
    if geometry.format.banded:
        return "CHANNEL_BUNDLE"
    if part is None:
        return "NONE"
    if part.normalize == "norm":
        return "NORM"
    if part.axis == "channel":
        return "CHANNEL_BUNDLE" if part.scales == "bundle" else "CHANNEL_PAGE"
    return "TOKEN"


def side_struct(name: str, geometry: PageGeometry, rope: Rope | None, by_bytes: bool = False) -> str:
    """C++ struct of one side's constants, as `cuda/sides.cuh` describes them. rope: of keys stored before RoPE."""
    fmt, shape = geometry.format, geometry.shape
    dense, sparse, sketch = fmt.dense, fmt.sparse, fmt.sketch
    words = fmt.banded.words(shape) if fmt.banded else 0
    rows, _, columns = dense.scale_shape(shape) if dense else (1, 1, 1)

    def offset(field: str) -> int:
        return geometry.fields[field].offset if field in geometry.fields else -1

    def in_record(field: str) -> int:
        return int(field in geometry.fields and geometry.fields[field].field.scope == "layer")

    rotated = rope is not None and fmt.domain == "pre_rope"
    numbers = {
        "EXACT": int(not fmt.parts),
        "T": fmt.t,
        "BITS": dense.bits if dense else 0,
        "BANDED": words,
        "CODES": offset("band_codes" if words else "codes"),
        "TILE_BYTES": shape.d * TILE // RUN * dense.bits * 4 if dense else TILE * 4 * words,
        "SCALE_TOKENS": shape.t // rows,  # tokens that share a scale
        "SCALE_CHANNELS": shape.d // columns if dense and not dense.spans_heads else shape.d,
        "SCALE": offset("scale"),
        "ZERO": offset("zero"),
        "SCALE_IN_RECORD": in_record("scale"),
        "SPARSE": int(sparse is not None),
        "START": offset("start"),
        "INDEX": offset("index"),
        "CORRECTION": offset("correction"),
        "RANK": fmt.lowrank.rank if fmt.lowrank else 0,
        "LEFT": offset("left"),
        "RIGHT": offset("right"),
        "SEGMENT": offset("segment"),
        "SKETCH": sketch.m if sketch else 0,
        "SIGNS": offset("signs"),
        "NORMS": offset("norm"),
        "OUTLIER_SKETCH": sketch.outlier_m if sketch else 0,
        "OUTLIER_SIGNS": offset("outlier_signs"),
        "OUTLIER_NORMS": offset("outlier_norm"),
        "HEAD_BYTES": geometry.head_bytes,
        "RECORD_BYTES": geometry.record_bytes,
        "SEGMENT_BYTES": geometry.segment_bytes,
        "CENTER": int(fmt.center is not None),
        "ROTATE": 0 if fmt.rotate is None else 2 if fmt.rotate.kind == "learned" else 1,
        "SINKS": fmt.window.sinks,
        "RECENT": fmt.window.recent,
        "EVEN": int(evenly_spaced(fmt)),
        "MASKED": int(fmt.masked and shape.side == "value"),
        "SMOOTH": int(by_bytes),
        "ROPE_DIM": rope.dim if rope and rotated else 0,
        "INTERLEAVED": int(rope is not None and rotated and rope.layout == "interleaved"),
    }
    unit, origin = byte_grid(fmt) if by_bytes else (0.0, 0.0)
    lines = [f"    static constexpr int {key} = {value};" for key, value in numbers.items()]
    lines.append(f"    static constexpr signpost::Scales SCALES = signpost::Scales::{scale_kind(geometry)};")
    lines.append(f"    static constexpr float UNIT = {unit!r}f, ORIGIN = {origin!r}f;")
    lines.append(f"    static constexpr float SPREAD = {spread(dense)!r}f;")
    lines.append(f"    static constexpr float UNBIASING = {unbiasing(sketch, shape.d) if sketch else 0.0!r}f;")
    return "\n".join([f"struct {name} {{", *lines, "};"])


def byte_grid(fmt: Format) -> tuple[float, float]:
    """(unit, origin) where all numbers of the codebook are the origin and whole units, -127 to 127 of them (with four
    bits 0 to 127), whatever the bundle holds; else (0, 0)."""
    part = fmt.dense
    if fmt.banded:
        return 1 / banded.UNITS, 0.0
    if part is None or part.bits > 4:
        return 0.0, 0.0
    if part.codebook == "nuq":
        steps = signpost_steps(part.bits)
        return 1 / steps, -(steps + 1) / steps if part.bits == 4 else 0.0
    return 0.0, 0.0


def evenly_spaced(fmt: Format) -> bool:
    """Whether the format has codes whose numbers are evenly spaced (`Dense.evenly_spaced`)."""
    return fmt.dense is not None and fmt.dense.evenly_spaced


def spread(part: Dense | None) -> float:
    """What the numbers of a codebook are divided by to be halves that are not rounded; 1 where no number makes them so.

    They are fractions of one denominator, which becomes the next power of two.
    """
    if part is None or part.codebook not in ("uniform", "uniform-fit", "nuq", "nuq-qnorm"):
        return 1.0
    if part.codebook != "uniform" and part.bits > 4:
        return 1.0
    of_uniform = {"uniform": (1 << part.bits) - 1, "uniform-fit": GRID}
    steps = of_uniform.get(part.codebook) or signpost_steps(part.bits)
    return (1 << steps.bit_length()) / steps


def fits_bytes(inv_freq: Tensor, codebooks: Iterable[Tensor]) -> bool:
    """Whether pages may go by bytes (cuda/bytes.cuh), if their formats allow it: a few functions of the token turn the
    model's keys, and no number of a codebook exceeds 1, which those of random bundles may."""
    return is_smooth(inv_freq) and all(bool((book.abs() <= 1).all()) for book in codebooks)


class Scoring(NamedTuple):
    """What a layer does with its scores. window: how many of the newest tokens a query sees, itself included, 0: all;
    softcap: what they are bent to stay below, as `runtime.exact.capped`."""

    window: int = 0
    softcap: float | None = None


ALL_PLAIN = Scoring()


def takes_bytes(key: PageGeometry, value: PageGeometry, rope: Rope, rows: int, scoring: Scoring = ALL_PLAIN) -> bool:
    """Whether formats and dimensions allow that pages go by bytes (cuda/bytes_layout.cuh, which decides; a test holds
    the two against each other). rows: query rows per kv head."""

    def plain(side: PageGeometry) -> bool:
        fmt = side.format
        few = fmt.banded or (fmt.dense and 2 <= fmt.dense.bits <= 4)
        fills = fmt.t == 64 or (64 % fmt.t == 0 and not fmt.sparse)  # a unit, by one page or several
        whole = byte_grid(fmt)[0] > 0 or evenly_spaced(fmt)
        return bool(fills and few and whole and not (fmt.lowrank or fmt.sketch or fmt.center))

    k, v, d = key.format, value.format, key.shape.d
    turned = k.domain == "pre_rope" and rope.dim == d and rope.layout != "interleaved" and not k.rotate
    whole = v.dense is not None and (v.dense.spans_heads or v.dense.scale_shape(value.shape)[2] == 1)
    by_token = not v.sparse if v.banded else scale_kind(value) == "TOKEN" and whole and not v.rotate
    alike = (k.t, k.window.recent, k.window.sinks) == (v.t, v.window.recent, v.window.sinks)
    scaled = scale_kind(key) == "CHANNEL_BUNDLE"
    fits = d <= 128 and rows <= 2 and scoring == ALL_PLAIN
    return fits and plain(key) and plain(value) and scaled and turned and by_token and alike


def takes_alone(key: Format, d: int, rows: int, scoring: Scoring = ALL_PLAIN) -> bool:
    """Whether a warp can have sequences of its own (`Limits::ALONE` in cuda/layout.cuh, which decides, with the shared
    memory there is). rows: query rows per kv head."""
    return d <= 128 and rows <= 8 and bool(key.parts) and not scoring.window


class Sharing(NamedTuple):
    """How the work of a step is dealt out. blocks: that share a multiprocessor, one's memory latency hiding another's
    work; alone: warps have sequences of their own (cuda/alone.cuh), in one block; beside: kernels of eight warps, and
    those whose merge multiplies by a matrix, leave room for it beside them (`Layout::BESIDE` in cuda/layout.cuh);
    multiplies: blocks multiply queries and results by rotations themselves (cuda/products.cuh)."""

    blocks: int = 1
    alone: bool = False
    beside: bool = False
    multiplies: bool = False


ONE_BLOCK = Sharing()


class Ways(NamedTuple):
    """Which ways a layer's steps can go, beside by tiles with the work of a block for all of its warps. takes: pages by
    bytes; alone: warps of their own; multiplies: by blocks that rotate; two: by two blocks that share a
    multiprocessor's 228 KB; grouped: by tiles, with more than two query rows per kv head; matrix: the merge multiplies
    results by one (`Limits::MERGE_MULTIPLIES` in cuda/layout.cuh), of heads of 128 channels; eight: whatever the
    formats, blocks of these by tiles have eight warps at most (`Limits::WIDEST`)."""

    takes: bool = False
    alone: bool = False
    multiplies: bool = False
    two: bool = True
    grouped: bool = False
    matrix: bool = False
    eight: bool = False


def ways(
    key: PageGeometry, value: PageGeometry, rope: Rope, rows: int, by_bytes: bool, scoring: Scoring = ALL_PLAIN
) -> Ways:
    """Those of rows query rows per kv head. by_bytes: what `fits_bytes` says."""
    takes = by_bytes and takes_bytes(key, value, rope, rows, scoring)
    fmt, d = LayerFormat(key.format, value.format), key.shape.d
    alone, grouped = takes_alone(key.format, d, rows, scoring), not takes and rows > 2
    multiply = multiplies(fmt, d, rows)
    partly = key.format.domain == "pre_rope" and rope.layout != "interleaved" and rope.dim != d
    return Ways(
        takes, alone, multiply, takes or two_fit(fmt, d), grouped,
        matrix=d == 128 and bool(fmt.value.rotate) and not multiply,
        eight=not takes and (rows > 8 or partly),
    )  # fmt: skip


def two_fit(fmt: LayerFormat, d: int) -> bool:
    """Whether two blocks by tiles share a multiprocessor of 228 KB: not where two look-up tables for codes of four bits
    lie beside what outliers add. `Plan` in cuda/plan.cuh decides, and takes one block where two do not fit; a test
    holds the two against each other for heads of up to 128 channels and four and eight query rows.
    """
    sparse = bool(fmt.key.sparse or fmt.value.sparse)
    four = all(side.dense and side.dense.bits == 4 for side in (fmt.key, fmt.value))
    return d < 128 or not (sparse and four)


def multiplies(fmt: LayerFormat, d: int, rows: int) -> bool:
    """Whether blocks can rotate queries and results themselves (`Limits::MULTIPLIES` in cuda/layout.cuh): there are
    rotations, which all heads share, and no sketch of queries. rows: query rows per kv head."""
    kinds = {rotate.kind for rotate in (fmt.key.rotate, fmt.value.rotate) if rotate}
    return bool(kinds) and "learned" not in kinds and not fmt.key.sketch and d <= 128 and rows <= 8


def sharing(fmt: LayerFormat, can: Ways, b: int, h_kv: int, tokens: int, processors: int) -> Sharing:
    """How a batch is dealt out best.

    b: sequences; tokens: the most that one holds; processors: multiprocessors.
    Measured (docs/kernels-history.md): warps are alone where a multiprocessor has many heads, by tiles only if
    sequences are short; else, if it has more than one (of grouped queries in short contexts nearly one), two blocks
    share it, which then have fewer warps: the beginning and end of one's heads are hidden by the other. By bytes,
    outliers and codes of four bits take so much shared memory that few warps are left, which is worth it only where
    sequences are short. Eight warps leave registers to the merge where that gains more than it costs them: where a
    multiprocessor has little to do. A merge that multiplies by a matrix has room where heads are few, since beside
    blocks it reads each result twice. Blocks multiply by rotations themselves where each has few heads, for all of
    which it does that.
    """
    heads = b * h_kv / processors
    if heads >= many(fmt, can) and can.alone and b <= MOST_ALONE and (can.takes or tokens <= SHORT):
        return Sharing(1, True)
    if two_blocks(fmt, can, heads, tokens):
        return Sharing(2)
    return Sharing(1, beside=roomy(fmt, can, heads, tokens), multiplies=can.multiplies and heads <= 1)


def roomy(fmt: LayerFormat, can: Ways, heads: float, tokens: int) -> bool:
    """Whether blocks of a multiprocessor that has so many heads of sequences leave the merge room, where that makes
    them others. What that costs has been measured in long contexts for twelve warps by tiles alone."""
    few = heads <= (ROOMY_BY_TILES if can.matrix and not can.takes else ROOMY)
    turned = eight_warps(fmt, can.takes)
    short = heads * tokens <= LITTLE or not (can.takes or can.eight or turned)
    return few and short and (can.matrix or turned)


def many(fmt: LayerFormat, can: Ways) -> float:
    """How many heads of sequences a multiprocessor has where warps are alone."""
    if can.takes:
        return MANY
    if not can.two:
        return MANY_UNSHARED
    return MANY_SKETCHED if fmt.key.sketch else MANY_BY_TILES


def two_blocks(fmt: LayerFormat, can: Ways, heads: float, tokens: int) -> bool:
    """Whether two blocks share a multiprocessor that has so many heads of sequences."""
    if not can.two:
        return False
    if can.takes:
        large = any(side.sparse or (side.dense and side.dense.bits > 3) for side in (fmt.key, fmt.value))
        return heads > ENOUGH and (not large or tokens <= 2 * SHORT)
    return heads > (ENOUGH_GROUPED if can.grouped and tokens <= 2 * SHORT else ENOUGH)


def eight_warps(fmt: LayerFormat, takes: bool) -> bool:
    """Whether, for heads of 128 channels and at most eight query rows, blocks that do not share a multiprocessor have
    eight warps (`Limits::WIDEST` in cuda/layout.cuh): where RoPE turns keys, or with factors.

    takes: whether pages go by bytes.
    """
    turned = fmt.key.domain == "pre_rope" and not fmt.key.banded
    return not takes and bool(turned or fmt.key.lowrank or fmt.value.lowrank)


def spans(most: int | None) -> list[int]:
    """Numbers of tokens that steps are dealt out for, where a sequence holds at most `most` (None: any number): each
    twice the one before."""
    longest = ANY if most is None else most
    found = [SHORT]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return [*found[:-1], longest]


def sharings(fmt: LayerFormat, can: Ways) -> list[Sharing]:
    """All that `sharing` may say."""
    some = [ONE_BLOCK]
    if can.two:
        some.append(Sharing(2))
    if can.alone:
        some.append(Sharing(1, alone=True))
    room = can.matrix or eight_warps(fmt, can.takes)
    others = product({False, room}, {False, can.multiplies})
    return some + [Sharing(1, beside=beside, multiplies=own) for beside, own in sorted(others) if beside or own]


def _bool(x: object) -> str:
    return str(bool(x)).lower()


def attend_unit(
    key: PageGeometry, value: PageGeometry, rope: Rope, dtype: str, rows: int, by_bytes: bool,
    how: Sharing = ONE_BLOCK, scoring: Scoring = ALL_PLAIN,
) -> Unit:  # fmt: skip
    """Attention over pages of one layer's keys and values, the merge of its partial results, writing of new tokens.

    dtype: of queries, window and output, C++ name. rows: query rows per kv head, 1 to 16, that a block takes, if the
    architecture has the shared memory, else a half of them or less (`attend_rows` of the module says).
    `attend_projects` and `attend_restores`: blocks multiply queries, and results, by matrices.
    by_bytes: what `fits_bytes` says. how: the work is to be dealt out, if that fits: what becomes of it, say
    `attend_blocks` and `attend_workers` of the module (of a block: what leaves partial results of its own). Where
    `attend_turns` is not 0, a launch needs what `runtime.turns` makes. A block of the merge has `merge_threads` threads
    and takes `merge_sequences` sequences of a kv head at once, `merge_most` in all. scoring: its numbers come with each
    launch.
    """
    d = key.shape.d
    source = f"""#include "attend.cuh"
#include "merge.cuh"
#include "write.cuh"
{side_struct("Key", key, rope, by_bytes)}
{side_struct("Value", value, None, by_bytes)}
struct Shape {{
    using Key = ::Key;
    using Value = ::Value;
    using Model = {dtype};
    static constexpr int D = {d}, ROWS = {rows}, BLOCKS = {how.blocks};
    static constexpr bool ALONE = {_bool(how.alone)}, MAKES_ROOM = {_bool(how.beside)};
    static constexpr bool MULTIPLIES = {_bool(how.multiplies)};
    static constexpr bool SLIDING = {_bool(scoring.window)}, CAPPED = {_bool(scoring.softcap)};
}};
using Plan = signpost::Plan<Shape>;
extern "C" __device__ int attend_threads = Plan::THREADS, attend_shared = Plan::SHARED;
extern "C" __device__ int attend_blocks = Plan::BLOCKS, attend_rows = Plan::ROWS, attend_workers = Plan::WORKERS;
extern "C" __device__ int attend_turns = Plan::TURNS;
extern "C" __device__ int attend_projects = signpost::Layout<Plan::Config>::PROJECTS;
extern "C" __device__ int attend_restores = signpost::Layout<Plan::Config>::RESTORES;
using Merging = signpost::Merge<Shape>;
extern "C" __device__ int merge_threads = Merging::THREADS, merge_sequences = Merging::SEQUENCES;
extern "C" __device__ int merge_most = Merging::MOST, merge_slices = Merging::SLICES;
extern "C" __global__ void __maxnreg__(Plan::REGISTERS)
attend(const __grid_constant__ signpost::AttendParams params) {{
    extern __shared__ __align__(128) unsigned char shared[];
    signpost::attend<Shape>(params, shared);
}}
extern "C" __global__ void __launch_bounds__(Merging::THREADS, Merging::BLOCKS)
merge(const __grid_constant__ signpost::MergeParams params) {{
    __shared__ __align__(16) float shared[Merging::SHARED];
    Merging::run(params, shared);
}}
extern "C" __global__ void __launch_bounds__({WRITE_THREADS})
write_tokens(const __grid_constant__ signpost::WriteParams params) {{
    signpost::Writer<Shape>::run(params);
}}
"""
    return Unit("attend", source, ("attend", "merge", "write_tokens"), INTEGERS, beside=True)


def _codebooks(bundle: Bundle, layer: int) -> Iterator[Tensor]:
    """Codebooks of a layer's keys and values; none of one in full precision."""
    for side, geometry in zip(SIDES, bundle.geometry.layers[layer] or (), strict=False):
        if geometry.format.dense:
            tables = {name: torch.as_tensor(x) for name, x in bundle.side_tensors(layer, side).items()}
            yield codebook(geometry.format.dense, geometry.shape.d, tables, torch.device("cpu"))


TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}  # of models, in C++


def units(
    bundle: Bundle,
    dtypes: Iterable[torch.dtype] = (torch.float16, torch.bfloat16),
    batches: Iterable[tuple[int, int, int]] | None = None,
) -> list[Unit]:
    """What a decode step of one token launches for this bundle, for models of these types, each unit once.

    batches: (sequences, tokens that one holds at most, multiprocessors); None: of any batch.
    """
    model = bundle.model
    inv_freq = torch.from_numpy(bundle.tensors["rope.inv_freq"])
    rows = min(MOST_ROWS, model.h_q // model.h_kv)
    found: dict[Unit, None] = {}
    for layer, pair in enumerate(bundle.geometry.layers):
        key, value = pair or unpaged(model.h_kv, model.d)
        scoring, by_bytes = Scoring(model.window(layer), model.softcap), fits_bytes(inv_freq, _codebooks(bundle, layer))
        formats, can = LayerFormat(key.format, value.format), ways(key, value, model.rope, rows, by_bytes, scoring)
        dealt = sharings(formats, can)
        if batches is not None:
            dealt = sorted({sharing(formats, can, b, key.shape.h_kv, n, grid) for b, n, grid in batches})
        for dtype, how in product(dtypes, dealt):
            found[attend_unit(key, value, model.rope, TYPES[dtype], rows, by_bytes, how, scoring)] = None
    return list(found)
