"""Do the Engine and generate() on a GPU choose the greedy tokens of the CPU runtime?

    python -m benchmarks.agreement reference --model FOLDER --bundle FOLDER --text FILE --out FILE   (no GPU)
    python -m benchmarks.agreement compare --model FOLDER --bundle FOLDER --reference FILE --out FILE

The reference runs in float32 on the CPU: greedy tokens behind prompts of different lengths cut from the text, and how
far the two best logits of every step are apart. The GPU runs in float32 too, but its page kernels multiply halves, so
tokens may differ where that gap is below what halves can do to a logit: twice (two logits) twice (what the kernels are
allowed) the largest change of any logit when attention of the plain model, over the same tokens, is computed in
float16. Behind a first difference texts differ, so the first one counts.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import load
from runtime import Engine
from runtime.exact import causal_attention
from runtime.hf import AttendingCache, SignpostCache, load_causal_lm
from runtime.hf_decoder import HFDecoder
from runtime.hf_model import with_cache

LENGTHS = (700, 37, 180)  # of prompts: many pages and less than one


def main() -> None:
    """One of the two commands."""
    options = _parser().parse_args()
    if options.command == "reference":
        found: dict[str, Any] = reference(options)
    else:
        found = compare(options)
    Path(options.out).write_text(json.dumps(found, indent=1))


def reference(options: argparse.Namespace) -> dict[str, Any]:
    """Prompts, and for each the CPU's tokens and gaps."""
    model, tokenizer = load_causal_lm(options.model, "float32", "cpu")
    text = tokenizer(Path(options.text).read_text()[:200_000])["input_ids"]
    prompts = [text[number * len(text) // len(LENGTHS) :][:n] for number, n in enumerate(LENGTHS)]
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out: Any = model.generate(
            ids, **with_cache(model, SignpostCache(model, load(options.bundle))), max_new_tokens=options.new,
            min_new_tokens=options.new, do_sample=False, output_logits=True, return_dict_in_generate=True,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        end = model.generation_config.eos_token_id
        logits = torch.cat(out.logits)
        if end is not None:  # generate() was told not to end
            logits[:, end] = -torch.inf
        best = logits.topk(2).values
        rows.append({
            "prompt": prompt, "tokens": out.sequences[0, len(prompt) :].tolist(),
            "gaps": [round(float(gap), 6) for gap in best[:, 0] - best[:, 1]],
        })  # fmt: skip
    return {"model": Path(options.model).name, "bundle": Path(options.bundle).name, "banned": end, "rows": rows}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """The GPU's tokens against the reference's."""
    given = json.loads(Path(options.reference).read_text())
    model, _ = load_causal_lm(options.model, "float32", "cuda")
    bundle, rows = load(options.bundle), given["rows"]
    bound = max(half_changes(model, row["prompt"] + row["tokens"]) for row in rows) * 4
    seconds = {}
    results = {}
    for name, run in (("engine", engine), ("engine, one by one", one_by_one), ("generate", generate)):
        start = time.perf_counter()
        results[name] = run(model, bundle, rows, given["banned"])
        seconds[name] = round(time.perf_counter() - start, 2)
    console, agreements = Console(width=140), []
    for name, found in results.items():
        for row, tokens in zip(rows, found, strict=True):
            agreements.append({"by": name, "prompt": len(row["prompt"])} | first_difference(row, tokens, bound))
            console.print(agreements[-1])
    console.print(f"bound {bound:.4f}; seconds {seconds}; all agree: {all(a['agrees'] for a in agreements)}")
    gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return gpu | {"model": given["model"], "bundle": given["bundle"], "bound": bound, "agreements": agreements}


def first_difference(row: dict[str, Any], tokens: list[int], bound: float) -> dict[str, Any]:
    """After how many tokens they differ, the gap there, and the smallest gap of all steps before."""
    wanted, gaps = row["tokens"], row["gaps"]
    same = next((i for i, (a, b) in enumerate(zip(wanted, tokens, strict=True)) if a != b), len(wanted))
    gap = gaps[same] if same < len(wanted) else None
    return {
        "same": same,
        "of": len(wanted),
        "gap": gap,
        "smallest gap": min(gaps),
        "agrees": gap is None or gap <= bound,
    }


@torch.no_grad()
def half_changes(model: PreTrainedModel, tokens: list[int]) -> float:
    """The largest change of any logit when attention is computed in float16."""
    ids = torch.tensor([tokens]).cuda()
    exact, half = (
        model(ids, **with_cache(model, Plain(model, dtype)), use_cache=True).logits
        for dtype in (torch.float32, torch.float16)
    )
    return float((exact - half).abs().max())


class Plain(AttendingCache):
    """Attention of one prompt, computed in a type; nothing is kept."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        super().__init__(model)
        self.dtype = dtype

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        return causal_attention(q, k, v, scaling).transpose(1, 2).float()


class Banning(HFDecoder):
    """A decoder that never chooses one token, as generate() with min_new_tokens."""

    banned: int | None = None

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any, behind: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, positions, attend, behind)
        if self.banned is not None:
            logits[:, self.banned] = -torch.inf
        return logits


def engine(model: PreTrainedModel, bundle: Any, rows: list[dict[str, Any]], banned: int | None) -> list[list[int]]:
    """All prompts at once, as they come."""
    decoder = Banning(model, bundle)
    decoder.banned = banned
    most = max(len(row["prompt"]) + len(row["tokens"]) for row in rows)
    made = Engine(decoder, bundle, sequences=len(rows), max_tokens=most, chunk=256)
    requests = [made.submit(row["prompt"], len(row["tokens"])) for row in rows]
    made.run()
    return [request.tokens for request in requests]


def one_by_one(model: PreTrainedModel, bundle: Any, rows: list[dict[str, Any]], banned: int | None) -> list[list[int]]:
    """Each prompt alone in an engine."""
    return [tokens for row in rows for tokens in engine(model, bundle, [row], banned)]


def generate(model: PreTrainedModel, bundle: Any, rows: list[dict[str, Any]], banned: int | None) -> list[list[int]]:
    """generate() on a batch with padding on the left."""
    longest, new = max(len(row["prompt"]) for row in rows), len(rows[0]["tokens"])
    ids = torch.tensor([[0] * (longest - len(row["prompt"])) + row["prompt"] for row in rows]).cuda()
    mask = torch.tensor([[0] * (longest - len(r["prompt"])) + [1] * len(r["prompt"]) for r in rows]).cuda()
    out: Any = model.generate(
        ids, attention_mask=mask, **with_cache(model, SignpostCache(model, bundle, max_tokens=longest + new)),
        max_new_tokens=new, min_new_tokens=new, do_sample=False,
    )  # fmt: skip
    return out[:, longest:].tolist()


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True)
    for name in ("reference", "compare"):
        parser = commands.add_parser(name)
        for option in ("--model", "--bundle", "--out", "--text" if name == "reference" else "--reference"):
            parser.add_argument(option, required=True)
        if name == "reference":
            parser.add_argument("--new", type=int, default=512)
    return top


if __name__ == "__main__":
    main()
