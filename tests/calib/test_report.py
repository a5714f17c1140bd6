"""`python -m calib.report`: sums against plain formulas, a page that runs nothing, errors."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from artifacts import BundleMismatchError
from artifacts.errors import SignpostError
from calib import data
from calib.data import Tokens
from calib.pipeline import calibrate
from calib.report import figures
from calib.report.__main__ import NAMES, main
from calib.report.observe import check, observe, shares
from calib.report.page import Picture, page
from calib.tap import Tap
from runtime.codec import Codec
from tests.artifacts.samples import sample_bundle
from tests.calib.taken import taken

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
RECIPES = {
    "kvquant": ["method=kvquant", "bits=3"],
    "qjl": ["method=qjl", "++method.key.sketch.m=64", "++method.key.sketch.outlier_m=32"],
    "turboquant": ["method=turboquant-mse", "bits=2"],
    "gear": ["method=gear", "bits=4", "++method.key.dense.group=32", "++method.value.dense.group=32"],
}


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(3)
    return Tokens(torch.randint(0, 256, (2, 160), generator=generator), "random bytes")


@pytest.fixture
def calibrated(tiny_model, settings, tokens):
    """A model and a bundle of it, by recipe."""

    def make(recipe):
        model = tiny_model("llama", torch.float32)
        given = settings("model.path=x", "model.name=tiny", "seqlen=160", *RECIPES[recipe])
        return model, calibrate(model, given, tokens)

    return make


@pytest.mark.parametrize("recipe", RECIPES)
def test_sums_are_those_of_the_formulas(calibrated, tokens, recipe):
    model, bundle = calibrated(recipe)
    found = observe(model, bundle, tokens).layers
    samples = [{a.layer: a for a in taken(Tap(model), sample, gradients=True)} for sample in tokens.ids]
    for layer, pair in enumerate(found):
        for side, facts in zip(("key", "value"), pair, strict=True):
            fmt = getattr(bundle.layers[layer], side)
            before = side == "key" and fmt.domain == "pre_rope"
            name = "value" if side == "value" else "key" if before else "rotated_key"
            slope = f"{name}_gradient"
            sinks, t = fmt.window.sinks, fmt.t
            geometry = bundle.geometry.layers[layer][side == "value"]
            fisher = error = lost = energy = 0.0
            rows = []
            for activations in (sample[layer] for sample in samples):
                x, g = getattr(activations, name)[sinks:], getattr(activations, slope)[sinks:]
                pages = len(x) // t
                x, g = (y[: pages * t].unflatten(0, (pages, t)) for y in (x, g))
                e = Codec(geometry, bundle.side_tensors(layer, side)).encode(x, 64)[1] - x
                fisher += (g.double() ** 2).sum().item()
                error += 0.5 * ((g.double() * e.double()) ** 2).sum().item()
                lost += (e.double() ** 2).sum().item()
                energy += (x.double() ** 2).sum().item()
                rows.append(getattr(activations, "value" if side == "value" else "rotated_key")[sinks:])
            assert facts.fisher == pytest.approx(fisher, rel=1e-6)
            assert facts.error == pytest.approx(error, rel=1e-4)
            assert facts.relative == pytest.approx((lost / energy) ** 0.5, rel=1e-4)
            magnitude = torch.cat(rows).double().abs().mean(0).numpy()
            np.testing.assert_allclose(facts.magnitude, magnitude, rtol=1e-6)
            assert (facts.unrotated is None) == (side == "value")
            assert (facts.histogram is None) == (fmt.dense is None)
            assert (np.diff(facts.spectrum) <= 1e-9 * facts.spectrum[0]).all()
            if fmt.dense:
                assert len(facts.codebook) == 1 << fmt.dense.bits


def test_another_model_is_refused(calibrated, tiny_model, tokens):
    _, bundle = calibrated("kvquant")
    with pytest.raises(BundleMismatchError):
        observe(tiny_model("llama", torch.float32, num_hidden_layers=3), bundle, tokens)


def test_windows_without_a_page_are_refused(calibrated, tokens):
    model, bundle = calibrated("kvquant")
    with pytest.raises(SignpostError, match=r"--seqlen 64 does not fill a page behind the sinks: at least 65"):
        observe(model, bundle, Tokens(tokens.ids[:, :64], "short"))
    with pytest.raises(SignpostError, match=r"--seqlen 513 is above the model's 512 positions: 512 at most"):
        check(model, bundle, 513)


def test_shares():
    assert shares([1.0, 3.0]) == [0.25, 0.75]
    assert shares([0.0, 0.0]) == [0.0, 0.0]


# Figures


def values_of(bundle, observation):
    return [
        figures.loss_against_bits(bundle, [{"recipe": "x", "bits": 3.0, "loss_increase": -0.1, "context": 4096}]),
        figures.sensitivity(observation),
        figures.magnitudes(observation),
        figures.signposts(observation, 0),
        figures.signposts(observation, 1),
        figures.spectra(observation),
        figures.memory(bundle),
    ]


@pytest.mark.parametrize("recipe", ["kvquant", "qjl"])
def test_figures_show_the_data(calibrated, tokens, recipe):
    model, bundle = calibrated(recipe)
    observation = observe(model, bundle, tokens)
    drawn = values_of(bundle, observation)
    assert (drawn[3] is None) == (recipe == "qjl")  # sketched keys have no codes
    bars = [bar.get_height() for bar in drawn[1].axes[1].patches]
    assert sum(bars) == pytest.approx(1)
    image = drawn[2].axes[1].get_images()[0].get_array()
    np.testing.assert_allclose(image[1], observation.layers[1][0].magnitude.reshape(-1))
    lines = drawn[6].axes[0].get_lines()
    assert lines[1].get_ydata()[0] == bundle.geometry.cache_bytes(1024) / 2**20
    assert (figures.thresholds(bundle) is None) == (recipe == "qjl")
    left = drawn[5].axes[0].get_lines()[0].get_ydata()
    assert left[0] == 1
    assert left[-1] == pytest.approx(0, abs=1e-9)
    figures.plt.close("all")


def test_layers_in_full_precision_are_left_out(tiny_model, settings, tokens, tmp_path):
    model = tiny_model("llama", torch.float32)
    options = ("model.path=x", "model.name=tiny", "seqlen=160", *RECIPES["kvquant"])
    bundle = calibrate(model, settings(*options, "++method.layers={0: null}"), tokens)
    assert {name.split(".")[1] for name in bundle.tensors if name.startswith("layers")} == {"1"}
    observation = observe(model, bundle, tokens)
    assert (observation.numbers, len(observation.layers)) == ((1,), 1)
    drawn = values_of(bundle, observation)
    assert [tick.get_text() for tick in drawn[1].axes[0].get_xticklabels()] == ["1"]
    assert drawn[3].axes[0].get_title() == "layer 1"
    figures.plt.close("all")
    assert "<td>full precision</td>" in page(bundle, [])
    exact = calibrate(model, settings(*options, "++method.layers={0-1: null}"), tokens)
    with pytest.raises(SignpostError, match="keeps all layers in full precision: there is nothing to look at"):
        observe(model, exact, tokens)


def test_many_layers_are_thinned_out():
    assert figures._spread(5) == [0, 1, 2, 3, 4]
    many = figures._spread(80)
    assert (many[0], many[-1], len(many)) == (0, 79, figures.SHOWN_LAYERS)


# The page


class Tags(HTMLParser):
    """All tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_hostile_texts_stay_texts():
    bundle = sample_bundle()
    bundle = replace(
        bundle,
        recipe=HOSTILE,
        model=replace(bundle.model, name=HOSTILE, architecture=HOSTILE),
        calibration={"data": {"source": HOSTILE, HOSTILE: HOSTILE}, "packages": {HOSTILE: HOSTILE}},
        evaluation={"loss": HOSTILE, "text": {"source": HOSTILE}, "kl_mean": HOSTILE},
    )
    tags = Tags(page(bundle, [Picture("x", HOSTILE, HOSTILE, b"png"), Picture("y", HOSTILE, HOSTILE)]))
    assert {tag for tag, _ in tags.tags} == {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "section", "div"),
        *("table", "tr", "th", "td", "img"),
    }
    assert not [name for _, attrs in tags.tags for name in attrs if name.startswith("on")]
    assert [attrs["src"][:22] for tag, attrs in tags.tags if tag == "img"] == ["data:image/png;base64,"]
    assert "default-src 'none'" in str(tags.tags)


def test_odd_evaluations_do_not_break_the_page():
    for evaluation in (None, {}, {"text": []}, {"loss": None}, {"tokens": [1]}):
        text = page(replace(sample_bundle(), evaluation=evaluation, calibration={"data": 3}), [])
        assert "Quality" in Tags(text).text


# The command


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_without_the_model_the_page_says_what_is_missing(tmp_path, capsys):
    path = sample_bundle().save(tmp_path / "b")
    code, out, _ = run(capsys, path)
    assert (code, out) == (0, f"{tmp_path}/b-report/index.html\n")
    text = (tmp_path / "b-report" / "index.html").read_text()
    assert text.count("Bundles do not hold what this needs: give --model (and --text).") == 5
    assert sorted(p.name for p in (tmp_path / "b-report").iterdir()) == [
        "index.html", "loss.png", "memory.png", "ranges.png",
    ]  # fmt: skip
    assert run(capsys, path)[0] == 0  # over the old one


def test_with_the_model(saved_model, text_file, tmp_path, calib):
    out = tmp_path / "bundle"
    done = calib(
        *("model=local", f"model.path={saved_model}", f"data.path={text_file}", "eval=none", "samples=2"),
        *("seqlen=128", f"out={out}"),
    )
    assert done.code == 0, done.err
    results = tmp_path / "results.json"
    row = {"recipe": "other", "bits": 4.0, "loss_increase": 0.01, "loss": 3.0, "context": 4096}
    results.write_text(json.dumps({"rows": {"full precision": {"recall": 1}, "a": row}}))
    arguments = ["--samples", 2, "--seqlen", 128, "--compare", results, "--out", tmp_path / "page"]
    assert main([str(a) for a in (out, "--model", saved_model, "--text", text_file, *arguments)]) == 0
    assert {p.stem for p in (tmp_path / "page").iterdir()} == {"index", *NAMES}
    text = (tmp_path / "page" / "index.html").read_text()
    assert "Bundles do not hold" not in text
    assert "text.txt, 256 tokens" in text
    assert len(re.findall("<img", text)) == len(NAMES)


def test_another_model_is_refused_before_it_writes_text(saved_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "generate", lambda *args: pytest.fail("text was generated"))
    code, _, err = run(capsys, sample_bundle().save(tmp_path / "b"), "--model", saved_model)
    assert (code, "does not fit 'two-layers'" in err) == (2, True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing"], "no bundle at missing"),
        (["b", "--text", "nope"], "--text nope: only a model reads it; add --model, or leave it out"),
        (["b", "--samples", "0"], "--samples 0 must be at least 1"),
        (["b", "--seqlen", "0"], "--seqlen 0 must be at least 1"),
        (["b", "--model", "no/such/model"], "cannot load the model 'no/such/model'"),
        (["b", "--compare", "b/manifest.json"], "not a file of benchmarks.quality"),
        (
            ["b", "--compare", "no.json"],
            "--compare no.json cannot be read (No such file or directory): name a JSON file",
        ),
        (["b", "--model", "tiny", "--text", "no.txt"], "--text no.txt does not exist: name a UTF-8 text file"),
        (["b", "--compare", "odd.json"], "bits, loss_increase, context must be numbers"),
        (["b", "--out", "b"], "so it is not ours to replace"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    sample_bundle().save("b")
    odd = {"recipe": "x", "bits": "3", "loss_increase": 0.1, "loss": 1, "context": 4096}
    (tmp_path / "odd.json").write_text(json.dumps({"rows": {"a": odd}}))
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_help_is_readable(capsys):
    with pytest.raises(SystemExit) as info:
        main(["--help"])
    assert info.value.code == 0
    assert "Exit codes" in capsys.readouterr().out
