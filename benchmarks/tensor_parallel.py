"""Time per token and cache bytes of a model whose kv heads several GPUs share, compressed beside fp16.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel --out tensor-parallel.json

The model is of Llama-2-7B's shape (or --model's), its weights random and never loaded: transformers makes each rank's
share on its GPU and connects the ranks; `benchmarks.decode_model` says how bundles and what caches hold are made. A
step is the whole model's, a CUDA graph with its collectives, eight tokens before the named length; its time is the
slowest rank's median over a fixed number of replays. `loop_us`: the engine's own loop over 64 steps instead. Without
torchrun: one GPU.
"""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from benchmarks.decode_attention import FORMATS
from benchmarks.decode_model import LOOP, MODELS, SHORT, bundle_of, fill, loop, step_at
from runtime import KVCache
from runtime.decoding import DeviceSteps
from runtime.dense import DenseCache
from runtime.hf import fingerprint
from runtime.hf_decoder import HFDecoder


@dataclass
class Row:
    """One cache. step_us, loop_us (0 for fp16): of the slowest rank; bytes: by rank."""

    cache: str
    b: int
    n: int
    step_us: float
    loop_us: float
    cache_bytes: list[int]
    predicted_bytes: list[int]
    weight_bytes: list[int]


def model_of(name: str, layers: int, positions: int) -> HFDecoder:
    """This rank's share of the model, random weights in float16."""
    sizes = MODELS[name] | {"num_hidden_layers": layers, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, max_position_embeddings=positions)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    where = {"device_map": {"": "cuda"}} if alone else {"distributed_config": DistributedConfig(tp_plan="auto")}
    logging.set_verbosity_error()  # that no weight was found is meant
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict={}, dtype=torch.float16, **where)
    return HFDecoder(model.eval().requires_grad_(False))


def everyones(value: Any) -> list[Any]:
    """What all ranks have found."""
    if not dist.is_initialized():
        return [value]
    dist.all_gather_object(found := [None] * dist.get_world_size(), value)
    return found


def median_us(work: Callable[[], object], count: int) -> float:
    """Median microseconds of as many calls on every rank, the first not counted."""
    times = []
    for _ in range(count + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def measured(decoder: HFDecoder, name: str, b: int, n: int, count: int) -> Row:
    """A cache at length n."""
    model = fingerprint(decoder.model).share(decoder.split.world)
    gc.collect()
    torch.cuda.empty_cache()
    weights, loop_us = torch.cuda.memory_allocated(), 0.0
    if name == "fp16":
        dense = DenseCache(decoder, model, b, n)
        held, predicted = torch.cuda.memory_allocated() - weights, dense.nbytes
        torch.nn.init.normal_(dense.numbers)
        step_us = median_us(dense.capture(n).replay, count)
    else:
        bundle = bundle_of(decoder, name).shard(decoder.split.rank, decoder.split.world)
        most = n + LOOP + 64
        kv = KVCache(bundle, b, most, torch.float16, decoder.device, prompt=n - 1)
        held, predicted = torch.cuda.memory_allocated() - weights, b * bundle.geometry.cache_bytes(most, 2, n - 1)
        steps = DeviceSteps(decoder, kv, [b])
        fill(kv, n - 1)
        graph, logits = step_at(steps, kv, n)
        step_us = median_us(graph.replay, count)
        assert torch.isfinite(logits).all(), f"{name}: logits have NaN"
        loop_us = loop(decoder, steps, b)
        kv.check()
    slowest = [max(times) for times in zip(*everyones((step_us, loop_us)), strict=True)]
    return Row(name, b, n, *slowest, *(everyones(size) for size in (held, predicted, weights)))


def main() -> None:
    """Measures all formats; rank 0 prints a line for each and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="llama2-7b", choices=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--formats", nargs="+", default=["fp16", "nuq3-1", "kivi2-g32"], choices=["fp16", *FORMATS])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--replays", type=int, default=50)
    args = parser.parse_args()
    decoder, rows = model_of(args.model, args.layers, max(args.tokens)), []
    run = {"model": args.model, "layers": args.layers, "ranks": decoder.ranks, "gpu": torch.cuda.get_device_name()}
    for n in args.tokens:
        for name in args.formats:
            rows.append(asdict(row := measured(decoder, name, args.batch, n - SHORT, args.replays)))
            if decoder.split.rank == 0:
                loop_us, sizes = f"loop {row.loop_us:.0f} us", f"cache bytes by rank {row.cache_bytes}"
                print(f"{decoder.ranks} GPUs, {args.batch} x {n} {name}: {row.step_us:.0f} us, {loop_us}, {sizes}")
                with open(args.out, "w") as file:
                    json.dump(run | {"torch": torch.__version__, "rows": rows}, file, indent=1)
    if dist.is_initialized():
        gc.collect()  # captured steps go before what connects their ranks
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
