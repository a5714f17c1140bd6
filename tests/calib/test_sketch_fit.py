"""Random matrices of sketches, which channels become outliers, and bundles that hold them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import (
    Bundle,
    Center,
    Dense,
    Format,
    LayerFormat,
    ModelFingerprint,
    PageShape,
    Rope,
    Rotate,
    Sketch,
    load,
)
from artifacts.errors import FormatError
from calib.choices import LayerRecipe
from calib.collect import collect
from calib.config import MethodConfig
from calib.fits import Side, sketch
from calib.fits.sketch import MaskFit, matrix
from calib.tap import Activations
from runtime import KVCache

H, D, T = 2, 64, 32
LLOYD = Dense(2, "head", 0, "lloyd", "online", "norm")
VALUE = Format(T, Dense(2, "token", 32))
OUTLIERS = Sketch(128, "orthogonal", 5, 64)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("d, m", [(64, 32), (64, 64), (64, 128), (64, 160), (128, 32), (128, 256)])
def test_orthogonal_rows(d, m):
    """Blocks of d rows, orthogonal and of norm sqrt(d): in float64 to d^1.5 + d roundoffs, then rounded to eight bits,
    by which a product of rows moves by (2 U + U^2) sum |a b| <= (2 U + U^2) d with U = 2^-8. Blocks are independent,
    so not orthogonal to each other."""
    s = matrix(m, d, "orthogonal", generator(0))
    assert (s.shape, s.dtype) == ((m, d), torch.float32)
    assert torch.equal(s.bfloat16().half().float(), s)
    for block in s.double().split(d):
        product = block @ block.T
        bound = (2 * 2.0**-8 + 2.0**-16) * d * 1.001 + d * (d**1.5 + d) * 2.0**-53
        assert (product - d * torch.eye(len(block), dtype=torch.float64)).abs().max() <= bound
    if m > d:
        between = (s[:d] @ s[d:].T).abs()
        assert between.max() > 1


def test_single_rows_are_uniform_on_the_sphere():
    """First and last row of a block, first and last channel, over seeds: mean 0, variance 1, fourth moment
    3 d / (d + 2), either sign as often. 4 standard errors."""
    n, d = 1500, 16
    drawn = torch.stack([matrix(32, d, "orthogonal", generator(seed)) for seed in range(n)]).double()
    for i, j in ((0, 0), (d - 1, d - 1), (0, d - 1), (d, 0), (2 * d - 1, 3)):
        x = drawn[:, i, j]
        for power, moment in ((1, 0.0), (2, 1.0), (4, 3 * d / (d + 2))):
            assert abs(float((x**power).mean()) - moment) <= 4 * float((x**power).std()) / n**0.5, (i, j, power)
        assert abs(float((x > 0).double().mean()) - 0.5) <= 4 * 0.5 / n**0.5


def test_gaussian_rows():
    """Moments of 65536 numbers within 4 standard errors: variances of x, x^2, x^4 are 1, 2, 96."""
    s = matrix(512, 128, "gaussian", generator(0)).double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        assert abs(float((s**power).mean()) - moment) <= 4 * (variance / s.numel()) ** 0.5
    norms = s.norm(dim=1)
    assert float(norms.std()) > 0.3, "about sqrt(1/2); rows of one norm would not be Gaussian"


def side_of(fmt, name="layers.0.key", seed=0):
    return Side(name, fmt, PageShape(fmt.t, H, D, "key"), 4 * fmt.t, MethodConfig("test", seed=seed), {})


@pytest.mark.parametrize("rows", ["orthogonal", "gaussian"])
def test_seeds(rows):
    """Keys of every layer have their own matrices, and outlier channels other ones than the rest."""
    fmt = Format(T, sketch=Sketch(64, rows, 5, 64), rotate=Rotate("haar"))

    def made(name="layers.0.key", seed=0):
        side = side_of(fmt, name, seed)
        assert isinstance(sketch.pending(side), MaskFit)
        return side.tables

    assert all(torch.equal(made()[name], made()[name]) for name in ("sketch", "outlier_sketch"))
    all_made = [made(), made(seed=1), made("layers.1.key"), made("layers.10.key")]
    drawn = [x[name].numpy().tobytes() for x in all_made for name in ("sketch", "outlier_sketch")]
    assert len(set(drawn)) == len(drawn)


def test_what_is_pending():
    side = side_of(Format(T, sketch=Sketch(64)))
    assert sketch.pending(side) is None
    assert side.tables.keys() == {"sketch"}
    assert sketch.pending(side_of(Format(T, LLOYD))) is None
    side = side_of(Format(T, sketch=OUTLIERS))
    fit = sketch.pending(side)
    fit.observe(torch.randn(4, T, H, D, generator=generator(0)), None, None)
    before = side.tables["sketch"]
    side.tables.update(fit.result())
    assert sketch.pending(side) is None
    assert side.tables["sketch"] is before


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 10_000), st.integers(1, D - 1))
@settings(max_examples=30)
def test_masks_are_the_channels_of_largest_norm(cuts, seed, outliers):
    """Head by head, for any chunks; channels differ by more than rounding, so the order is certain."""
    rng = np.random.default_rng(seed)
    size = np.stack([rng.permutation(1.2 ** np.arange(D)) for _ in range(H)])
    x = (size * rng.choice([-1, 1], (6, T, H, D)) * rng.uniform(0.95, 1.05, (6, T, H, D))).astype(np.float32)
    fit = MaskFit(Sketch(64, "orthogonal", outliers, 32))
    for chunk in np.split(x, sorted(cuts)):
        fit.observe(torch.from_numpy(chunk), None, None)
    mask = fit.result()["outlier_mask"]
    norms = np.sqrt((x.astype(np.float64) ** 2).sum((0, 1)))
    expected = np.zeros((H, D), np.uint8)
    np.put_along_axis(expected, norms.argsort(-1)[:, D - outliers :], 1, -1)
    assert mask.dtype == torch.uint8
    assert np.array_equal(mask.numpy(), expected)


def test_means_count_for_the_mask_unless_they_are_taken_off():
    """A channel far from zero has a large norm; centred, it has none, and the wide one is the outlier."""
    x = torch.randn(2, 4 * T + 3, H, D, generator=generator(0))
    x[..., 7] += 50
    x[..., 9] *= 5
    part = Sketch(64, "orthogonal", 1, 32)
    for fmt, channel in ((Format(T, sketch=part), 7), (Format(T, sketch=part, center=Center()), 9)):
        mask = collected(fmt, x)["layers.0.key.outlier_mask"]
        assert mask.nonzero()[:, 1].tolist() == [channel] * H


class FakeTap:
    """Shows given tensors [samples, n, h_kv, d] as keys and values of one layer."""

    def __init__(self, x):
        self.x = x

    def run(self, ids, gradients, see):
        x = self.x[int(ids[0])]
        see(Activations(0, x, x, x, None, None, None))


def collected(key, x, value=VALUE):
    ids = torch.arange(x.shape[0])[:, None].expand(-1, x.shape[1])
    return collect(FakeTap(x), ids, [LayerRecipe(LayerFormat(key, value))], MethodConfig("test"), H, D)[1]


FORMATS = {
    "qjl": Format(T, sketch=Sketch(128, "orthogonal", 8, 64)),
    "gaussian": Format(T, sketch=Sketch(96, "gaussian")),
    "turboquant-prod": Format(T, LLOYD, sketch=Sketch(64), rotate=Rotate("haar")),
    "all": Format(T, LLOYD, sketch=OUTLIERS, center=Center(), rotate=Rotate("hadamard")),
}


def bundle_of(fmt):
    x = torch.randn(2, 4 * T + 3, H, D, generator=generator(0)) * torch.logspace(-1, 1, D)
    rope = Rope(D, "half", 1.0, "default")
    model = ModelFingerprint("random", "RandomForCausalLM", 1, 2 * H, H, D, rope, "0", "0")
    made = {name: tensor.numpy() for name, tensor in collected(fmt, x).items()}
    made["rope.inv_freq"] = (10000.0 ** -(np.arange(0, D, 2) / D)).astype(np.float32)
    return Bundle("test", model, (LayerFormat(fmt, VALUE),), made)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_what_is_collected_makes_a_bundle(fmt, tmp_path):
    """It agrees with the format's declaration, survives the disk byte by byte, and the cache runs on it."""
    bundle = bundle_of(fmt)
    bundle.save(tmp_path / "bundle")
    loaded = load(tmp_path / "bundle")
    assert loaded.layers == bundle.layers
    assert loaded.tensors.keys() == bundle.tensors.keys()
    assert all(np.array_equal(loaded.tensors[name], x) for name, x in bundle.tensors.items())
    kv = KVCache(loaded, 1)
    q = torch.randn(1, 2 * H, T + 1, D, generator=generator(1))
    k, v = (torch.randn(1, H, T + 1, D, generator=generator(seed)) for seed in (2, 3))
    kv.layers[0].attend(q, k, v, torch.arange(T + 1)[None], None, D**-0.5)
    out = kv.layers[0].attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], torch.tensor([[T + 1]]), None, D**-0.5)
    assert torch.isfinite(out).all()
    assert kv.layers[0].key.used == [1]


def test_bundles_without_their_mask_are_refused():
    bundle = bundle_of(FORMATS["qjl"])
    tensors = {name: x for name, x in bundle.tensors.items() if "mask" not in name}
    with pytest.raises(FormatError, match=r"tensor layers\.0\.key\.outlier_mask is missing"):
        Bundle("test", bundle.model, bundle.layers, tensors)
