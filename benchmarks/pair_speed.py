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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import Progress

from artifacts import Format, PageGeometry, Rope, Window
from artifacts.geometry import SEGMENT_PAGES
from benchmarks.commands import command
from benchmarks.decode_attention import L2_BYTES, MODELS, D, filled, numbers, samples, tables, timed, unit_of
from calib.__main__ import CONF
from calib.allocation.candidates import SIDES, Candidates, Filling
from calib.allocation.speed import described, page_formats
from calib.config import Settings, register
from runtime import jit
from runtime.attention import PagedAttention, PagedSide
from runtime.rope import Rotation

SETS = 16  # caches of a pair at most, among which steps go round


def main() -> None:
    """Measures all pairs and writes the file."""
    given = _parser().parse_args()
    candidates, shape = candidates_of(given.candidates, given.options), shape_of(given.shape)
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        pairs = list(pairs_of(candidates))
        for key, value, us in progress.track(times(candidates, pairs, shape), total=len(pairs), description="pairs"):
            rows.append({"key": key[0], "key_t": key[1], "value": value[0], "value_t": value[1], "us": round(us, 2)})
    found = record(candidates, shape, rows) | {
        "command": command("pair_speed"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")


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


def pairs_of(candidates: Candidates) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Variants of keys and of values, each with a page size."""
    for key in page_formats(candidates, "key"):
        for value in page_formats(candidates, "value"):
            yield key, value


def record(candidates: Candidates, shape: dict[str, int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `calib.allocation.speed.Speed.load` reads, but for the GPU's name."""
    return {"shape": shape, "formats": {side: described(candidates, side) for side in SIDES}, "rows": rows}


class _Caches:
    """Filled sides, each made when it is first asked for."""

    def __init__(self, candidates: Candidates, shape: dict[str, int]):
        self.candidates, self.shape, self.sample = candidates, shape, numbers(1024, shape["h_kv"], 99)
        self._tables: dict[tuple[int, str, int], dict[str, torch.Tensor]] = {}
        self._sides: dict[tuple[int, str, int], list[PagedSide]] = {}

    def format(self, side: int, name: str, t: int) -> Format:
        """Of a variant in pages of t tokens, without a window of its own but as many sinks as it can have."""
        sinks = self.candidates.fillings[0].sinks
        return replace(self.candidates.format(SIDES[side], name, Filling(t)), window=Window(sinks=sinks))

    def geometry(self, side: int, name: str, t: int) -> PageGeometry:
        return PageGeometry.of(self.format(side, name, t), self.shape["h_kv"], D, SIDES[side])

    def tables(self, side: int, name: str, t: int) -> dict[str, torch.Tensor]:
        """The bundle's tensors."""
        at = side, name, t
        if at not in self._tables:
            self._tables[at] = tables(self.format(*at), self.sample)
        return self._tables[at]

    def sides(self, side: int, name: str, t: int, count: int) -> list[PagedSide]:
        """So many caches."""
        made = self._sides.setdefault((side, name, t), [])
        b, n = self.shape["b"], self.shape["tokens"]
        if len(made) < count:
            few = samples(self.geometry(side, name, t), self.tables(side, name, t), SEGMENT_PAGES, 5 * side)
            made += [filled(few, b, n) for _ in range(count - len(made))]
        return made[:count]


def times(
    candidates: Candidates, pairs: Sequence[tuple[tuple[str, int], tuple[str, int]]], shape: dict[str, int]
) -> Iterator[tuple[tuple[str, int], tuple[str, int], float]]:
    """Each pair with its microseconds. All kernels are compiled at once, on all cores, while the first are timed."""
    caches, b, n = _Caches(candidates, shape), shape["b"], shape["tokens"]
    rotation = Rotation(Rope(D, "half", 1.0, "default"), 10000.0 ** -(torch.arange(0, D, 2) / D), "cuda")
    found = []
    for pair in pairs:
        geometries = [caches.geometry(side, *at) for side, at in enumerate(pair)]
        each = [caches.tables(side, *at) for side, at in enumerate(pair)]
        found.append(PagedAttention(*geometries, *each, rotation, shape["h_q"], torch.float16, "cuda"))
    jit.begin([unit_of(kernels, b, n) for kernels in found], found[0].device)
    lengths = torch.full((b,), n, dtype=torch.int32, device="cuda")
    offsets = torch.zeros(b, dtype=torch.int32, device="cuda")
    q = torch.randn(b, shape["h_q"], 1, D, device="cuda", dtype=torch.float16)
    out = torch.empty_like(q)
    for (key, value), kernels in zip(pairs, found, strict=True):
        bytes_ = sum(b * s.format.window.pages(n - 1, s.format.t) * s.page_bytes for s in (kernels.key, kernels.value))
        count = max(1, min(SETS, 1 + 2 * L2_BYTES // max(1, bytes_)))
        both = zip(caches.sides(0, *key, count), caches.sides(1, *value, count), strict=True)
        plans = [kernels.plan(k, v, lengths, offsets, 1, D**-0.5) for k, v in both]
        us = timed([lambda plan=plan: plan.run(q, out) for plan in plans], 0.05)
        if not torch.isfinite(out).all():
            raise RuntimeError(f"keys {key}, values {value}: the output has NaN")
        yield key, value, us


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="llama3-8b@1x131072, 32/8@8x32768, ...")
    parser.add_argument("--candidates", default="banded", help="by their name in conf/candidates (default: banded)")
    parser.add_argument("--options", nargs="*", default=[], help="of calib, that change the candidates")
    parser.add_argument("--out", required=True, type=Path)
    return parser


if __name__ == "__main__":
    main()
