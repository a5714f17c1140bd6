"""Sketches: what pages store, QJL's lemmas 2 and 5, scores from bytes on the CPU, and whole steps of attention.

U, H: unit roundoffs of float32 and float16; LEAST: half of float16's smallest number.
"""

import copy
from functools import cache
from math import ceil, erfc, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import Bundle, Center, Dense, Format, LayerFormat, ModelFingerprint, PageGeometry, Rope, Rotate, Sketch
from calib.fits.rotate import haar
from calib.fits.sketch import matrix
from runtime import KVCache
from runtime import cache as runtime_cache
from runtime.codec import Codec, PagePool
from runtime.cpu import PageReader
from runtime.parts.sketch import unbiasing
from tests.formats import cache_numbers
from tests.oracles import sketch as oracle
from tests.oracles.attention import attention, float32_bound

U, H, LEAST = 2.0**-24, 2.0**-11, 2.0**-25
ROWS = ("orthogonal", "gaussian")
LLOYD = Dense(2, "head", 0, "lloyd", "online", "norm")
PLAIN, OUTLIERS = Sketch(128), Sketch(128, "gaussian", 5, 64)
FORMATS = {
    "plain": Format(32, sketch=PLAIN),
    "gaussian": Format(32, sketch=Sketch(96, "gaussian")),
    "few-rows": Format(32, sketch=Sketch(32)),
    "outliers": Format(32, sketch=OUTLIERS),
    "dense": Format(32, LLOYD, sketch=PLAIN),
    "turboquant-prod": Format(32, LLOYD, sketch=Sketch(64), rotate=Rotate("haar")),
    "all": Format(32, LLOYD, sketch=OUTLIERS, center=Center(), rotate=Rotate("haar")),
}
all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


@cache
def tensors(fmt, h_kv, d, seed=0):
    """What `fmt` wants from the bundle; other channels are outliers in every head."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    if fmt.center:
        made["mean"] = torch.from_numpy(cache_numbers((64, h_kv, d), 5).mean(0))
    if fmt.rotate:
        made["rotation"] = haar(d, generator).float()
    part = fmt.sketch
    if part:
        made["sketch"] = matrix(part.m, d, part.rows, generator)
    if part and part.outliers:
        made["outlier_sketch"] = matrix(part.outlier_m, d, part.rows, generator)
        order = torch.rand(h_kv, d, generator=generator).argsort(-1)
        made["outlier_mask"] = (order < part.outliers).to(torch.uint8)
    return made


def codec_of(fmt, h_kv=2, d=64, seed=0):
    return Codec(PageGeometry.of(fmt, h_kv, d, "key"), tensors(fmt, h_kv, d, seed))


def pages_of(fmt, h_kv=2, d=64, p=3):
    return torch.from_numpy(cache_numbers((p, fmt.t, h_kv, d), 1))


def sketches(codec):
    """Each sketch of the format: prefix of its fields, S, and its channels as 0 and 1, [h_kv, d]."""
    tables, h_kv, d = codec.tables, codec.geometry.shape.h_kv, codec.geometry.shape.d
    if "outlier_mask" not in tables:
        return [("", tables["sketch"].double().numpy(), np.ones((h_kv, d)))]
    mask = tables["outlier_mask"].double().numpy()
    return [
        ("", tables["sketch"].double().numpy(), 1 - mask),
        ("outlier_", tables["outlier_sketch"].double().numpy(), mask),
    ]


def stored_signs(words):
    """uint32 words [..., m / 32] as +1 and -1 [..., m], the first sign in the lowest bit."""
    raw = np.ascontiguousarray(words.numpy()).astype("<i4").view(np.uint8)
    return 2.0 * np.unpackbits(raw, axis=-1, bitorder="little") - 1


@pytest.mark.parametrize("name", ["plain", "gaussian", "few-rows", "outliers"])
def test_fields_are_the_papers_signs_and_norms(name):
    """A sign may differ from float64 only where |<s, k>| is below d U |s||k|, what float32 may be off by."""
    fmt = FORMATS[name]
    codec, x = codec_of(fmt), pages_of(fmt, p=1)
    fields, _ = codec.encode(x)
    for prefix, s, channels in sketches(codec):
        found, norms = stored_signs(fields[f"{prefix}signs"])[0], fields[f"{prefix}norm"][0]
        assert norms.dtype == torch.float16
        for h, j in np.ndindex(2, fmt.t):
            k = x[0, j, h].double().numpy() * channels[h]
            certain = np.abs(s @ k) > 64 * U * (np.abs(s) @ np.abs(k))
            assert certain.sum() >= len(s) - 1, "next to nothing may hide behind rounding"
            assert (found[h, j] == oracle.signs(s, k))[certain].all()
            norm = np.linalg.norm(k)
            assert abs(float(norms[h, j]) - norm) <= (H + 64 * U) * norm


@all_formats
def test_decoding_gives_what_encoding_said(fmt):
    """Also out of the pool's bytes, between pages of poison, of which not one byte changes."""
    codec = codec_of(fmt)
    fields, approximation = codec.encode(pages_of(fmt))
    assert approximation.dtype == torch.float32
    assert torch.equal(codec.decode(fields), approximation)
    pool, ids = PagePool(codec.geometry, 5), torch.tensor([3, 0, 2])
    pool.heads.fill_(0xFF)
    pool.write(ids, fields)
    assert torch.equal(codec.decode(pool.read(ids)), approximation)
    assert (pool.heads[[1, 4]] == 0xFF).all()


@pytest.mark.parametrize("name", ["plain", "gaussian", "few-rows", "outliers"])
def test_products_with_what_is_decoded_are_the_papers_estimate(name):
    """m + 3 roundings of decoding: the sum over m rows, and two products with the constant and the norm."""
    fmt = FORMATS[name]
    codec = codec_of(fmt)
    fields, decoded = codec.encode(pages_of(fmt, p=1))
    q = np.random.default_rng(3).normal(size=64)
    for h, j in np.ndindex(2, fmt.t):
        expected = bound = 0.0
        for prefix, s, channels in sketches(codec):
            c = oracle.factor(fmt.sketch.rows, 64)
            sign, norm = stored_signs(fields[f"{prefix}signs"])[0, h, j], float(fields[f"{prefix}norm"][0, h, j])
            expected += oracle.estimate(s, q * channels[h], sign, norm, c)
            bound += (len(s) + 3) * U * oracle.estimate_size(s, q * channels[h], norm, c)
        assert abs(q @ decoded[0, j, h].double().numpy() - expected) <= bound


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d, m, outlier_m", [(64, 32, 32), (64, 64, 32), (64, 256, 96), (128, 256, 128)])
def test_bits_of_a_page(rows, d, m, outlier_m):
    """m sign bits and a float16 norm per token, key head and sketch, and nothing else."""
    for part, bits in (
        (Sketch(m, rows), m + 16),
        (Sketch(m, rows, 8, outlier_m), m + 16 + outlier_m + 16),
    ):
        geometry = PageGeometry.of(Format(128, sketch=part), 2, d, "key")
        assert geometry.bits == bits / d
        assert geometry.record_bytes == 0


@all_formats
def test_zeros_stay_zeros(fmt):
    """Norm 0, so the estimate is exactly 0 whatever the signs; centred, zero is the mean."""
    codec = codec_of(fmt)
    x = torch.zeros(1, fmt.t, 2, 64)
    fields, decoded = codec.encode(x + codec.tables.get("mean", 0))
    assert all((fields[name] == 0).all() for name in fields if "norm" in name)
    assert torch.equal(decoded, x + codec.tables.get("mean", 0))
    assert all((fields[name] == -1).all() for name in fields if "signs" in name), "a sign bit says: not negative"


@pytest.mark.parametrize("name", ["plain", "outliers"])
@pytest.mark.parametrize("size", [65504.0, 1e5, 1e30])
def test_norms_beyond_float16_saturate(name, size):
    """Even where the squares overflow float32, the stored norm is float16's largest number and estimates are finite."""
    fmt = FORMATS[name]
    codec = codec_of(fmt)
    fields, decoded = codec.encode(torch.full((1, fmt.t, 2, 64), size))
    assert (fields["norm"] == 65504).all()
    assert torch.isfinite(decoded).all()
    assert (fields["signs"] == codec.encode(torch.ones(1, fmt.t, 2, 64))[0]["signs"]).all()


# Lemma 2 and the constants


@pytest.mark.parametrize("d", [64, 128])
def test_constant_of_orthogonal_rows(d):
    """The closed form against the density's integral, to the midpoint rule's error of about 1e-12 d; below sqrt(pi / 2)
    by the first term of its expansion, 1 / (4 d), the next being below 1 / d^2."""
    c = unbiasing(Sketch(d), d)
    assert c == pytest.approx(oracle.factor("orthogonal", d), rel=1e-8)
    assert c / sqrt(pi / 2) == pytest.approx(1 - 1 / (4 * d), abs=1 / d**2)
    assert unbiasing(Sketch(d, "gaussian"), d) == sqrt(pi / 2)


def test_constant_of_orthogonal_rows_against_monte_carlo():
    """<k, k> = 1 estimated for random directions k. A fixed S will do: S k is as uniform for a uniform k as for a
    uniform S. The gap of 0.2% to the Gaussian constant is over ten standard errors here."""
    d, n = 128, 16384
    fmt = Format(n, sketch=Sketch(d))
    k = torch.randn(1, n, 1, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k = (k / k.norm(dim=-1, keepdim=True)).float()
    estimates = (codec_of(fmt, 1, d).encode(k)[1] * k).sum(-1).double().flatten()
    error = float(estimates.std() / n**0.5)
    assert abs(float(estimates.mean()) - 1) <= 4 * error
    gaussian = float(estimates.mean()) * sqrt(pi / 2) / unbiasing(Sketch(d), d)
    assert gaussian - 1 >= 8 * error


def pair(d, cosine, seed=0):
    """Unit vectors q and k at this angle; rounding to float16 leaves the norm of 1 as it is."""
    rng = np.random.default_rng(seed)
    k, other = np.linalg.qr(rng.normal(size=(d, 2)))[0].T
    return cosine * k + sqrt(1 - cosine**2) * other, k


def estimates(part, d, q, k, n, seed):
    """Estimates of <q, k> by n independent sketches, float64 [n]; the outlier channels are the first ones."""
    geometry = PageGeometry.of(Format(1, sketch=part), 1, d, "key")
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(d)[None] < part.outliers).to(torch.uint8)
    key, query = torch.from_numpy(k).float().reshape(1, 1, 1, d), torch.from_numpy(q)
    found = []
    for _ in range(n):
        tables = {"sketch": matrix(part.m, d, part.rows, generator)}
        if part.outliers:
            tables |= {"outlier_sketch": matrix(part.outlier_m, d, part.rows, generator), "outlier_mask": mask}
        found.append(Codec(geometry, tables).encode(key)[1].flatten().double() @ query)
    return torch.stack(found).numpy()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("m, outlier_m", [(32, 0), ("d", 0), ("2d", 0), ("d", 32)])
def test_lemma_2_the_estimate_is_unbiased(rows, d, m, outlier_m):
    """The mean over sketches is within 4 standard errors of <q, k> (64 such tests in a million would fail by chance).

    With outlier channels both norms are rounded to float16, which adds at most H of each of the two products.
    """
    part = Sketch({"d": d, "2d": 2 * d}.get(m, m), rows, 6 if outlier_m else 0, outlier_m)
    q, k = pair(d, 0.6)
    if outlier_m:
        k[:6] *= 4
    found = estimates(part, d, q, k, 200, 1)
    rounding = H * (abs(q[:6] @ k[:6]) + abs(q[6:] @ k[6:])) if outlier_m else 0.0
    error = found.std(ddof=1) / len(found) ** 0.5
    assert abs(found.mean() - q @ k) <= 4 * error + rounding
    assert error < 0.05 * abs(q @ k), "otherwise this shows nothing"


# Lemma 5


def violations(rows, m, epsilon, n, cosine, d=16, seed=2):
    """Share of n sketches with `m` rows, rounded up to whole words, whose estimate is off by more than epsilon."""
    q, k = pair(d, cosine)
    found = estimates(Sketch(32 * ceil(m / 32), rows), d, q, k, n, seed)
    return float((np.abs(found - q @ k) > epsilon).mean())


@pytest.mark.parametrize("cosine", [0.0, 0.8])
@pytest.mark.parametrize("epsilon, delta", [(0.5, 0.1), (0.3, 0.1), (0.2, 0.02)])
def test_lemma_5_orthogonal_rows_with_the_papers_m(epsilon, delta, cosine):
    """At most delta, plus 4 standard deviations of a binomial share."""
    n, d = 400, 64
    share = violations("orthogonal", oracle.distortion_rows(epsilon, delta), epsilon, n, cosine, d)
    assert share <= delta + 4 * sqrt(delta * (1 - delta) / n)


@pytest.mark.parametrize("cosine", [0.0, 0.8])
@pytest.mark.parametrize("epsilon, delta", [(0.5, 0.1), (0.3, 0.05), (0.2, 0.01)])
def test_lemma_5_gaussian_rows(epsilon, delta, cosine):
    """With m as the lemma's own moments give it. At most delta, plus 4 standard deviations of a binomial share."""
    n = 800
    share = violations("gaussian", oracle.bernstein_rows(epsilon, delta), epsilon, n, cosine)
    assert share <= delta + 4 * sqrt(delta * (1 - delta) / n)


def test_lemma_5_as_printed_asks_for_too_few_gaussian_rows():
    """The lemma's proof drops the factor pi / 2 of the variance, so for small delta its m is too small.

    Where q and k are orthogonal, <s, q> and sign(<s, k>) are independent, so the error is exactly normal with variance
    pi / (2 m): 1.1% of sketches are off by more than epsilon, not 0.2%. 4 standard deviations of a binomial share on
    either side.
    """
    epsilon, delta, n = 0.1, 0.002, 4000
    m = 32 * ceil(oracle.distortion_rows(epsilon, delta) / 32)
    normal = erfc(epsilon * sqrt(m / pi))  # P(|x| > a) = erfc(a / sqrt(2 variance))
    share = violations("gaussian", m, epsilon, n, 0.0)
    assert share > delta + 4 * sqrt(delta * (1 - delta) / n)
    assert abs(share - normal) <= 4 * sqrt(normal * (1 - normal) / n)


# Orthogonal rows against Gaussian ones


def score_error(fmt, d=128, tokens=2048):
    """Mean squared error of scores of isotropic queries and keys over the mean squared score."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens // fmt.t, fmt.t, 1, d, generator=generator)
    q = torch.randn(256, d, generator=generator)
    error = (codec_of(fmt, 1, d).encode(x)[1] - x).flatten(0, 2) @ q.T
    return float(error.square().mean() / (x.flatten(0, 2) @ q.T).square().mean())


def test_orthogonal_rows_lose_less_than_gaussian_ones():
    """Relative error at m = 256, d = 128: w, the estimate of a unit vector k, has E w = k, and of isotropic q's scores
    E|w - k|^2 is lost. Orthogonal blocks of d rows: |w| = c for each block, so (c^2 - 1) d / m. Gaussian rows:
    E|w|^2 = pi d / (2 m) + (m - 1) / m. Roots 0.53 and 0.88; KIVI at 2 bits has 0.39.

    Within 5%, two standard errors: |w - k|^2 differs between 2048 keys by less than its mean (2.2%), the 256 queries
    weigh 128 directions (sqrt(2 / 256 / 128) = 0.8%), and |S|^2 is a sum of m d squares (0.8%, twice).
    """
    d, m = 128, 256
    errors = {rows: score_error(Format(32, sketch=Sketch(m, rows))) for rows in ROWS}
    assert errors["orthogonal"] == pytest.approx((oracle.factor("orthogonal", d) ** 2 - 1) * d / m, rel=0.05)
    assert errors["gaussian"] == pytest.approx(pi * d / (2 * m) - 1 / m, rel=0.05)
    kivi = score_error(Format(32, Dense(2, "channel", 32)))
    assert kivi < errors["orthogonal"] < errors["gaussian"]
    assert sqrt(kivi) == pytest.approx(0.39, abs=0.01)  # METHODS.md


# Scores from bytes


def sketch_sizes(codec, fields, absolute_q):
    """Over the format's sketches: the size that rounding errors are relative to, [h_kv, rows, p * t]."""
    total = 0.0
    for prefix, s, channels in sketches(codec):
        c, norm = oracle.factor(codec.geometry.format.sketch.rows, s.shape[1]), fields[f"{prefix}norm"].double().numpy()
        sizes = (absolute_q * channels[:, None]) @ np.abs(s).T
        norms = norm.transpose(1, 0, 2).reshape(norm.shape[1], 1, -1)
        total = total + c / len(s) * sizes.sum(-1, keepdims=True) * norms
    return total


@all_formats
@pytest.mark.parametrize("rows", [1, 8])
def test_scores_from_bytes(fmt, rows):
    """Within rounding of the queries times the decoded pages, taken in float64.

    A sum of n float32 products is off by at most n U of their sizes. Both ways from the query to a score:
    kernels   q P (d), <q P, dense> (d), q S^T (d), byte sums (8), their sum (m / 8), 4 products and sums, <q, mean> (d)
    decoding  S^T signs (m), 3 products, sum of the parts (1), times P^T (d), plus the mean (1)
    so at most 4 d + 9 m / 8 + 17, of sizes in which every factor stands by its absolute value.
    """
    h_kv, d = 3, 64
    codec, x = codec_of(fmt, h_kv, d), pages_of(fmt, h_kv, d)
    fields, decoded = codec.encode(x)
    pool, ids = PagePool(codec.geometry, 5), torch.tensor([4, 0, 3])
    pool.heads.fill_(0xFF)
    pool.write(ids, fields)
    q = torch.randn(h_kv, rows, d, generator=torch.Generator().manual_seed(3))
    found = PageReader.of(pool, codec.tables).scores(q, ids.int(), None, 0).double().numpy()
    keys = decoded.double().flatten(0, 1).permute(1, 2, 0).numpy()
    mean, rotation = (
        codec.tables.get(name, other).double().numpy()
        for name, other in (("mean", torch.zeros(h_kv, d)), ("rotation", torch.eye(d)))
    )
    absolute_q = np.abs(q.double().numpy()) @ np.abs(rotation)
    sizes = sketch_sizes(codec, fields, absolute_q) + np.abs(q.double().numpy()) @ np.abs(mean)[:, :, None]
    if fmt.dense:
        inner = Format(fmt.t, fmt.dense)
        dense = Codec(PageGeometry.of(inner, h_kv, d, "key"), {}).decode(fields)
        sizes = sizes + absolute_q @ dense.abs().double().flatten(0, 1).permute(1, 2, 0).numpy()
    bound = (4 * d + 9 / 8 * fmt.sketch.m + 17) * U * sizes
    error = np.abs(found - q.double().numpy() @ keys)
    worst = np.unravel_index((error / bound).argmax(), error.shape)
    assert (error <= bound).all(), f"{worst}: off by {error[worst]}, bound {bound[worst]}, score {found[worst]}"
    assert bound.max() < 0.01 * np.abs(found).max(), "otherwise this shows nothing"


@given(st.lists(st.integers(0, 255), min_size=4, max_size=4), st.integers(0, 31))
@settings(max_examples=30)
def test_every_byte_of_signs_is_looked_up(byte, row):
    """S with a single row that is not zero: the score is that row's product with the query, by that row's own sign."""
    fmt, d = Format(1, sketch=Sketch(32, "gaussian")), 32
    s = torch.zeros(32, d)
    s[row] = 1.0
    pool = PagePool(PageGeometry.of(fmt, 1, d, "key"), 1)
    word = torch.tensor(byte, dtype=torch.uint8).view(torch.int32)
    pool.write(torch.tensor([0]), {"signs": word.reshape(1, 1, 1, 1), "norm": torch.ones(1, 1, 1).half()})
    score = PageReader.of(pool, {"sketch": s}).scores(torch.ones(1, 1, d), torch.tensor([0]).int(), None, 0)
    sign = 1 if byte[row // 8] >> row % 8 & 1 else -1
    assert float(score) == pytest.approx(sign * d * sqrt(pi / 2) / 32, rel=64 * U)


# Whole steps

H_Q, H_KV, D = 8, 2, 64
QJL = LayerFormat(
    Format(128, sketch=Sketch(128, "orthogonal", 4, 64)),
    Format(128, Dense(2, "token", 32)),
)
PROD = LayerFormat(
    Format(128, LLOYD, sketch=Sketch(64), rotate=Rotate("haar")), Format(128, LLOYD, rotate=Rotate("haar"))
)


def bundle_of(layer):
    """A bundle of one layer of this format."""
    rope = Rope(D, "half", 1.0, "default")
    model = ModelFingerprint("random", "RandomForCausalLM", 1, H_Q, H_KV, D, rope, "0", "0")
    made = {"rope.inv_freq": (10000.0 ** -(np.arange(0, D, 2) / D)).astype(np.float32)}
    for side, fmt in (("key", layer.key), ("value", layer.value)):
        made |= {f"layers.0.{side}.{name}": x.numpy() for name, x in tensors(fmt, H_KV, D).items()}
    return Bundle("random", model, (layer,), made)


def step(m, seed):
    q = torch.randn(1, H_Q, m, D, generator=torch.Generator().manual_seed(seed)) * 0.3
    k, v = (torch.from_numpy(cache_numbers((1, m, H_KV, D), seed + i)).transpose(1, 2) for i in (1, 2))
    return q, k, v


@pytest.mark.parametrize("layer", [QJL, PROD], ids=["qjl", "turboquant-prod"])
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129])
def test_steps_behind_prompts_around_a_page(layer, n, monkeypatch):
    """Kernels and decoding to dense, for one and for eight new tokens, within float32's bound of attention in float64
    over what the cache decodes to. Decoded keys are off as `test_scores_from_bytes` says, values by (d + 2) U twice and
    n U of their terms where they are rotated."""
    kv = KVCache(bundle_of(layer), 1)
    first = step(n, 10)
    whole = kv.layers[0].attend(*first, torch.arange(n)[None], None, D**-0.5)
    assert torch.isfinite(whole).all()
    key, value = kv.layers[0].key, kv.layers[0].value
    assert key.used == value.used == [n // 128]
    held = []
    for side, fresh in ((key, first[1]), (value, first[2])):
        packed = side.dense(0).double() if side.used[0] else torch.zeros(0, H_KV, D, dtype=torch.float64)
        newest = fresh[0].transpose(0, 1)[packed.shape[0] :].double()
        rotation = side.codec.tables.get("rotation", torch.eye(D)).double()
        size = (packed @ rotation).abs() @ rotation.T.abs() * (2 * (D + 2) + n) * U * ("rotation" in side.codec.tables)
        held.append((torch.cat([packed, newest]), torch.cat([size, 0 * newest])))
    if key.used[0]:  # decoded keys, channel by channel: unit queries
        fields = key.pool.read(key.pages_of(0).long())
        rotation = key.codec.tables.get("rotation", torch.eye(D)).double().numpy()
        units = np.broadcast_to(np.abs(rotation), (H_KV, D, D))
        sizes = (4 * D + 9 / 8 * key.format.sketch.m + 17) * U * sketch_sizes(key.codec, fields, units)
        held[0][1][:128] += torch.from_numpy(sizes).permute(2, 0, 1)
    for m in (1, runtime_cache.FUSED_QUERIES):
        q, k, v = step(m, 20)
        numbers = [
            torch.cat([x, fresh[0].transpose(0, 1)]).transpose(0, 1).numpy()
            for (x, _), fresh in zip(held, (k, v), strict=True)
        ]
        errors = [torch.nn.functional.pad(e, (0, 0, 0, 0, 0, m)).transpose(0, 1).numpy() for _, e in held]
        exact = attention(q[0].double().numpy(), *numbers, D**-0.5)
        bound = float32_bound(q[0].double().numpy(), *numbers, D**-0.5, *errors)
        for fused in (runtime_cache.FUSED_QUERIES, 0):
            monkeypatch.setattr(runtime_cache, "FUSED_QUERIES", fused)
            out = copy.deepcopy(kv).layers[0].attend(q, k, v, n + torch.arange(m)[None], None, D**-0.5)
            monkeypatch.undo()
            error = np.abs(out[0].transpose(0, 1).double().numpy() - exact)
            assert (error <= bound).all(), f"m={m}, fused={fused}: {(error / bound).max():.2f} of the bound"
