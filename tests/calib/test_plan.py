"""The dry run: what it says is what comes, and no weight is read for it. Launchers of several runs."""

import os
import re
import subprocess
import sys

import pytest
from transformers import AutoConfig

import artifacts
from calib import pipeline, plan
from calib.__main__ import CONF

OPTIONS = ("seqlen=96", "samples=2", "eval=none", "method.bins=512")


@pytest.fixture
def local(saved_model):
    return ("model=local", f"model.path={saved_model}", "model.name=two", *OPTIONS)


def test_a_plan_reads_no_weights_and_says_what_comes(calib, local, saved_model, tiny_model, tmp_path, monkeypatch):
    out = tmp_path / "bundle"
    assert calib(*local, f"out={out}").code == 0
    bundle = artifacts.load(out)
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("COLUMNS", "160")
    done = calib(*local, f"out={tmp_path / 'other' / 'bundle'}", "dry_run=true")
    assert (done.code, done.err) == (0, "")
    assert sorted(tmp_path.rglob("*")) == before
    for text in (
        f"{bundle.geometry.bits(4096):.3f} at 4096 tokens, {bundle.geometry.bits(131072):.3f} at 131072",
        f"{bundle.geometry.cache_bytes(131072) / 2**20:.1f} MiB",
        f"{bundle.geometry.bundle_bytes / 1024:.0f} KiB",
        "2 samples of 96 tokens",
    ):
        assert text in done.out, done.out
    config = AutoConfig.from_pretrained(saved_model)
    assert plan.parameters(config) == sum(p.numel() for p in tiny_model("llama").parameters())


def test_a_plan_for_the_shape_of_llama_2_7b(settings):
    """Peak memory above the weights was measured as 1.86 GB on a GPU (docs/calibration.md)."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000,
    )  # fmt: skip
    assert plan.parameters(config) == 6_738_415_616
    made = settings("model=tiny", "bits=3", "seqlen=2048")
    assert 0.7 * 1.86e9 < plan.working(made, config, plan.torch.bfloat16) < 1.86e9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("bits=5",), "bits=5 is not supported"),
        (("seqlen=5000",), "seqlen=5000 is above the model's 512 positions"),
        (("budget=3bits@1K",), "dry_run plans recipes, not budgets: leave one of them out"),
        (("model.path=./nowhere",), "model.path=./nowhere: there is no such folder"),
        (("data.path=nowhere.txt",), "nowhere.txt"),
    ],
)
def test_what_cannot_work_cannot_be_planned(calib, local, options, reason):
    done = calib(*local, *options, "dry_run=true")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert reason in line


def launched(folder, *options):
    """`python -m calib -m` with jobs in processes of their own, through submitit."""
    command = [sys.executable, "-m", "calib", "-m", "launcher=slurm", *options]
    environment = os.environ | {"PYTHONPATH": str(CONF.parent)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def test_jobs_of_a_launcher_share_what_is_collected(local, tmp_path):
    here = ("hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=0", f"work={tmp_path / 'work'}")
    done = launched(tmp_path, *local, *here, "bits=2,3")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "bundles").iterdir()) == ["two-kvquant-2bit", "two-kvquant-3bit"]
    for bits in (2, 3):
        assert artifacts.load(tmp_path / "bundles" / f"two-kvquant-{bits}bit").layers[0].key.dense.bits == bits
    done = launched(tmp_path, *local, *here, "bits=5")  # seen before anything is launched
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: method.key.dense: bits=5 is not supported: allowed are 1, 2, 3, 4, 8"
    )
    done = launched(tmp_path, *local, *here, "data.path=nowhere.txt")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: a job failed: data.path=nowhere.txt does not exist: name a")


def test_no_slurm_here(calib, local, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    done = calib("-m", "launcher=slurm", *local, "bits=2,3")
    assert done.code == 2
    assert re.search("error: launcher=slurm: Could not detect .srun.", done.err.splitlines()[-1])


def test_launchers_that_are_unknown_or_not_installed(calib, local):
    assert "launcher=foo: known are local, slurm" in calib(*local, "launcher=foo").err
    done = calib(*local, "hydra/launcher=submitit_nowhere")
    assert "launcher=slurm needs submitit, which is not installed: pip install 'signpost-kv[slurm]'" in done.err
