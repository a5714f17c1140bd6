"""Numbers that recipes leave to calibration: ranks by the spectrum of residuals, outlier channels by their share."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import Center, Dense, Format, LayerFormat, LowRank, PageGeometry, PageShape, Rotate, Sketch, Sparse
from artifacts.errors import FormatError
from calib.choices import LayerRecipe, split
from calib.collect import collect, observes
from calib.config import MethodConfig
from calib.fits import Side, lowrank, sketch
from calib.fits.lowrank import SpectrumFit, allocate, squares
from calib.fits.sketch import MaskFit
from calib.tap import Activations
from runtime.codec import Codec
from runtime.parts import sparse
from tests.formats import cache_numbers

H, D, T = 2, 64, 32
BACKBONE = Format(T, Dense(2, "channel", 32), Sparse(0.02, "channel", "online"))
GEAR = Format(T, Dense(2, "channel", 32), Sparse(0.02, "channel", "online"), lowrank=LowRank(4, 2))
VALUE = Format(T, Dense(2, "token", 32))
OPEN = {"lowrank.rank": 4.0, "lowrank.block_rank": 2.0}


def side_of(fmt, rules=OPEN, weights="none", layer=0, tables=None):
    method = MethodConfig("test", weights=weights)
    return Side(f"layers.{layer}.key", fmt, PageShape(fmt.t, H, D, "key"), 8 * fmt.t, method, tables or {}, rules)


# Rules in the place of numbers


def test_a_rule_leaves_a_stand_in_and_its_number():
    table = {
        "t": 32,
        "lowrank": {"rank": {"mean": 3.6}, "block_rank": 2},
        "sketch": {"m": 64, "outliers": {"share": 0.1}},
    }
    concrete, rules = split(table, "method.key")
    assert concrete == {"t": 32, "lowrank": {"rank": 4, "block_rank": 2}, "sketch": {"m": 64, "outliers": 1}}
    assert rules == {"lowrank.rank": 3.6, "sketch.outliers": 0.1}
    assert table["lowrank"]["rank"] == {"mean": 3.6}, "what the bundle's card will say"
    for other in ({"lowrank": {"rank": 4}}, {"lowrank": None}, {}, 7):
        assert split(other, "method.key") == (other, {})


@pytest.mark.parametrize(
    "rule", [{"mean": 0}, {"mean": -1}, {"mean": True}, {"mean": float("inf")}, {"mean": "4"}, {"share": 4}, {}]
)
def test_rules_that_make_no_sense(rule):
    with pytest.raises(FormatError, match=r"key\.lowrank\.rank=.*: a number is allowed, or \{mean: X\} with X above 0"):
        split({"lowrank": {"rank": rule}}, "key")
    with pytest.raises(FormatError, match=r"outliers=.*: a number is allowed, or \{share: X\} with X between 0 and 1"):
        split({"sketch": {"outliers": {"share": 1}}}, "key")


# Allocation


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 14))
@settings(max_examples=100)
def test_allocation_is_the_best_of_all(rows, budget):
    """Against every way to spend at most the budget; savings fall along a row, as squared singular values do."""
    gains = torch.tensor([sorted(row, reverse=True) for row in rows], dtype=torch.float64)
    found = allocate(gains, budget)
    saved = sum(float(row[:r].sum()) for row, r in zip(gains, found, strict=True))
    every = itertools.product(range(4), repeat=len(rows))
    best = max(
        sum(float(row[:r].sum()) for row, r in zip(gains, ranks, strict=True))
        for ranks in every
        if sum(ranks) <= budget
    )
    assert saved == best
    assert sum(found) <= budget
    assert sum(found) == min(budget, int((gains > 0).sum())), "all is spent that saves anything"


@pytest.mark.parametrize("n, d", [(20, 64), (64, 64), (200, 64)])
def test_squares_are_those_of_the_svd(n, d):
    """eigvalsh of a Gram matrix is off by n d 2^-53 of its largest eigenvalue (Gram product, then Weyl)."""
    x = torch.randn(3, n, d, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, d)
    exact = np.linalg.svd(x.double().numpy(), compute_uv=False) ** 2
    exact = np.pad(exact, ((0, 0), (0, d - exact.shape[1])))
    assert (np.abs(squares(x).numpy() - exact) <= 2 * n * d * 2.0**-53 * exact[:, :1]).all()


@pytest.mark.parametrize("weights", ["none", "fisher"])
def test_spectra_are_those_of_the_residual(weights):
    """SVD of what the backbone leaves, sample by sample for prompts and page by page for blocks, over the heads."""
    x = torch.from_numpy(cache_numbers((2, 3, T, H, D), 1))  # two samples of three pages
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 3.0])[:, None]
    codec = Codec(PageGeometry.of(BACKBONE, H, D, "key"), {})
    fit = SpectrumFit(side_of(GEAR, weights=weights))
    assert fit.gradients == (weights == "fisher")
    expected = {"spectrum": np.zeros(D), "block_spectrum": np.zeros(D)}
    factor = gradient.double().square().sum((0, 1, 2, 4)).numpy() if weights == "fisher" else np.ones(H)
    for sample, its_gradient in zip(x, gradient, strict=True):
        fit.observe(sample, _outliers(sample), its_gradient if fit.gradients else None)
        left = (sample - codec.encode(sample)[1]).double().numpy()
        for head in range(H):
            expected["spectrum"] += factor[head] * _energies(left[:, :, head].reshape(-1, D))
            expected["block_spectrum"] += factor[head] * sum(_energies(page) for page in left[:, :, head])
    for name, found in fit.result().items():
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found.numpy(), expected[name], rtol=1e-5, atol=1e-9 * expected[name][0])


def _outliers(pages):
    return sparse.select(BACKBONE.sparse, PageShape(T, H, D, "key"), pages, {})


def _energies(matrix):
    found = np.linalg.svd(matrix, compute_uv=False) ** 2
    return np.pad(found, (0, D - found.size))


def measured(fmt, energies, blocks=None, rules=OPEN, layer=0):
    tables = {"spectrum": _row(energies), "block_spectrum": _row(energies if blocks is None else blocks)}
    return side_of(fmt, rules, layer=layer, tables=tables)


def _row(energies):
    return torch.tensor([*energies, *[0.0] * (D - len(energies))], dtype=torch.float64)


def parts(sides):
    return [side.format.lowrank for side in lowrank.chosen(sides)]


def test_layers_get_the_rank_that_saves_most():
    """Four ranks on average over three layers: 12, by the size of the savings; blocks 6, never more than the rank."""
    sides = [measured(GEAR, [9.0] * 8), measured(GEAR, [5.0, 4.0, 3.0, 2.0]), measured(GEAR, [1.0, 0.5])]
    assert parts(sides) == [LowRank(8, 6), LowRank(4, 1), None]
    assert parts(sides[1:]) == [LowRank(4, 4), LowRank(2, 1)], "what saves nothing is not spent"
    sides = [measured(GEAR, [9.0] * 3, [9.0] * 64), measured(GEAR, [5.0] * 64, [1.0] * 64)]
    assert parts(sides) == [LowRank(3, 3), LowRank(5, 1)]


def test_fixed_numbers_beside_open_ones():
    fixed = side_of(Format(T, Dense(2, "channel", 32), lowrank=LowRank(6, 6)), {})
    assert parts([fixed, side_of(BACKBONE, {}), measured(GEAR, [1.0] * 9)]) == [LowRank(6, 6), None, LowRank(4, 2)]
    only_rank, only_blocks = {"lowrank.rank": 1.0}, {"lowrank.block_rank": 3.0}
    assert parts([measured(GEAR, [1.0] * 9, rules=only_rank)]) == [LowRank(1, 1)], "2 would be above the rank"
    assert parts([measured(GEAR, [1.0] * 9, rules=only_blocks)]) == [LowRank(4, 3)]


def test_no_rank_is_above_what_a_page_can_have():
    few = Format(16, Dense(2, "channel", 16), lowrank=LowRank(4, 2))
    assert parts([measured(few, [9.0] * D, rules={"lowrank.rank": 40.0})]) == [LowRank(16, 2)]


class FakeTap:
    """Shows given tensors [samples, n, h_kv, d], one for each layer, as keys and values."""

    def __init__(self, *layers):
        self.layers = layers

    def run(self, ids, gradients, see):
        for layer, x in enumerate(self.layers):
            x = x[int(ids[0])]
            see(Activations(layer, x, x, x, *([torch.ones_like(x)] * 3 if gradients else [None] * 3)))

    def collect(self, recipes, **method):
        samples, n = self.layers[0].shape[:2]
        ids = torch.arange(samples)[:, None].expand(-1, n)
        return collect(self, ids, recipes, MethodConfig("test", **method), H, D)


NUQ = Dense(2, "channel", 0, "nuq", "bundle")
BACKBONES = {
    "kivi": GEAR,
    "nuq": Format(T, NUQ, Sparse(0.02, "channel", "bundle"), lowrank=LowRank(4, 2)),
    "rotated": Format(T, Dense(2, "token"), lowrank=LowRank(4, 2), center=Center(), rotate=Rotate("haar")),
}


@pytest.mark.parametrize("weights", ["none", "fisher"])
@pytest.mark.parametrize("fmt", BACKBONES.values(), ids=BACKBONES)
def test_ranks_go_to_the_layer_whose_residual_has_a_spectrum(fmt, weights):
    """Behind whatever the backbone needs from the bundle; a recipe with these ranks fixed gives the same tensors."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 4 * T, H, D, generator=generator)
    # Along eight random directions, wider by far than a step of the codes elsewhere: errors that belong together.
    steep = noise + torch.randn(2, 4 * T, H, 8, generator=generator) @ torch.randn(8, D, generator=generator) * 5
    tap = FakeTap(noise, steep)
    recipe = LayerRecipe(LayerFormat(fmt, VALUE), OPEN)
    formats, tensors = tap.collect([recipe, recipe], weights=weights)
    ranks = [layer.key.lowrank.rank if layer.key.lowrank else 0 for layer in formats]
    assert sum(ranks) == 8
    assert ranks[1] > ranks[0]
    fixed, same = tap.collect([LayerRecipe(layer) for layer in formats], weights=weights)
    assert fixed == formats
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[name], same[name]) for name in same)


# Outlier channels


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 10_000), st.floats(0.001, 0.5))
@settings(max_examples=40)
def test_outlier_channels_hold_their_share(cuts, seed, share):
    """Head by head and for any chunks: exactly those whose sum of squares is at least that share of the head's."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(6, T, H, D)) * 10 ** rng.uniform(-1, 1, (H, D))).astype(np.float32)
    fit = MaskFit(Sketch(64, "orthogonal", 1, 32), share)
    for chunk in np.split(x, sorted(cuts)):
        fit.observe(torch.from_numpy(chunk), None, None)
    energies = (x.astype(np.float64) ** 2).sum((0, 1))
    shares = energies / energies.sum(1, keepdims=True)
    near = np.abs(shares - share) < 1e-9
    assert ((fit.result()["outlier_mask"].numpy() == (shares >= share)) | near).all()


def test_not_every_channel_is_an_outlier():
    """A head whose channels are alike keeps one for the main sketch; one of zeros has none."""
    x = torch.ones(2, T, H, D)
    x[:, :, 1] = 0
    fit = MaskFit(Sketch(64, "orthogonal", 1, 32), 0.5 / D)
    fit.observe(x, None, None)
    assert fit.result()["outlier_mask"].sum(1).tolist() == [D - 1, 0]


def test_layers_have_as_many_outlier_channels_as_their_richest_head():
    """One layer with three and one, one layer with none: that one has no second sketch, nor its tensors."""
    some = torch.randn(2, 2 * T, H, D, generator=torch.Generator().manual_seed(0))
    none = some.clone()
    some[..., 0, [3, 8, 21]] *= 30
    some[..., 1, 5] *= 30
    fmt = Format(T, sketch=Sketch(64, "orthogonal", 1, 32))
    recipe = LayerRecipe(LayerFormat(fmt, VALUE), {"sketch.outliers": 0.1})
    formats, tensors = FakeTap(some, none).collect([recipe, recipe])
    assert [layer.key.sketch for layer in formats] == [Sketch(64, "orthogonal", 3, 32), Sketch(64)]
    assert tensors["layers.0.key.outlier_mask"].nonzero().tolist() == [[0, 3], [0, 8], [0, 21], [1, 5]]
    assert {name for name in tensors if name.startswith("layers.1")} == {"layers.1.key.sketch"}
    sides = [side_of(fmt, {"sketch.outliers": 0.1}), side_of(Format(T, sketch=Sketch(64, "orthogonal", 8, 32)), {})]
    sides[0].tables["outlier_mask"] = torch.zeros(H, D)
    assert [side.format.sketch.outliers for side in sketch.chosen(sides)] == [0, 8]


# What needs text at all


@pytest.mark.parametrize(
    "choice, needed",
    [
        ("method=int", False),
        ("method=kivi", False),
        ("method=gear", False),
        ("method=turboquant-prod", False),
        ("method=nf", True),
        ("method=kvquant", True),
        ("method=qjl", True),
        ("experiment=methods/gear-spectrum", True),
    ],
)
def test_tuning_free_formats_observe_nothing(settings, choice, needed):
    made = settings(choice)
    assert observes(made.recipes(2), made.config.method, H, D) == needed
    if not needed:
        formats, tensors = collect(None, torch.empty(0, 1024), made.recipes(2), made.config.method, H, D)
        assert formats == made.formats(2)
        assert all(name.endswith(("rotation", "sketch")) for name in tensors)
