"""What streaming is held against: all numbers kept, and the optimum over single numbers."""

import numpy as np
import pytest
import torch

from benchmarks.exact_statistics import cost, kept, optimal_signposts
from calib.collect import collect
from calib.fits import dense, sparse
from calib.tap import Tap
from tests.oracles.kmeans import optimal_cost


@pytest.mark.parametrize("n", [8, 9, 31, 32, 33, 300])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_signposts_over_single_numbers_cost_the_least(n, k):
    """Prefix sums lose 2^-53 of all weight and squares at most n times."""
    rng = np.random.default_rng(n * k)
    numbers, weights = rng.standard_normal(n + 5).astype(np.float32), rng.standard_t(2, n + 5) ** 2
    weights[rng.choice(n + 5, 5, replace=False)] = 0  # n are left
    given = torch.from_numpy(numbers), torch.from_numpy(weights)
    values = optimal_signposts(*given, k)
    assert (values.diff() > 0).all()
    rounding = n * 2.0**-52 * float((weights * numbers.astype(np.float64) ** 2).sum())
    assert cost(*given, values) == pytest.approx(optimal_cost(numbers, weights, k), rel=1e-12, abs=rounding)


def test_streaming_finds_what_all_numbers_give(settings, tiny_model):
    """Thresholds to the bit, signposts at no more than a thousandth of the cost above the optimum's."""
    model, found = tiny_model("llama", torch.float32), {}
    ids = torch.randint(2, 256, (4, 200), generator=torch.Generator().manual_seed(0))
    s = settings("bits=3")
    for exact in (False, True):
        with kept(exact) as seen:
            _, found[exact] = collect(Tap(model), ids, s.recipes(2), s.config.method, 2, 32)
    excess = [fit.excess for fit in seen.signposts if fit.excess is not None]
    assert len(excess) == 4  # keys and values of two layers
    assert min(excess) >= -1e-6  # the optimum itself is rounded to float32 where it is kept
    assert max(excess) <= 1e-3
    for name, tensor in found[True].items():
        if "signposts" in name:
            torch.testing.assert_close(found[False][name], tensor, rtol=0, atol=2e-3)
        else:
            assert torch.equal(found[False][name], tensor), name


def test_fits_made_elsewhere_keep_nothing():
    before = sparse.ThresholdFit, dense.SignpostFit
    with kept():
        assert sparse.ThresholdFit is not before[0]
    assert (sparse.ThresholdFit, dense.SignpostFit) == before
