"""`python -m calib` from end to end, on a random model of two layers and on the embedded one."""

import json
import re
from importlib.metadata import version

import numpy as np
import pytest
import torch

from artifacts import load
from calib import pipeline
from calib.__main__ import CONF
from calib.data import calibration_tokens
from calib.progress import track
from runtime.hf import ModelLoadError, SignpostCache, fingerprint, load_causal_lm
from tests.runtime.tiny_models import MLA

SHORT = ("samples=2", "seqlen=80", "eval.tokens=160", "eval.cache_tokens=70", "device=cpu")


@pytest.fixture
def local(saved_model):
    """Options that calibrate the saved model quickly."""
    return ("model=local", f"model.path={saved_model}", "method.bins=512", *SHORT)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_bundle_is_written_and_loads(calib, local, saved_model, text_file, tmp_path):
    out = tmp_path / "deep" / "bundle"
    done = calib(*local, "bits=3", f"data.path={text_file}", f"eval.path={text_file}", "seed=5", f"out={out}")
    assert done.code == 0, done.err
    assert names(out) == ["README.md", "evaluation.json", "manifest.json", "tensors.safetensors"]
    assert names(out.parent) == ["bundle"]
    bundle = load(out)
    model, tokenizer = load_causal_lm(str(saved_model), "float32", "cpu")
    bundle.model.require(fingerprint(model))
    assert (bundle.recipe, bundle.model.name) == ("kvquant", "two-layers")
    assert {f.key.dense.bits for f in bundle.layers} == {3}
    assert np.array_equal(bundle.tensors["rope.inv_freq"], model.model.rotary_emb.inv_freq.numpy())
    ids = tokenizer("3 times 3 makes", return_tensors="pt")["input_ids"]
    text = model.generate(ids, past_key_values=SignpostCache(model, bundle), max_new_tokens=3, do_sample=False)
    assert text.shape[1] == ids.shape[1] + 3


def test_provenance_is_complete_and_tells_of_no_folders(calib, local, saved_model, text_file, tmp_path, settings):
    out = tmp_path / "bundle"
    assert calib(*local, f"data.path={text_file}", "eval=none", "seed=5", f"out={out}").code == 0
    found = load(out).calibration
    model, tokenizer = load_causal_lm(str(saved_model), "float32", "cpu")
    tokens = calibration_tokens(settings(f"data.path={text_file}").config.data, model, tokenizer, 2, 80, 5)
    assert found["data"] == {"source": "text.txt", "sha256": tokens.digest, "samples": 2, "seqlen": 80}
    assert (found["seed"], found["model_dtype"]) == (5, "float32")
    for package in ("torch", "transformers", "numpy", "numba", "safetensors"):
        assert found["packages"][package] == version(package)
    assert found["packages"].keys() >= {"python", "signpost-kv"}
    used = found["settings"]
    assert (used["bits"], used["outliers"], used["sinks"], used["samples"]) == (4, 0.01, 1, 2)
    assert used["method"]["weights"] == "fisher_scaled"
    assert used["method"]["key"]["dense"]["bits"] == 4
    assert (used["model"]["path"], used["data"]["path"]) == ("two-layers", "text.txt")
    text = (out / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert str(saved_model.parent) not in text


def test_two_runs_are_equal_to_the_bit(calib, local, text_file, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for out in folders:
        assert calib(*local, f"out={out}").code == 0  # generated text, evaluated
    assert names(folders[0]) == names(folders[1])
    for name in ("tensors.safetensors", "evaluation.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    one, two = (manifest(out) for out in folders)
    assert all(one[key] == two[key] for key in one.keys() - {"created", "sha256"})
    assert one.keys() == two.keys()


def test_a_run_replaces_the_bundle_that_is_there(calib, local, tmp_path):
    out = tmp_path / "bundle"
    assert calib(*local, "bits=2", f"out={out}").code == 0
    assert calib(*local, "bits=3", "eval=none", f"out={out}").code == 0
    assert names(out) == ["README.md", "manifest.json", "tensors.safetensors"]
    assert load(out).layers[0].key.dense.bits == 3
    assert names(tmp_path) == ["bundle"]


def test_the_table_goes_to_stdout_and_the_rest_to_stderr(calib, local, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "a[b]" / "bundle[/red]"  # what looks like markup is text
    done = calib(*local, f"out='{out}'")
    assert done.code == 0, done.err
    bundle = load(out)
    result = bundle.evaluation
    for text in (
        "kvquant for two-layers",
        str(out),
        f"{bundle.geometry.bits(80):.3f} at 80 tokens",
        f"{bundle.geometry.bits(131072):.3f} at 131072",
        "158 tokens in windows of 80",
        f"{result['loss']:.4f} nats per token, full precision {result['loss_full']:.4f}",
        f"{result['kl_mean']:.5f} mean, {result['kl_p999']:.4f} at 99.9%",
        f"{100 * result['top1']:.2f}%",
        "on 70 tokens",
    ):
        assert text in done.out, text
    assert f"saved {out}" in done.err
    for title in ("calibration text", "pass 1: thresholds", "pass 2: signposts", "evaluation text", "evaluating"):
        assert title in done.err
        assert title not in done.out
    without = calib(*local, "eval=none", f"out={tmp_path / 'plain'}")
    assert "at 131072" in without.out
    assert "perplexity" not in without.out
    assert load(tmp_path / "plain").evaluation is None


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ModelLoadError("gone [now]"), 2)])
def test_whatever_ends_evaluation_leaves_the_calibrated_bundle(calib, local, tmp_path, monkeypatch, error, code):
    def fail(*args):
        raise error

    monkeypatch.setattr(pipeline, "evaluate", fail)
    done = calib(*local, f"out={tmp_path / 'bundle'}")
    assert done.code == code
    saved = f"interrupted: {tmp_path / 'bundle'} is saved, without its evaluation"
    stopped = f"{saved}: the same command continues from {tmp_path}/.signpost-work, which is kept for it"
    assert done.err.splitlines()[-1] == (stopped if code == 130 else "error: gone [now]")
    assert load(tmp_path / "bundle").evaluation is None
    assert names(tmp_path) == [".signpost-work", "bundle"]  # the same command continues


def test_a_model_that_slides_in_some_layers(tiny_model, tokenizer, calib, tmp_path):
    """Gemma 2: the first of two layers is in full precision, unless it is asked for; the summary counts it."""
    tiny_model("gemma2", torch.float32, sliding_window=40).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    options = ("model=local", f"model.path={tmp_path / 'gemma'}", "method.bins=512", *SHORT)
    done = calib(*options, f"out={tmp_path / 'bundle'}")
    assert done.code == 0, done.err
    bundle = load(tmp_path / "bundle")
    assert (bundle.layers[0], bundle.model.sliding, bundle.model.softcap) == (None, (40, 0), 50.0)
    assert bundle.evaluation["bits"] == bundle.geometry.bits(80) > 8
    assert bundle.evaluation["cache_check"]["largest_logit_difference"] < 1e-2
    assert f"{bundle.geometry.bits(131072):.3f} at 131072" in done.out
    done = calib(*options, "eval=none", "method.layers={sliding: {}}", f"out={tmp_path / 'all'}")
    assert done.code == 0, done.err
    assert None not in load(tmp_path / "all").layers


def test_latent_attention_is_refused_before_anything_is_loaded(calib, tmp_path, monkeypatch):
    MLA.save_pretrained(tmp_path / "deepseek")
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    done = calib("model=local", f"model.path={tmp_path / 'deepseek'}", *SHORT, f"out={tmp_path / 'bundle'}")
    assert done.code == 2
    assert done.err.strip() == (
        "error: deepseek_v3 caches a latent vector (MLA), not keys and values: there is nothing to compress"
    )


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("pipeline.load_causal_lm", "while loading the model: set device=split .* or model.dtype=bfloat16"),
        ("pipeline.evaluate", r"in a window of eval.seqlen=80 tokens: set eval.seqlen=40; .*bundle is calibrated"),
        ("data.generate", "while the model wrote 80 tokens 2 times at once: set seqlen=40, or let the text come from"),
    ],
)
def test_out_of_memory_says_what_to_lower(calib, local, tmp_path, monkeypatch, where, message):
    """Collecting does as well: see test_resume.py."""

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(f"calib.{where}", full)
    more = ("data=generated", "data.path=null") if where == "data.generate" else ()
    done = calib(*local, *more, f"out={tmp_path / 'bundle'}")
    assert done.code == 2
    assert re.search("error: out of GPU memory " + message, done.err.splitlines()[-1])


def test_an_interruption_before_anything_is_saved(calib, local, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    done = calib(*local, f"out={tmp_path / 'bundle'}")
    assert (done.code, done.err) == (
        130, "interrupted: nothing was saved yet, the same command starts from the beginning\n",
    )  # fmt: skip
    assert names(tmp_path) == []


def test_what_another_run_saved_stays_and_is_mentioned(calib, local, tmp_path):
    (tmp_path / ".signpost-work" / "of-another-run").mkdir(parents=True)
    done = calib(*local, "eval=none", f"out={tmp_path / 'bundle'}")
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == (
        f"{tmp_path}/.signpost-work stays: other runs have saved there what they continue from; if none will, delete it"
    )
    assert names(tmp_path / ".signpost-work") == ["of-another-run"]


def test_an_error_before_the_end_leaves_the_old_bundle(calib, local, tmp_path, monkeypatch):
    out = tmp_path / "bundle"
    assert calib(*local, "eval=none", f"out={out}").code == 0
    before = (out / "manifest.json").read_bytes()
    monkeypatch.setattr(pipeline, "collect", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert calib(*local, "bits=2", f"out={out}").code == 130
    assert (out / "manifest.json").read_bytes() == before
    assert names(tmp_path) == [".signpost-work", "bundle"]  # the same command continues


def test_a_place_that_cannot_be_written_is_refused_first(calib, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("")
    done = calib(f"out={tmp_path / 'file' / 'bundle'}")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_text_is_read_before_the_long_work(calib, local, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "collect", lambda *args: pytest.fail("calibration began"))
    done = calib(*local, "seqlen=500", "samples=1000", "eval=none", f"data.path={text_file}", f"out={tmp_path / 'b'}")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(
        "error: text.txt has 2600 tokens, samples=1000 x seqlen=500 needs 500000"
    )
    text_file.with_name("short.txt").write_text("too short")
    done = calib(*local, f"eval.path={text_file.with_name('short.txt')}", f"out={tmp_path / 'bundle'}")
    assert done.err.splitlines()[-1].startswith("error: short.txt: 9 tokens do not fill one window of eval.seqlen=80")
    assert names(tmp_path) == ["short.txt", "text.txt"]


def test_several_runs_by_one_command(calib, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = calib(*local, "-m", "bits=2,3", "eval=none", "method.value.dense.codebook=uniform,nf",
                 "out=runs/${bits}-${method.value.dense.codebook}")  # fmt: skip
    assert done.code == 0, done.err
    assert names(tmp_path) == ["runs"]
    assert names(tmp_path / "runs") == ["2-nf", "2-uniform", "3-nf", "3-uniform"]
    assert {load(tmp_path / "runs" / f"{bits}-nf").layers[1].key.dense.bits for bits in (2, 3)} == {2, 3}
    assert calib(*local, "bits=2,7", "eval=none", "out=runs/${bits}", "-m").code == 2


def test_the_embedded_model_is_the_default(calib, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = calib("samples=1", "seqlen=70", "eval=none", "method.bins=512")
    assert done.code == 0, done.err
    bundle = load(tmp_path / "bundles" / "tiny-kvquant-4bit")
    assert bundle.model.name == "tiny"
    assert str(CONF.parent) not in json.dumps(manifest(tmp_path / "bundles" / "tiny-kvquant-4bit"))


@pytest.mark.parametrize("name", ["kvquant", "int"])
def test_the_callers_random_state_is_left_alone(calib, local, tmp_path, name):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert calib(*local, f"method={name}", f"out={tmp_path / name}").code == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_models_in_half_precision(calib, local, tmp_path):
    done = calib(*local, "model.dtype=bfloat16", f"out={tmp_path / 'bundle'}")
    assert done.code == 0, done.err
    bundle = load(tmp_path / "bundle")
    assert bundle.calibration["model_dtype"] == "bfloat16"
    assert bundle.evaluation["loss"] == pytest.approx(bundle.evaluation["loss_full"], abs=0.5)


def test_a_broken_model_is_named(calib, local, tiny_model, tokenizer, text_file, tmp_path):
    model = tiny_model("llama", torch.float32)
    model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own = (*local, f"model.path={tmp_path / 'model'}", f"out={tmp_path / 'bundle'}")
    for options, message in (
        (("data=generated",), "the model's logits hold NaN or infinity: check the weights"),
        ((f"data.path={text_file}", "eval=none"), "layer 1: values hold NaN or infinity"),
        (("method=int", f"data.path={text_file}", f"eval.path={text_file}"), "the model's hidden states hold NaN"),
    ):
        done = calib(*own, *options)
        assert done.code == 2
        assert message in done.err.splitlines()[-1]


def test_tuning_free_formats_are_given_no_text(calib, local, saved_model, tmp_path, monkeypatch):
    """Generating it would take longer than all the rest. The card says so."""
    monkeypatch.setattr(pipeline, "calibration_tokens", lambda *args: pytest.fail("text was made"))
    out = tmp_path / "bundle"
    done = calib(*local, "method=kivi", "method.key.t=32", "eval=none", f"out={out}")
    assert done.code == 0, done.err
    found = load(out).calibration["data"]
    assert (found["source"], found["samples"], found["seqlen"]) == ("none needed", 0, 80)


GROUPS = ("method.key.t=32", "method.value.t=32", "method.key.dense.group=32", "method.value.dense.group=32")


def test_ranks_are_chosen_written_decoded_and_evaluated(calib, local, text_file, tmp_path):
    """From the command to the cache: every layer its ranks, so many on average, and both modes of evaluation agree."""
    out = tmp_path / "bundle"
    texts = (f"data.path={text_file}", f"eval.path={text_file}")
    done = calib(*local, *texts, "experiment=methods/gear-spectrum", *GROUPS, f"out={out}")
    assert done.code == 0, done.err
    bundle = load(out)
    for side in ("key", "value"):
        parts = [getattr(layer, side).lowrank for layer in bundle.layers]
        assert sum(part.rank for part in parts if part) == 8
    assert bundle.layers[0] != bundle.layers[1]
    assert bundle.calibration["settings"]["method"]["key"]["lowrank"] == {
        "rank": {"mean": 4},
        "block_rank": {"mean": 2},
    }
    check = bundle.evaluation["cache_check"]
    assert check["loss_cache"] == pytest.approx(check["loss_simulated"], abs=1e-3)
    assert bundle.evaluation["bits"] == bundle.geometry.bits(80)


def test_outlier_channels_are_chosen_written_and_evaluated(calib, local, text_file, tmp_path):
    out = tmp_path / "bundle"
    texts = (f"data.path={text_file}", f"eval.path={text_file}")
    done = calib(*local, *texts, "experiment=methods/qjl-share", "method.key.t=32", "method.value.t=32", f"out={out}")
    assert done.code == 0, done.err
    bundle = load(out)
    for layer, formats in enumerate(bundle.layers):
        counts = bundle.side_tensors(layer, "key")["outlier_mask"].sum(1)
        assert formats.key.sketch.outliers == counts.max() > 0
    check = bundle.evaluation["cache_check"]
    assert check["loss_cache"] == pytest.approx(check["loss_simulated"], abs=1e-3)


def test_bars_are_optional():
    track(None, "nothing", 3)()
