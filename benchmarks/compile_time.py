"""Seconds to compile what the first tokens of a model need, with an empty cache: packing of both sides, then attention.

    python -m benchmarks.compile_time --out compile.json [--formats nuq4-1 ...]

Units one after the other, as the first step finds them missing, and all at once, as `python -m runtime compile` does.
Needs no GPU. The first compilation of a process also loads NVRTC; that is measured apart.
"""

import argparse
import json
import os
import tempfile
import time

import torch

from artifacts import PageGeometry, Rope
from benchmarks.decode_attention import FORMATS, MODELS, D
from runtime import jit
from runtime.jit import Unit
from runtime.pack_units import pack_unit
from runtime.units import attend_unit


def units(name: str, model: str, layers: int = 32) -> list[Unit]:
    """Of one format for a float16 model whose layers are alike."""
    formats, (h_q, h_kv) = FORMATS[name], MODELS[model]
    rope = Rope(D, "half", 1.0, "default")
    key, value = (PageGeometry.of(fmt, h_kv, D, side) for side, fmt in (("key", formats.key), ("value", formats.value)))
    packed = [
        pack_unit("pack", side, rope if side.format.domain == "pre_rope" else None, torch.float16, "sm_90a", layers)
        for side in (key, value)
    ]
    return [attend_unit(key, value, rope, "__half", h_q // h_kv, True), *packed]


def seconds(wanted: list[Unit], at_once: bool) -> tuple[float, list[float]]:
    """In all, and of each unit, into an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SIGNPOST_CACHE_DIR"] = folder
        start = time.perf_counter()
        if at_once:
            each = [found[1] for found in jit.precompile(wanted, "sm_90a")]
        else:
            each = [next(jit.precompile([unit], "sm_90a"))[1] for unit in wanted]
        return time.perf_counter() - start, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["nuq4-1", "nuq2-1", "kivi2-g32"], choices=list(FORMATS))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    first = seconds([Unit("nothing", 'extern "C" __global__ void k(int x) {}', ("k",))], False)[0]
    run = {"nvrtc": jit._nvrtc_version(), "cores": os.cpu_count(), "model": args.model, "load_s": first}
    rows = []
    for name in args.formats:
        wanted = units(name, args.model)
        (apart, each), (together, _) = seconds(wanted, False), seconds(wanted, True)
        rows.append({"format": name, "attend_s": each[0], "key_s": each[1], "value_s": each[2]})
        rows[-1] |= {"one_after_the_other_s": apart, "at_once_s": together}
        print(f"{name}: {apart:.2f} s one after the other, {together:.2f} s at once")
        with open(args.out, "w") as file:
            json.dump(run | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
