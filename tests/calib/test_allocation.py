"""A budget in, a bundle out: parsing, measured damages, the integer program, the table, and the command line."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import artifacts
from artifacts.errors import FormatError
from calib import pipeline
from calib.allocation import damage, job
from calib.allocation.budget import Budget, spent
from calib.allocation.candidates import Candidates
from calib.allocation.damage import OneSide, measure
from calib.allocation.damages import Damages
from calib.allocation.solve import BudgetError, solve
from calib.allocation.table import Table, TableError, fitted
from calib.collect import collect, collect_all
from calib.config import ConfigError
from calib.forward import hidden_states
from calib.pipeline import arrays
from calib.tap import Tap
from runtime.codec import Codec
from runtime.hf import fingerprint
from runtime.hf_model import rotary
from runtime.rope import Rotation

SMALL = (
    "candidates=plain",
    "candidates.fillings=[{t: 16, sinks: 1}, {t: 16, sinks: 1, recent: 32}]",
    "candidates.bins=512",
    "candidates.tokens=96",
    "seqlen=96",
    "samples=2",
    "data=generated",
)
WINDOW = torch.randint(3, 250, (2, 96), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def candidates(settings):
    return Candidates.of(settings(*SMALL, "model=tiny").config.candidates)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def bundles(model, candidates):
    info = fingerprint(model)
    found = collect_all(Tap(model), WINDOW, candidates.recipes(info.l), candidates.method, info.h_kv, info.d)
    return tuple(artifacts.Bundle("candidates", info, formats, arrays(model, t)) for formats, t in found)


# ---------------------------------------------------------------------------------------------------------- budgets


def test_budgets():
    assert Budget.parse("2.5bits") == Budget("2.5bits", 2.5, None, None)
    assert Budget.parse("3bits@32K").tokens == 32768
    assert Budget.parse("1.5bits@1M").length == 1 << 20
    assert Budget.parse("2bits").length == 131072
    assert (Budget.parse("8GiB@128K").size, Budget.parse("8GiB@128K").tokens) == (8 << 30, 131072)
    assert Budget.parse("1.5MB@100").size == 1_500_000
    assert Budget.parse("2.5bits@1K").allowed(131072) == 131072 * 2.5 / 8
    assert Budget.parse("0.1MiB@1K").allowed(131072) == int(0.1 * 2**20)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "say bits, or bytes in"),
        ("2.5", "say bits, or bytes in MB, GB, MiB, GiB, such as budget=2.5bits@32K"),
        ("2.5 apples@4K", "say bits"),
        ("-2bits", "say bits"),
        ("2bits@4X", "say bits"),
        ("2bits@0", "a length of 0 tokens"),
        ("16bits@4K", "full precision takes 16 bits"),
        ("8GiB", "how much fits depends on the length; say it, such as"),
    ],
)
def test_budgets_that_say_nothing(text, reason):
    with pytest.raises(ConfigError, match=f"budget={re.escape(text)}:.*{re.escape(reason)}"):
        Budget.parse(text)


def test_a_budget_that_full_precision_fits():
    with pytest.raises(ConfigError, match="full precision takes 262144 bytes at 1024 tokens, which fits"):
        Budget.parse("1MiB@1K").allowed(131072)


# ----------------------------------------------------------------------------------------------------------- solving


@st.composite
def problems(draw):
    layers, count = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    shape = (2 * layers, count)
    numbers = st.integers(1, 1000)
    size = np.array(draw(st.lists(numbers, min_size=shape[0] * count, max_size=shape[0] * count))).reshape(shape)
    harm = np.array(draw(st.lists(numbers, min_size=shape[0] * count, max_size=shape[0] * count))).reshape(shape) / 7.0
    group = np.array(draw(st.lists(st.integers(0, 1), min_size=shape[0] * count, max_size=shape[0] * count)))
    missing = draw(st.lists(st.tuples(st.integers(0, shape[0] - 1), st.integers(0, count - 1)), max_size=2))
    for at in missing:
        harm[at] = np.inf
    return harm, size.astype(np.int64), group.reshape(shape), draw(st.integers(1, 2500))


@given(problems())
def test_the_solver_finds_what_trying_all_finds(problem):
    harm, size, group, allowed = problem
    sides, count = harm.shape
    rows = np.arange(sides)
    best = np.inf
    for choice in product(range(count), repeat=sides):
        chosen = rows, np.array(choice)
        alike = (group[chosen][0::2] == group[chosen][1::2]).all()
        if alike and size[chosen].sum() <= allowed:
            best = min(best, harm[chosen].sum())
    if best == np.inf:
        with pytest.raises(BudgetError):
            solve(harm, size, group, allowed, gap=0)
        return
    found = solve(harm, size, group, allowed, gap=0)
    assert found.damage == pytest.approx(best, rel=1e-6)
    assert found.size <= allowed
    assert found.size == size[rows, found.candidates].sum()
    assert (group[rows, found.candidates][0::2] == group[rows, found.candidates][1::2]).all()


def test_one_candidate_that_costs_far_more_hides_no_difference():
    """The solver's absolute gap is of the largest cost."""
    cost = np.array([[1e4, 2.0, 1.999], [1e4, 1.0, 1.001]] + [[0.5, 0.5, 0.5]] * 2)
    found = solve(cost, np.ones((4, 3), np.int64), np.zeros((4, 3), np.int64), 4)
    assert found.damage == pytest.approx(1.999 + 1.0 + 1.0, rel=1e-6)


def test_nothing_fits():
    with pytest.raises(BudgetError, match="the smallest of the candidates take 7 bytes together, the budget allows 6"):
        solve(np.ones((2, 2)), np.array([[3, 9], [4, 9]]), np.zeros((2, 2), np.int64), 6)
    with pytest.raises(BudgetError, match=r"layer 0: no candidate of its keys goes with one of its values"):
        solve(np.ones((2, 1)), np.ones((2, 1), np.int64), np.array([[0], [1]]), 6)


# ------------------------------------------------------------------------------------------------- fits and damages


def test_fits_of_several_recipes_at_once_are_those_of_each(model, candidates, bundles):
    info = fingerprint(model)
    for recipes, bundle in zip(candidates.recipes(info.l), bundles, strict=True):
        formats, tensors = collect(Tap(model), WINDOW, recipes, candidates.method, info.h_kv, info.d)
        assert formats == bundle.layers
        assert all(torch.equal(t.cpu(), torch.from_numpy(bundle.tensors[name])) for name, t in tensors.items())


def test_recipes_that_see_the_same_share_what_is_collected(model, candidates, monkeypatch):
    """Signposts of 1 to 4 bits without outliers read one histogram."""
    info, seen = fingerprint(model), []
    observe = collect_all.__globals__["SideFits"].observe
    monkeypatch.setattr(
        collect_all.__globals__["SideFits"], "observe", lambda self, *a: (seen.append(self), observe(self, *a))[1]
    )
    collect_all(Tap(model), WINDOW[:1], candidates.recipes(info.l), candidates.method, info.h_kv, info.d)
    # Pass 1: ranges, thresholds, and values, which wait. Pass 2: histograms with and without outliers, of both sides.
    assert len(seen) == info.l * (3 + 4)


def test_damage_is_the_divergence_of_a_whole_pass(model, candidates, bundles):
    """What is kept of the layers below changes nothing; a window that covers all tokens costs nothing."""
    info, held = fingerprint(model), fitted(candidates, bundles)
    rotation = Rotation(*rotary(model), model.device)
    ids = WINDOW[:1]
    passes = damage._Passes(model, ids, info.l)
    full = model(ids).logits[0].log_softmax(-1)
    for layer, (index, side) in product(range(info.l), enumerate(("key", "value"))):
        for name, filling in product(("1bit", "2bit-1%"), candidates.fillings):
            fmt = candidates.format(side, name, filling)
            geometry = artifacts.PageGeometry.of(fmt, info.h_kv, info.d, side)
            codec = Codec(geometry, held[f"{side}.{name}"].side_tensors(layer, side))

            def cache(layer=layer, index=index, fmt=fmt, codec=codec):
                return OneSide(model, layer, index, fmt, codec, rotation)

            hidden = hidden_states(model, ids, cache())
            logits = model.lm_head(hidden)[0].log_softmax(-1)
            expected = (full.exp() * (full - logits)).sum(-1).mean().item()
            assert passes.damage(layer, cache()) == pytest.approx(expected, rel=1e-4, abs=1e-9)
            assert expected > 1e-6
    assert torch.equal(model(ids).logits[0].log_softmax(-1), full)  # the model is as it was


def test_damages_of_variants_and_fillings_multiply():
    found = Damages(np.array([[8.0, 2.0]]), np.array([[6.0, 3.0, 1.0]]), np.array([[[4.0, 1.0], [3.0, 6.0]]]))
    assert found.of(0).tolist() == [[[8.0, 2.0], [2.0, 0.5]]]
    assert found.of(1).tolist() == [[[6.0, 12.0], [3.0, 6.0], [1.0, 2.0]]]


def test_more_bits_and_wider_windows_damage_less(model, candidates, bundles):
    found = measure(model, WINDOW[:1], candidates, fitted(candidates, bundles))
    for harm, side in ((found.key, "key"), (found.value, "value")):
        plain = [harm[:, candidates.names(side).index(f"{bits}bit")] for bits in (1, 2, 3, 4)]
        assert all((more < less).all() for less, more in pairwise(plain))
    assert (found.fillings[:, :, 1] < found.fillings[:, :, 0]).all()


# ------------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize(
    "option, reason",
    [
        ("candidates.fillings=[]", "candidates.fillings: a list of"),
        ("candidates.fillings=[{t: 20}]", "tokens are not stored in tiles of 16"),
        ("candidates.fillings=[{pages: 20}]", "candidates.fillings.0.pages is not a setting"),
        ("candidates.key=3", "candidates.key: a table with base"),
        ("+candidates.value.variants.wrong={dense: {bits: 5}}", "candidates.value.variants.wrong"),
        ("+candidates.value.variants.wrong={t: 32}", "t of a variant; page size and window belong into fillings"),
    ],
)
def test_candidates_that_no_format_can_be(settings, option, reason):
    with pytest.raises((ConfigError, FormatError), match=re.escape(reason)):
        Candidates.of(settings("model=tiny", option).config.candidates).check(2, 64)


def test_the_default_candidates_fit_common_models(settings):
    for h_kv, d in ((2, 128), (32, 128), (8, 64), (1, 256)):
        Candidates.of(settings("model=tiny").config.candidates).check(h_kv, d)


def test_a_head_whose_bands_have_no_such_mean_is_told_the_way_out(settings):
    reason = (
        "candidates.key.variants.band-0.5: banded.bits=0.5: the widths of a head's 3 bands .* candidates=plain has no"
    )
    with pytest.raises(FormatError, match=reason):
        Candidates.of(settings("model=tiny").config.candidates).check(8, 96)
    Candidates.of(settings("model=tiny", "candidates=plain").config.candidates).check(8, 96)


# ------------------------------------------------------------------------------------------------ the command line


@pytest.fixture
def local(saved_model):
    return ("model=local", f"model.path={saved_model}", "model.name=two", *SMALL, "eval=none")


def test_a_budget_becomes_a_bundle_and_the_next_one_needs_no_model(calib, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = calib(*local, "budget=4bits@1K")
    assert done.code == 0, done.err
    assert sorted(p.name for p in (tmp_path / "bundles").iterdir()) == ["two-auto-4bits@1K", "two-plain.table"]
    first = artifacts.load("bundles/two-auto-4bits@1K")
    monkeypatch.setattr(job, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    done = calib(*local, "budget=3.2bits@1K", "out=bundles/small")
    assert done.code == 0, done.err
    assert "3.2" in done.out
    second = artifacts.load("bundles/small")
    sizes = []
    for bundle, bits in ((first, 4), (second, 3.2)):
        allocation = bundle.calibration["allocation"]
        sizes.append(spent(bundle.geometry, 1024))
        assert allocation["bytes"] == sizes[-1] <= bits * 1024 * 2 * 2 * 2 * 32 / 8
        assert bundle.geometry.bits(1024) <= bits
        assert allocation["tokens"] == 1024
    assert sizes[0] > sizes[1]
    assert first.calibration["allocation"]["predicted_kl"] < second.calibration["allocation"]["predicted_kl"]


def test_another_budget_imports_neither_torch_nor_transformers(calib, local, tmp_path, tabled):
    """Its bundle is that of the way which looks at the model's configuration; another file of it goes that way."""
    if not tabled.exists():
        assert calib(*local, "budget=4bits@1K", f"table={tabled}", f"out={tmp_path / 'first'}").code == 0
    options = [*local, "budget=3.5bits@1K", "eval=none", f"table={tabled}"]
    code = """if True:
        import sys
        from calib.__main__ import main
        main()
        assert not {"torch", "transformers"} & set(sys.modules), "imported"
    """
    light = [sys.executable, "-c", code, *options, f"out={tmp_path / 'light'}"]
    assert subprocess.run(light, capture_output=True, text=True, cwd=tmp_path).returncode == 0

    copy = tmp_path / "copy.table"
    shutil.copytree(tabled, copy)
    record = json.loads((copy / "table.json").read_text())
    record["provenance"]["model_config"]["sha256"] = "another"
    (copy / "table.json").write_text(json.dumps(record))
    heavy = [*light[:-1], f"table={copy}", f"out={tmp_path / 'heavy'}"]
    assert "imported" in subprocess.run(heavy, capture_output=True, text=True, cwd=tmp_path).stderr
    found, same = (artifacts.load(tmp_path / name) for name in ("light", "heavy"))
    assert found.layers == same.layers
    assert all(np.array_equal(x, same.tensors[name]) for name, x in found.tensors.items())


def test_an_evaluated_bundle(calib, local, tmp_path):
    done = calib(*local[:-1], "budget=4bits@1K", "eval.tokens=192", "eval.cache_tokens=70", f"out={tmp_path / 'b'}")
    assert done.code == 0, done.err
    found = artifacts.load(tmp_path / "b").evaluation
    assert found["cache_check"]["largest_logit_difference"] < 1e-3


BAD = {
    "budget=4": "budget=4: say bits, or bytes",
    "budget=4bits": "budget=4bits names no length, but the candidates keep different windows exact.*budget=4bits@32K",
    "budget=16bits@1K": "full precision takes 16 bits",
    "budget=1GiB@1K": "full precision takes [0-9]+ bytes at 1024 tokens, which fits",
    "budget=0.5bits@1K": "the smallest of the candidates take [0-9]+ bytes together, the budget allows 16384",
    "budget=4bits@1K candidates=foo": "candidates=foo: known are banded, plain",
    "budget=4bits@1K candidates.bins=100": "candidates.bins=100: allowed are",
    "budget=4bits@1K candidates.tokens=0": "candidates.tokens=0 must be at least 1",
    "budget=4bits@1K seqlen=16": "seqlen=16 does not fill a page behind the sinks: set seqlen to at least 17",
    "budget=4bits@1K seqlen=5000": "seqlen=5000 is above the model's 512 positions",
}


@pytest.fixture(scope="module")
def tabled(tmp_path_factory):
    return tmp_path_factory.mktemp("tables") / "two.table"


@pytest.mark.parametrize("options", BAD)
def test_budgets_that_cannot_be(calib, local, tmp_path, monkeypatch, tabled, options):
    """Refused before any model is loaded, if there is a table for what needs one; nothing is left behind."""
    if not tabled.exists():
        assert calib(*local, "budget=4bits@1K", f"table={tabled}", f"out={tmp_path / 'first'}").code == 0
    monkeypatch.setattr(job, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    out = tmp_path / "none" / "bundle"
    done = calib(*local, *options.split(), f"table={tabled}", f"out={out}")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert re.search(BAD[options], line), line
    assert not out.parent.exists()


def test_what_cannot_end_well_is_refused_before_it_is_measured(calib, local, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    at = (f"table={tmp_path / 'table'}", f"out={tmp_path / 'b'}")
    done = calib(*local, *at, "budget=0.5bits@1K")
    assert (done.code, "the smallest of the candidates take 51088 bytes together" in done.err) == (2, True), done.err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "thesis.tex").write_text("")
    done = calib(*local, *at, "budget=4bits@1K")
    assert (done.code, "holds thesis.tex, so it is not ours to replace" in done.err) == (2, True), done.err


def test_layers_whose_forward_pass_is_somebody_elses_keep_it(model):
    """As accelerate's, which moves inputs between GPUs."""
    layers = model.base_model.layers
    first = layers[0]
    own = first.forward
    first.forward = own
    with damage._skipped(layers, [1, 2]):
        assert [layer(None) for layer in layers] == [1, 2]
    assert first.__dict__.pop("forward") == own
    assert "forward" not in layers[1].__dict__


def test_tables_that_cannot_be_used(calib, local, tmp_path, tabled, tiny_model, tokenizer):
    if not tabled.exists():
        assert calib(*local, "budget=4bits@1K", f"table={tabled}", f"out={tmp_path / 'first'}").code == 0
    other = tmp_path / "other"
    tiny_model("llama", torch.float32, num_key_value_heads=4).save_pretrained(other)
    tokenizer.save_pretrained(other)
    at = (f"table={tabled}", f"out={tmp_path / 'b'}", "budget=4bits@1K")
    done = calib(*local, f"model.path={other}", "model.name=other", *at)
    assert (done.code, f"table={tabled} was measured for two-layers, not for model=other" in done.err) == (2, True)
    done = calib(*local, *at, "candidates.seed=1")
    assert (done.code, "was measured for other candidates than plain" in done.err) == (2, True)
    copy = tmp_path / "copy.table"

    def newer(path):
        record = json.loads((path / "table.json").read_text())
        (path / "table.json").write_text(json.dumps(record | {"version": 2}))

    for spoil, reason in (
        (lambda path: (path / "tensors.safetensors").write_bytes(b"0" * 100), "was altered since it was written"),
        (lambda path: (path / "tensors.safetensors").unlink(), "cannot be read"),
        (lambda path: (path / "table.json").write_text("{}"), "cannot be read"),
        (lambda path: (path / "table.json").write_text("{"), "cannot be read"),
        (newer, "is of version 2"),
    ):
        copy.mkdir(exist_ok=True)
        for file in tabled.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        spoil(copy)
        done = calib(*local, "budget=4bits@1K", f"table={copy}", f"out={tmp_path / 'b'}")
        assert (done.code, reason in done.err) == (2, True), done.err
        assert "delete the folder to measure again" in done.err
    assert not (tmp_path / "b").exists()


def test_a_table_comes_back_as_it_was(model, candidates, bundles, tmp_path):
    damages = Damages(np.full((2, 8), 0.5), np.full((2, 8), 0.25), np.ones((2, 2, 2)) / 3)
    table = Table(candidates, damages, bundles, {"data": None})
    read = Table.load(table.save(tmp_path / "t"), candidates)
    assert all((a == b).all() for a, b in zip(read.damages, damages, strict=True))
    assert (read.model, read.provenance) == (table.model, table.provenance)
    for mine, theirs in zip(read.bundles, bundles, strict=True):
        assert mine.layers == theirs.layers
        assert all((mine.tensors[name] == t).all() for name, t in theirs.tensors.items())
    with pytest.raises(TableError, match="cannot be read"):
        Table.load(tmp_path / "nowhere", candidates)
