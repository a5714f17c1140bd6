"""Means, random rotations, their laws and seeds, and what fits observe behind transforms.

U: unit roundoff of float32.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from artifacts import Center, Dense, Format, PageShape, Rotate
from calib.collect import SideFits
from calib.config import MethodConfig
from calib.fits import Side, center, rotate
from calib.fits.center import MeanFit
from calib.fits.rotate import haar, hadamard
from calib.tap import Activations
from tests.formats import cache_numbers

U = 2.0**-24
H, D, T = 2, 32, 8
MAKE = {"haar": haar, "hadamard": hadamard}
DENSE = Dense(3, "token", 0, "nuq")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def side_of(fmt, name="layers.0.key", seed=0, d=D):
    return Side(name, fmt, PageShape(fmt.t, H, d, "key"), 4 * fmt.t, MethodConfig("test", seed=seed), {})


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(0, 10_000))
@settings(max_examples=30)
def test_means_are_exact_for_any_chunks(cuts, seed):
    """To one rounding to float32; sums of float32 numbers in float64 leave n 2^-53 of the sizes, which the 2 covers."""
    x = cache_numbers((8, T, H, D), seed)
    fit = MeanFit()
    for chunk in np.split(x, sorted(cuts)):
        fit.observe(torch.from_numpy(chunk), None, None)
    mean = fit.result()["mean"]
    exact = x.astype(np.float64).mean((0, 1))
    assert mean.dtype == torch.float32
    size = np.abs(x.astype(np.float64)).mean((0, 1))
    assert (np.abs(mean.double().numpy() - exact) <= U * np.abs(exact) + 2 * 64 * 2.0**-53 * size).all()


def test_means_keep_small_numbers_beside_large_ones():
    """2^24 + 1 is no float32: added up there, the ones would be lost."""
    x = torch.ones(4, T, 1, 1)
    x[0, 0] = 2.0**24
    fit = MeanFit()
    fit.observe(x, None, None)
    assert float(fit.result()["mean"]) == np.float32((2.0**24 + 31) / 32)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_rotations_are_orthogonal(make, d):
    """Householder's QR is orthogonal to d^1.5 roundoffs of float64 (Higham, 19.3); checking adds d more per product."""
    matrix = make(d, generator(1))
    assert (matrix.shape, matrix.dtype) == ((d, d), torch.float64)
    bound = (d**1.5 + d) * 2.0**-53
    for product in (matrix @ matrix.T, matrix.T @ matrix):
        assert (product - torch.eye(d, dtype=torch.float64)).abs().max() <= bound


def test_haar_entries_have_the_law_of_a_random_direction():
    """Over seeds: mean 0, variance 1/d, fourth moment 3 / (d (d + 2)), and positive as often as negative, which QR by
    itself gets wrong on the diagonal. 4 standard errors."""
    n, d = 2000, 8
    matrices = torch.stack([haar(d, generator(seed)) for seed in range(n)])
    for i, j in ((0, 0), (3, 3), (d - 1, d - 1), (0, d - 1), (5, 2)):
        x = matrices[:, i, j]
        for power, moment in ((1, 0.0), (2, 1 / d), (4, 3 / (d * (d + 2)))):
            error = float((x**power).std()) / n**0.5
            assert abs(float((x**power).mean()) - moment) <= 4 * error, (i, j, power)
        assert abs(float((x > 0).double().mean()) - 0.5) <= 4 * 0.5 / n**0.5


@pytest.mark.parametrize("d", [1, 2, 32, 64, 256])
def test_hadamard_entries(d):
    """All +-1 / sqrt(d), the division's rounding aside; either sign in every row's first column over seeds."""
    matrix = hadamard(d, generator(3))
    assert (matrix.abs() == torch.tensor(1 / d**0.5, dtype=torch.float64)).all() or (
        (matrix.abs() * d**0.5 - 1).abs() <= 2 * 2.0**-53
    ).all()
    first = torch.stack([hadamard(d, generator(seed))[:, 0].sign() for seed in range(64)])
    assert (first.mean(0).abs() <= 4 / 64**0.5).all()  # a fair coin, 4 standard deviations


@pytest.mark.parametrize("kind", MAKE)
def test_seeds(kind):
    fmt = Format(T, DENSE, rotate=Rotate(kind))

    def made(name="layers.0.key", seed=0):
        side = side_of(fmt, name, seed)
        assert rotate.pending(side) is None
        return side.tables["rotation"]

    assert made().dtype == torch.float32
    assert torch.equal(made(), made())
    others = [made(), made(seed=1), made("layers.1.key"), made("layers.0.value"), made("layers.10.key")]
    assert len({x.numpy().tobytes() for x in others}) == len(others)


def test_a_rotation_that_is_there_is_kept():
    side = side_of(Format(T, DENSE, rotate=Rotate("haar")))
    side.tables["rotation"] = torch.eye(D)
    rotate.pending(side)
    assert torch.equal(side.tables["rotation"], torch.eye(D))


def test_nothing_is_made_for_formats_without_transforms():
    side = side_of(Format(T, DENSE))
    assert (center.pending(side), rotate.pending(side), side.tables) == (None, None, {})


class Recorder:
    """A fit that keeps what it observes."""

    title, gradients = "recorder", True

    def observe(self, pages, outliers, gradient, lane=0):
        self.pages, self.outliers, self.gradient = pages, outliers, gradient

    def result(self):
        return {}


def activations(x, gradient):
    return Activations(0, x, x, x, gradient, gradient, gradient)


def observed(fmt, x, gradient, tables):
    fits = SideFits(side_of(fmt), True)
    fits.side.tables.update(tables)
    fits.fit = Recorder()
    fits.observe(activations(x, gradient))
    return fits.fit


def transforms(kind="haar"):
    mean = torch.from_numpy(cache_numbers((64, H, D), 3).mean(0))
    return {"mean": mean, "rotation": MAKE[kind](D, generator(5)).float()}


@pytest.mark.parametrize("kind", MAKE)
def test_fisher_weights_stand_in_rotated_coordinates(kind):
    """Squared gradients that a fit gets are those of autograd by y, the numbers in pages, through x = y P^T + mean.

    The loss is not a function of single channels, so gradients that stayed where they were would show. A product of d
    terms each way: 2 d U of their sizes g |P|, and P P^T is off by 2 U |P| |P|^T; doubled by squaring.
    """
    fmt, tables = Format(T, DENSE, center=Center(), rotate=Rotate(kind)), transforms(kind)
    mix = torch.randn(D, D, dtype=torch.float64, generator=generator(6))
    y = torch.randn(4 * T, H, D, dtype=torch.float64, generator=generator(7)).requires_grad_()
    x = y @ tables["rotation"].double().T + tables["mean"].double()
    by_x, by_y = torch.autograd.grad(torch.sin(x @ mix).sum(), (x, y))
    found = observed(fmt, x.detach().float(), by_x.float(), tables)
    exact, p = by_y.reshape(4, T, H, D), tables["rotation"].double().abs()
    off = (D + 1) * U * (by_x.abs() @ p).reshape(4, T, H, D)
    assert ((found.gradient.double() - exact).abs() <= off).all()
    assert ((found.gradient.double().square() - exact.square()).abs() <= off * (2 * exact.abs() + off)).all()
    # The numbers: x rounded, the difference, the product, and P's own distance from orthogonal.
    size = (x.detach().abs() + tables["mean"].double().abs()).reshape(4, T, H, D)
    bound = (D + 4) * U * ((size @ p) + size @ p @ p.T @ p)
    assert ((found.pages.double() - y.detach().reshape(4, T, H, D)).abs() <= bound).all()


def test_a_transform_waits_for_its_tensors():
    """Means are taken of the raw numbers, though the format rotates what comes behind."""
    fmt = Format(T, DENSE, center=Center(), rotate=Rotate("haar"))
    fits = SideFits(side_of(fmt), True)
    fits.prepare()
    assert isinstance(fits.fit, MeanFit)
    x = torch.from_numpy(cache_numbers((4 * T, H, D), 1))
    fits.observe(activations(x, None))
    fits.finish(fits.fit.result())
    exact = x.double().mean(0)
    assert ((fits.side.tables["mean"].double() - exact).abs() <= 2 * U * exact.abs()).all()
    fits.prepare()
    assert fits.fit
    assert "rotation" in fits.side.tables


@pytest.mark.parametrize("kind", MAKE)
def test_rotations_go_where_the_model_is(kind):
    """Matrices are made on the CPU, pages come from the model's device; fake tensors refuse to mix them like CUDA."""
    side = side_of(Format(T, DENSE, rotate=Rotate(kind)))
    rotate.pending(side)
    with FakeTensorMode() as mode:
        tables = {"rotation": mode.from_tensor(side.tables["rotation"])}
        x = torch.zeros(2 * T, H, D, device="lazy")
        found = observed(side.format, x, x, tables)
    assert found.pages.device.type == found.gradient.device.type == "lazy"
