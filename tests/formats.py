"""The one list of formats and shapes that shared tests run over, random bundles for them, and numbers like a cache's.

`CASES` covers every pair of values of any two axes at least once (with 3 bits: each codebook, each head dimension, each
number of kv heads, ...) unless they contradict each other: what goes wrong, nearly always goes wrong by two choices
that do not fit together. tests/calib/test_recipes.py runs the recipes of conf/ over all widths and shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts import (
    Banded,
    Bundle,
    Center,
    Dense,
    Format,
    LayerFormat,
    LowRank,
    ModelFingerprint,
    Rope,
    Rotate,
    Sketch,
    Sparse,
    Window,
)
from artifacts.fields import PageShape, SideName
from artifacts.matrices import eight_bits
from artifacts.parts.banded import BAND

DENSE: dict[str, dict[str, Any] | None] = {
    "channel-bundle": {"axis": "channel", "scales": "bundle"},
    "token": {"axis": "token"},
    "token-32": {"axis": "token", "group": 32},
    "channel-32": {"axis": "channel", "group": 32},
    "head": {"axis": "head"},
    "norm": {"axis": "head", "normalize": "norm"},
    "none": None,
}
SPARSE = {
    "none": None,
    "channel": Sparse(0.02, "channel", "bundle"),
    "page-channel": Sparse(0.02, "channel", "online"),
    "token": Sparse(0.02, "token", "online"),
    "matrix": Sparse(0.01, "matrix", "bundle", capacity=2.0),
}
LOWRANK = {"none": None, "rank-1": LowRank(1, 1), "rank-4": LowRank(4, 2)}
SKETCH = {
    "none": None,
    "sketch": Sketch(64),
    "gaussian": Sketch(96, "gaussian"),
    "two-sketches": Sketch(128, "orthogonal", 8, 64),
}
DOMAIN: dict[str, dict[str, Any]] = {
    "pre_rope": {"domain": "pre_rope"},
    "post_rope": {},
    "centered": {"center": Center()},
    "rotated": {"rotate": Rotate("haar")},
    "centered-rotated": {"center": Center(), "rotate": Rotate("hadamard")},
}
AXES: dict[str, list[Any]] = {
    "dense": list(DENSE),
    "bits": [1, 2, 3, 4, 8],
    "codebook": ["uniform", "nf", "nuq", "nuq-qnorm"],
    "sparse": list(SPARSE),
    "lowrank": list(LOWRANK),
    "sketch": list(SKETCH),
    "t": [32, 64],
    "d": [64, 128, 256],
    "h_kv": [1, 2, 4, 7, 8],
    "g": [1, 2, 4, 7, 8],  # query heads per kv head
    "sinks": [0, 1, 4],
    "recent": [0, 5, 64],
    "domain": list(DOMAIN),
    "layout": ["half", "interleaved"],
    "rotated": [1, 2],  # every channel, or the first half of each head
}


@dataclass(frozen=True)
class Case:
    """Formats of keys and values, and the dimensions and rotary embedding of a model to run them at."""

    name: str
    key: Format
    value: Format
    h_q: int
    h_kv: int
    d: int
    rope: Rope

    def sides(self) -> list[tuple[SideName, Format]]:
        return [("key", self.key), ("value", self.value)]

    def bundle(self, layers: int = 1) -> Bundle:
        """A random valid bundle for as many layers of this case."""
        return random_bundle([LayerFormat(self.key, self.value)] * layers, self.h_q, self.h_kv, self.d, self.rope)


def contradicts(row: Mapping[str, Any]) -> bool:
    """Whether formats refuse what the row asks of keys: a sketch before RoPE, or no part that covers every number."""
    return (row["sketch"] != "none" and row["domain"] == "pre_rope") or row["dense"] == row["sketch"] == "none"


def all_pairs(
    axes: Mapping[str, list[Any]], refused: Callable[[Mapping[str, Any]], bool] = lambda row: False
) -> list[dict[str, Any]]:
    """Rows, one value per axis, in which every pair of values of two axes stands together at least once. Deterministic.

    Greedy: each row is the best of a fixed number of random ones, repaired to hold a pair that is still missing. A pair
    that is refused in all of them is left out.
    """
    rng = np.random.default_rng(0)
    missing = {((a, x), (b, y)) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])}
    rows = []
    while missing:
        wanted = min(missing, key=repr)
        drafts = [{axis: values[rng.integers(len(values))] for axis, values in axes.items()} for _ in range(40)]
        drafts = [draft | dict(wanted) for draft in drafts]
        drafts = [draft for draft in drafts if not refused(draft)]
        if not drafts:
            missing.remove(wanted)
            continue
        row = max(drafts, key=lambda draft: len(missing & set(combinations(draft.items(), 2))))
        missing -= set(combinations(row.items(), 2))
        rows.append(row)
    return rows


def _format(row: Mapping[str, Any]) -> Format:
    kind, dense = DENSE[row["dense"]], None
    if kind is not None:
        # Lloyd-Max is made for vectors of norm 1, and takes the place of uniform there.
        codebook = "lloyd" if "normalize" in kind and row["codebook"] == "uniform" else row["codebook"]
        dense = Dense(row["bits"], codebook=codebook, **kind)
    return Format(
        t=row["t"],
        dense=dense,
        sparse=SPARSE[row["sparse"]],
        window=Window(row["sinks"], row["recent"]),
        lowrank=LOWRANK[row["lowrank"]],
        sketch=SKETCH[row["sketch"]],
        **DOMAIN[row["domain"]],
    )


def _value_format(row: Mapping[str, Any], sinks: int) -> Format:
    """Values know neither RoPE nor sketches, so they need codes; a sink is one on both sides."""
    changes = {"sinks": sinks, "sketch": "none", "domain": row["domain"].replace("pre_rope", "post_rope")}
    return _format({**row, **changes, "dense": "token" if row["dense"] == "none" else row["dense"]})


def _case(index: int, rows: list[dict[str, Any]]) -> Case:
    """Keys by row `index`, values by another row."""
    row, value = rows[index], _value_format(rows[(index + 1) % len(rows)], rows[index]["sinks"])
    words = ("dense", "bits", "codebook", "sparse", "lowrank", "sketch", "domain", "d", "h_kv", "g")
    name = "{}-{}bit-{}-{}-{}-{}-{}-d{}-{}x{}".format(*(row[word] for word in words))
    rope = Rope(row["d"] // row["rotated"], row["layout"], 1.0 + index % 2 / 8, "default")
    return Case(name, _format(row), value, row["h_kv"] * row["g"], row["h_kv"], row["d"], rope)


def _banded(g: int, h_kv: int, d: int, key: Format, value: Format, rope: Rope | None = None) -> Case:
    """Codes of a width by band of channels."""

    def said(fmt: Format) -> str:
        bits = f"{fmt.banded.bits:g}" if fmt.banded else f"{fmt.dense.bits}bit" if fmt.dense else ""
        return "-".join([bits, *(name for name in fmt.parts if name not in ("dense", "banded")), *fmt.transforms])

    name = f"banded-{said(key)}-{said(value)}-t{key.t}-d{d}-{h_kv}x{g}"
    return Case(name, key, value, h_kv * g, h_kv, d, rope or Rope(d, "half", 1.0, "default"))


def _banded_cases() -> list[Case]:
    one, learned, before = Window(1), Rotate("learned"), "pre_rope"
    nuq = Format(64, Dense(4, "token", codebook="nuq"), window=one)
    outliers = Format(64, Dense(2, "token"), SPARSE["token"], one)
    mixed = Sparse(0.02, "channel", "bundle")
    return [
        _banded(
            1, 2, 128,
            Format(64, banded=Banded(2.5), window=one, domain=before),
            Format(64, banded=Banded(1.5), window=one, rotate=learned),
        ),
        _banded(2, 2, 128, Format(64, banded=Banded(3.5), window=one, domain=before), nuq),
        _banded(
            4, 2, 128,
            Format(64, banded=Banded(2.0), window=one, domain=before),
            Format(64, banded=Banded(3.0), window=one, rotate=learned),
        ),
        _banded(
            7, 3, 64,
            Format(32, banded=Banded(2.5), window=one, domain=before),
            Format(32, banded=Banded(1.5, 3), window=Window(1, 5), rotate=learned),
            Rope(64, "interleaved", 1.0, "default"),
        ),
        _banded(
            2, 1, 256,
            Format(32, banded=Banded(1.5), domain=before),
            Format(32, banded=Banded(2.5, 4), rotate=learned),
        ),
        _banded(1, 2, 128, Format(64, banded=Banded(2.5), sparse=mixed, window=one, domain=before), outliers),
        _banded(
            2, 4, 128,
            Format(32, banded=Banded(1.5), sparse=SPARSE["token"], rotate=learned),
            Format(32, banded=Banded(3.5)),
        ),
        _banded(
            8, 2, 64,
            Format(64, banded=Banded(0.5, 1), sketch=Sketch(64), center=Center(), rotate=Rotate("hadamard")),
            Format(64, banded=Banded(4.0), center=Center(), rotate=Rotate("haar")),
            Rope(32, "half", 1.125, "default"),
        ),
        _banded(
            1, 2, 128,
            Format(32, banded=Banded(2.0), lowrank=LowRank(2, 1), sketch=Sketch(64), window=one),
            Format(32, Dense(4, "head", codebook="lloyd", normalize="norm"), window=one, rotate=learned),
        ),
        _banded(
            4, 2, 128,
            Format(64, banded=Banded(4.0), window=one, domain=before),
            Format(64, banded=Banded(4.0), window=one, rotate=learned),
        ),
    ]  # fmt: skip


def _evenly_spaced_cases() -> list[Case]:
    """Every width of codes that `uniform-fit` has, with scales of all kinds, by bytes and not."""
    one = Window(sinks=1)

    def case(h_q: int, h_kv: int, d: int, key: Format, value: Format) -> Case:
        rope = Rope(d, "half", 1.0, "default")
        bits = [fmt.dense.bits if fmt.dense else 0 for fmt in (key, value)]
        return Case(f"even-{bits[0]}-{bits[1]}bit-d{d}-{h_kv}x{h_q // h_kv}", key, value, h_q, h_kv, d, rope)

    def kvquant(bits: int, of_values: int, t: int, sparse: bool) -> tuple[Format, Format]:
        outliers = (SPARSE["channel"], SPARSE["token"]) if sparse else (None, None)
        return (
            Format(t, Dense(bits, "channel", 0, "uniform-fit", "bundle"), outliers[0], one, "pre_rope"),
            Format(t, Dense(of_values, "token", 0, "uniform-fit"), outliers[1], one),
        )

    normed = Dense(3, "head", 0, "uniform-fit", "online", "norm")
    return [
        case(2, 2, 128, *kvquant(2, 2, 32, False)),
        case(4, 2, 64, *kvquant(3, 4, 64, True)),
        case(8, 2, 128, *kvquant(4, 3, 64, True)),
        case(4, 2, 128, Format(64, normed, rotate=Rotate("haar")), Format(32, Dense(2, "token", 32, "uniform-fit"))),
        case(
            2, 2, 256, Format(32, Dense(4, "channel", 32, "uniform-fit")),
            Format(64, Dense(2, "head", 0, "uniform-fit"), SPARSE["token"]),
        ),
    ]  # fmt: skip


_ROWS = all_pairs(AXES, contradicts)
CASES = [_case(index, _ROWS) for index in range(len(_ROWS))] + _banded_cases() + _evenly_spaced_cases()
# For tests of one side alone: name, format, kv heads, head dimension, keys or values.
SIDES = [(f"{case.name}.{side}", fmt, case.h_kv, case.d, side) for case in CASES for side, fmt in case.sides()]
DENSE_SIDES = [side for side in SIDES if side[1].dense]


def bare(fmt: Format) -> Format:
    """The format without what is done to vectors before its parts see them."""
    return replace(fmt, center=None, rotate=None)


def plain(fmt: Format) -> Format:
    """The format's codes and outliers alone: what any reader of the bytes decodes to the very same bits."""
    return replace(bare(fmt), lowrank=None, sketch=None)


def kvquant(bits: int, t: int = 64, sinks: int = 1, recent: int = 0, codebook: Any = "nuq") -> LayerFormat:
    """KVQuant with 1% outliers."""
    window = Window(sinks, recent)
    return LayerFormat(
        Format(t, Dense(bits, "channel", 0, codebook, "bundle"), Sparse(0.01, "channel", "bundle"), window, "pre_rope"),
        Format(t, Dense(bits, "token", 0, codebook), Sparse(0.01, "token", "online"), window),
    )


def without_outliers(formats: LayerFormat) -> LayerFormat:
    """The same, but for the outliers."""
    return LayerFormat(replace(formats.key, sparse=None), replace(formats.value, sparse=None))


def kivi(bits: int, t: int = 64, recent: int = 64, sinks: int = 0) -> LayerFormat:
    """KIVI with groups of 32."""
    window = Window(sinks, recent)
    return LayerFormat(
        Format(t, Dense(bits, "channel", 32), None, window), Format(t, Dense(bits, "token", 32), None, window)
    )


def turned(bits: int) -> LayerFormat:
    """TurboQuant: both sides rotated, scaled by their norms."""
    side = Format(64, Dense(bits, "head", 0, "lloyd", normalize="norm"), rotate=Rotate("haar"))
    return LayerFormat(side, side)


def exact_window(tokens: int) -> LayerFormat:
    """A format whose window is never full before `tokens` tokens: nothing is quantized."""
    return kivi(2, 32, recent=tokens)


def cache_numbers(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Numbers [..., h_kv, d] as keys are: channels differ in mean and spread by an order of magnitude; heavy tails."""
    channels = np.random.default_rng(7)  # the same channels under every seed
    mean = channels.normal(size=shape[-2:])
    spread = np.exp(channels.normal(-0.5, 0.8, size=shape[-2:]))
    return (mean + spread * np.random.default_rng(seed).laplace(size=shape)).astype(np.float32)


@cache
def random_tensors(fmt: Format, h_kv: int, d: int, seed: int) -> dict[str, NDArray[Any]]:
    """Tensors that `fmt` declares, calibrated in the plainest way on 256 tokens of `cache_numbers`."""
    rng = np.random.default_rng(seed)
    x = cache_numbers((256, h_kv, d), seed).astype(np.float64)
    tensors, whole = {}, {}
    if fmt.center:
        tensors["mean"] = x.mean(0)
        x -= tensors["mean"]
    if fmt.rotate and fmt.rotate.kind == "learned":  # neither orthogonal nor alike for all heads
        matrices = [np.exp(rng.normal(size=d)) * _orthogonal("haar", d, rng) for _ in range(h_kv)]
        whole["rotation"] = np.stack([np.rint(m / np.abs(m).max(0) * 127) for m in matrices]).astype(np.int8)
        x = np.einsum("nhc,hcd->nhd", x, whole["rotation"].astype(np.float64))
    elif fmt.rotate:
        tensors["rotation"] = _orthogonal(fmt.rotate.kind, d, rng)
        x @= tensors["rotation"]
    if fmt.sparse and fmt.sparse.thresholds == "bundle":
        ends = [fmt.sparse.fraction / 2, 1 - fmt.sparse.fraction / 2]
        if fmt.sparse.axis == "channel":
            lower, upper = np.quantile(x, ends, axis=0)
        else:
            lower, upper = np.quantile(x, ends).reshape(2, 1, 1)
        tensors |= {"lower": lower, "upper": upper}
        x = np.clip(x, lower, upper)
    if fmt.banded or (fmt.dense and fmt.dense.scales == "bundle"):
        low, high = x.min(0), x.max(0)
        tensors |= {"scale": (high - low) / 2, "zero": (high + low) / 2}
    if fmt.dense and fmt.dense.codebook == "uniform-fit":
        step = int(rng.integers(1, 4094 // ((1 << fmt.dense.bits) - 1), endpoint=True))
        start = int(rng.integers(-2047, 2047 - step * ((1 << fmt.dense.bits) - 1), endpoint=True))
        whole["spacing"] = np.array([start, step], np.int16)
    if fmt.dense and fmt.dense.codebook in ("nuq", "nuq-qnorm"):
        tensors["signposts"] = np.sort(rng.uniform(-1, 1, 1 << fmt.dense.bits))
    if fmt.dense and fmt.dense.codebook == "nuq-qnorm":
        tensors["edges"] = (tensors["signposts"][:-1] + tensors["signposts"][1:]) / 2
        tensors["signposts"] = 1.1 * tensors["signposts"] + 0.05
    if fmt.banded:
        whole["widths"] = band_widths(fmt.banded, h_kv, d // BAND, rng)
        tensors["signposts"] = np.sort(rng.uniform(-1, 1, (*whole["widths"].shape, 1 << fmt.banded.most)))
    found = whole | {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    found |= _sketches(fmt.sketch, h_kv, d, rng) if fmt.sketch else {}
    specs = fmt.bundle_tensors(PageShape(fmt.t, h_kv, d, "key"))
    return {name: eight_bits(tensor) if specs[name].coarse else tensor for name, tensor in found.items()}


def band_widths(part: Banded, h_kv: int, bands: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Widths that add up to what every head has, moved from band to band at random."""
    widths = np.full((h_kv, bands), int(part.bits))
    for head in widths:
        head[: round((part.bits - int(part.bits)) * bands)] += 1
        for _ in range(4 * bands):
            a, b = rng.integers(bands, size=2)
            if a != b and head[a] > 0 and head[b] < part.most:
                head[a], head[b] = head[a] - 1, head[b] + 1
    return widths.astype(np.uint8)


def _sketches(part: Sketch, h_kv: int, d: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Random matrices as the part says; other channels are outliers in every head."""

    def matrix(m: int) -> NDArray[np.float32]:
        blocks = [_orthogonal("haar", d, rng) * d**0.5 for _ in range(-(-m // d))]
        rows = rng.normal(size=(m, d)) if part.rows == "gaussian" else np.concatenate(blocks)[:m]
        return rows.astype(np.float32)

    if not part.outliers:
        return {"sketch": matrix(part.m)}
    mask = rng.random((h_kv, d)).argsort(-1) < part.outliers
    return {"sketch": matrix(part.m), "outlier_sketch": matrix(part.outlier_m), "outlier_mask": mask.astype(np.uint8)}


def _orthogonal(kind: str, d: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if kind == "haar":
        return np.linalg.qr(rng.normal(size=(d, d)))[0]
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return rng.choice([-1.0, 1.0], d)[:, None] * matrix / d**0.5


def random_bundle(
    layers: Iterable[LayerFormat | None],
    h_q: int,
    h_kv: int,
    d: int,
    rope: Rope | None = None,
    model: ModelFingerprint | None = None,
    inv_freq: NDArray[np.float32] | None = None,
) -> Bundle:
    """A valid bundle with random tensors. rope: default is the whole head, half layout; model: a real fingerprint."""
    layers = tuple(layers)
    rope = model.rope if model else rope or Rope(d, "half", 1.0, "default")
    model = model or ModelFingerprint("random", "RandomForCausalLM", len(layers), h_q, h_kv, d, rope, "0", "0")
    if inv_freq is None:
        inv_freq = (10000.0 ** -(np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32)
    tensors: dict[str, NDArray[Any]] = {"rope.inv_freq": inv_freq}
    for layer, formats in enumerate(layers):
        for number, (side, fmt) in enumerate([("key", formats.key), ("value", formats.value)] if formats else []):
            for name, tensor in random_tensors(fmt, h_kv, d, 2 * layer + number).items():
                tensors[f"layers.{layer}.{side}.{name}"] = tensor
    return Bundle("random", replace(model, l=len(layers)), layers, tensors)
