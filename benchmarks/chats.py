"""Milliseconds from a chat's turn to its first token, in an engine that keeps texts and in one that does not.

    python -m benchmarks.chats --out chats.json [--formats nuq3-1 ...] [--turns 8] [--user 200] [--answer 300]

A real architecture's layers, random weights (`benchmarks.decode_model`). Every chat begins with the same system prompt;
a turn sends all that was said before, the user's tokens behind it, and takes an answer of so many tokens. So many chats
are under way at once, one turn after the other. Medians over chats, of the first turn and of the last one, and the time
that all turns of all chats take; what of prompts was cached already; bytes that the cache has.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.commands import command, require_gpu
from benchmarks.decode_attention import FORMATS
from benchmarks.decode_model import MODELS, bundle_of, fresh_peak, model_of
from runtime import Engine
from runtime.hf_decoder import HFDecoder


def tokens(decoder: HFDecoder, count: int, seed: int) -> list[int]:
    """Random ones."""
    return torch.randint(decoder.vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def talk(engine: Engine, decoder: HFDecoder, args: argparse.Namespace) -> dict[str, Any]:
    """All turns of all chats."""
    chats = [tokens(decoder, args.system, 0) for _ in range(args.chats)]
    first: list[list[float]] = []  # by turn
    sent = reused = 0
    start = time.perf_counter()
    for turn in range(args.turns):
        waited = []
        for number, text in enumerate(chats):
            text += tokens(decoder, args.user, 1 + turn * args.chats + number)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            request = engine.submit(text, args.answer)
            while not request.tokens:
                engine.step()
            waited.append(1e3 * (time.perf_counter() - begun))
            for _ in engine.stream(request):
                pass
            sent, reused = sent + len(text), reused + request.reused
            text += request.tokens
        first.append(waited)
    return {
        "first turn": statistics.median(first[0]),
        "last turn": statistics.median(first[-1]),
        "all, s": time.perf_counter() - start,
        "reused": reused / sent,
        "cache, GB": engine.kv.nbytes / 1e9,
    }


def main() -> None:
    """Measures all formats, without kept texts and with them; writes the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", default="llama3-8b", choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["nuq3-1", "kivi2-g32"], choices=FORMATS)
    parser.add_argument("--system", type=int, default=1024, help="tokens that all chats begin with")
    parser.add_argument("--user", type=int, default=200, help="tokens of a user's turn")
    parser.add_argument("--answer", type=int, default=300, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    require_gpu()
    most = args.system + args.turns * (args.user + args.answer) + 1
    decoder = model_of(args.model, args.layers, 1 << 20)
    run = {"command": command("chats"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for name in args.formats:
        for kept in (0, args.chats + 1):  # a place for each chat, and one for what all begin with
            engine = Engine(decoder, bundle_of(decoder, name), args.chats, most, reuse=kept)
            engine.prepare()
            rows.append({"format": name, "reuse": kept} | talk(engine, decoder, args))
            print(rows[-1], file=sys.stderr, flush=True)
            args.out.write_text(
                json.dumps(run | {"model": args.model, "layers": args.layers, "rows": rows}, indent=1) + "\n"
            )
            del engine
            fresh_peak()
    table = Table(*rows[0], title="ms to the first token")
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
