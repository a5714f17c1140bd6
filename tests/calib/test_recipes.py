"""Every recipe of conf/method, and combinations that nobody has published, over widths, head dimensions and GQA ratios.

The full product where it is cheap: geometry, JSON, bits and bytes; encoding and decoding for every width and head
dimension; attention where every pair of recipe, width, head dimension and ratio stands together at least once.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from hydra import compose, initialize_config_dir

from artifacts import Format, LayerFormat, PageGeometry, Rope
from artifacts.format import from_json, to_json
from calib.__main__ import CONF
from calib.config import Settings, register
from runtime import KVCache
from runtime import cache as runtime_cache
from runtime.codec import Codec, PagePool
from runtime.parts import dense
from tests.attending import expected, filled, step
from tests.formats import Case, all_pairs, cache_numbers, random_tensors

RECIPES = {path.stem: [f"method={path.stem}"] for path in sorted((CONF / "method").glob("*.yaml"))} | {
    # Widths of their own, whatever `bits` is: one a head's mean of which is no whole number, and few.
    "banded": ["method=banded", "method.key.banded.bits=2.5", "method.value.banded.bits=1.5"],
    "banded-outliers": [
        "method=banded",
        "++method.key.banded={bits: 1, most: 3}",
        "++method.key.sparse={fraction: 0.01, axis: channel, thresholds: bundle}",
        "method.value.banded.bits=3",
        "++method.value.center={}",
    ],
    "gear-on-nuq": [
        "method=kvquant",
        "++method.key.lowrank={rank: 4, block_rank: 2}",
        "++method.value.lowrank={rank: 4, block_rank: 2}",
    ],
    "gear-kcvt": ["method=gear", "method.value.dense.group=0"],
    "qjl-keys-nuq-values": [
        "method=qjl",
        "method.weights=none",
        "++method.value.dense={bits: ${bits}, axis: token, group: 0, codebook: nuq}",
    ],
    "rotated-nuq": ["method=turboquant-mse", "++method.key.dense.codebook=nuq", "++method.value.dense.codebook=nuq"],
    "nuq-qnorm": ["experiment=methods/nuq2-1-qnorm"],
    "gear-on-a-sketch": ["method=qjl", "++method.key.lowrank={rank: 2, block_rank: 1}"],
    "centred-turboquant": ["method=turboquant-prod", "++method.key.center={}", "++method.value.center={}"],
}
AXES = {
    "recipe": list(RECIPES),
    "bits": [1, 2, 3, 4, 8],
    "d": [64, 128, 256],
    "g": [1, 2, 4, 7, 8],  # query heads per kv head
}
HEADS = {1: 4, 2: 2, 4: 2, 7: 1, 8: 1}  # kv heads beside each ratio
NAMES = pytest.mark.parametrize("recipe", RECIPES)
BITS = pytest.mark.parametrize("bits", AXES["bits"])
PROMPT, MORE = 300, 140


@cache
def layer_of(recipe: str, bits: int) -> LayerFormat:
    """Formats of the recipe. A width that it fixes for itself (QJL's values, say) stays."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return Settings.of(compose("config", [*RECIPES[recipe], f"bits={bits}"])).formats(1)[0]


def case_of(recipe: str, bits: int, d: int, g: int) -> Case:
    layer = layer_of(recipe, bits)
    return Case(recipe, layer.key, layer.value, HEADS[g] * g, HEADS[g], d, Rope(d, "half", 1.0, "default"))


@BITS
@NAMES
def test_bits_and_bytes(recipe: str, bits: int) -> None:
    """What the geometry says is what a cache allocates, to the byte; bits of a bundle are page bytes * 8 / numbers."""
    layer = layer_of(recipe, bits)
    assert from_json(LayerFormat, json.loads(json.dumps(to_json(layer))), "layer") == layer
    for d in AXES["d"]:
        for g, h_kv in HEADS.items():
            bundle = case_of(recipe, bits, d, g).bundle()
            kv = KVCache(bundle, 1, PROMPT + MORE, prompt=PROMPT)
            assert kv.nbytes == bundle.geometry.cache_bytes(PROMPT + MORE, 4, PROMPT)
            for side, geometry in zip((kv.layers[0].key, kv.layers[0].value), bundle.geometry.layers[0], strict=True):
                pages, segments = side.pool.capacity, side.pool.segments.shape[0]
                assert pages == geometry.format.window.pages(PROMPT + MORE, geometry.format.t)
                assert side.pool.nbytes == pages * geometry.page_bytes + segments * h_kv * geometry.segment_bytes
                assert geometry.bits == 8 * geometry.page_bytes / (geometry.format.t * h_kv * d)
                codes = geometry.format.dense or geometry.format.banded
                assert geometry.bits >= (codes.bits if codes else 1)


@pytest.mark.parametrize("d", AXES["d"])
@BITS
@NAMES
def test_pages_decode_to_what_encoding_said(recipe: str, bits: int, d: int) -> None:
    """Out of a pool of poison, of which not one other byte changes; better than nothing; sizes as declared."""
    for side, fmt in case_of(recipe, bits, d, 1).sides():
        codec = Codec(PageGeometry.of(fmt, 2, d, side), random_tensors(fmt, 2, d, 0))
        x = torch.from_numpy(cache_numbers((2, fmt.t, 2, d), 1))
        fields, approximation = codec.encode(x, 2)
        for placed in codec.geometry.fields.values():
            assert tuple(fields[placed.field.name].shape[-len(placed.field.shape) :]) == placed.field.shape
        pool, ids = PagePool(codec.geometry, 4, segments=3), torch.tensor([2, 0])
        for store in (pool.heads, pool.records, pool.segments):
            store.fill_(0xFF)
        pool.write(ids, fields, torch.tensor([1]))
        assert torch.equal(codec.decode(pool.read(ids)), approximation)
        for store, others in ((pool.heads, [1, 3]), (pool.records, [1, 3]), (pool.segments, [0, 2])):
            assert not store.shape[0] or (store[others] == 0xFF).all()


ROWS = all_pairs(AXES)


@pytest.mark.parametrize("row", ROWS, ids=["{recipe}-{bits}bit-d{d}-g{g}".format(**row) for row in ROWS])
def test_attention(row: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page kernels and decoding to dense against float64, behind a prompt and decoded tokens that fill a page."""
    case = case_of(**row)
    kv = filled(case, [PROMPT])
    for done in range(0, MORE, 4):
        _, k, v, _ = step(case, kv.lengths, 4, 100 + done)
        kv.layers[0].append(0, k[0], v[0])
    assert kv.layers[0].key.used[0] > case.key.window.pages(PROMPT, case.key.t)
    q, k, v, _ = step(case, kv.lengths, 1, 20)
    exact, bound = expected(case, kv, 0, q[0], k[0], v[0])
    for fused in (runtime_cache.FUSED_QUERIES, 0):
        monkeypatch.setattr(runtime_cache, "FUSED_QUERIES", fused)
        out = kv.layers[0]._attend_one(0, q[0], k[0], v[0], case.d**-0.5).double().numpy()
        assert (abs(out - exact) <= bound).all(), f"fused={fused}: {(abs(out - exact) / bound).max():.2f} of the bound"


def test_every_pair_of_the_axes_stands_in_a_row() -> None:
    for one in AXES:
        for other in AXES:
            assert {(row[one], row[other]) for row in ROWS} == {
                (a, b) for a in AXES[one] for b in AXES[other] if one != other or a == b
            }


@pytest.mark.parametrize("d", AXES["d"])
@BITS
@pytest.mark.parametrize("codebook", ["uniform", "nf", "nuq"])
def test_pages_that_are_exact_encode_to_themselves(codebook: str, bits: int, d: int) -> None:
    """Codes with the bundle's scales, with its outliers: decoded pages take the same codes and the same outliers, and a
    correction of float16 that was added to a code's value comes out of the sum again."""
    key = layer_of("kvquant", bits).key
    fmt: Format = replace(key, dense=replace(key.dense, codebook=codebook))
    codec = Codec(PageGeometry.of(fmt, 2, d, "key"), random_tensors(fmt, 2, d, 0))
    fields, once = codec.encode(torch.from_numpy(cache_numbers((2, fmt.t, 2, d), 1)))
    again, twice = codec.encode(once)
    book = dense.codebook(fmt.dense, d, codec.tables, torch.device("cpu"))
    if book.unique().numel() == book.numel():  # rounded signposts may coincide: then the lower one's code is taken
        assert torch.equal(again["codes"], fields["codes"])
    assert torch.equal(twice, once)
