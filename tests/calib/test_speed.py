"""Times as a second bound: the integer program with pairs, the file of times, and the command line."""

import json
import re
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import artifacts
from benchmarks import pair_speed
from benchmarks.decode_attention import MODELS
from calib.allocation import job
from calib.allocation.candidates import Candidates
from calib.allocation.solve import BudgetError, Pace, require_room, solve
from calib.allocation.speed import Speed, SpeedError, page_formats
from calib.config import ConfigError
from tests.calib.test_allocation import SMALL, problems

QUICK = (*SMALL, "eval=none")


@st.composite
def paces(draw, count: int) -> Pace:
    kinds = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    us = np.array(draw(st.lists(st.integers(1, 50), min_size=kinds[0] * kinds[1], max_size=kinds[0] * kinds[1])))
    of = tuple(np.array(draw(st.lists(st.integers(0, k - 1), min_size=count, max_size=count))) for k in kinds)
    return Pace(us.reshape(kinds).astype(float), (of[0], of[1]), draw(st.one_of(st.none(), st.integers(1, 120))))


@given(st.data())
def test_the_solver_finds_what_trying_all_finds(data):
    harm, size, group, allowed = data.draw(problems())
    pace = data.draw(paces(harm.shape[1]))
    rows, best = np.arange(len(harm)), np.inf
    for choice in map(np.array, product(range(harm.shape[1]), repeat=len(harm))):
        chosen = rows, choice
        alike = (group[chosen][0::2] == group[chosen][1::2]).all()
        if alike and size[chosen].sum() <= allowed and (pace.most is None or pace.taken(choice) <= pace.most):
            best = min(best, harm[chosen].sum())
    if best == np.inf:
        with pytest.raises(BudgetError):
            solve(harm, size, group, allowed, gap=0, pace=pace)
        return
    found = solve(harm, size, group, allowed, gap=0, pace=pace)
    assert found.damage == pytest.approx(best, rel=1e-6)
    pairs = zip(found.candidates[0::2], found.candidates[1::2], strict=True)
    assert found.us == sum(pace.us[pace.of[0][k], pace.of[1][v]] for k, v in pairs)
    assert pace.most is None or found.us <= pace.most


def test_a_bound_that_nothing_keeps_names_the_least_time():
    pace = Pace(np.array([[10.0, 3.0], [4.0, 9.0]]), (np.array([0, 1]), np.array([0, 1])), 5.0)
    damage, size, group = np.ones((4, 2)), np.array([[1, 5]] * 4), np.zeros((4, 2), np.int64)
    with pytest.raises(BudgetError, match=r"most_us=5: the fastest choice of at most 100 bytes takes 6\.0 microsec"):
        solve(damage, size, group, 100, pace=pace)
    with pytest.raises(BudgetError, match=r"the fastest choice of at most 8 bytes takes 13\.0 microseconds"):
        require_room(2, [([1, 5], [0, 0]), ([1, 5], [0, 0])], 8, pace)
    require_room(2, [([1, 5], [0, 0]), ([1, 5], [0, 0])], 100, pace._replace(most=6.0))
    require_room(3, [([1], [0]), ([1], [0])], 100, Pace(np.array([[0.1]]), (np.zeros(1, int), np.zeros(1, int)), 0.3))


# ---------------------------------------------------------------------------------------------------- file of times


@pytest.fixture
def candidates(settings):
    return Candidates.of(settings(*QUICK, "model=tiny").config.candidates)


def write(path, candidates, heads=(8, 8, 16), us=lambda key, value: 1.0):
    """A file as the benchmark writes it. us: by place of keys and of values among page formats."""
    keys, values = (list(page_formats(candidates, side)) for side in ("key", "value"))
    rows = [
        {"key": k, "key_t": kt, "value": v, "value_t": vt, "us": us(keys.index((k, kt)), values.index((v, vt)))}
        for (k, kt), (v, vt) in pair_speed.pairs_of(candidates)
    ]
    shape = dict(zip(("h_q", "h_kv", "d"), heads, strict=True)) | {"b": 1, "tokens": 4096}
    path.write_text(json.dumps(pair_speed.record(candidates, shape, rows) | {"gpu": "a GPU"}))
    return path


def test_a_file_of_times(candidates, settings, tmp_path):
    path = write(tmp_path / "speed.json", candidates, us=lambda key, value: 10.0 * key + value + 1)
    speed = Speed.load(path, 7.0, candidates)
    assert speed.us.tolist() == [[10.0 * k + v + 1 for v in range(8)] for k in range(8)]
    assert speed.origin == {"gpu": "a GPU", "shape": dict(speed.shape), "most_us": 7.0}
    pace = speed.pace(candidates)
    assert pace.of[0].tolist() == pace.of[1].tolist() == [i // 2 for i in range(16)]  # two fillings, of one page size
    sizes = settings(*QUICK, "candidates.fillings=[{t: 16}, {t: 32}]", "model=tiny").config.candidates
    two = Candidates.of(sizes)
    assert Speed.load(write(path, two), None, two).pace(two).of[0].tolist() == list(range(16))


def spoiled(change):
    """A file's record, changed."""

    def spoil(path):
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return spoil


SPOILED = {
    r"cannot be read \(.*Expecting": lambda path: path.write_text("{"),
    r"cannot be read \(.*No such file": lambda path: path.unlink(),
    r"cannot be read \('rows'\)": lambda path: path.write_text("{}"),
    r"cannot be read \(times must be above 0\)": spoiled(lambda r: r["rows"][3].update(us=0)),
    r"cannot be read \(shape lacks \['tokens'\]\)": spoiled(lambda r: r["shape"].pop("tokens")),
    r"cannot be read \('NoneType'": spoiled(lambda r: r["formats"].update(key=None)),
    r"cannot be read \(cannot convert float infinity": spoiled(lambda r: r["shape"].update(b=float("inf"))),
    r"has no times of the key candidate 2bit as it is now": spoiled(lambda r: r["formats"]["key"].pop("2bit")),
    r"has no times of the value candidate 4bit as": spoiled(lambda r: r["formats"]["value"]["4bit"].update(dense=None)),
    r"has no time of keys 1bit in pages of 16 with values 1bit in pages of 16": spoiled(lambda r: r["rows"].pop(0)),
}


@pytest.mark.parametrize("reason", SPOILED)
def test_files_that_cannot_be_used(candidates, tmp_path, reason):
    path = write(tmp_path / "speed.json", candidates)
    SPOILED[reason](path)
    with pytest.raises(SpeedError, match=f"speed={re.escape(str(path))} {reason}.*pair_speed.*or leave speed= out"):
        Speed.load(path, None, candidates)


def test_times_of_other_heads(candidates, tmp_path):
    speed = Speed.load(write(tmp_path / "speed.json", candidates, (32, 8, 128)), None, candidates)
    speed.require_heads(32, 8, 128)
    with pytest.raises(SpeedError, match="for 32 query heads, 8 kv heads and head dimension 128, the model has"):
        speed.require_heads(32, 32, 128)


def test_shapes():
    assert pair_speed.shape_of("llama3-8b@2x4096") == {"h_q": 32, "h_kv": 8, "d": 128, "b": 2, "tokens": 4096}
    assert pair_speed.shape_of("28/4@1x512")["h_kv"] == 4
    for text in ("28/3@1x512", "llama9@1x512", "32/8", "32/0@1x512", "32/8@0x512"):
        with pytest.raises(SystemExit, match=f"--shape {text}: {', '.join(MODELS)} or QUERY_HEADS/KV_HEADS"):
            pair_speed.shape_of(text)
    assert len(page_formats(pair_speed.candidates_of("banded", ["samples=4"]), "key")) == 17


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["pair_speed", "--shape", "llama3-8b@1x512", "--out", "speed.json"])
    with pytest.raises(SystemExit, match=r"runs on an NVIDIA GPU, and torch .* finds none: .*Installing"):
        pair_speed.main()


# ----------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "options, reason",
    [
        (["speed=f.json"], "speed=f.json: only a choice by budget= weighs times"),
        (["budget=4bits@1K", "most_us=5"], r"most_us=5\.0: microseconds above 0, by a file of times \(speed=FILE"),
        (["budget=4bits@1K", "speed=f.json", "most_us=0"], r"most_us=0\.0: microseconds above 0"),
    ],
)
def test_settings_that_cannot_be(settings, options, reason):
    with pytest.raises(ConfigError, match=reason):
        settings(*QUICK, "model=tiny", *options)


def test_a_bundle_within_a_time(calib, tiny_model, tokenizer, candidates, tmp_path, monkeypatch):
    """What is slow is chosen where it may be; then not; and what cannot be is refused before anything is measured."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = artifacts_heads(tmp_path / "model")
    slow = [i for i, name in enumerate(candidates.names("key")) if name.endswith("%")]
    path = write(
        tmp_path / "speed.json", candidates, model, lambda key, value: 5.0 + 10 * (key in slow) + 10 * (value in slow)
    )
    local = (*QUICK, "model=local", f"model.path={tmp_path / 'model'}", "budget=6bits@1K", f"speed={path}")
    with monkeypatch.context() as patch:
        patch.setattr(job, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
        done = calib(*local, "most_us=9", f"out={tmp_path / 'none'}")
        assert (done.code, "most_us=9: the fastest choice of at most" in done.err) == (2, True), done.err
        assert "takes 10.0 microseconds" in done.err
        wrong = write(tmp_path / "wrong.json", candidates)
        done = calib(*local, f"speed={wrong}", f"out={tmp_path / 'none'}")
        assert (done.code, "was measured for 8 query heads" in done.err) == (2, True), done.err
    found = {}
    for most in (None, 40.0, 10.0):  # two layers; the later ones from the table
        bound = () if most is None else (f"most_us={most}",)
        done = calib(*local, *bound, f"out={tmp_path / 'bundle'}")
        assert done.code == 0, done.err
        found[most] = artifacts.load(tmp_path / "bundle")
    for most, bundle in found.items():
        said = bundle.calibration["allocation"]
        outliers = sum(bool(side.format.sparse) for side in bundle.geometry.sides)
        assert said["predicted_us"] == 10.0 + 10 * outliers
        assert said["speed"]["most_us"] == most
        assert most is None or said["predicted_us"] <= most
    assert found[None].calibration["allocation"]["predicted_us"] > 40
    damage = [found[most].calibration["allocation"]["predicted_kl"] for most in (None, 40.0, 10.0)]
    assert damage[0] <= damage[1] <= damage[2] != damage[0]


def artifacts_heads(folder) -> tuple[int, int, int]:
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    return heads, config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads
