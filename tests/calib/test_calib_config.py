"""Every file of conf/ composes, and what cannot work is refused in one clear line before a model is loaded."""

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import MISSING as VALUE_MISSING
from omegaconf import OmegaConf

from artifacts import LowRank, Sketch
from artifacts.errors import FormatError
from calib import early, pipeline
from calib.__main__ import CONF
from calib.config import Config, ConfigError, Settings
from tests.formats import kivi, kvquant, random_bundle

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"model=local": ["model.path=x"], "data=text": ["data.path=x"], "eval=text": ["eval.path=x"]}
FILES = [
    f"{group.name}={path.relative_to(group).with_suffix('')}"
    for group in sorted(CONF.iterdir())
    if group.is_dir()
    for path in sorted(group.rglob("*.yaml"))
]


@pytest.mark.parametrize("choice", FILES)
def test_every_file_composes_and_validates(settings, choice):
    made = settings(choice, *NEEDS.get(choice, []))
    assert len(made.formats(3)) == 3
    assert made.resolved["method"]["name"] == made.config.method.name


def test_defaults_are_the_main_job(settings):
    config = settings().config
    assert (config.model.path, config.method.name, config.bits, config.outliers, config.sinks) == (
        "tiny", "kvquant", 4, 0.01, 1,
    )  # fmt: skip
    assert config.out == "bundles/tiny-kvquant-4bit"


def test_options_reach_the_formats(settings):
    made = settings("bits=3", "outliers=0.02", "sinks=5")
    (layer,) = made.formats(1)
    for fmt in (layer.key, layer.value):
        assert (fmt.dense.bits, fmt.sparse.fraction, fmt.window.sinks) == (3, 0.02, 5)
    assert settings("outliers=0").formats(1)[0].key.sparse is None


def test_naming_a_path_makes_it_the_source(settings):
    made = settings("data.path=some/file.txt")
    assert made.config.data.source == made.resolved["data"]["source"] == "text"


def test_settings_of_single_layers(settings):
    made = settings(
        "++method.layers.1.key.dense.bits=8", "++method.layers={2: {value: {sparse: null, dense: {bits: 2}}}}", "bits=3"
    )
    bits = [(f.key.dense.bits, f.value.dense.bits) for f in made.formats(4)]
    assert bits == [(3, 3), (8, 3), (3, 2), (3, 3)]
    assert [f.value.sparse is None for f in made.formats(4)] == [False, False, True, False]
    with pytest.raises(FormatError, match=r"method\.layers\.2: the model has layers 0 to 1"):
        made.formats(2)


def test_settings_of_ranges_and_halves(settings):
    """Halves first, then ranges, then single layers, whatever the order in the file."""
    made = settings(
        "method=qjl",
        "++method.layers={3: {key: {sketch: {m: 32}}}, 2-4: {key: {sketch: {m: 64}}}, first_half: {key: {t: 64}},"
        " second_half: {key: {sketch: {m: 96, outlier_m: 32}}}}",
    )
    keys = [layer.key for layer in made.formats(7)]
    assert [key.sketch.m for key in keys] == [256, 256, 64, 32, 64, 96, 96]
    assert [key.sketch.outlier_m for key in keys] == [128, 128, 128, 32, 32, 32, 32]
    assert [key.t for key in keys] == [64, 64, 64, 128, 128, 128, 128]
    with pytest.raises(FormatError, match=r"method\.layers\.2-4: the model has layers 0 to 3"):
        made.formats(4)


def test_layers_in_full_precision(settings):
    """null takes the format away, what comes on top of it in a narrower place gives one again."""
    made = settings("++method.layers={first_half: null, 1: {key: {t: 32}}, 5: null}")
    assert [f is None for f in made.formats(6)] == [True, False, True, False, False, True]
    assert made.formats(6)[1].key.t == 32
    assert [recipe is None for recipe in made.recipes(6)] == [True, False, True, False, False, True]


def test_layers_that_slide(settings):
    """In full precision where others do not slide, unless the recipe says otherwise."""
    mixed, everywhere = (20, 20, 0, 20), (20,) * 4

    def exact(*options, sliding):
        return [f is None for f in settings(*options).formats(4, sliding)]

    assert exact(sliding=mixed) == [True, True, False, True]
    assert exact(sliding=everywhere) == exact(sliding=()) == [False] * 4
    assert exact("++method.layers={sliding: {}}", sliding=mixed) == [False] * 4
    assert exact("++method.layers={sliding: null}", sliding=everywhere) == [True] * 4
    assert exact("++method.layers={sliding: null, 0: {}}", sliding=everywhere) == [False, True, True, True]
    assert exact("++method.layers={1-2: {}, first_half: null}", sliding=mixed) == [True, False, False, True]
    with pytest.raises(FormatError, match=r"method.layers.sliding: the model has no layers that slide, leave it out"):
        settings("++method.layers={sliding: null}").formats(4)


def test_the_setting_of_qjls_authors(settings):
    """32 layers: 512 signs, 256 for the outlier channels, in the first 16, then 256 and 128; 8 channels throughout."""
    sketches = [layer.key.sketch for layer in settings("experiment=methods/qjl-paper").formats(32)]
    assert sketches == [Sketch(512, "orthogonal", 8, 256)] * 16 + [Sketch(256, "orthogonal", 8, 128)] * 16


def test_numbers_left_to_calibration(settings):
    """Rules reach the fits beside stand-ins; a layer may have a number of its own; the card keeps what was asked."""
    made = settings("experiment=methods/gear-spectrum", "++method.layers={1: {key: {lowrank: {rank: 3}}}}")
    first, second = made.recipes(2)
    assert first.formats.key.lowrank == first.formats.value.lowrank == LowRank(4, 2)
    assert first.key == first.value == {"lowrank.rank": 4.0, "lowrank.block_rank": 2.0}
    assert (second.formats.key.lowrank, second.key) == (LowRank(3, 2), {"lowrank.block_rank": 2.0})
    assert made.resolved["method"]["key"]["lowrank"]["rank"] == {"mean": 4}
    fixed = settings("experiment=methods/gear-spectrum", "++method.key.lowrank={rank: 6, block_rank: 2}").recipes(1)[0]
    assert (fixed.formats.key.lowrank, fixed.key) == (LowRank(6, 2), {})


BAD = {
    "model=foo": "model=foo: known are .*llama2-7b.*tiny",
    "method=foo": "method=foo: known are .*kvquant",
    "data=foo": "data=foo: known are .*generated.*text",
    "eval=foo": "eval=foo: known are .*none",
    "experiment=foo": "experiment=foo: known are .*ladder/int2-token",
    "model=schema": "model=schema: known are .*tiny",
    "model=local": "model.path has no value: set model.path=",
    "nosuch=1": "unknown option 'nosuch': known are model, method, .*, out, experiment, launcher. See --help",
    "+nosuch=1": "unknown option 'nosuch'",
    "method.nosuch=1": "unknown option 'method.nosuch': known are method.name, method.key",
    "eval.token=1": "unknown option 'eval.token': known are .*eval.tokens",
    "bits 3": "'bits' is no option: options are written name=value, such as bits=3. See --help",
    "--bits 3": "'--bits' is no option: options are written name=value",
    "--bits=3": "'--bits=3' is no option: options are written name=value",
    "bits=2,3": "add --multirun",
    "bits=7": "method.key.dense: bits=7 is not supported: allowed are 1, 2, 3, 4, 8",
    "bits=abc": "bits=abc: allowed are 1, 2, 3, 4, 8",
    "bits=1.5": "bits=1.5: allowed are 1, 2, 3, 4, 8",
    "samples=many": "samples=many: allowed are whole numbers",
    "eval.tokens=all": "eval.tokens=all: allowed are whole numbers and null",
    "dry_run=maybe": "dry_run=maybe: allowed are true and false",
    "outliers=few": r"outliers=few: allowed are numbers from 0 \(none\) to 0.25",
    "codebook=kmeans": r"codebook=kmeans: allowed are nuq, uniform-fit, nuq-qnorm, nf, uniform",
    "outliers=0.5": r"outliers=0.5: allowed are numbers from 0 \(none\) to 0.25; outliers=0 keeps none",
    "outliers=-1": "outliers=-1.0: allowed are",
    "outliers=nan": "outliers=nan: allowed are",
    "method.key.sparse.fraction=0.5": "sparse.fraction=0.5 must be above 0 and at most 0.25",
    "samples=0": "samples=0 must be at least 1",
    "sinks=-1": "sinks=-1 must be at least 0",
    "seed=-1": "seed=-1 must be at least 0",
    "seed=4294967296": "seed=4294967296 must be at most 4294967295",
    "seqlen=1": "seqlen=1 must be at least 2",
    "seqlen=64": "seqlen=64 does not fill a page of 64 tokens behind 1 sinks: set seqlen to at least 65",
    "seqlen=4097": "seqlen=4097 is above the model's 4096 positions: set seqlen=4096 or less",
    "eval.seqlen=5000": "eval.seqlen=5000 is above the model's 4096 positions",
    "eval.seqlen=1": "eval.seqlen=1 must be at least 2",
    "eval.tokens=100": "eval.tokens=100 do not fill one window of seqlen=512",
    "eval.cache_tokens=1": "eval.cache_tokens=1: at least 2",
    "eval.cache_tokens=-1": "eval.cache_tokens=-1: at least 2",
    "method.weights=fish": "method.weights=fish: allowed are none, fisher, fisher_scaled",
    "method.bins=100": "method.bins=100: at least 256",
    "method.layers.5.key.dense.bits=2": "method.layers.5: the model has layers 0 to 4",
    "method.layers.0.key.dense.bits=5": "method.layers.0.key.dense: bits=5 is not supported",
    "method.layers.x.key.t=64": "method.layers.x: layers are numbers from 0, .* first_half, second_half or sliding",
    "method.layers={3-1:{key:{t:64}}}": "method.layers.3-1: layers are numbers from 0, ranges",
    "method.layers={0-x:{key:{t:64}}}": "method.layers.0-x: layers are numbers from 0, ranges",
    "method.layers={3-5:{key:{t:32}}}": "method.layers.3-5: the model has layers 0 to 4",
    "method.layers.second_half.key.dense.bits=5": "method.layers.second_half.key.dense: bits=5 is not supported",
    "method.layers.0.keys.t=64": "method.layers.0: keys is not a side: known are key, value",
    "method.layers.0=7": "method.layers.0: 7 is not a side",
    "method.layers=7": "method.layers=7 must be a table of layers",
    "method.key=7": "method.key must be a table of settings, not 7",
    "method.key.t=0": "method.key: page of t=0 tokens",
    "method.key.t=128.5": "method.key.t=128.5 must be of type int",
    "method.key.dense.axis=row": "method.key.dense.axis='row': allowed are channel, token",
    "method.value.dense.group=48": "method.value: .*group=48 does not divide the head dimension 64: set a divisor of",
    "method=kivi method.key.dense.group=48": (
        "method.key: dense.group=48 does not divide the page of 128 tokens: set a divisor of 128, such as 16"
    ),
    "method=kivi method.key.window.recent=100": (
        "method.key.window.recent=100 is not a multiple of dense.group=32: groups .* whole, set 96 or 128"
    ),
    "method=gear method.key.lowrank.rank=65": (
        "method.key: lowrank.rank=65 is above what 64 tokens x 64 channels can have: 64 at most"
    ),
    "method=gear method.layers.4.value.lowrank.rank=65": "method.value: lowrank.rank=65 is above what",
    "method=gear method.key.lowrank.block_rank=5": "lowrank.rank=4, lowrank.block_rank=5: .* block_rank at most rank",
    "method=gear method.key.lowrank.rank=0": "lowrank.rank=0, .*at least 1",
    "method=gear method.key.lowrank.rank={mean:0}": (
        "method.key.lowrank.rank={'mean': 0}: a number is allowed, or {mean: X} with X above 0"
    ),
    "method=gear method.key.dense.bits={mean:2}": "method.key.dense.bits={'mean': 2} must be of type int",
    "method=qjl method.key.sketch.m=100": "sketch.m=100, sketch.outlier_m=128: multiples of 32, m at least 32",
    "method=qjl method.key.sketch.outlier_m=48": "sketch.outlier_m=48: multiples of 32",
    "method=qjl method.key.sketch.outliers=64": "method.key: sketch.outliers=64 must be below the head dimension 64",
    "method=qjl method.key.sketch.outliers={share:1.5}": (
        "outliers={'share': 1.5}: a number is allowed, or {share: X} with X between 0 and 1"
    ),
    "method=qjl method.layers.0.value.sketch.m=64": "value.sketch: a sketch estimates products with the query",
    "method=qjl method.key.domain=pre_rope": "sketch with domain=pre_rope: .*; set domain=post_rope",
    "method.key.rotate.kind=haar": "rotate with domain=pre_rope: .* does not commute with RoPE.*; set domain=post_rope",
    "method.key.center={}": "center with domain=pre_rope: .*; set domain=post_rope, or leave center out",
    "method.value.dense.grop=32": "method.value.dense.grop is not a setting: known ones are bits, axis, group",
    "method.key.dense.scales=online": "method.key.dense: .* needs a group of tokens",
    "method.value.dense.scales=bundle": "method.value.dense: .*scales=bundle needs axis=channel",
    "method.value.sparse.thresholds=bundle": "method.value.sparse: .*axis=token does not go with thresholds=bundle",
    "method.value.domain=pre_rope": "value.domain=pre_rope: values are not rotated",
    "method.value.window.sinks=3": "key.window.sinks=1 and value.window.sinks=3 differ",
    "data=text": "data=text needs data.path=FILE_OR_FOLDER",
    "eval=text": "eval=text needs eval.path=FILE_OR_FOLDER",
    "data.source=none": "data.source=none: allowed are generated, text, wikitext2, c4",
    "eval.source=some": "eval.source=some: allowed are generated, text, wikitext2, c4, none",
    "device=nonsense": "device=nonsense: allowed are auto, cpu, cuda, cuda:0, ..., split",
    "out=": "out= is empty: name a path, or leave the option out",
    "data.path=": "data.path= is empty: name a path",
    "out=README.md/x": r"out=README.md/x cannot be written \(Not a directory\): name a folder that can be made",
    "out=README.md/x dry_run=true": "out=README.md/x cannot be written",
    "work=README.md": r"work=README.md cannot be written \(Not a directory\): name a folder that can be made",
    "budget=3bits@1K table=README.md/x": "table=README.md/x cannot be written",
    "budget=3": "budget=3: say bits, or bytes",
    "model=local model.path=README.md": "model.path=README.md is a file: name a folder that holds a Hugging Face model",
    "model=local model.path=.": "model.path=. holds no config.json: name a folder that holds a Hugging Face model",
    "model=local model.path=./x": "model.path=./x: there is no such folder, and hub ids look different: name a folder",
    "out=.": "out=. holds .* so it is not ours to replace: name a new or empty folder",
    "data.path=nowhere.txt": "data.path=nowhere.txt does not exist: name a UTF-8 text file",
    "eval.path=.": "eval.path=. holds no .txt file: name a UTF-8 text file",
    "out=README.md": "out=README.md is a file: name a folder",
    "out=${nosuch}": "Interpolation key 'nosuch' not found",
}


@pytest.mark.parametrize("argument", BAD)
def test_what_cannot_work_is_refused_in_one_line(calib, monkeypatch, tmp_path, argument):
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    (tmp_path / "README.md").write_text("not a bundle")
    monkeypatch.chdir(tmp_path)
    done = calib(*argument.split())
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert re.search(BAD[argument], line), line
    assert done.out == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["README.md"]


def test_a_bundle_of_the_same_name_does_not_hide_the_embedded_model(calib, monkeypatch, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    done = calib("model=tiny", "out=other", "dry_run=true")
    assert done.code == 0, done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there(calib, tmp_path):
    done = calib("device=cuda", f"out={tmp_path}")
    assert done.code == 2
    assert "device=cuda: " in done.err
    assert "use device=cpu" in done.err


def test_a_hub_that_is_not_reached_is_asked_once(calib, tmp_path, monkeypatch):
    asked = []

    def ask(name, **named):
        asked.append(name)
        raise OSError("We couldn't connect to 'https://huggingface.co'") from LocalEntryNotFoundError("no route")

    monkeypatch.setattr(pipeline.AutoConfig, "from_pretrained", ask)
    for more in ("dry_run=true", "dry_run=false", "budget=3bits@1K"):
        done = calib("model=llama2-7b", f"out={tmp_path / 'out'}", more)
        assert done.code == 2
        assert re.fullmatch(
            r"error: model.path=meta-llama/Llama-2-7b-hf is no folder, the hub's cache \(HF_HOME\) does not have it, "
            r"and the hub was not reached: download it .*hf download meta-llama/Llama-2-7b-hf.*, or name a folder .*\n",
            done.err,
        )
    assert len(asked) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_configuration_says_nothing(calib, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = calib("model=local", f"model.path={tmp_path}", f"out={tmp_path / 'out'}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert re.match(
        f"error: model.path={tmp_path}: .* Name a folder that holds a Hugging Face model, or a hub id", done.err
    )


@pytest.mark.parametrize("option", ["data=wikitext2", "eval=c4"])
def test_texts_of_the_hub_need_a_package(calib, tmp_path, monkeypatch, option):
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.setattr(early, "find_spec", lambda name: None)
    done = calib(option, f"out={tmp_path / 'out'}")
    assert (done.code, done.err) == (
        2, f"error: {option} needs the package `datasets`: pip install 'signpost-kv[datasets]'\n",
    )  # fmt: skip


def test_what_needs_no_model_imports_neither_torch_nor_transformers(tmp_path):
    """Both take seconds, and an error should not."""
    code = "import sys, calib.early\nassert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_unknown_dtype(calib, tmp_path):
    done = calib("model.dtype=int8", f"out={tmp_path / 'out'}")
    assert (done.code, done.err) == (2, "error: dtype=int8: allowed are auto, float32, bfloat16, float16\n")


def test_a_schema_is_needed():
    with pytest.raises(ConfigError, match="does not follow the schema"):
        Settings.of(OmegaConf.create({"bits": 4}))
    assert OmegaConf.structured(Config).bits == 4


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "calib", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("argument", ["model=foo", "bits=abc", "method.key.dense.axis=row", "~method"])
def test_errors_of_the_command_itself(tmp_path, argument):
    done = command(argument, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_help_and_composed_configuration(tmp_path):
    shown = command("--help", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    for word in ("python -m calib model=", "turboquant-mse", "Exit codes: 0, 2 with"):
        assert word in shown.stdout
    assert "schema" not in shown.stdout
    assert shown.stdout.count("\n") < 60
    assert max(map(len, shown.stdout.splitlines()[:35])) <= 120
    for option in fields(Config):
        assert (line := re.search(rf"^{option.name}=(\S+) +\w", shown.stdout, re.MULTILINE)), option.name
        if option.default not in (MISSING, VALUE_MISSING):
            assert yaml.safe_load(line[1]) == option.default, option.name
    job = command("--cfg", "job", "bits=3", "method.key.dense.group=32", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "bits: 3" in job.stdout
    assert "group: 32" in job.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["method=qjl", "bits=3"],
            "bits=3: method=qjl does not read it (widths are said by part, such as method.value",
        ),
        (["method=kivi", "outliers=0.05"], "outliers=0.05: method=kivi does not read it (recipes with outliers have"),
        (
            ["method=kivi", "codebook=nf"],
            "codebook=nf: method=kivi does not read it (codebooks are said by part, such as",
        ),
        (["method=kivi", "sinks=2"], "sinks=2: method=kivi does not read it (windows are said by side, such as"),
        (
            ["budget=2.5bits@32K", "bits=3"],
            "bits=3: budget=2.5bits@32K chooses from candidates=banded, which do not read",
        ),
    ],
)
def test_options_that_nothing_reads(calib, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    done = calib(*options)
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert message in done.err


def test_none_of_what_a_recipe_has_none_of(settings):
    """Is no error; and what nothing reads is not recorded."""
    found = settings("method=kivi", "outliers=0", "sinks=0")
    assert {"bits", "method"} <= set(found.resolved)
    assert not {"outliers", "sinks"} & set(found.resolved)
    assert {"bits", "outliers", "sinks"} <= set(settings().resolved)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "tiny-kvquant-4bit"),
        (["bits=2", "outliers=0", "sinks=4"], "tiny-kvquant-2bit-outliers0.0-sinks4"),
        (["bits=2", "codebook=uniform-fit"], "tiny-kvquant-2bit-codebookuniform-fit"),
        (["method=qjl"], "tiny-qjl"),
        (["method=kivi", "bits=2"], "tiny-kivi-2bit"),
        (["budget=2.5bits@32K"], "tiny-auto-2.5bits@32K"),
    ],
)
def test_where_a_bundle_goes_that_nobody_has_named(settings, options, name):
    assert settings(*options).config.out == f"bundles/{name}"


def test_several_runs_are_looked_at_before_the_first_begins(calib, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "load_causal_lm", lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    done = calib("-m", "bits=2,3", "out=same")
    assert done.code == 2
    assert "bits=3 out=same would save to same, as bits=2 out=same would: name the folder by what differs" in done.err
    done = calib("-m", "bits=2,9", "launcher=local")
    assert done.code == 2
    assert "bits=9 is not supported" in done.err
    assert list(tmp_path.iterdir()) == []


def test_several_runs_that_only_plan_save_nothing(calib, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = calib("-m", "dry_run=true", "seed=1,2")
    assert done.code == 0, done.err
    assert done.out.count("bits per number") == 2


def test_runs_for_a_cluster_are_looked_at_here(calib, monkeypatch, tmp_path):
    """By the launcher that needs no cluster, whatever is said of that one's."""
    monkeypatch.chdir(tmp_path)
    slurm = ("launcher=slurm", "hydra.launcher.partition=gpu", f"work={tmp_path / 'work'}")
    assert "would save to same" in calib("-m", *slurm, "bits=2,3", "out=same").err
    launched = []
    monkeypatch.setattr("calib.__main__._run", lambda job: launched.append(list(sys.argv[1:])))
    calib("-m", *slurm, "bits=2,3", "out=a${bits}")
    checked, wanted = launched
    assert not any("launcher" in option for option in checked[:-1])
    assert checked[-1] == "hydra/launcher=basic"
    assert set(slurm) <= set(wanted)


def test_several_runs_plan_what_each_would_do(calib, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = calib("-m", "bits=2,3", "outliers=0,0.01", "dry_run=true")
    assert done.code == 0, done.err
    assert done.out.count("bits per number") == 4


def test_tokens_that_are_checked_fill_a_page_of_every_side(settings):
    bundle = random_bundle([kivi(2, 128, 128), kvquant(3)], 4, 2, 64)
    assert settings().cache_tokens(bundle) == 128 + 128 + 32
    assert settings("eval.cache_tokens=7").cache_tokens(bundle) == 7
    assert settings("seqlen=256").cache_tokens(bundle) == 256
    assert settings().cache_tokens(random_bundle([kvquant(3)], 4, 2, 64)) == 97
