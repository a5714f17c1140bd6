"""Which passes a recipe takes, that it ends with every tensor its formats declare, and what must not change them."""

from itertools import product

import numpy as np
import pytest
import torch

from artifacts.errors import SignpostError
from artifacts.fields import PageShape
from calib.__main__ import CONF
from calib.collect import collect
from calib.tap import Activations, Tap
from tests.oracles.fits import thresholds

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
EXPERIMENTS = sorted(
    str(path.relative_to(CONF / "experiment").with_suffix("")) for path in (CONF / "experiment").rglob("*.yaml")
)
H, D, LAYERS = 2, 64, 2
QUICK = ("method.bins=512", "seqlen=140", "eval.tokens=140", "sinks=1")


class FakeTap:
    """Shows given tensors float32 [samples, layers, n, h_kv, d] as a model would, and counts its passes.

    Its token ids are the samples' numbers.
    """

    def __init__(self, samples=3, n=140, seed=0):
        shape = (6, samples, LAYERS, n, H, D)
        draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.key, self.rotated, self.value, *self.gradients = draw * torch.logspace(-1, 1, D)
        self.passes = []
        self.ids = torch.arange(samples)[:, None].expand(samples, n)

    def run(self, ids, gradients, see):
        sample = int(ids[0])
        if sample == int(self.ids[0, 0]):
            self.passes.append(gradients)
        for layer in range(LAYERS):
            found = [x[sample, layer] if gradients else None for x in self.gradients]
            numbers = [x[sample, layer] for x in (self.key, self.rotated, self.value)]
            see(Activations(layer, *numbers, *found))

    def collect(self, settings):
        return self.calibrate(settings)[1]

    def calibrate(self, settings):
        """Formats and tensors."""
        return collect(self, self.ids, settings.recipes(LAYERS), settings.config.method, H, D)


def assert_same(one, other, relative=0.0):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=relative, atol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["method=kvquant"], [False, True]),
        (["method=kvquant", "outliers=0"], [False, True]),
        (["method=int"], []),
        (["experiment=ladder/nuq3-1-matrix"], [False, False, True]),
        (["experiment=ladder/nuq3-unweighted"], [False, False]),
        (["experiment=ladder/int3-prerope"], [False]),
        (["experiment=ladder/int3-token"], []),
    ],
)
def test_passes_and_which_of_them_pay_for_gradients(settings, tiny_model, monkeypatch, overrides, passes):
    seen = []
    real = Tap.run

    def run(self, ids, gradients, see):
        seen.append(gradients)
        real(self, ids, gradients, see)

    monkeypatch.setattr(Tap, "run", run)
    made = settings(*QUICK, *overrides)
    ids = torch.randint(0, 260, (2, 140), generator=torch.Generator().manual_seed(0))
    collect(Tap(tiny_model("llama", torch.float32)), ids, made.recipes(LAYERS), made.config.method, 2, 32)
    assert seen == [gradients for gradients in passes for _ in ids]


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            [f"method={m}", f"outliers={o}", f"bits={b}"]
            for m, o, b in product(METHODS, ("0", "0.01"), (2, 3, 4, 8))
            if (m, b) != ("banded", 8)  # no band is as wide
        ),
        *([f"experiment={e}"] for e in EXPERIMENTS),
    ],
    ids=" ".join,
)
def test_every_declared_tensor_is_found(settings, overrides):
    made = settings(*overrides, *QUICK[:-1])
    chosen, tensors = FakeTap(samples=2).calibrate(made)
    expected = {}
    for layer, formats in enumerate(chosen):
        for side, fmt in (("key", formats.key), ("value", formats.value)):
            specs = fmt.bundle_tensors(PageShape(fmt.t, H, D, side))
            expected |= {f"layers.{layer}.{side}.{name}": (spec.dtype, spec.shape) for name, spec in specs.items()}
    assert {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()} == expected
    assert all(torch.isfinite(t).all() for t in tensors.values())


def test_a_layer_may_have_settings_of_its_own(settings):
    made = settings(
        *QUICK,
        "method=kvquant",
        "bits=3",
        "++method.layers={1: {key: {dense: {bits: 8}}, value: {dense: {codebook: uniform}, sparse: null}}}",
    )
    tensors = FakeTap().collect(made)
    plain = FakeTap().collect(settings(*QUICK, "method=kvquant", "bits=3"))
    own = {name for name in plain if name.startswith("layers.0")}
    assert_same({name: tensors[name] for name in own}, {name: plain[name] for name in own})
    assert tensors["layers.1.key.signposts"].shape == (256,)
    assert not [name for name in tensors if name.startswith("layers.1.value")]


def test_thresholds_are_those_of_all_tokens_that_fill_pages(settings):
    tap = FakeTap()
    found = tap.collect(settings(*QUICK, "experiment=ladder/nuq3-1"))
    numbers = tap.key[:, 1, 1:129].flatten(0, 1).double().numpy()  # behind the sink, two pages a sample
    for name, expected in zip(("lower", "upper"), thresholds(numbers, 0.01), strict=True):
        assert np.array_equal(found[f"layers.1.key.{name}"].numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("experiment", ["ladder/nuq3-1", "ladder/nuq3-1-matrix"])
def test_outliers_are_left_out_of_ranges_and_signposts(settings, experiment):
    made, tap = settings(*QUICK, f"experiment={experiment}"), FakeTap()
    plain = tap.collect(made)
    lower, upper = (plain[f"layers.0.key.{name}"] for name in ("lower", "upper"))
    low, high = (plain["layers.0.key.zero"] + sign * plain["layers.0.key.scale"] for sign in (-1, 1))
    assert (low >= lower - 1e-5).all()
    assert (high <= upper + 1e-5).all()
    # The largest value of a token is an outlier, however large it is, and whatever its gradient.
    page = tap.value[0, 0, 1:65].flatten(1)
    spikes = torch.zeros_like(page, dtype=torch.bool).scatter_(1, page.argmax(1, keepdim=True), True).view(64, H, D)
    tap.value[0, 0, 1:65][spikes] *= 1e3
    tap.gradients[2][0, 0, 1:65][spikes] *= 1e3
    found = tap.collect(made)["layers.0.value.signposts"]
    assert torch.equal(found, plain["layers.0.value.signposts"]) == (experiment == "ladder/nuq3-1")
    assert found.abs().max() <= 1


def test_order_of_samples_does_not_matter(settings):
    made = settings(*QUICK, "method=kvquant")
    tap = FakeTap(samples=5)
    plain = tap.collect(made)
    tap.ids = tap.ids[[3, 0, 4, 2, 1]]
    # Sums of the same numbers in float64, in another order; the means are stored in float32.
    assert_same(tap.collect(made), plain, relative=2**-23)


def test_sinks_and_what_fills_no_page_change_nothing(settings):
    made = settings(*QUICK, "method=kvquant", "sinks=4")
    tap = FakeTap(n=140)  # 4 sinks, 2 pages of 64, and 8 tokens over
    plain = tap.collect(made)
    for tensor in (tap.key, tap.value, *tap.gradients):
        tensor[:, :, :4] = 1e30
        tensor[:, :, -8:] = -1e30
    assert_same(tap.collect(made), plain)


def test_keys_are_taken_before_or_after_rope_as_the_format_says(settings):
    made = settings(*QUICK, "experiment=ladder/int3-prerope"), settings(*QUICK, "experiment=ladder/int3-channel")
    tap = FakeTap()
    for found, numbers in zip((tap.collect(m) for m in made), (tap.key, tap.rotated), strict=True):
        x = numbers[:, 0, 1:129].flatten(0, 1)  # behind the sink
        assert torch.allclose(found["layers.0.key.scale"], (x.amax(0) - x.amin(0)) / 2, rtol=1e-6)


def test_gradients_belong_to_the_numbers_that_are_quantized(settings):
    tap = FakeTap()
    before = tap.collect(settings(*QUICK, "method=kvquant"))
    after = tap.collect(settings(*QUICK, "method=kvquant", "++method.key.domain=post_rope"))
    tap.gradients[1] = tap.gradients[1].flip(1)  # of keys after RoPE
    assert_same(tap.collect(settings(*QUICK, "method=kvquant")), before)
    changed = tap.collect(settings(*QUICK, "method=kvquant", "++method.key.domain=post_rope"))
    assert not torch.equal(changed["layers.0.key.signposts"], after["layers.0.key.signposts"])
    assert torch.equal(changed["layers.0.value.signposts"], after["layers.0.value.signposts"])


def test_zero_gradients_name_the_layer(settings):
    tap = FakeTap()
    tap.gradients[2][:, 1] = 0
    with pytest.raises(SignpostError, match=r"layers\.1\.value: no number has any weight"):
        tap.collect(settings(*QUICK, "method=kvquant"))


def test_samples_shorter_than_a_page_are_refused(settings):
    with pytest.raises(
        SignpostError, match="samples of 64 tokens do not fill a page of 64 behind 1 sinks: set seqlen to at"
    ):
        FakeTap(n=64).collect(settings(*QUICK, "method=kvquant"))
