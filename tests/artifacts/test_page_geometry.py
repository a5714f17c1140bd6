"""Page geometry: layout by rule and by hand, and what a cache costs."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import CacheGeometry, Dense, Format, LayerFormat, PageGeometry, Window
from artifacts.geometry import ALIGN
from tests.artifacts.samples import formats, kvquant


@given(formats(), st.sampled_from([64, 128, 256]), st.sampled_from([1, 2, 4, 8, 32]), st.sampled_from(["key", "value"]))
def test_fields_are_aligned_disjoint_and_inside_the_page(fmt, d, h_kv, side):
    geometry = PageGeometry.of(fmt, h_kv, d, side)
    assert geometry.head_bytes % ALIGN == geometry.record_bytes % ALIGN == 0
    ends = {"head": 0, "layer": 0}
    for placed in sorted(geometry.fields.values(), key=lambda placed: placed.offset):
        field = placed.field
        assert placed.offset % ALIGN == 0
        assert placed.offset >= ends[field.scope]
        ends[field.scope] = placed.offset + np.dtype(field.dtype).itemsize * prod(field.shape)
    assert geometry.head_bytes - ALIGN < ends["head"] <= geometry.head_bytes
    assert geometry.record_bytes - ALIGN < ends["layer"] <= geometry.record_bytes
    assert geometry.page_bytes == h_kv * geometry.head_bytes + geometry.record_bytes
    assert [placed.field for placed in geometry.fields.values()] == list(fmt.page_fields(geometry.shape))


def test_kvquant_3_bits_by_hand():
    layer = kvquant(3)
    ((key, value),) = CacheGeometry.of([layer], h_kv=2, d=128).layers
    assert key.head_bytes == value.head_bytes == 64 * 128 * 3 // 8
    # Keys: starts of 4 tiles of 2 heads and the end in 36 bytes, and ceil(1.5 * 1% of 16384) = 246 slots of 1 and of 2
    # bytes, each padded to 16.
    assert key.record_bytes == 48 + 256 + 496
    assert [key.fields[name].offset for name in ("start", "index", "correction")] == [0, 48, 304]
    assert key.page_bytes == 2 * 3072 + 800 == 6944
    # Values: scale and zero point of 64 tokens, and twice ceil(0.5% of 256) = 4 outliers for each of them.
    assert value.record_bytes == 128 + 128 + 48 + 256 + 512
    assert value.page_bytes == 2 * 3072 + 1072 == 7216
    assert key.bits == pytest.approx(8 * 6944 / 16384)
    # Bundle: scale, zero, lower, upper of 256 channels and 8 signposts; values have signposts only.
    assert (key.bundle_bytes, value.bundle_bytes) == (4 * 256 * 4 + 32, 32)


@given(st.integers(0, 5), st.integers(0, 20), st.integers(1, 9))
def test_window_counts_what_appending_one_by_one_leaves(sinks, recent, t):
    window = Window(sinks, recent)
    pages = exact = 0
    for n in range(1, 60):
        exact += n > sinks
        if exact == recent + t:
            pages, exact = pages + 1, exact - t
        assert (window.pages(n, t), window.exact(n, t)) == (pages, exact)


@pytest.mark.parametrize("n, pages", [(0, 0), (4, 0), (5 + 32 + 63, 0), (5 + 32 + 64, 1), (5 + 32 + 65, 1), (293, 4)])
def test_cache_bytes_at_the_edges(n, pages):
    fmt = Format(64, Dense(4, "token"), window=Window(sinks=5, recent=32))
    page = 2 * 64 * 128 // 2 + 2 * 64 * 2  # codes of two heads; scale and zero point of 64 tokens
    for full_bytes in (2, 4):
        buffers = (5 + 32 + 64) * 2 * 128 * full_bytes
        expected = buffers + pages * (page + 4)
        assert PageGeometry.of(fmt, 2, 128, "key").cache_bytes(n, full_bytes) == expected
        model = CacheGeometry.of([LayerFormat(fmt, fmt)] * 3, h_kv=2, d=128)
        assert model.cache_bytes(n, full_bytes) == 6 * expected


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("h_kv, n, overhead", [(32, 131072, 0.40), (2, 4096, 0.75)])
def test_kvquant_with_one_percent_outliers_keeps_its_promise(bits, h_kv, n, overhead):
    geometry = CacheGeometry.of([kvquant(bits)] * 32, h_kv, d=128)
    assert bits < geometry.bits(n) < bits + overhead


@pytest.mark.parametrize("bits, known", [(2, 2.331), (3, 3.330), (4, 4.330)])
def test_bits_of_llama_2_7b_with_one_percent_outliers(bits, known):
    assert CacheGeometry.of([kvquant(bits)] * 32, 32, d=128).bits(131072) == pytest.approx(known, abs=5e-4)


@pytest.mark.parametrize("h_kv, d, bits", [(2, 128, 0.016), (4, 128, 0.012), (8, 128, 0.012), (8, 64, 0.023)])
def test_what_the_beginnings_of_tiles_cost(h_kv, d, bits):
    """Four bytes a tile of each head, in place of four for each head."""
    key = PageGeometry.of(kvquant(2).key, h_kv, d, "key")
    sizes = [-(-4 * (lists + 1) // ALIGN) * ALIGN for lists in (h_kv * 64 // 16, h_kv)]
    assert key.fields["index"].offset == sizes[0]
    assert 8 * (sizes[0] - sizes[1]) / key.shape.numbers == pytest.approx(bits, abs=5e-4)


def test_bits_count_cache_and_bundle():
    geometry = CacheGeometry.of([kvquant(3), kvquant(2)], h_kv=2, d=128)
    bundle = 2 * 4 * 256 * 4 + 2 * (8 + 4) * 4  # scale, zero, lower, upper; signposts of keys and values
    assert geometry.bits(1000) == 8 * (geometry.cache_bytes(1000) + bundle) / (1000 * 2 * 2 * 256)
