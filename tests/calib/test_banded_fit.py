"""Widths, codebooks and learned matrices of `banded`: laws, and float64."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import Banded, Dense, Format, LayerFormat, PageGeometry, PageShape, Rotate
from artifacts.errors import FormatError, SignpostError
from artifacts.parts.banded import BAND
from calib.choices import LayerRecipe
from calib.collect import SideFits, collect_all
from calib.config import MethodConfig
from calib.fits import Side, banded, rotate
from calib.fits.banded import BandFit, cheapest
from calib.fits.rotate import MomentFit, learned
from calib.signposts import fit_signposts
from calib.statistics import LANES
from calib.tap import Activations
from runtime.codec import Codec
from tests.formats import cache_numbers

H, D, T, N = 2, 128, 16, 4096


@given(
    st.integers(1, 4).flatmap(
        lambda most: st.lists(st.lists(st.floats(0, 100), min_size=most + 1, max_size=most + 1), min_size=1, max_size=4)
    ),
    st.data(),
)
@settings(max_examples=100)
def test_no_other_widths_cost_less(costs, data):
    """Against all of them. Costs need not fall with the width."""
    most = len(costs[0]) - 1
    words = data.draw(st.integers(0, most * len(costs)))
    every = [w for w in product(range(most + 1), repeat=len(costs)) if sum(w) == words]
    found = cheapest(costs, words)
    assert sum(found) == words

    def cost(widths):
        return sum(of_band[width] for of_band, width in zip(costs, widths, strict=True))

    assert cost(found) == pytest.approx(min(map(cost, every)), rel=1e-12)


def test_where_widths_cost_the_same_later_bands_are_narrow():
    assert cheapest([[1.0, 0.0], [1.0, 0.0]], 1) == [1, 0]


def correlated(seed: int) -> torch.Tensor:
    """Numbers [n, h_kv, d] of which a few directions have nearly all variance, as values of attention do."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(5).normal(size=(H, D, D)) * np.exp(-np.arange(D) / 12)[:, None]
    return torch.from_numpy(np.einsum("nhc,hcd->nhd", rng.normal(size=(N, H, D)), mixing) + 1.0).float()


def gradients(seed: int) -> torch.Tensor:
    """Of which some channels have ten times as much as others."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(N, H, D)) * np.exp(np.random.default_rng(6).normal(size=(H, D)))).float()


def fitted(fmt: Format, x: torch.Tensor, gradient: torch.Tensor | None, weights: str) -> Codec:
    """The codec of what all fits of the format find in values x."""
    side = Side("layers.0.value", fmt, PageShape(T, H, D, "value"), N, MethodConfig("test", weights=weights), {})
    fits, none = SideFits(side, False), torch.zeros_like(x)
    fits.prepare()
    while fits.fit is not None:
        fits.observe(Activations(0, none, none, x, none, none, gradient))
        fits.finish(fits.fit.result())
        fits.prepare()
    return Codec(PageGeometry.of(fmt, H, D, "value"), fits.side.tables)


def damage(codec: Codec, x: torch.Tensor, gradient: torch.Tensor) -> float:
    """What errors cost to second order: the mean of (g e)^2 over tokens and heads, g independent of e."""
    error = (codec.encode(x.unflatten(0, (-1, T)))[1].flatten(0, 1) - x).double()
    fisher = torch.einsum("nhc,nhd->hcd", gradient.double(), gradient.double()) / N
    return torch.einsum("nhc,hcd,nhd->", error, fisher, error).item() / N


def test_bands_and_matrices_pay():
    """At two bits: unequal widths cost less than equal ones, and far less behind the learned matrix."""
    x, g = correlated(1), gradients(2)
    costs = {}
    for name, fmt in (
        ("equal", Format(T, banded=Banded(2.0, 2))),
        ("bands", Format(T, banded=Banded(2.0))),
        ("learned", Format(T, banded=Banded(2.0), rotate=Rotate("learned"))),
    ):
        codec = fitted(fmt, x, g, "fisher_scaled")
        assert (codec.tables["widths"].sum(1) == 2 * D // BAND).all()
        costs[name] = damage(codec, x, g)
    assert costs["bands"] <= costs["equal"]
    assert costs["learned"] < 0.5 * costs["bands"]


def test_widths_follow_the_numbers_without_gradients():
    """Channels of the first band ten times as wide as those of the last: more bits for it."""
    spread = torch.tensor([10.0, 3.0, 1.0, 0.3]).repeat_interleave(BAND)
    x = torch.randn(N, H, D, generator=torch.Generator().manual_seed(0)) * spread
    widths = fitted(Format(T, banded=Banded(2.0)), x, None, "none").tables["widths"]
    assert widths.tolist() == [[4, 3, 1, 0]] * H


def test_moments_merge_to_the_same_bits():
    """In lanes, so any ranks that share the samples come to one matrix."""
    x, g = correlated(3), gradients(4)
    alone, parts = MomentFit("fisher"), [MomentFit("fisher") for _ in range(3)]
    for lane in range(LANES):
        rows = slice(lane * N // LANES, (lane + 1) * N // LANES)
        pages, gradient = x[rows].unflatten(0, (-1, T)), g[rows].unflatten(0, (-1, T))
        for fit in (alone, parts[lane % 3]):
            fit.observe(pages, None, gradient, lane)
    parts[1].absorb(parts[2].tensors())
    parts[0].absorb(parts[1].tensors())
    assert torch.equal(parts[0].result()["rotation"], alone.result()["rotation"])


def test_learned_matrices_decorrelate_in_the_metric_of_the_loss():
    """P = F^(1/2) V: P^T C P and P^-1 F P^-T are diagonal, up to the rounding to eight bits (half a unit of 127 an
    entry, so 2^-8 sqrt(d) of what stands in a row and a column) and the hundredth that is added to F."""
    x, g = correlated(5).double(), gradients(6).double()
    centred = x - x.mean(0)
    covariance, fisher = (torch.einsum("nhc,nhd->hcd", a, a) / N for a in (centred, g))
    matrix = learned(covariance, fisher)
    assert matrix.dtype == torch.int8
    assert (matrix.int().abs().amax(1) == 127).all()
    p = matrix.double()
    inside = p.mT @ covariance @ p
    size = inside.diagonal(dim1=-2, dim2=-1).sqrt()
    coherence = inside / (size[:, :, None] * size[:, None, :]) - torch.eye(D)
    assert coherence[:, :16, :16].abs().max() < 0.1  # where the variance is: the first of 128
    level = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    back = torch.linalg.inv(p)
    metric = back @ (fisher / level + 0.01 * torch.eye(D)) @ back.mT
    size = metric.diagonal(dim1=-2, dim2=-1).sqrt()
    coherence = metric / (size[:, :, None] * size[:, None, :]) - torch.eye(D)
    assert coherence.abs().max() < 0.2
    variance = (torch.einsum("nhc,hcd->nhd", centred, p) * size).square().mean(0)
    assert (variance[:, :8] > variance[:, 64:72]).all()


def test_heads_that_the_loss_does_not_see_have_a_matrix():
    covariance = torch.eye(D, dtype=torch.float64).repeat(H, 1, 1)
    matrix = learned(covariance, torch.zeros_like(covariance))
    assert torch.linalg.matrix_rank(matrix.double()).tolist() == [D] * H


def test_nothing_has_weight():
    fit = BandFit(
        Banded(2.0), "key", "fisher", 64, {"scale": torch.ones(H, D), "zero": torch.zeros(H, D)}, "layers.3.key"
    )
    fit.observe(torch.zeros(1, T, H, D), None, torch.zeros(1, T, H, D))
    with pytest.raises(SignpostError, match=r"layers\.3\.key: no number has any weight for the bands"):
        fit.result()


def test_a_band_without_weight_is_stored_as_nothing():
    """A head whose gradients are zero in one band: its bits go to the others."""
    x = torch.from_numpy(cache_numbers((N, H, D), 0))
    g = torch.ones(N, H, D)
    g[:, :, BAND : 2 * BAND] = 0.0
    tables = fitted(Format(T, banded=Banded(2.0)), x, g, "fisher").tables
    assert (tables["widths"][:, 1] == 0).all()
    assert tables["signposts"].isfinite().all()


@pytest.mark.parametrize(
    "bits, words",
    [
        ("8", r"method\.key\.banded: banded\.bits=8 must be above 0 and at most banded\.most=4"),
        ("0", r"banded\.bits=0 must be above 0"),
    ],
)
def test_recipes_with_widths_that_no_band_has(settings, bits, words):
    with pytest.raises(FormatError, match=words):
        settings("method=banded", f"bits={bits}")


def test_recipes_that_differ_in_bits_find_matrices_and_codebooks_once(monkeypatch):
    """And what each comes to is what it would find alone."""
    x, g, finding = correlated(7), gradients(8), []
    monkeypatch.setattr(rotate, "learned", lambda *given: (finding.append("matrix"), learned(*given))[1])
    monkeypatch.setattr(banded, "fit_signposts", lambda *given: (finding.append("book"), fit_signposts(*given))[1])
    key = Format(T, Dense(4, "token"))
    values = [Format(T, banded=Banded(bits), rotate=Rotate("learned")) for bits in (0.5, 2.0, 3.5)]
    recipes = [[LayerRecipe(LayerFormat(key, value))] for value in values]

    class Shown:
        def run(self, ids, gradients, see):
            see(Activations(0, x, x, x, *([g] * 3 if gradients else [None] * 3)))

    def found(recipes):
        finding.clear()
        results = collect_all(Shown(), torch.zeros(1, N, dtype=torch.int64), recipes, MethodConfig("test"), H, D)
        return [tensors for _, tensors in results], finding.count("matrix"), finding.count("book")

    together, matrices, books = found(recipes)
    assert (matrices, books) == (1, H * (D // BAND) * 5)
    for recipe, mine in zip(recipes, together, strict=True):
        ((alone,), _, _) = found([recipe])
        assert mine.keys() == alone.keys()
        assert all(torch.equal(mine[name], alone[name]) for name in mine)
