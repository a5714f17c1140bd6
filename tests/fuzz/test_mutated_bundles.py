"""A short run of what `python -m tests.fuzz` does a million times, and proof that its rules can be broken."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import BundleCorruptError, load
from tests.artifacts.samples import sample_bundle
from tests.fuzz import harness
from tests.fuzz.harness import Broken, Fuzzer, Opened
from tests.fuzz.mutations import BYTES

OPENED = Opened()
ANOTHER = sample_bundle(99)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A loaded machine is no fault: here only what never ends is one."""
    monkeypatch.setattr(harness, "HANG", 60.0)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"), 1, OPENED)


def test_the_first_inputs(fuzzer):
    for n in range(1500):
        fuzzer.run(n, memory=n % 50 == 0)
    tally = fuzzer.tally
    assert tally.inputs.keys() == {*BYTES, "spoil_folder"}
    assert tally.outcomes.keys() == {"accepted", "BundleCorruptError", "BundleNotFoundError", "BundleVersionError"}
    assert tally.outcomes["BundleCorruptError"] > 1000


@settings(max_examples=100)
@given(n=st.integers(0, 2**63), memory=st.booleans())
def test_any_input(fuzzer, n, memory):
    fuzzer.run(n, memory)


def test_the_same_number_is_the_same_input(tmp_path):
    runs = []
    for name in ("one", "other"):
        fuzzer = Fuzzer(tmp_path / name, 5, OPENED)
        fuzzer.run(17)
        runs.append({path.name: path.read_bytes() for path in Path(fuzzer.folder).iterdir() if path.is_file()})
    first, second = ({n: d for n, d in files.items() if n != "README.md"} for files in runs)
    assert first.keys() == second.keys()
    assert first["tensors.safetensors"] == second["tensors.safetensors"]


def run_with(monkeypatch, tmp_path, replacement, **options):
    fuzzer = Fuzzer(tmp_path / "x", 1, OPENED)
    monkeypatch.setattr(harness, "load", replacement)
    for n in range(30):
        fuzzer.run(n, **options)


def crash(path):
    raise KeyError("x")


def read_outside(path):
    with open(path.parent / "secret" / "manifest.json"):
        raise BundleCorruptError("x")


def allocate(path):
    bytearray(1 << 26)
    raise BundleCorruptError("x")


def rant(path):
    raise BundleCorruptError("x" * 10_000)


def altered(path):
    return ANOTHER


RULES = {
    "another error": (crash, {}, "input 0 .*: KeyError"),
    "a file outside": (read_outside, {}, r"opened .*secret/manifest\.json"),
    "memory": (allocate, {"memory": True}, r"\d{8} bytes of memory"),
    "a long message": (rant, {}, "a message of 10000 characters"),
    "an altered bundle": (altered, {}, "accepted, but altered"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_can_be_broken(monkeypatch, tmp_path, name):
    replacement, options, message = RULES[name]
    with pytest.raises(Broken, match=message):
        run_with(monkeypatch, tmp_path, replacement, **options)


def test_a_slow_load_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "HANG", 0.0)
    with pytest.raises(Broken, match=r"input 0 .*: 0\.0 s"):
        run_with(monkeypatch, tmp_path, load)


FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg"}


def executing(source):
    """What in Python source can run what it reads, wherever it stands: eval, exec, and loaders that build objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in FORBIDDEN]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] if module.partition(".")[0] in FORBIDDEN else []
                found += [
                    f"{module}.load" for name in names if (module, name.name) in {("yaml", "load"), ("torch", "load")}
                ]
            case ast.Name(id=("eval" | "exec") as name, ctx=ast.Load()):
                found.append(name)
            case ast.Attribute(value=ast.Name(id="builtins" | "__builtins__"), attr=("eval" | "exec") as name):
                found.append(name)
            case ast.Attribute(
                value=ast.Name(id=("yaml" | "torch") as module), attr="load" | "unsafe_load" | "full_load"
            ):
                found.append(f"{module}.load")
            case ast.keyword(arg=("allow_pickle" | "trust_remote_code") as name):
                found.append(name)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if name.partition(".")[0] in FORBIDDEN:
                found.append(name)  # importlib.import_module
    return found


def test_nothing_here_executes_what_it_reads():
    """Pickle, YAML loaders that build objects, eval and exec appear nowhere in what ships, nor in the benchmarks."""
    root = Path(__file__).resolve().parents[2]
    paths = [path for name in ("artifacts", "runtime", "calib", "benchmarks") for path in (root / name).rglob("*.py")]
    assert len(paths) > 100
    for path in [*paths, root / "hatch_build.py", *(root / ".ci").glob("*.py")]:
        assert not executing(path.read_text()), path


@pytest.mark.parametrize(
    "source, found",
    [
        ("def f(x):\n    return eval(x)", "eval"),
        ("import builtins\nbuiltins.exec('1')", "exec"),
        ("def f():\n    import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import importlib\nimportlib.import_module('pickle')", "pickle"),
        ("import yaml\nyaml.load(x, yaml.Loader)", "yaml.load"),
        ("from yaml import load", "yaml.load"),
        ("import torch\ntorch.load(x)", "torch.load"),
        ("numpy.load(x, allow_pickle=True)", "allow_pickle"),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", "trust_remote_code"),
    ],
)
def test_what_executes_is_found(source, found):
    assert executing(source) == [found]
    assert not executing("model.eval()\njson.loads(x)\nartifacts.load(x)\nyaml.safe_load(x)")
