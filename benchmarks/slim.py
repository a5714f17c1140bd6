"""What the slim runtime costs: python -m benchmarks.slim --out docs/results/slim.json

* bytes: of the wheel as installed, and of every package that `pip install .` brings without extras;
* imports: seconds of `from runtime import *` in a fresh process beyond those of starting Python and of `import torch`,
  and which top-level modules it brings in;
* loading: seconds to load and check a bundle of the Llama-2-7B shape by `artifacts.load`, copied and mapped.

Sizes are read from the packages installed here (names and markers from their own metadata), so run it in an environment
that has them; times are medians, and the machine's load goes into them.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

from artifacts import (
    Bundle,
    Dense,
    Format,
    LayerFormat,
    ModelFingerprint,
    PageShape,
    Rope,
    Rotate,
    Sketch,
    Sparse,
    Window,
    load,
)

ROOT = Path(__file__).resolve().parents[1]
NOT_COUNTED = re.compile(r"torch|triton|nvidia-.*|cuda-.*")  # torch and the CUDA packages
LLAMA_2_7B = ModelFingerprint(
    "llama-2-7b", "LlamaForCausalLM", 32, 32, 32, 128, Rope(128, "half", 1.0, "default"), "", ""
)
WINDOW = Window(sinks=1)
RECIPES = {
    "kvquant": LayerFormat(
        Format(64, Dense(4, "channel", codebook="nuq", scales="bundle"), Sparse(0.01, "channel", "bundle"), WINDOW,
               "pre_rope"),
        Format(64, Dense(4, "token", codebook="nuq"), Sparse(0.01, "token", "online"), WINDOW),
    ),
    "qjl": LayerFormat(
        Format(128, sketch=Sketch(256, "orthogonal", 8, 128)),
        Format(128, Dense(2, "token", 32)),
    ),
    "turboquant-mse": LayerFormat(
        Format(64, Dense(4, "head", 0, "lloyd", "online", "norm"), rotate=Rotate("haar")),
        Format(64, Dense(4, "head", 0, "lloyd", "online", "norm"), rotate=Rotate("haar")),
    ),
}  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="of every time; default: 15")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    result = {
        "command": "python -m benchmarks.slim",
        "machine": {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)},
        "python": platform.python_version(),
        "torch": distribution("torch").version,
        "bytes": sizes(),
        "imports": imports(options.repeats),
        "loading": {name: loading(recipe, options.repeats) for name, recipe in RECIPES.items()},
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)


def sizes() -> dict[str, Any]:
    """Bytes on the disk of our own package and of what it requires, by package; the sums without torch and CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        (wheel,) = WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
        packed = Path(wheel).stat().st_size
        subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, f"{folder}/open"], check=True)
        own = sum(path.stat().st_size for path in Path(folder, "open").rglob("*") if path.is_file())
        (metadata,) = Path(folder, "open").glob("*.dist-info/METADATA")
        needed = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    found: dict[str, int | None] = {}
    for line in needed:
        _collect(line, found)
    counted = {name: size for name, size in found.items() if not NOT_COUNTED.fullmatch(name)}
    missing = sorted(name for name, size in counted.items() if size is None)
    by_package = {name: size for name, size in sorted(counted.items()) if size is not None}
    return {"wheel": packed, "own": own, "packages": by_package, "not_installed_here": missing,
            "sum": own + sum(by_package.values())}  # fmt: skip


def _collect(line: str, found: dict[str, int | None]) -> None:
    """Adds a requirement and all that it requires, but nothing below torch and the CUDA packages."""
    requirement = Requirement(line)
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        return
    try:
        package = distribution(name)
    except PackageNotFoundError:
        found[name] = None
        return
    paths = (Path(str(package.locate_file(file))) for file in package.files or ())
    found[name] = sum(path.stat().st_size for path in paths if path.is_file())
    if not NOT_COUNTED.fullmatch(name):
        for line in package.requires or ():
            _collect(line, found)


def imports(repeats: int) -> dict[str, Any]:
    """Seconds of imports in fresh processes, and the top-level modules that `from runtime import *` brings."""
    times = {
        name: statistics.median(_seconds(code) for _ in range(repeats))
        for name, code in (("python", "pass"), ("torch", "import torch"), ("runtime", "from runtime import *"))
    }
    code = (
        "import sys; before = set(sys.modules); from runtime import *; "
        "print(*sorted({n.partition('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "import_runtime_seconds": times["runtime"] - times["python"],
        "import_torch_seconds": times["torch"] - times["python"],
        "beyond_torch_seconds": times["runtime"] - times["torch"],
        "top_level_modules": done.stdout.split(),
    }


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.perf_counter() - start


def loading(recipe: LayerFormat, repeats: int) -> dict[str, Any]:
    """Size of a bundle of this recipe for Llama-2-7B, and seconds to load it from the page cache."""
    layers = (recipe,) * LLAMA_2_7B.l
    with tempfile.TemporaryDirectory() as folder:
        path = Bundle("benchmark", LLAMA_2_7B, layers, _tensors(layers)).save(Path(folder) / "bundle")
        size = sum(file.stat().st_size for file in path.iterdir())
        times = {}
        for name, mapped in (("copied", False), ("mapped", True)):
            found = []
            for _ in range(repeats):
                start = time.perf_counter()
                load(path, mapped=mapped)
                found.append(time.perf_counter() - start)
            times[name] = {"median_seconds": statistics.median(found), "slowest_seconds": max(found)}
    return {"bytes": size, **times}


def _tensors(layers: tuple[LayerFormat, ...]) -> dict[str, Any]:
    """Random numbers that pass the checks: ascending, not negative, masks of zeros and ones."""
    rng, model = np.random.default_rng(0), LLAMA_2_7B
    tensors = {"rope.inv_freq": rng.random(model.rope.dim // 2, np.float32)}
    for layer, formats in enumerate(layers):
        for side, fmt in (("key", formats.key), ("value", formats.value)):
            shape = PageShape(fmt.t, model.h_kv, model.d, "key" if side == "key" else "value")
            for name, spec in fmt.bundle_tensors(shape).items():
                numbers = np.sort(rng.random(spec.shape, np.float32), axis=-1)
                tensors[f"layers.{layer}.{side}.{name}"] = numbers.astype(spec.dtype)
    return tensors


if __name__ == "__main__":
    main()
