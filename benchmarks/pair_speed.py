"""Time of attention with every pair of candidates on this GPU: what `python -m calib budget=... speed=FILE` takes.

    python -m benchmarks.pair_speed --shape llama3-8b@1x131072 --out speed.json
    python -m benchmarks.pair_speed --shape 28/4@8x32768 --candidates plain --out speed.json

A shape is a model of `benchmarks.decode_attention`, or query heads / kv heads of 128 channels, then batch x tokens.
Pages are made and times taken as there: microseconds of one layer's attention in a decode step, merge included, without
a window of exact tokens.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import Progress

from artifacts import Format, PageGeometry, Rope, Window
from artifacts.geometry import SEGMENT_PAGES
from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import L2_BYTES, MODELS, D, filled, numbers, samples, tables, timed, unit_of
from calib.__main__ import CONF
from calib.allocation.candidates import SIDES, Candidates, Filling
from calib.allocation.speed import described, page_formats
from calib.config import Settings, register
from runtime import jit
from runtime.attention import PagedAttention, PagedSide, Step
from runtime.codec import PagePool
from runtime.rope import Rotation

Variant = tuple[str, int]  # its name, tokens of its pages
Pair = tuple[Variant, Variant]  # of keys and of values
SETS = 16  # caches of a pair at most, among which steps go round


def main() -> None:
    """Measures all pairs and writes the file."""
    given = _parser().parse_args()
    require_gpu()
    candidates, shape = candidates_of(given.candidates, given.options), shape_of(given.shape)
    bench, pairs, us = _Bench(candidates, shape), list(pairs_of(candidates)), {}
    bench.begin(pairs)
    with Progress(console=Console(stderr=True)) as progress:
        for pair in progress.track(pairs, description="pairs"):
            us[pair] = bench.pair(pair)
    rows = [
        {
            "key": key,
            "key_t": key_t,
            "value": value,
            "value_t": value_t,
            "us": round(us[(key, key_t), (value, value_t)], 2),
        }
        for (key, key_t), (value, value_t) in pairs
    ]
    found = record(candidates, shape, rows) | {
        "mixtures": mixtures(bench, us, given.mixtures),
        "command": command("pair_speed"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    for mixture in found["mixtures"]:
        print(f"a mixture: {mixture['us']:.0f} us, the sum of its layers {mixture['predicted_us']:.0f}")


def candidates_of(name: str, options: Sequence[str]) -> Candidates:
    """The candidates that `python -m calib candidates=<name> <options>` chooses from."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = Settings.of(compose("config", [f"candidates={name}", *options]))
    return Candidates.of(settings.config.candidates)


def shape_of(text: str) -> dict[str, int]:
    """Query heads, kv heads, channels of a head, sequences and tokens of each. Raises SystemExit for anything else."""
    found = re.fullmatch(r"(?:(\d+)/(\d+)|([\w-]+))@(\d+)x(\d+)", text)
    heads = MODELS.get(found[3]) if found and found[3] else found and (int(found[1]), int(found[2]))
    if not found or not heads or heads[0] % max(1, heads[1]) or min(*heads, int(found[4]), int(found[5])) < 1:
        raise SystemExit(
            f"--shape {text}: {', '.join(MODELS)} or QUERY_HEADS/KV_HEADS, then @BATCHxTOKENS, as in 32/8@1x131072"
        )
    return {"h_q": heads[0], "h_kv": heads[1], "d": D, "b": int(found[4]), "tokens": int(found[5])}


def pairs_of(candidates: Candidates) -> Iterator[Pair]:
    """Variants of keys and of values, each with a page size."""
    for key in page_formats(candidates, "key"):
        for value in page_formats(candidates, "value"):
            yield key, value


def record(candidates: Candidates, shape: dict[str, int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `calib.allocation.speed.Speed.load` reads, but for the GPU's name."""
    return {"shape": shape, "formats": {side: described(candidates, side) for side in SIDES}, "rows": rows}


class _Bench:
    """Kernels and filled caches of pairs, each made when it is first asked for."""

    def __init__(self, candidates: Candidates, shape: dict[str, int]):
        self.candidates, self.shape, self.sample = candidates, shape, numbers(1024, shape["h_kv"], 99)
        self.b, self.n = shape["b"], shape["tokens"]
        self.rotation = Rotation(Rope(D, "half", 1.0, "default"), 10000.0 ** -(torch.arange(0, D, 2) / D), "cuda")
        self.lengths = torch.full((self.b,), self.n, dtype=torch.int32, device="cuda")
        self.offsets = torch.zeros(self.b, dtype=torch.int32, device="cuda")
        self.q = torch.randn(self.b, shape["h_q"], 1, D, device="cuda", dtype=torch.float16)
        self.out = torch.empty_like(self.q)
        self._tables: dict[tuple[int, str, int], dict[str, torch.Tensor]] = {}
        self._pages: dict[tuple[int, str, int], PagePool] = {}
        self._sides: dict[tuple[int, str, int], list[PagedSide]] = {}
        self._kernels: dict[Pair, PagedAttention] = {}

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Compiles all of their kernels at once, on all cores, while the first are timed."""
        kernels = [self.kernels(pair) for pair in pairs]
        jit.begin([unit_of(each, self.b, self.n) for each in kernels], kernels[0].device)

    def pair(self, pair: Pair) -> float:
        """Microseconds of one layer's attention."""
        count = max(1, min(SETS, 1 + 2 * L2_BYTES // max(1, self._bytes(pair))))
        return self._timed([self._plan(pair, i) for i in range(count)], f"keys {pair[0]}, values {pair[1]}")

    def mixture(self, layers: Sequence[Pair]) -> float:
        """Microseconds of the attention of layers one after the other in one graph, each with caches of its own."""
        met: Counter[tuple[int, Variant]] = Counter()
        plans = []
        for pair in layers:
            places = [met[side, variant] for side, variant in enumerate(pair)]
            met.update(enumerate(pair))
            plans.append(self._plan(pair, *places))
        return self._timed(plans, "a mixture") * len(layers)

    def format(self, side: int, variant: Variant) -> Format:
        """Of a variant, without a window of its own but as many sinks as it can have."""
        name, t = variant
        sinks = self.candidates.fillings[0].sinks
        return replace(self.candidates.format(SIDES[side], name, Filling(t)), window=Window(sinks=sinks))

    def geometry(self, side: int, variant: Variant) -> PageGeometry:
        return PageGeometry.of(self.format(side, variant), self.shape["h_kv"], D, SIDES[side])

    def tables(self, side: int, variant: Variant) -> dict[str, torch.Tensor]:
        """The bundle's tensors."""
        at = side, *variant
        if at not in self._tables:
            self._tables[at] = tables(self.format(side, variant), self.sample)
        return self._tables[at]

    def kernels(self, pair: Pair) -> PagedAttention:
        if pair not in self._kernels:
            geometries = [self.geometry(side, variant) for side, variant in enumerate(pair)]
            each = [self.tables(side, variant) for side, variant in enumerate(pair)]
            self._kernels[pair] = PagedAttention(
                *geometries, *each, self.rotation, self.shape["h_q"], torch.float16, "cuda"
            )
        return self._kernels[pair]

    def cache(self, side: int, variant: Variant, i: int) -> PagedSide:
        """The i-th filled cache of a variant."""
        at = side, *variant
        if at not in self._pages:
            geometry, found = self.geometry(side, variant), self.tables(side, variant)
            self._pages[at] = samples(geometry, found, SEGMENT_PAGES, 5 * side)
        made = self._sides.setdefault(at, [])
        while len(made) <= i:
            made.append(filled(self._pages[at], self.b, self.n))
        return made[i]

    def _bytes(self, pair: Pair) -> int:
        kernels = self.kernels(pair)
        sides = (kernels.key, kernels.value)
        return sum(self.b * s.format.window.pages(self.n - 1, s.format.t) * s.page_bytes for s in sides)

    def _plan(self, pair: Pair, key: int, value: int | None = None) -> Step:
        """A step over the key-th cache of keys and the value-th of values (default: the same)."""
        caches = self.cache(0, pair[0], key), self.cache(1, pair[1], key if value is None else value)
        return self.kernels(pair).plan(*caches, self.lengths, self.offsets, 1, D**-0.5)

    def _timed(self, plans: Sequence[Step], what: str) -> float:
        us = timed([partial(plan.run, self.q, self.out) for plan in plans], 0.05)
        if not torch.isfinite(self.out).all():
            raise RuntimeError(f"{what}: the output has NaN")
        return us


def mixtures(bench: _Bench, us: dict[Pair, float], count: int, layers: int = 32) -> list[dict[str, float]]:
    """Random mixtures of so many layers: what they take in one graph, and the sum of their pairs' times."""
    found, pairs = [], list(us)
    for seed in range(count):
        chosen = [pairs[i] for i in np.random.default_rng(seed).integers(len(pairs), size=layers)]
        predicted = sum(us[pair] for pair in chosen)
        found.append({"predicted_us": round(predicted, 2), "us": round(bench.mixture(chosen), 2)})
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="llama3-8b@1x131072, 32/8@8x32768, ...")
    parser.add_argument("--candidates", default="banded", help="by their name in conf/candidates (default: banded)")
    parser.add_argument("--options", nargs="*", default=[], help="of calib, that change the candidates")
    parser.add_argument(
        "--mixtures",
        type=int,
        default=0,
        metavar="N",
        help="also time N random mixtures of 32 layers in one graph each",
    )
    parser.add_argument("--out", required=True, type=Path)
    return parser


if __name__ == "__main__":
    main()
