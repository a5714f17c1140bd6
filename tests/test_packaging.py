"""The floors as a user meets them: what a wheel holds, and what an import pulls in."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]
# Not scipy: numba imports it where it is installed.
OFFLINE = [
    "transformers",
    "accelerate",
    "hydra",
    "omegaconf",
    "sklearn",
    "matplotlib",
    "huggingface_hub",
    "datasets",
    "lm_eval",
]


def run_python(code: str, cwd: Path = ROOT) -> str:
    """Runs `code` in a fresh interpreter in `cwd`, which heads its path, and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in paths}


def test_cuda_folder_holds_no_python():
    # One .py there, and the folder hides cuda-python's own `cuda` from whoever runs from the root.
    assert list((ROOT / "cuda").rglob("*.cuh")), "no kernels under cuda/"
    assert not list((ROOT / "cuda").rglob("*.py"))


@pytest.mark.skipif(sys.platform != "linux", reason="cuda-python is a dependency on Linux only")
def test_cuda_python_imports_from_the_root():
    run_python("import cuda.bindings.nvrtc, cuda.core, cuda.pathfinder")


@pytest.mark.parametrize(
    ("target", "version", "expected"),
    [
        ("wheel", "standard", {"cuda": "runtime/_kernels", "conf": "calib/_conf"}),
        ("wheel", "editable", {}),
        ("sdist", "standard", {}),
    ],
)
def test_build_hook_maps_only_for_the_wheel(target, version, expected):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.CustomBuildHook(str(ROOT), {}, None, None, str(ROOT / "dist"), target)
    build_data = {"force_include": {}}
    hook.initialize(version, build_data)
    assert build_data["force_include"] == expected


def test_wheel_holds_kernels_configuration_and_model(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, installed, needed in [
        ("cuda", "runtime/_kernels", ".cuh"),
        ("conf", "calib/_conf", "config.yaml"),
        ("calib/tiny", "calib/tiny", "model.safetensors"),
    ]:
        expected = {f"{installed}/{name}" for name in files(ROOT / folder)}
        assert any(name.endswith(needed) for name in expected), f"{folder} holds no {needed}"
        assert expected <= names
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"artifacts", "calib", "runtime"}


def test_checkout_holds_no_copies():
    # One would go stale, and win over the folders that are edited.
    assert not (ROOT / "runtime/_kernels").exists()
    assert not (ROOT / "calib/_conf").exists()


def test_slim_runtime_declares_no_offline_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    slim = " ".join(project["dependencies"])
    assert not [name for name in [*OFFLINE, "scikit-learn", "scipy"] if name in slim]


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("artifacts", ["torch", "numba", "scipy", *OFFLINE]),
        ("artifacts", ["runtime", "calib"]),
        ("runtime", [*OFFLINE, "calib", "torch._dynamo"]),
    ],
)
def test_import_stays_on_its_floor(package, unwanted):
    code = f"from {package} import *; import sys; print(*[name for name in {unwanted!r} if name in sys.modules])"
    assert run_python(code).split() == []
