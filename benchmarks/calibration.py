"""Time and memory of calibration for the shape of a large model, with random weights made on the device.

    python -m benchmarks.calibration --samples 16,256 --out docs/results/calibration-1gpu.json
    torchrun --nproc-per-node 4 -m benchmarks.calibration --samples 32 --out docs/results/calibration-4gpu.json

Runs what `python -m calib method=kvquant bits=3 eval=none` runs once the model is loaded: checksums of the weights,
both passes, merging and fits of all layers, stages on disk, the bundle. Text is random tokens, as weights are random.
The first run is a rehearsal on one sample a rank (kernels are compiled and loaded); it is reported as such.
Memory is the most that torch held at once besides the weights, of every stage, and the host's peak resident set of the
process so far. Files are those written besides the bundle, and what a save of a running pass would write for a layer.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from hydra import compose, initialize_config_dir
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from calib import passes, store
from calib.__main__ import CONF
from calib.config import Settings, register
from calib.data import Tokens
from calib.devices import Place, place
from calib.inputs import of_model
from calib.pipeline import calibrate
from calib.ranks import Ranks, leave
from calib.store import Store

SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096},
    "llama3-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                   "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    # The first shape's heads in a model that a CPU can run: what calibration does with each head takes its full time.
    "llama2-7b-heads": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 128,
                        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 1000},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 4, "vocab_size": 1000},
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama2-7b")
    parser.add_argument("--samples", default="16", help="one run for each number (default: %(default)s)")
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--device", default="auto", help="as the option of calib (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--bundle", type=Path, help="folder for the last run's bundle, to compare bits")
    return parser.parse_args()


def random_model(
    shape: str, placed: Place, layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """The shape with random weights made where they stay, the same on every rank. layers: None for all of them."""
    config = LlamaConfig(**SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {}))
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    gpus: tuple[int | torch.device, ...] = placed.gpus or (placed.device,)
    layers = config.num_hidden_layers
    where: dict[str, Any] = {f"model.layers.{i}": gpus[i * len(gpus) // layers] for i in range(layers)}
    where |= {"model.embed_tokens": gpus[0], "model.rotary_emb": gpus[0], "model.norm": gpus[-1], "lm_head": gpus[-1]}
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    for name, device in where.items():
        module = model.get_submodule(name)
        torch.manual_seed(sum(name.encode()))
        if name == "model.rotary_emb":
            module.to(device)
            continue
        module.to_empty(device=device)
        for weight in module.parameters():
            weight.data.normal_(0, config.initializer_range) if weight.dim() > 1 else weight.data.fill_(1)
    if len(gpus) > 1:
        dispatch_model(model, where)
    return model.eval().requires_grad_(False)


class Clock:
    """Seconds of each stage, with the device idle at both ends, and the most bytes that each GPU held in it."""

    def __init__(self, device: torch.device, gpus: Sequence[torch.device]):
        self.device, self.gpus = device, gpus
        self.seconds, self.bytes = dict[str, float](), dict[str, list[int]]()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._wait()
        for gpu in self.gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in self.gpus]
        self.bytes[name] = list(map(max, peaks, self.bytes.get(name, peaks)))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def watched(clock: Clock, files: list[int]) -> Iterator[None]:
    """Makes the stages of a pass tell the clock how long they take, and lists the bytes of every file of statistics."""
    titles = {"_observe": "collect", "_merged": "merge", "_fit": "fit"}
    real, write = {name: getattr(passes, name) for name in titles}, store._write_file

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with clock.stage(f"{titles[name]}, {args[3]}" if name == "_observe" else titles[name]):
                result = real[name](*args)
            if name == "_observe":
                files.append(max(sum(x.nbytes for x in passes._joined(sides).values()) for sides in args[2]))
            return result

        return call

    def counted(path: Path, data: bytes) -> None:
        files.append(len(data))
        write(path, data)

    try:
        for name in real:
            setattr(passes, name, timed(name))
        store._write_file = counted
        yield
    finally:
        for name, function in real.items():
            setattr(passes, name, function)
        store._write_file = write


def one_run(model: PreTrainedModel, settings: Settings, samples: int, ranks: Ranks, out: Path | None) -> dict[str, Any]:
    """Seconds by stage and peak memory of one calibration."""
    generator = torch.Generator().manual_seed(samples)
    ids = torch.randint(0, model.config.vocab_size, (samples, settings.config.seqlen), generator=generator)
    gpus = sorted({weight.device for weight in model.parameters() if weight.is_cuda}, key=str)
    weights = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    clock, files = Clock(model.device, gpus), list[int]()
    with watched(clock, files), tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with clock.stage("checksum of the weights"):
            work = passes.Work(ranks, Store(Path(folder) / "work"), of_model(model), settings.config.checkpoint)
        bundle = calibrate(model, settings, Tokens(ids, "random"), None, work)
        if ranks.first:
            with clock.stage("save"):
                bundle.save(out or Path(folder) / "bundle")
        total = time.perf_counter() - start
    collecting = sum(seconds for name, seconds in clock.seconds.items() if name.startswith(("collect", "merge")))
    found: dict[str, Any] = {
        "samples": samples,
        "total_s": round(total, 2),
        "collecting_s": round(collecting, 2),
        "collecting_s_a_sample": round(collecting / samples, 4),
        "stages_s": {name: round(seconds, 2) for name, seconds in clock.seconds.items()},
        "largest_file_MB": round(max(files) / 1e6, 1),
        "host_peak_GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    if gpus:
        above = {name: [x - w for x, w in zip(peaks, weights, strict=True)] for name, peaks in clock.bytes.items()}
        found["weights_GB"] = [round(size / 1e9, 2) for size in weights]
        found["peak_above_weights_GB"] = [round(max(of_gpu) / 1e9, 2) for of_gpu in zip(*above.values(), strict=True)]
        found["stages_above_weights_GB"] = {name: [round(x / 1e9, 2) for x in peaks] for name, peaks in above.items()}
    return found


def main() -> None:
    given = arguments()
    register()
    placed = place(given.device)
    ranks = Ranks.join(placed.device)
    model = random_model(given.shape, placed)
    options = ["method=kvquant", "bits=3", "outliers=0.01", "eval=none", f"seqlen={given.seqlen}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = Settings.of(compose("config", options))
    runs = [one_run(model, settings, ranks.world, ranks, None)]
    for samples in map(int, given.samples.split(",")):
        runs.append(one_run(model, settings, samples, ranks, given.bundle))
        if ranks.first:
            print(json.dumps(runs[-1]), flush=True)
    leave()
    if ranks.first:
        result = {
            "command": shlex.join(["python", "-m", "benchmarks.calibration", *sys.argv[1:]]),
            "calibration": shlex.join(options),
            "ranks": ranks.world,
            "shape": {"name": given.shape, "layers": model.config.num_hidden_layers},
            "rehearsal": runs[0],
            "runs": runs[1:],
            "device": torch.cuda.get_device_name() if placed.device.type == "cuda" else platform.machine(),
            "cores": os.cpu_count(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"transformers": version("transformers")},
        }
        if given.out:
            given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
