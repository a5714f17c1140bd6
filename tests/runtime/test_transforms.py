"""What is done to vectors before the parts see them, and undone after: centring, rotations; TurboQuant's squared error.

U: unit roundoff of float32. A product of d terms in any order is off by at most d U times the sum of their sizes.
"""

import numpy as np
import pytest
import torch

from artifacts import Center, Dense, Format, PageGeometry, Rotate
from calib.fits.rotate import haar, hadamard
from runtime.codec import Codec
from runtime.parts import MODULES
from tests.formats import cache_numbers
from tests.oracles.attention import attention, float32_bound

U = 2.0**-24
H_KV, D = 2, 64
MAKE = {"haar": haar, "hadamard": hadamard}


def tables_of(kind="haar", d=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.from_numpy(cache_numbers((256, H_KV, d), 4).mean(0))
    return {"mean": mean, "rotation": MAKE[kind](d, generator).float()}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_rotation_forward_against_float64_and_back(kind, d):
    """Row vectors times P; back again by two products, and by how far P in float32 is from orthogonal: entries are
    rounded to U of themselves, so P P^T by at most 2 U |P| |P|^T."""
    tables, x = tables_of(kind, d), torch.from_numpy(cache_numbers((3, 8, H_KV, d), 1))
    forward = MODULES["rotate"].forward(x, tables)
    p, exact = tables["rotation"].double(), x.double()
    assert ((forward - exact @ p).abs() <= d * U * (exact.abs() @ p.abs())).all()
    back = MODULES["rotate"].inverse(forward, tables)
    # 2 d for the two products, 2 for the entries of P, 1 for all second orders.
    bound = (2 * d + 3) * U * (exact.abs() @ p.abs() @ p.abs().T)
    assert ((back - exact).abs() <= bound).all()


def test_centring_forward_and_back():
    """One rounding each way: forward of the difference, back of the sum. Head by head, channel by channel."""
    tables, x = tables_of(), torch.from_numpy(cache_numbers((3, 8, H_KV, D), 1))
    forward = MODULES["center"].forward(x, tables)
    exact = x.double() - tables["mean"].double()
    assert ((forward - exact).abs() <= U * exact.abs()).all()
    back = MODULES["center"].inverse(forward, tables)
    assert ((back - x).abs() <= U * (exact.abs() + x.abs()) * (1 + U)).all()


@pytest.mark.parametrize("kind", MAKE)
def test_gradients_follow_the_transforms(kind):
    """d loss / d ((x - mean) P), by autograd in float64, from d loss / d x."""
    tables = {name: table.double() for name, table in tables_of(kind).items()}
    weights = torch.randn(4, H_KV, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = torch.randn(4, H_KV, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    # The loss as a function of the numbers in pages: x = y P^-1 + mean, without the code under test.
    x = torch.linalg.solve(tables["rotation"].T, y.transpose(-1, -2)).transpose(-1, -2) + tables["mean"]
    x.retain_grad()
    (torch.sin(x) * weights).sum().backward()
    found = x.grad
    for name in ("center", "rotate"):
        found = MODULES[name].forward_gradient(found, tables)
    # P is a float64 copy of float32 entries, so its inverse is its transpose up to 2 U |P| |P|^T (above).
    bound = 3 * U * (x.grad.abs() @ tables["rotation"].abs() @ tables["rotation"].abs().T @ tables["rotation"].abs())
    assert ((found - y.grad).abs() <= bound).all()


@pytest.mark.parametrize("kind", [None, *MAKE])
def test_softmax_does_not_see_centring_nor_rotation(kind):
    """Attention with queries and keys as pages would hold them, nothing quantized, against plain keys; in float64.

    Both vectors of a product are rotated, each to d u of its terms, and P is orthogonal to d^1.5 + d roundoffs u
    (test_transform_fits.py), so a product is off by (3 d + d^1.5 + 1) u of |q| |P| |P|^T |k|, and twice that of the
    mean, which takes part in the difference. `float32_bound` is first order, so it scales with u.
    """
    d, n, scaling = D, 50, D**-0.5
    tables = {"mean": tables_of()["mean"].double()}
    tables |= {"rotation": MAKE[kind](d, torch.Generator().manual_seed(0))} if kind else {}
    q = torch.randn(2 * H_KV, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.5
    k, v = (torch.from_numpy(cache_numbers((n, H_KV, d), seed)).double() for seed in (1, 2))
    held, turned = MODULES["center"].forward(k, tables), q
    p = tables.get("rotation", torch.eye(d, dtype=torch.float64)).abs()
    if kind:
        held, turned = (MODULES["rotate"].forward(x, tables) for x in (held, q))
    assert (held - k).abs().max() > 0.1, "something must have been done"
    k, held, v = (x.transpose(0, 1).numpy() for x in (k, held, v))
    exact, found = (attention(a.numpy(), b, v, scaling) for a, b in ((q, k), (turned, held)))
    size = (np.abs(k) + 2 * tables["mean"].abs().numpy()[:, None]) @ (p @ p.T).numpy()
    error = (3 * d + d**1.5 + 1) * U * size
    bound = float32_bound(q.numpy(), k, v, scaling, error, np.zeros_like(v)) * 2.0**-53 / U
    assert (np.abs(found - exact) <= bound).all()


def directions(n, d, t, seed=0):
    """Pages [n / t, t, 1, d] of vectors of random directions whose lengths differ by three orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator)
    lengths = 10 ** (3 * torch.rand(n, 1, generator=generator) - 1)
    return (x / x.norm(dim=-1, keepdim=True) * lengths).reshape(-1, t, 1, d)


def relative_error(fmt, x, tables=None):
    """Mean of |x - decoded|^2 / |x|^2 over vectors."""
    codec = Codec(PageGeometry.of(fmt, 1, x.shape[-1], "key"), tables or {})
    return float(((codec.encode(x)[1] - x).square().sum(-1) / x.square().sum(-1)).mean())


@pytest.mark.parametrize("bits, theory", [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turboquant_mse_has_the_error_of_lloyd_max(bits, theory):
    """Figures of Lloyd-Max for a Gaussian (Max 1960, table I). The coordinates' law has kurtosis 3 - 6 / (d + 2), and
    its distortion is smaller by the order of 1 / d, below 1 / 32 here; the sample (4096 vectors of 128 numbers) adds
    less than 1%, the norm in float16 (2^-11)^2 / 3."""
    d = 128
    fmt = Format(64, Dense(bits, "head", 0, "lloyd", "online", "norm"))
    found = relative_error(fmt, directions(4096, d, 64))
    assert theory * (1 - 4 / d - 0.01) <= found <= theory * 1.01


@pytest.mark.parametrize("kind", MAKE)
def test_rotating_gives_any_direction_the_error_of_a_random_one(kind):
    """Vectors along axes, the worst for Lloyd-Max, cost about what random directions cost once they are rotated.

    One matrix and d fixed vectors leave the mean of d rows (haar), each with a standard deviation of a few percent;
    entries of a hadamard matrix are all 1 / sqrt(d), one of the law's typical values: below 1 anyway.
    """
    d = 128
    dense, x = Dense(2, "head", 0, "lloyd", "online", "norm"), torch.eye(d).reshape(2, 64, 1, d)
    plain = relative_error(Format(64, dense), x)
    rotation = MAKE[kind](d, torch.Generator().manual_seed(0)).float()
    rotated = relative_error(Format(64, dense, rotate=Rotate(kind)), x, {"rotation": rotation})
    assert plain > 0.3
    if kind == "haar":
        assert rotated == pytest.approx(0.1175, rel=0.05)
    else:
        inner = Codec(PageGeometry.of(Format(64, dense), 1, d, "key"), {})
        values = inner.encode(torch.full((1, 64, 1, d), d**-0.5))[1]
        assert rotated == pytest.approx(float((values[0, 0, 0] - d**-0.5).square().sum()), rel=1e-4)


def test_formats_apply_transforms_in_order():
    """Centred first, then rotated: what the parts encode is (x - mean) P, and decoding undoes both."""
    tables = tables_of()
    dense = Dense(8, "head", 0, "lloyd", "online", "norm")
    x = torch.from_numpy(cache_numbers((1, 32, H_KV, D), 1))
    fmt = Format(32, dense, center=Center(), rotate=Rotate("haar"))
    both = Codec(PageGeometry.of(fmt, H_KV, D, "value"), tables)
    inner = Codec(PageGeometry.of(Format(32, dense), H_KV, D, "value"), {})
    fields, decoded = both.encode(x)
    expected, numbers = inner.encode((x - tables["mean"]) @ tables["rotation"])
    assert all(torch.equal(fields[name], expected[name]) for name in expected)
    assert torch.equal(decoded, numbers.contiguous() @ tables["rotation"].T + tables["mean"])
