"""Work space that packing takes on a GPU where it finds factors: what is counted is what is asked of torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Dense, Format, LayerFormat, LowRank, PageGeometry, Window
from artifacts.geometry import SEGMENT_PAGES
from runtime import KVCache, cache, pack_factors
from runtime.pack_params import Params
from runtime.pages import CacheFullError
from runtime.room import Room
from tests.formats import random_bundle


def geometry_of(h_kv=2, d=64, t=16):
    return PageGeometry.of(Format(t, Dense(2, "token"), lowrank=LowRank(4, 2)), h_kv, d, "value")


class Module:
    def kernel(self, entry):
        return entry


@pytest.mark.parametrize(
    "layers, b, pages", [(1, 1, 1), (3, 2, 1), (1, 1, 5 * SEGMENT_PAGES), (1, 2, SEGMENT_PAGES + 3)]
)
def test_work_bytes_are_those_asked_for(layers, b, pages, monkeypatch):
    geometry, asked = geometry_of(), []
    empty = torch.empty

    def counted(*shape, device):
        asked.append(4 * empty(shape, device="meta").numel())
        return empty(shape)

    monkeypatch.setattr(pack_factors.torch, "empty", counted)
    factors = pack_factors.Factors(geometry, Module(), torch.device("cpu"))
    factors.run([Params() for _ in range(layers)], b, pages, lambda *launch: None)
    left = 2 * layers * b * pages * 16 * 2 * 64  # what `Packer` asks for before it
    assert pack_factors.work_bytes(geometry, layers, b, pages) == left + sum(asked)


@given(
    st.sampled_from([(2, 64, 16), (32, 128, 64), (8, 256, 128)]), st.integers(1, 90), st.integers(1, 2000),
    st.integers(0, 20000),
)  # fmt: skip
def test_it_is_bounded(shape, layers, b, pages):
    """By ROOM, or by what a segment takes, but for products that are summed up in parts, of which there are few."""
    geometry = geometry_of(*shape)
    parts = 4 * 2 * pack_factors.CTAS * geometry.shape.d**2
    step, prompt = pack_factors.most_work_bytes(geometry, layers, b, pages)
    assert step <= max(pack_factors.ROOM, pack_factors.work_bytes(geometry, 1, 1, 1)) + parts
    assert prompt <= max(pack_factors.ROOM, pack_factors.work_bytes(geometry, 1, 1, SEGMENT_PAGES)) + parts
    assert step >= pack_factors.work_bytes(geometry, 1, 1, 1)


@given(
    st.sampled_from([(2, 64, 16), (32, 128, 64), (8, 128, 64), (8, 256, 128)]), st.integers(1, 64), st.integers(1, 300),
    st.integers(1, 600), st.data(),
)  # fmt: skip
def test_it_is_enough(shape, layers, b, pages, data):
    """For whatever number of sequences and pages, as `Packer.step` and `Packer.prompts` divide them."""
    geometry, fit, work = geometry_of(*shape), pack_factors.fit, pack_factors.work_bytes
    step, prompt = pack_factors.most_work_bytes(geometry, layers, b, pages)
    some, few = data.draw(st.integers(1, b)), data.draw(st.integers(1, pages))
    together = min(layers, fit(geometry, some, 1))
    assert work(geometry, together, min(some, fit(geometry, together, 1)), 1) <= step
    together = pack_factors.layers_together(geometry, layers, some, few)
    at_once = min(few, SEGMENT_PAGES * fit(geometry, some, SEGMENT_PAGES))
    for layers in range(1, together + 1):  # the last ones, or those that wait, are fewer
        assert work(geometry, layers, min(some, fit(geometry, layers, at_once)), at_once) <= prompt


@pytest.mark.parametrize("b", [5, 7])
def test_fewer_layers_may_take_more(b):
    """768 matrices and more are not summed up in parts, fewer are."""
    geometry = geometry_of(8, 128, 64)
    together = pack_factors.layers_together(geometry, 40, b, 11)
    most = max(pack_factors.work_bytes(geometry, layers, b, 11) for layers in range(1, together + 1))
    assert most <= pack_factors.LAYERS_ROOM


@pytest.mark.parametrize("rows", [None, 4000])
def test_parameters_from_a_sequence_on(rows):
    """Where rows say what prompt and ring have, these stay where they are."""
    params = Params(table=1000, table_stride=7, lengths=2000, offsets=3000, rows=rows)
    params.prompt.data, params.prompt.sequence = 1 << 20, 100
    params.ring.data, params.ring.sequence = 1 << 30, 50
    found = params.from_sequence(3, 2)
    assert (found.table, found.lengths, found.offsets) == (1000 + 3 * 4 * 7, 2012, 3012)
    assert (found.rows, found.segment_ids) == (rows and 4012, None)
    assert found.prompt.data == (1 << 20) + (0 if rows else 3 * 100 * 2)
    assert found.ring.data == (1 << 30) + (0 if rows else 3 * 50 * 2)
    assert (params.table, params.ring.data) == (1000, 1 << 30)


FACTORS = LayerFormat(*(Format(16, Dense(2, "token"), window=Window(1, 3), lowrank=LowRank(4, 2)) for _ in range(2)))


def test_budgets_pay_for_it():
    """Pages get what is left."""
    bundle = random_bundle([FACTORS] * 2, 4, 2, 64)
    work = cache._work_bytes(bundle, 2, 400)
    assert work > 0
    room = [Room(bundle.geometry, 2, 400, 0, 200_000 + more, 4, torch.device("cpu"), more) for more in (0, work)]
    assert room[0].free_tokens() == room[1].free_tokens() < 400
    with pytest.raises(CacheFullError, match=rf"budget=1000: full .* bytes, {work} of them work space for factors"):
        Room(bundle.geometry, 2, 400, 0, 1000, 4, torch.device("cpu"), work)


def test_caches_on_a_gpu_pay_for_it(monkeypatch):
    monkeypatch.setattr(cache, "has_kernels", lambda device: True)
    monkeypatch.setattr(cache, "_begin_kernels", lambda *bundle: None)
    bundle = random_bundle([FACTORS] * 2, 4, 2, 64)
    work = cache._work_bytes(bundle, 2, 400)
    room = Room(bundle.geometry, 2, 400, 0, 200_000, 4, torch.device("cpu"))
    assert KVCache(bundle, 2, 400, budget=200_000 + work).free_tokens() == room.free_tokens() < 400


def test_without_factors_there_is_none():
    plain = LayerFormat(Format(16, Dense(2, "token")), Format(16, Dense(2, "token")))
    assert cache._work_bytes(random_bundle([plain] * 2, 4, 2, 64), 2, 400) == 0
    assert KVCache(random_bundle([FACTORS] * 2, 4, 2, 64), 2, 400, budget=500_000).free_tokens() > 0  # on a CPU
