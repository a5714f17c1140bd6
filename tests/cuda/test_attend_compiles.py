"""Attention over pages compiles for every format of the shared list and every architecture: needs no GPU."""

import ctypes
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch

from artifacts import Banded, Format, LayerFormat, LowRank, PageGeometry, Rope, Rotate, Window
from runtime import attention, jit
from runtime.codec import PagePool
from runtime.rope import Rotation
from runtime.sources import kernel_folder
from runtime.units import (
    ALL_PLAIN,
    ONE_BLOCK,
    Scoring,
    Sharing,
    attend_unit,
    eight_warps,
    side_struct,
    two_fit,
    units,
    ways,
)
from runtime.unpaged import unpaged
from tests.cuda.compiling import check
from tests.formats import CASES, Case, kivi, kvquant, random_bundle, turned, without_outliers

ROPE = Rope(128, "half", 1.0, "default")
RECIPES = {"kvquant-4": kvquant(4), "kvquant-2": kvquant(2), "kivi-2": kivi(2)}
SMALL_PAGES = without_outliers(kvquant(2, 16))
FEW_BITS = LayerFormat(
    Format(64, banded=Banded(1.5), window=Window(1), domain="pre_rope"),
    Format(64, banded=Banded(1.5), window=Window(1), rotate=Rotate("learned")),
)
FACTORS = LayerFormat(*(replace(side, lowrank=LowRank(4, 2)) for side in (kivi(2).key, kivi(2).value)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNPOST_CACHE_DIR", str(tmp_path))


def unit_of(case: Case, dtype: str = "__half") -> jit.Unit:
    key, value = (PageGeometry.of(fmt, case.h_kv, case.d, side) for side, fmt in case.sides())
    return attend_unit(key, value, case.rope, dtype, min(16, case.h_q // case.h_kv), True)


def recipe_unit(name: str, d: int = 128, rows: int = 1, dtype: str = "__half", how: Sharing = ONE_BLOCK) -> jit.Unit:
    others = {"factors-2": FACTORS, "few-bits": FEW_BITS, "small-pages": SMALL_PAGES, "turned-3": turned(3)}
    others["outliers"] = LayerFormat(kvquant(4).key, replace(FEW_BITS.value, window=kvquant(4).key.window))
    formats = (RECIPES | others)[name]
    key, value = (PageGeometry.of(fmt, 8, d, side) for side, fmt in (("key", formats.key), ("value", formats.value)))
    return attend_unit(key, value, Rope(d, "half", 1.0, "default"), dtype, rows, True, how)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_format(case: Case) -> None:
    unit = unit_of(case)
    assert set(unit.entries) == {"attend", "merge", "write_tokens"}
    check(unit, "sm_90a")


@pytest.mark.parametrize("arch", [arch for arch in jit.ARCHS if arch != "sm_90a"])
def test_every_architecture(arch: str) -> None:
    for name, rows in (("kvquant-4", 1), ("kvquant-2", 2), ("kivi-2", 1), ("small-pages", 1)):
        check(recipe_unit(name, rows=rows), arch, assembled=rows == 1)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        ("__half", 2),
        ("__half", 8),
        ("__half", 9),
        ("__half", 16),
        ("__nv_bfloat16", 2),
        ("__nv_bfloat16", 9),
        ("float", 8),
    ],
)
def test_rows_and_model_types(dtype: str, rows: int) -> None:
    check(recipe_unit("kvquant-2", rows=rows, dtype=dtype), "sm_90a")


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("arch", "rows"), [("sm_80", 8), ("sm_80", 16), ("sm_89", 8), ("sm_90a", 16)])
def test_outliers_on_one_side_with_many_rows(side: str, arch: str, rows: int) -> None:
    formats = kvquant(4)
    plain = {other: replace(getattr(formats, other), sparse=None) for other in ("key", "value") if other != side}
    key, value = (
        PageGeometry.of(fmt, 8, 128, name)
        for name, fmt in (("key", plain.get("key", formats.key)), ("value", plain.get("value", formats.value)))
    )
    check(attend_unit(key, value, ROPE, "__half", rows, True), arch)


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("rows", [12, 16])
def test_outliers_on_both_sides_with_many_rows(rows: int, d: int) -> None:
    """Where not all rows fit a block, fewer do."""
    check(recipe_unit("kvquant-4", d, rows), "sm_89")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_two_blocks_share_a_multiprocessor(name: str, rows: int) -> None:
    """Or one, where two do not fit."""
    check(recipe_unit(name, rows=rows, how=Sharing(2)), "sm_90a")


FOUR, TWO = kvquant(4), kvquant(2)
MIXED = {
    **RECIPES,
    "no-outliers-4": without_outliers(FOUR),
    "outliers-of-keys-4": replace(FOUR, value=replace(FOUR.value, sparse=None)),
    "codes-4-outliers-2": LayerFormat(replace(FOUR.key, sparse=None), TWO.value),
    "outliers-2-codes-4": LayerFormat(TWO.key, FOUR.value),
    "turned-before-4": replace(FOUR, key=replace(FOUR.key, domain="post_rope")),
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MIXED)
def test_two_blocks_fit_where_steps_are_dealt_out_to_them(name: str, d: int) -> None:
    """The compiler counts them, and says so."""
    key, value = (PageGeometry.of(getattr(MIXED[name], side), 8, d, side) for side in ("key", "value"))
    for rows in (4, 8):
        unit = attend_unit(key, value, Rope(d, "half", 1.0, "default"), "__half", rows, False, Sharing(2))
        said = f'static_assert(Plan::BLOCKS == {1 + two_fit(MIXED[name], d)}, "as runtime/units.py says");\n'
        check(replace(unit, source=unit.source + said), "sm_90a", assembled=False)


@pytest.mark.parametrize("dtype", ["__nv_bfloat16", "float"])
def test_warps_alone_of_other_model_types(dtype: str) -> None:
    check(recipe_unit("kvquant-2", rows=1, dtype=dtype, how=Sharing(1, alone=True)), "sm_90a")


@pytest.mark.parametrize(
    ("name", "rows", "arch"),
    [
        *((name, 4, "sm_90a") for name in (*RECIPES, "factors-2")),
        *((name, 1, "sm_90a") for name in ("kvquant-4", "kivi-2")),
        *(("kvquant-2", rows, "sm_90a") for rows in (2, 8)),
        *(("kvquant-4", rows, "sm_89") for rows in (1, 4)),
        ("few-bits", 8, "sm_89"),
    ],
)
def test_warps_alone(name: str, rows: int, arch: str) -> None:
    """Or not, where a warp's ring would have no room for a query."""
    check(recipe_unit(name, rows=rows, how=Sharing(1, alone=True)), arch)


@pytest.mark.parametrize("scoring", [ALL_PLAIN, Scoring(100), Scoring(0, 5.0)], ids=str)
@pytest.mark.parametrize(("d", "rows", "dtype"), [(128, 1, "__half"), (256, 2, "__nv_bfloat16"), (64, 16, "float")])
def test_layers_in_full_precision_windows_and_caps(d: int, rows: int, dtype: str, scoring: Scoring) -> None:
    rope = Rope(d, "half", 1.0, "default")
    for formats in (None, kvquant(2), FACTORS) if d < 256 else (None, kivi(2)):
        sides = (("key", formats.key), ("value", formats.value)) if formats else ()
        pair = [PageGeometry.of(fmt, 8, d, side) for side, fmt in sides] or unpaged(8, d)
        unit = attend_unit(*pair, rope, dtype, rows, True, scoring=scoring)
        check(unit, "sm_90a")
        if not formats:
            assert jit.report(unit, "sm_90a")["attend"].spill_bytes == 0


@pytest.mark.parametrize("arch", [arch for arch in jit.ARCHS if arch != "sm_90a"])
def test_layers_in_full_precision_on_every_architecture(arch: str) -> None:
    check(
        attend_unit(*unpaged(8, 256), Rope(256, "half", 1.0, "default"), "__half", 2, True, scoring=Scoring(9, 5.0)),
        arch,
    )


def test_which_ways_layers_can_go() -> None:
    """What Python says of formats and dimensions is what the kernels do."""
    found, source = [], '#include "layout.cuh"\n'
    for case, scoring in product(CASES, (ALL_PLAIN, Scoring(100), Scoring(0, 5.0))):
        rows = min(16, case.h_q // case.h_kv)
        key, value = (PageGeometry.of(fmt, case.h_kv, case.d, side) for side, fmt in case.sides())
        can = ways(key, value, case.rope, rows, True, scoring)
        found.append(can)
        eight = case.d == 128 and (can.eight or eight_warps(LayerFormat(key.format, value.format), False))
        source += f"""namespace case{len(found)} {{
{side_struct("Key", key, case.rope, True)}
{side_struct("Value", value, None, True)}
struct Shape {{
    using Key = case{len(found)}::Key;
    using Value = case{len(found)}::Value;
    static constexpr int D = {case.d}, ROWS = {rows}, BLOCKS = 1;
    static constexpr bool ALONE = false, MULTIPLIES = true, MAKES_ROOM = true, SLIDING = {int(scoring.window > 0)};
    static constexpr bool CAPPED = {int(scoring.softcap is not None)};
}};
static_assert(signpost::Bytes<Shape>::POSSIBLE == {int(can.takes)}, "{case}");
static_assert(signpost::Limits<Shape>::ALONE == {int(can.alone)}, "{case}");
constexpr bool rotates = Key::ROTATE || Value::ROTATE;
static_assert((rotates && signpost::Limits<Shape>::MULTIPLIES) == {int(can.multiplies)}, "{case}");
static_assert((signpost::Limits<Shape>::MERGE_MULTIPLIES && {case.d} == 128) == {int(can.matrix)}, "{case}");
static_assert({int(eight or can.takes)} || {case.d} != 128 || signpost::Limits<Shape>::WIDEST > 8, "{case}");
static_assert(!{int(eight)} || signpost::Limits<Shape>::WIDEST == 8, "{case}");
}}
"""
    assert all(set(each) == {True, False} for each in zip(*found, strict=True))
    source += 'extern "C" __global__ void nothing() {}\n'
    assert jit.compile_unit(jit.Unit("takes", source, ("nothing",), ()), "sm_90a")


def test_tuned_kernels_without_outliers_do_not_spill() -> None:
    assert jit.report(recipe_unit("kivi-2"), "sm_90a")["attend"].spill_bytes == 0


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize(
    ("name", "how", "most"),
    [
        ("kivi-2", ONE_BLOCK, 160),
        ("kvquant-2", Sharing(1, beside=True), 240),
        ("kvquant-4", Sharing(1, beside=True), 240),
        ("turned-3", Sharing(1, multiplies=True), 160),
    ],
)
def test_a_block_of_the_merge_fits_beside_one_of_attention(name: str, how: Sharing, most: int, rows: int) -> None:
    """In the registers that are left in each of a multiprocessor's four parts, and in 1 KB, which each block has for
    itself anyway."""
    found = jit.report(recipe_unit(name, rows=rows, how=how), "sm_90a")
    assert found["attend"].registers <= most
    assert found["attend"].spill_bytes == 0
    assert (found["merge"].registers, found["merge"].spill_bytes, found["merge"].shared) == (32, 0, 0)


@pytest.mark.parametrize("rows", [4, 8])
def test_so_does_one_that_multiplies_by_a_matrix(rows: int) -> None:
    """Which is in shared memory, half of the columns."""
    found = jit.report(recipe_unit("few-bits", rows=rows, how=Sharing(1, beside=True)), "sm_90a")
    attend, merge = found["attend"], found["merge"]
    assert attend.registers <= 160
    assert attend.spill_bytes == 0
    assert (merge.registers, merge.spill_bytes, merge.shared) == (32, 0, 4 * 128 * (64 + 2))


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "arch"),
    [
        ("few-bits", 1, "float", "sm_100"),
        ("outliers", 1, "__half", "sm_90a"),
        ("outliers", 16, "__nv_bfloat16", "sm_90a"),
    ],
)
def test_merges_that_multiply_beside_blocks(name: str, rows: int, dtype: str, arch: str) -> None:
    check(recipe_unit(name, rows=rows, dtype=dtype, how=Sharing(1, beside=True)), arch)


@pytest.mark.parametrize("arch", jit.ARCHS)
@pytest.mark.parametrize(("rows", "dtype"), [(1, "__half"), (8, "__nv_bfloat16"), (4, "float")])
def test_blocks_that_multiply_by_rotations_themselves(rows: int, dtype: str, arch: str) -> None:
    check(recipe_unit("turned-3", rows=rows, dtype=dtype, how=Sharing(1, multiplies=True)), arch)


def test_eight_warps_leave_no_room_in_long_steps() -> None:
    assert jit.report(recipe_unit("kvquant-2", rows=4), "sm_90a")["merge"].registers > 32


STRUCTS = {
    "SideParams": attention._Side,
    "AttendParams": attention._Attend,
    "MergeParams": attention._Merge,
    "WriteSide": attention._WriteSide,
    "WriteParams": attention._Write,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_arguments_are_laid_out_as_the_kernels_see_them(name: str) -> None:
    """The same fields in the same order, and the same size by the compiler that compiles the kernels."""
    struct = STRUCTS[name]
    text = "".join((kernel_folder() / file).read_text() for file in ("params.cuh", "merge.cuh", "write.cuh"))
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S).group(1)
    code = " ".join(line.split("//")[0].strip() for line in body.splitlines())
    declared = [re.findall(r"\w+", part)[-1] for line in code.split(";") if line.strip() for part in line.split(",")]
    assert declared == [field for field, *_ in struct._fields_]
    check = f"static_assert(sizeof(signpost::{name}) == {ctypes.sizeof(struct)});\n"
    source = '#include "merge.cuh"\n#include "write.cuh"\n' + check + 'extern "C" __global__ void nothing() {}\n'
    assert jit.compile_unit(jit.Unit("layout", source, ("nothing",), ()), "sm_90a")


def test_a_bundle_compiles_each_unit_once() -> None:
    found = units(random_bundle([kvquant(3), kvquant(3), kivi(2)], 8, 2, 128))
    assert len(found) == len(set(found)) == 14  # two model types, two kinds of layers: three and four ways


@pytest.mark.parametrize("stretch", [1.0, 1.5])
def test_what_is_compiled_ahead_is_what_is_loaded(stretch: float, monkeypatch) -> None:
    """Also where a codebook leaves [-1, 1], so that pages do not go by bytes."""
    bundle = random_bundle([kvquant(3)], 8, 8, 128)
    name = "layers.0.value.signposts"
    tensors = {key: torch.as_tensor(x) for key, x in bundle.tensors.items()}
    tensors[name] = tensors[name] / tensors[name].abs().max() * stretch
    bundle = replace(bundle, tensors={key: x.numpy() for key, x in tensors.items()})
    monkeypatch.setattr(attention.PagedAttention, "_device", staticmethod(lambda device: torch.device("cpu")))
    monkeypatch.setattr(attention.PagedAttention, "_processors", lambda self: 16)
    loaded = []
    monkeypatch.setattr(jit, "load", lambda unit, device: loaded.append(unit))
    (key, value), rope = bundle.geometry.pairs[0], bundle.model.rope
    tables = [{n: torch.as_tensor(x) for n, x in bundle.side_tensors(0, side).items()} for side in ("key", "value")]
    rotation = Rotation(rope, tensors["rope.inv_freq"])
    kernels = attention.PagedAttention(key, value, *tables, rotation, 8, torch.float16, "cpu")
    for b, tokens in ((1, 300), (1, 100000), (3, 300), (500, 300), (500, 100000)):
        kernels.module(1, kernels.sharing(1, b, tokens))
    assert kernels.by_bytes == (stretch == 1.0)
    assert set(loaded) <= set(units(bundle))
    assert len(set(loaded)) == 3  # one block, two, and with warps alone, by bytes or by tiles


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": 96}, r'head dimension 96: the kernels have \(64, 128, 256\); take device="cpu"'),
        ({"h_q": 9}, r"9 query heads are not a multiple of 2 kv heads"),
        ({"dtype": "float64"}, r"dtype torch.float64: the kernels take torch.float16, torch.bfloat16, torch.float32"),
        ({"t": 48}, r"pages of 48 tokens of keys and 48 of values: the kernels take 16, 32, 64 or 128"),
        ({"rank": 16}, r"key.lowrank.rank=16: the kernels take at most 8"),
    ],
)
def test_what_the_kernels_do_not_cover(changes, message) -> None:
    formats, h_q, d = kivi(2, changes.get("t", 64)) if "t" not in changes else kvquant(2, 48), 8, changes.get("d", 128)
    key, value = formats.key, formats.value
    if "rank" in changes:
        key = replace(key, lowrank=LowRank(changes["rank"], 1))
    pair = (PageGeometry.of(key, 2, d, "key"), PageGeometry.of(value, 2, d, "value"))
    with pytest.raises(jit.KernelError, match=message):
        attention.check(*pair, changes.get("h_q", h_q), getattr(torch, changes.get("dtype", "float16")))


@pytest.mark.parametrize(
    ("lengths", "table", "message"),
    [
        ([4 + 63, 4 + 128], [[7, -1], [2, 0]], None),  # only pages that are packed are looked at
        ([4 + 64, 4 + 128], [[7, 0], [2, 0]], "page 0 of sequence 0 has id 7, the pool has pages 0 to 2"),
        ([0, 4 + 128], [[0, 0], [2, -1]], "page 1 of sequence 1 has id -1"),
        ([0, 4 + 192], [[0, 0], [2, 1]], "keys: 196 tokens of sequence 1 fill 3 pages, its block table has 2"),
        ([-1, 4 + 64], [[7, 7], [2, 7]], None),  # the first is nobody's, as where an engine fills up a batch
    ],
)
def test_block_tables_are_checked(lengths: list[int], table: list[list[int]], message: str | None) -> None:
    fmt, side = paged_side(table)
    with nullcontext() if message is None else pytest.raises(jit.KernelError, match=message):
        attention.check_tables("keys", side, fmt, lengths)


def paged_side(table: list[list[int]]) -> tuple[Format, attention.PagedSide]:
    """Keys behind four sinks, in a pool of three pages."""
    fmt = replace(kivi(2).key, window=Window(4, 0))
    pool = PagePool(PageGeometry.of(fmt, 2, 64, "key"), 3)
    window = torch.zeros(2, 64, 2, 64)
    ids = torch.tensor(table, dtype=torch.int32)
    return fmt, attention.PagedSide(pool.heads, pool.records, pool.segments, ids, window[:, :4], window)


@pytest.mark.parametrize(
    ("sliding", "behind"), [(135, 0), (134, 1), (71, 1), (70, 2), (7, 2), (6, 3), (1, 3), (400, 0), (0, 0)]
)
def test_ids_of_pages_behind_a_window_may_be_any(sliding: int, behind: int) -> None:
    """Of 201 tokens, of which the last five are exact, the next one sees so many and itself."""
    n = 4 + 3 * 64 + 5
    for page in range(3):
        fmt, side = paged_side([[-1 if i == page else 0 for i in range(3)]])
        with nullcontext() if page < behind else pytest.raises(jit.KernelError, match=f"page {page} of sequence 0"):
            attention.check_tables("keys", side, fmt, [n], sliding)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(None, "keys: a window of 50 tokens; 3 new ones that see 100 each need 102"), (50, None), (60, "need 60")],
)
def test_rings_hold_what_several_new_tokens_see(tokens: int | None, message: str | None) -> None:
    """Without pages: all of it, or all tokens that a sequence ever holds."""
    fmt = unpaged(2, 64)[0].format
    none, window = torch.empty(0, dtype=torch.uint8), torch.zeros(1, 50, 2, 64)
    side = attention.PagedSide(none, none, none, none.int().expand(1, 0), window[:, :0], window)
    with nullcontext() if message is None else pytest.raises(jit.KernelError, match=message):
        attention.check_window("keys", side, fmt, 3, 100, tokens)


@pytest.mark.parametrize(
    ("m", "message"), [(1, None), (2, "keys: a window of 69 tokens; 5 recent .* 2 new ones need 70")]
)
def test_windows_hold_all_exact_tokens(m: int, message: str | None) -> None:
    fmt = replace(kivi(2).key, window=Window(4, 5))
    pool = PagePool(PageGeometry.of(fmt, 2, 64, "key"), 3)
    window = torch.zeros(1, fmt.t + 5, 2, 64)
    side = attention.PagedSide(pool.heads, pool.records, pool.segments, torch.zeros(1, 1), window[:, :4], window)
    with nullcontext() if message is None else pytest.raises(jit.KernelError, match=message):
        attention.check_window("keys", side, fmt, m)


def test_without_a_gpu_the_error_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    formats = kivi(2)
    pair = [PageGeometry.of(f, 2, 128, side) for side, f in (("key", formats.key), ("value", formats.value))]
    rotation = Rotation(ROPE, 10000.0 ** -(torch.arange(64) / 64))
    with pytest.raises(jit.KernelError, match=r'no CUDA device .*device="cpu"'):
        attention.PagedAttention(*pair, {}, {}, rotation, 8, torch.float16, "cuda")
