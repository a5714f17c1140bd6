"""Free-running greedy generation: after how many tokens does a compressed cache write another text than full precision?

    python -m benchmarks.divergence --model FOLDER --data CALIBRATION.txt --text TEST.txt --table TABLE --out FILE.json

Prompts are cut from the text at even distances. In full precision the model's own cache is used; every recipe is
calibrated here (as in `benchmarks.quality`), every budget is solved from the table that `python -m calib budget=...`
left behind, and both generate through `runtime.Engine`, all prompts in one batch. No token ends a text.

Of each prompt counts how many tokens are the same before the first that is not: quartiles and mean over the prompts,
the share that never diverges, and how far apart the two best logits of full precision are where texts part. Then KL
and the share of equal top tokens along the text that full precision wrote, simulated as in `calib.evaluate`. The row
`exact window` compresses nothing: what differs there is the arithmetic of the kernels, and a sum in another order. Bits
are those at the generated length, everything counted. *Best* is a row of which none has a larger mean with as few bits
or up to 0.05 more. --out keeps everything as JSON; what it already holds is not measured again.
"""

import argparse
import gc
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from artifacts import Bundle, Dense, Format, LayerFormat, Window
from benchmarks.commands import command
from benchmarks.quality import calibrated, experiments
from benchmarks.tables import load_table
from calib.allocation.budget import Budget
from calib.allocation.table import Table
from calib.config import TextConfig, register
from calib.data import calibration_tokens
from calib.evaluate import Comparison, SimulatedCache
from calib.forward import Head, blocks, hidden_states
from runtime import Engine
from runtime.hf import fingerprint, load_causal_lm
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import rotary, with_cache

ROWS = [  # those of docs/quality.md with codes of 2 and 3 bits
    f"methods/{name}"
    for name in (
        "int2", "int3", "nf2", "nf3", "nuq2-1", "nuq3-1", "kivi2", "kivi3", "kivi2-g64", "gear-l2", "gear2", "gear-l3",
        "gear3", "qjl", "qjl-512", "qjl-gaussian", "turboquant-mse2", "turboquant-mse3", "turboquant-prod3",
        "banded2", "banded3",
    )
]  # fmt: skip
BUDGETS = "2.0bits@4K,2.33bits@4K,2.5bits@4K,3.0bits@4K"
EXACT = "exact window"
ALIKE = 0.05  # bits


def main() -> None:
    """Measures what is missing and prints the table."""
    options = _parser().parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    rows = kept["rows"]
    wanted = [*experiments(options.rows), *(text for text in options.budgets.split(",") if text), EXACT]
    if missing := [name for name in wanted if name not in rows]:
        register()
        bench = Bench(options)
        for name in missing:
            rows[name] = bench.row(name)
            options.out.write_text(json.dumps({"rows": rows} | bench.environment, indent=1) + "\n")
            print(f"{name}: {rows[name]['mean']:.1f}, {rows[name]['seconds']:.1f} s", file=sys.stderr, flush=True)
    print(markdown({name: rows[name] for name in wanted}))


class Bench:
    """A loaded model, its table, prompts int64 [b, m] and what full precision writes behind them."""

    def __init__(self, options: argparse.Namespace):
        self.new = options.new
        self.model, tokenizer = load_causal_lm(options.model, options.dtype, options.device)
        data, text = TextConfig("text", options.data), TextConfig("text", options.text)
        self.calibration = calibration_tokens(data, self.model, tokenizer, options.samples, options.seqlen, 0)
        self.prompts = calibration_tokens(
            text, self.model, tokenizer, options.prompts, options.prompt_tokens, 0
        ).ids  # [b, m]
        self.table = table_of(options) if options.budgets else None
        start = time.perf_counter()
        self.full, self.gaps = greedy(self.model, self.prompts, self.new)
        device = self.model.device
        self.environment = {
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "prompts": f"{options.prompts} x {options.prompt_tokens} tokens of {Path(options.text).name}",
            "new": options.new,
            "calibration": f"{Path(options.data).name}, {options.samples} x {options.seqlen}",
            "table": dict(self.table.provenance) if self.table else None,
            "full_precision_s": round(time.perf_counter() - start, 2),
            "smallest_gaps": np.quantile(self.gaps.numpy(), [0.001, 0.01, 0.1]).tolist(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": command("divergence"),
        }

    def row(self, name: str) -> dict[str, Any]:
        """One recipe or budget, from calibration on."""
        start = time.perf_counter()
        bundle = self.bundle(name)
        made = time.perf_counter()
        found = generated(self.model, bundle, self.prompts, self.new)
        written = time.perf_counter()
        n = self.prompts.shape[1] + self.new
        along = forced(self.model, bundle, torch.cat([self.prompts, self.full], 1), self.prompts.shape[1])
        return {
            "recipe": bundle.recipe,
            "bits": bundle.geometry.bits(n),
            **divergence(self.full, found, self.gaps),
            **{key: along[key] for key in ("kl_mean", "kl_p999", "top1")},
            "generating_s": round(written - made, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }

    def bundle(self, name: str) -> Bundle:
        """Of a row's name: `exact window`, an experiment or a budget."""
        if name == EXACT:
            return exact_window(self.model, self.prompts.shape[1] + self.new)
        if "/" in name:
            return calibrated(self.model, name, self.calibration)
        assert self.table is not None  # there are budgets
        return self.table.bundle(Budget.parse(name))


def table_of(options: argparse.Namespace) -> Table:
    """The table that budgets are solved from. Raises SystemExit where none is named, else as `Table.load`."""
    if options.table is None:
        raise SystemExit("--budgets needs --table, the folder that `python -m calib budget=...` made; or --budgets ''")
    return load_table(options.table, options.options)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [b, new] in full precision behind prompts int64 [b, m], and by how much, float32 [b, new], the logit
    of each exceeds the second best; on the CPU."""
    cache, ids = DynamicCache(), prompts.to(model.device)
    tokens, gaps = [], []
    for _ in range(new):
        best, order = model(ids, **with_cache(model, cache), use_cache=True, logits_to_keep=1).logits[:, -1].topk(2)
        ids = order[:, :1]
        tokens.append(ids)
        gaps.append(best[:, 0] - best[:, 1])
    return torch.cat(tokens, 1).cpu(), torch.stack(gaps, 1).float().cpu()


def generated(model: PreTrainedModel, bundle: Bundle, prompts: Tensor, new: int) -> Tensor:
    """Greedy tokens int64 [b, new] of an engine behind prompts int64 [b, m]. Raises what a request failed with."""
    engine = Engine(HFDecoder(model, bundle), bundle, sequences=len(prompts), max_tokens=prompts.shape[1] + new)
    requests = [engine.submit(prompt, new) for prompt in prompts.tolist()]
    engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    found = torch.tensor([request.tokens for request in requests])
    del engine, requests
    gc.collect()  # graphs and pools, before the next ones are made
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def divergence(full: Tensor, found: Tensor, gaps: Tensor) -> dict[str, Any]:
    """How long tokens int64 [b, new] are those of full precision; gaps as `greedy` gives them.

    first: of each prompt, how many are the same before the first that is not (`new` where all are).
    """
    new = full.shape[1]
    same = full == found
    first = same.long().cumprod(1).sum(1)
    parted = first < new
    at = gaps[parted].gather(1, first[parted, None])
    low, median, high = np.quantile(first.numpy(), [0.25, 0.5, 0.75]).tolist()
    return {
        "first": first.tolist(),
        "median": median,
        "quartiles": [low, high],
        "mean": first.double().mean().item(),
        "never": 1 - parted.double().mean().item(),
        "agreeing_before": first.double().mean().item() / new,
        "same_place": same.double().mean().item(),
        "gap_where_parted": at.median().item() if parted.any() else None,
    }


@torch.no_grad()
def forced(model: PreTrainedModel, bundle: Bundle, texts: Tensor, prompt: int) -> dict[str, float]:
    """KL and equal top tokens along texts int64 [b, n], of all tokens behind the first `prompt`."""
    comparison, head = Comparison(), Head(model)
    for text in texts:
        ids = text[None].to(model.device)
        full, compressed = hidden_states(model, ids), hidden_states(model, ids, SimulatedCache(model, bundle))
        for block in blocks(ids.shape[1] - prompt):
            rows = slice(block.start + prompt - 1, block.stop + prompt - 1)  # each predicts the next token
            targets = ids[0, rows.start + 1 : rows.stop + 1]
            comparison.add(head(full[:, rows])[0], head(compressed[:, rows])[0], targets)
    return comparison.result()


def exact_window(model: PreTrainedModel, tokens: int) -> Bundle:
    """Nothing becomes a page before `tokens` tokens."""
    fmt, info = Format(64, Dense(8, "token"), window=Window(recent=-(-tokens // 64) * 64)), fingerprint(model)
    return Bundle(EXACT, info, (LayerFormat(fmt, fmt),) * info.l, {"rope.inv_freq": rotary(model)[1].numpy()})


def best(rows: dict[str, dict[str, Any]]) -> set[str]:
    """Names of the rows of which no other has a larger mean with as few bits, or up to `ALIKE` more."""
    return {
        name
        for name, row in rows.items()
        if not any(o["mean"] > row["mean"] and o["bits"] <= row["bits"] + ALIKE for o in rows.values())
    }


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table, by bits."""
    front = best({name: row for name, row in rows.items() if name != EXACT})
    titles = ["recipe", "bits", "first: median", "quartiles", "mean", "never", "KL", "KL 99.9%", "top token", "best"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name, row in sorted(rows.items(), key=lambda each: each[1]["bits"]):
        low, high = row["quartiles"]
        cells = [
            name.removeprefix("methods/"),
            f"{row['bits']:.2f}",
            f"{row['median']:.0f}",
            f"{low:.0f} to {high:.0f}",
        ]
        cells += [f"{row['mean']:.1f}", f"{100 * row['never']:.0f}%", f"{row['kl_mean']:.4f}", f"{row['kl_p999']:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{100 * row['top1']:.1f}%", "*" * (name in front)]) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--data", help="calibration text")
    parser.add_argument("--text", help="text that prompts are cut from")
    parser.add_argument("--table", type=Path, help="folder that `python -m calib budget=...` has made")
    parser.add_argument("--options", default="", help="options of calib that the table was made with, if any")
    parser.add_argument("--rows", default=",".join(ROWS), help="patterns over experiments (default: 2 and 3 bits)")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
