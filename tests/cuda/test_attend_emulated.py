"""Attention kernels on the CPU (tests/cuda/attend_emulator.h) against float64. Needs g++, no GPU.

The cases are fewer than those of tests/gpu/test_attention.py, since a block of the kernel is emulated thread by thread.
"""

import shutil
from dataclasses import replace

import pytest
import torch

from artifacts import Bundle, Center, Dense, Format, LayerFormat, LowRank, Rope, Window
from runtime.codec import Codec
from runtime.jit import KernelError
from runtime.pack import device_tables
from runtime.rope import Rotation
from runtime.units import MOST_ROWS, Scoring, Sharing, takes_alone
from tests.cuda.attention_emulated import (
    ALLOWED,
    BANDED,
    ROUNDED,
    Emulated,
    case,
    check,
    check_scene,
    in_pages_of,
    times_half,
    with_outliers,
)
from tests.formats import CASES, Case, cache_numbers, kivi, kvquant, random_bundle, without_outliers
from tests.gpu import paged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    monkeypatch.setattr(paged, "DEVICE", "cpu")
    monkeypatch.setattr(paged, "PagedAttention", Emulated)


LENGTHS = [1, 63, 65, 66, 64 * 9 + 37]
CENTRED = replace(kivi(2), value=replace(kivi(2).value, center=Center()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_widths_with_outliers(bits):
    check(case(kvquant(bits)), LENGTHS)


@pytest.mark.parametrize("g", [1, 3, 4, 12])
def test_query_heads_per_kv_head(g):
    check(case(kvquant(2), 2 * g), [700, 130])


@pytest.mark.parametrize(("g", "m"), [(12, 1), (5, 3)])
def test_fewer_rows_a_block_where_shared_memory_is_small(g, m, monkeypatch):
    """A GeForce's: its multiprocessors have 99 KB for a block."""
    monkeypatch.setattr(Emulated, "arch", 890)
    taken = []

    def built(self, rows, how, module=Emulated.module):
        found = module(self, rows, how)
        taken.append((rows, found.integers["attend_rows"]))
        return found

    monkeypatch.setattr(Emulated, "module", built)
    check(case(kvquant(4), 2 * g, d=256), [1 + m, 300, 130], m)
    assert taken == [(g * m, (min(g * m, MOST_ROWS) + 1) // 2)]


@pytest.mark.parametrize("bits", [2, 8])
def test_rope_on_a_part_of_wide_heads_where_shared_memory_is_small(bits, monkeypatch):
    monkeypatch.setattr(Emulated, "arch", 890)
    check(case(kvquant(bits), 4, d=256, rope=Rope(64, "half", 1.0, "default")), [300, 65])


@pytest.mark.parametrize("t", [16, 32])
@pytest.mark.parametrize(
    ("formats", "g", "d", "alone"),
    [
        (without_outliers(kvquant(2)), 1, 128, True),
        (without_outliers(kvquant(2)), 2, 64, False),
        (without_outliers(kvquant(3)), 1, 128, False),
        (without_outliers(kvquant(3)), 2, 64, True),
        (without_outliers(kvquant(4)), 1, 64, False),
        (BANDED, 1, 128, True),
        (BANDED, 2, 128, False),
    ],
)
def test_units_of_several_pages(t, formats, g, d, alone, monkeypatch):
    """Of which a sequence's last one may lack some."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone))
    taken = in_pages_of(t, formats)
    check(case(taken, 2 * g, d=d), [1, 17, 18 + t, 66, 113, 130, 64 * 9 + 37])


@pytest.mark.parametrize("how", [Sharing(1), Sharing(1, alone=True)], ids=["block", "alone"])
@pytest.mark.parametrize(
    ("formats", "g"),
    [(without_outliers(kvquant(3)), 1), (with_outliers(0.02), 4), (with_outliers(0.02, 4), 4)],
    ids=["bytes", "2 bits", "4 bits"],
)
def test_more_pages_than_ids_at_hand(formats, g, how, monkeypatch):
    """A warp has the ids of as many pages as it has lanes, or of twice as many, and asks for more when it has used
    them."""
    monkeypatch.setattr(Emulated, "how", how)
    monkeypatch.setattr(Emulated, "_processors", lambda self: 1)
    check(case(in_pages_of(16, formats), g, h_kv=1), [10000, 66])


@pytest.mark.parametrize("blocks", [16, 17, 32, 33, 70])
@pytest.mark.parametrize("formats", [kivi(2), CENTRED, BANDED], ids=["plain", "centred", "rotated"])
def test_results_of_many_blocks(blocks, formats, monkeypatch):
    """Of one head: as many as the merge asks for at once, as it has lanes, and more."""
    monkeypatch.setattr(Emulated, "_processors", lambda self: blocks)
    check(case(formats, 1, h_kv=1), [64 * blocks + 37])


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize(
    "formats",
    [kvquant(3), with_outliers(0.02), with_outliers(0.1, 4), BANDED, without_outliers(kvquant(2, 32))],
    ids=str,
)
def test_warps_alone(formats, g, monkeypatch):
    """Heads of fewer units than warps, sequences that several warps share, within a block and across."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    check(case(formats, 2 * g), [1, 66, 330, 130])
    check(case(formats, 2 * g, d=64), [3, 200, 64])


GROUPS_OF_TOKENS = Dense(2, "token", 32)
# Formats that do not go by bytes; windows and pages of both sides alike, and either side ahead.
BY_TILES = {
    "kivi": kivi(2),
    "factors": LayerFormat(*(replace(side, lowrank=LowRank(4, 2)) for side in (kivi(2).key, kivi(2).value))),
    "keys-behind": LayerFormat(
        Format(64, Dense(4, "channel", 32), None, Window(1, 70)), Format(32, GROUPS_OF_TOKENS, None, Window(1, 5))
    ),
    "values-behind": LayerFormat(
        Format(32, Dense(4, "channel", 32), None, Window(2)), Format(64, GROUPS_OF_TOKENS, None, Window(2, 90))
    ),
}


BEFORE_ROPE = {"kvquant": kvquant(2), "crowded": with_outliers(0.09), "banded": BANDED}


@pytest.mark.parametrize(
    ("name", "g"),
    [
        *(("kivi", g) for g in (1, 2, 4, 8)),
        *((name, g) for name, g in (("factors", 1), ("keys-behind", 4), ("values-behind", 1))),
        *(("kvquant", g) for g in (3, 8)),
        ("crowded", 4),
        ("banded", 4),
    ],
)
def test_warps_alone_by_tiles(name, g, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    formats = (BY_TILES | BEFORE_ROPE)[name]
    check(case(formats, 2 * g), [1, 66, 330, 130])
    if g != 4:
        check(case(formats, 2 * g, d=64), [3, 200, 64])


ALONE = [given for given in CASES if takes_alone(given.key, given.d, given.h_q // given.h_kv)]


@pytest.mark.parametrize("given", ALONE[::2], ids=lambda given: given.name)  # all: tests/gpu/test_attention.py
def test_warps_alone_with_any_parts(given, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    check(given, [3, 330, 200])


@pytest.mark.parametrize("formats", [with_outliers(0.02), without_outliers(kvquant(3))], ids=["outliers", "plain"])
def test_warps_alone_with_several_new_tokens(formats, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    check(case(formats, 2), [2, 66, 700, 130], 2)


@pytest.mark.parametrize("formats", [with_outliers(0.02), BANDED], ids=["outliers", "banded"])
def test_warps_alone_with_more_sequences_than_lanes(formats, monkeypatch):
    """And than a block of the merge takes at once, where values are rotated."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    check(case(formats, 2, d=64), [1, 66, 5, 130, 64, 3, 200] * 10)


def test_warps_alone_that_have_all_of_most_sequences(monkeypatch):
    """More than lanes: these write the output, and the merge adds up what they share. As root mean squares: one of the
    70 sequences misses the bound by itself, whichever way pages go (docs/kernels.md)."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    assert times_half(case(without_outliers(kvquant(2, 16)), 2), [1, 66, 5, 130, 64, 3, 200] * 10) < ALLOWED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("formats", [with_outliers(0.02), kvquant(3)], ids=["outliers", "kvquant"])
def test_warps_alone_with_other_model_types(formats, dtype, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    check_scene(paged.Scene.of(case(formats, 2, d=64), [1, 66, 5, 130, 64, 3, 200] * 5, dtype=dtype))


def test_more_sequences_than_lanes():
    """The line of units goes through them 32 at a time, and passes over those that are all other blocks'."""
    check(case(kivi(2), 2), [1, 66, 5, 130, 64, 3, 200] * 10)


WEIGHED = [64 * 200 + 70]  # so many pages a block that looking at some of them is worth while


def test_heads_are_weighed_by_their_outliers():
    check(case(with_outliers(0.02), d=64), WEIGHED)


def test_fewer_blocks_where_heads_are_few():
    check(case(with_outliers(0.02), d=64), [300])
    check(case(kivi(2)), [300])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_uniform_codes_by_bytes(bits):
    check(case(with_outliers(0.01, bits, "uniform")), LENGTHS)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("d, g, alone", [(128, 1, True), (64, 2, False), (128, 2, False), (64, 1, True)])
def test_evenly_spaced_codes_by_bytes(bits, d, g, alone, monkeypatch):
    """Also of small pages, and where one side alone has them."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone))
    plain = without_outliers(with_outliers(0.01, bits, "uniform-fit"))
    tabled = without_outliers(with_outliers(0.01, bits))
    for formats in (in_pages_of(32 if alone else 64, plain), LayerFormat(plain.key, tabled.value)):
        check(case(formats, 2 * g, d=d), [1, 65, 400, 330])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_evenly_spaced_codes_with_outliers(bits):
    check(case(with_outliers(0.05, bits, "uniform-fit"), 2), [300, 65])


@pytest.mark.parametrize("g", [1, 4, 12])
@pytest.mark.parametrize("share", [0.002, 0.06, 0.09])
def test_few_and_many_outliers(share, g):
    """Pages without any in a head, and lists longer than a warp reads ahead, or than bytes count."""
    check(case(with_outliers(share), 2 * g), [300, 65])


@pytest.mark.parametrize("g", [4, 12])
def test_more_outliers_than_fit_a_word_of_counts(g):
    """15%, which no recipe has: 128 and more in a tile. Nearly every key is rounded as one with an outlier is."""
    assert times_half(case(with_outliers(0.15), 2 * g), [300, 65, 310, 320]) < ALLOWED


@pytest.mark.parametrize("g", [1, 4, 8, 12])
@pytest.mark.parametrize("side", ["key", "value"])
def test_outliers_on_one_side_only(side, g):
    formats = with_outliers(0.02, 4)
    plain = {other: replace(getattr(formats, other), sparse=None) for other in ("key", "value") if other != side}
    check(case(replace(formats, **plain), 2 * g), [300, 65])


@pytest.mark.parametrize("g", [1, 4, 12])
def test_values_far_beyond_their_range(g, monkeypatch):
    """One in a hundred values is 10000 times larger, so a few probabilities are the output: their errors, which are the
    scores', do not average."""

    def spiky(n: int, h_kv: int, d: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.from_numpy(cache_numbers((n, h_kv, d), seed))
        spikes = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.01
        return torch.where(spikes, x, x * 1e-4 if seed >= 100 else x).to(dtype)

    monkeypatch.setattr(paged, "numbers", spiky)
    assert times_half(case(with_outliers(0.02), 2 * g), [70, 140, 290, 300, 310, 320]) < ROUNDED


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("rank", [None, LowRank(4, 2)], ids=["plain", "factors"])
def test_large_values(rank, outliers, monkeypatch):
    """Their scales are in the hundreds, and probabilities of a few tokens above one before the maximum moves."""

    def large(n: int, h_kv: int, d: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.from_numpy(cache_numbers((n, h_kv, d), seed))
        return (300 * x if seed >= 100 else x).to(dtype)

    monkeypatch.setattr(paged, "numbers", large)
    formats = with_outliers(0.02)
    value = replace(formats.value, sparse=formats.value.sparse if outliers else None, lowrank=rank)
    check(case(replace(formats, value=value), 8), [300, 490, 1500])


@pytest.mark.parametrize("g", [1, 4])
@pytest.mark.parametrize("domain", ["pre_rope", "post_rope"])
def test_channels_of_any_size_with_outliers(domain, g, monkeypatch):
    """Next to none, below and above one, and one that was always the same until now."""
    sizes = torch.tensor([0.0, 1e-6, 1e-3, 0.3, 1.0, 3.0]).repeat(128)[:128]
    sizes = sizes[torch.randperm(128, generator=torch.Generator().manual_seed(1))]

    def key_numbers(n: int, h_kv: int, d: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.from_numpy(cache_numbers((n, h_kv, d), seed))
        if seed >= 100:  # values
            return x.to(dtype)
        wild = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.01
        return torch.where(wild, 5 * x, x * sizes).to(dtype)

    plain = Case.bundle

    def bundle(self: Case, layers: int = 1) -> Bundle:
        found = plain(self, layers)
        for name in ("scale", "zero", "lower", "upper"):
            found.tensors[f"layers.0.key.{name}"] = found.tensors[f"layers.0.key.{name}"] * sizes.numpy()
        return found

    monkeypatch.setattr(paged, "numbers", key_numbers)
    monkeypatch.setattr(Case, "bundle", bundle)
    formats = with_outliers(0.02)
    given = case(replace(formats, key=replace(formats.key, domain=domain)), 2 * g)
    assert times_half(given, [70, 140, 290, 300, 310, 320]) < ROUNDED


@pytest.mark.parametrize("g", [1, 4])
def test_without_rope_on_reading(g):
    check(case(kivi(2), 2 * g), LENGTHS)


@pytest.mark.parametrize(("g", "m"), [(1, 2), (4, 4)])
def test_several_new_tokens_are_causal(g, m):
    check(case(kvquant(4), 2 * g), [m, 64 + m, 400], m)


@pytest.mark.parametrize(
    "formats",
    [without_outliers(kvquant(2)), without_outliers(kvquant(4, 32)), with_outliers(0.02), with_outliers(0.15), BANDED],
    ids=["codes", "pages-of-32", "outliers", "many", "banded"],
)
@pytest.mark.parametrize(("g", "m"), [(5, 1), (8, 1), (4, 2)])
def test_tiles_that_share_columns(formats, g, m):
    """Five to eight query rows: two tiles a turn in the same columns, of which the last one may be missing."""
    check(case(formats, 2 * g), [m, 200, 330, 1100], m)


def test_tiles_that_share_columns_with_a_cap():
    check_scene(paged.Scene.of(case(without_outliers(kvquant(2)), 16), [65, 400], scoring=Scoring(0, 20.0)))


def test_tiles_that_share_columns_where_two_blocks_share_a_multiprocessor(monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(2))
    check(case(without_outliers(kvquant(2)), 16), [200, 330, 1100])


@pytest.mark.parametrize("d", [64, 256])
def test_head_dimensions(d):
    check(case(kvquant(3), d=d), [300, 65])


@pytest.mark.parametrize("t", [16, 128])
def test_page_sizes(t):
    check(case(kvquant(3, t)), [1, t, 400])


@pytest.mark.parametrize(("of_keys", "of_values"), [(128, 0), (0, 128)])
def test_one_side_is_packed_behind_a_window_before_the_other(of_keys, of_values):
    """Pages that nobody sees are not read, even where they are of one side alone."""
    keys, values = (
        Format(64, Dense(2, axis, 32), window=Window(4, recent))
        for axis, recent in (("channel", of_keys), ("token", of_values))
    )
    scene = paged.Scene.of(case(LayerFormat(keys, values), 4), [196, 260, 400], scoring=Scoring(100))
    check_scene(scene)
    q = scene.query()
    out, gone = scene.run(q), 0
    for side, fmt in ((scene.key.paged, keys), (scene.value.paged, values)):
        for i, n in enumerate(scene.lengths.tolist()):
            behind = min((n - 100 - 4) // 64, fmt.window.pages(n - 1, 64))
            side.table[i, :behind] = 1 << 30
            gone += behind
    assert gone > 6
    assert torch.equal(scene.run(q), out)


@pytest.mark.parametrize("recent", [(5, 77)])
def test_windows_of_different_length(recent):
    formats = kivi(2)
    key, value = (replace(f, window=Window(0, r)) for f, r in zip((formats.key, formats.value), recent, strict=True))
    check(case(LayerFormat(key, value)), [1, 65, 200, 500])


@pytest.mark.parametrize("layout", [("half", 64), ("interleaved", 64)])
def test_rotary_layouts(layout):
    name, dim = layout
    check(case(kvquant(2), rope=Rope(dim, name, 1.0, "default")), [300, 70])


BUNDLE = Dense(2, "channel", 0, "nuq", "bundle")


@pytest.mark.parametrize("dim", [64, 128])  # pairs of channels in different steps of the head, and in one
@pytest.mark.parametrize(
    ("dense", "rank"),
    [(Dense(2, "token"), None), (Dense(2, "token"), LowRank(4, 2)), (BUNDLE, LowRank(4, 2))],
    ids=["tokens", "tokens-factors", "channels-factors"],
)
def test_keys_that_are_turned_are_rounded_once(dense, rank, dim):
    """As fp16 attention's are. The query is rounded too, behind its turn: twice the variance. Codes are not."""
    key = Format(64, dense, None, Window(sinks=1), "pre_rope", lowrank=rank)
    value = Format(64, Dense(2, "token"), window=Window(sinks=1))
    given = case(LayerFormat(key, value), 16, 2, rope=Rope(dim, "half", 1.0, "default"))
    assert times_half(given, [300, 318, 330, 500]) < 2**0.5


SCORINGS = [Scoring(20), Scoring(150, 5.0), Scoring(0, 5.0)]
every_scoring = pytest.mark.parametrize("scoring", SCORINGS, ids=str)


@every_scoring
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("formats", [kvquant(3), kivi(2, t=32)], ids=["kvquant", "kivi"])
def test_windows_that_slide_and_caps(formats, m, scoring):
    check(case(formats, 4, 2), [m, 66, 300, 500], m, scoring)


@every_scoring
def test_windows_and_caps_where_blocks_share_a_multiprocessor(scoring, monkeypatch):
    monkeypatch.setattr(Emulated, "how", Sharing(2))
    check(case(kivi(2, t=32), 4, 2), [1, 66, 300, 130], 1, scoring)
    check_scene(paged.Scene.unpaged((4, 2, 128), [1, 64, 300], scoring=scoring))


@pytest.mark.parametrize("formats", [kvquant(3), kivi(2, t=32)], ids=["kvquant", "kivi"])
def test_caps_where_warps_are_alone(formats, monkeypatch):
    """With a window they are not (`takes_alone`)."""
    monkeypatch.setattr(Emulated, "how", Sharing(1, alone=True))
    assert takes_alone(formats.key, 128, 2, Scoring(0, 5.0))
    check(case(formats, 4, 2), [1, 66, 300, 130], 1, Scoring(0, 5.0))


@every_scoring
@pytest.mark.parametrize("sizes", [(2, 1, 64), (4, 2, 128), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("m", [1, 3])
def test_layers_in_full_precision(sizes, m, scoring):
    check_scene(paged.Scene.unpaged(sizes, [m, 64, 65, 300, 163], m, scoring=scoring))


def test_checked_without_pages(monkeypatch):
    """There are none of which ids could be wrong."""
    monkeypatch.setenv("SIGNPOST_DEBUG", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_scene(paged.Scene.unpaged((2, 1, 64), [300, 64]))


def test_a_ring_of_too_few_tokens():
    scene = paged.Scene.unpaged((2, 1, 64), [40, 30], 2, scoring=Scoring(20))
    scene.key.paged = replace(scene.key.paged, window=scene.key.paged.window[:, 1:])
    with pytest.raises(KernelError, match="keys: a window of 20 tokens; 2 new ones that see 20 each need 21: make it"):
        scene.run(scene.query())


ONLY_OUTLIERS_AND_SKETCHES = [given for given in CASES if given.key.parts == ("sparse", "sketch")]


@pytest.mark.parametrize(
    "given", [*CASES[:-10:12], *ONLY_OUTLIERS_AND_SKETCHES, *CASES[-10:]], ids=lambda given: given.name
)  # and all of widths by band
def test_formats_of_the_shared_list(given: Case):
    few = replace(given, h_q=given.h_q // given.h_kv * 2, h_kv=2)
    check(few, [1, 5 * max(given.key.t, given.value.t) + 7])


def test_tables_on_a_device_are_what_the_geometry_says():
    """Of a learned matrix, which they are nearly all of: as the bundle has it, for packing, and its inverse; whatever
    else is there is small and, where layers share it, there once. What turns keys is not among them, and made late."""
    bundle = random_bundle([BANDED, BANDED], 32, 8, 128)
    rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"])
    held: dict[int, int] = {}
    kept = []  # or addresses come twice
    for layer, pair in enumerate(bundle.geometry.pairs):
        codecs = [Codec(side, bundle.side_tensors(layer, side.shape.side)) for side in pair]
        turns = rotation, None
        packed = [
            device_tables(codec, turn, torch.float16, "sm_90a") for codec, turn in zip(codecs, turns, strict=True)
        ]
        assert packed[0] is device_tables(codecs[0], rotation, torch.float16, "sm_90a")
        kernels = Emulated(*pair, *(codec.tables for codec in codecs), rotation, 32, torch.float16, "cpu")
        shared = {"frequencies": kernels._inv_freq, "functions": kernels._functions}
        tables = [*(codec.tables for codec in codecs), *packed, *kernels._tables, shared]
        kept.append(tables)
        for x in (x for each in tables for x in each.values()):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    predicted = bundle.geometry.resident_bytes
    assert predicted <= sum(held.values()) <= 1.1 * predicted
    assert predicted > 2 * 8 * 128 * 128 * 7
    assert kernels._turns is None
    assert kernels.turns().nbytes == 3 * 2 * 8 * 64 * 128
