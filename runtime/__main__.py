"""The runtime's commands.

`python -m runtime generate --bundle B --model M --prompt "..."`: text from a model with a compressed cache.
`python -m runtime bench --bundle B --model M`: memory and speed with the bundle beside full precision.
`python -m runtime compile --bundle B --arch sm_90a`: the kernels that a bundle needs, compiled ahead; no GPU needed.

`torchrun --nproc-per-node N -m runtime generate ...` (or bench): N processes share the model, the first one prints.
"""

import argparse
import gc
import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from artifacts import Bundle, load
from artifacts.errors import SignpostError
from artifacts.summary import LENGTHS
from runtime import _quit
from runtime.jit import ARCHS, cache_folder, precompile
from runtime.sampling import Sampling

LONG = LENGTHS[-1]
MOST = (1 << 31) - 1  # of what is counted: products of two still fit torch's sizes
MORE_MEMORY = "take fewer tokens or sequences, --dtype bfloat16, or several GPUs by torchrun"
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL = "the model that the bundle was made for: its folder, hub id, or name in `python -m calib model=`, such as tiny"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m runtime", description="Runs models with a compressed KV cache.")
    commands = top.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate", help="continue a prompt", description="Continues a prompt; streams the text."
    )
    bench = commands.add_parser(
        "bench",
        help="memory and speed beside full precision",
        description="Memory, time to the first token, time per token, tokens per second: full precision and a bundle.",
    )
    bench.add_argument("--batch", type=_at_least(1), default=1, metavar="N", help="sequences; default: 1")
    bench.add_argument("--prompt-tokens", type=_at_least(1), default=1024, metavar="N", help="of each; default: 1024")
    bench.add_argument(
        "--new-tokens", type=_at_least(2), default=64, metavar="N", help="of each, 2 at least; default: 64"
    )
    bench.add_argument("--compile", action="store_true", help="compile the model's layers around their attention")
    for command in (generate, bench):
        _add_model(command)
    generate.add_argument("--prompt", required=True, help="text to continue; - reads it from standard input")
    generate.add_argument("--max-new-tokens", type=_at_least(1), default=128, metavar="N", help="default: 128")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="for temperature above 0: draw from the likeliest tokens "
        "that together have this probability; default: 1, all"
    )  # fmt: skip
    generate.add_argument("--seed", type=int, default=0, help="for temperature above 0; default: 0")
    compile_ = commands.add_parser(
        "compile",
        help="compile a bundle's kernels ahead of time",
        description="Compiles the kernels that a bundle needs into the folder SIGNPOST_CACHE_DIR; needs no GPU.",
    )
    compile_.add_argument("--bundle", required=True, type=Path, help="folder written by `python -m calib`")
    compile_.add_argument(
        "--arch", required=True, nargs="+", choices=ARCHS, help=f"one or several of {', '.join(ARCHS)}"
    )
    compile_.add_argument(
        "--ranks", type=_at_least(1), default=1, metavar="N", help="processes that will share the model; default: 1"
    )
    return top


def _at_least(least: int) -> Callable[[str], int]:
    """What argparse makes of an option that counts something; it names the option where that fails."""

    def number(text: str) -> int:
        try:
            given = int(text)
        except ValueError:
            given = least - 1
        if not least <= given <= MOST:
            raise argparse.ArgumentTypeError(f"{text}: must be an integer from {least} to {MOST}")
        return given

    return number


def _add_model(command: argparse.ArgumentParser) -> None:
    """Options of commands that run a model."""
    command.add_argument("--bundle", required=True, type=Path, help="folder written by `python -m calib`")
    command.add_argument("--model", required=True, help=MODEL)
    command.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of weights and window; auto: the checkpoint's"
    )
    command.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:0, ...; auto takes a GPU if there is one"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 2 with one line on what is wrong, 130 after Ctrl-C, or 141 where nobody
    reads the output any more."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True, quiet=not _first())
    try:
        if options.command == "compile":
            _compile(load(options.bundle), options.arch, options.ranks)
            return 0
        if options.command == "bench":
            _bench(options, load(options.bundle), console)
            return _left()
        _generate(options, Sampling(options.temperature, options.top_p, options.seed), load(options.bundle), console)
        return _left()
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            console.print()  # behind the text so far
        console.print("interrupted")
        return 130
    except (SignpostError, OSError) as error:
        return 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) and _unread() else _failed(str(error))
    except (RuntimeError, MemoryError) as error:
        if not _wants_memory(error):
            raise
        return _failed(f"out of memory{_wanted(error)}: {MORE_MEMORY}")
    except ImportError as error:
        return _failed(f"{error}: pip install 'signpost-kv[hf]'")


def _unread() -> bool:
    """Whether who read our output has left, as `head` does. Then what is still to be written goes nowhere."""
    try:
        output = sys.stdout.fileno()
    except io.UnsupportedOperation:  # it is in memory
        return False
    asked = select.poll()
    asked.register(output, 0)
    if not any(found & select.POLLERR for _, found in asked.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def _wants_memory(error: Exception) -> bool:
    """Whether a device or the host had no room; for the host's torch has no error of its own."""
    import torch

    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _wanted(error: Exception) -> str:
    """How much, where torch says it."""
    found = re.search(r"(?i)tried to allocate ([\d.]+ \w+)", str(error))
    return f" for {found[1]} more" if found else ""


def _failed(message: str) -> int:
    """Every rank says what failed it: the others may not know. torchrun then ends them."""
    where = f" rank {os.environ.get('RANK', '0')}:" if _ranks() > 1 else ""
    error = Text.assemble(("error:", "bold red"), f"{where} {message}")  # names may look like markup
    Console(stderr=True).print(error, soft_wrap=True)
    return 2


def _ranks() -> int:
    """Processes that torchrun has started to share a model; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _first() -> bool:
    """Whether this process is the one that prints."""
    return _ranks() == 1 or os.environ.get("RANK", "0") == "0"


def _left() -> int:
    """Takes leave of the other ranks, after a success of all."""
    if _ranks() > 1:
        import torch.distributed as dist

        gc.collect()  # captured steps go before what connects their ranks
        dist.destroy_process_group()
    return 0


def _compile(bundle: Bundle, archs: list[str], ranks: int) -> None:
    """Fills the kernel cache; prints a line per unit and the total."""
    from runtime.exact import HALVES
    from runtime.joined import join_unit
    from runtime.pack_units import units as pack_units
    from runtime.project import units as project_units
    from runtime.units import units
    from runtime.unpack import units as unpack_units

    start, count = time.perf_counter(), 0
    bundle = bundle.shard(0, ranks)  # kernels know how many heads there are, not which
    for arch in archs:
        steps = [*units(bundle), *project_units(bundle)]
        wanted = [*steps, *pack_units(bundle, arch), *unpack_units(bundle), *map(join_unit, HALVES)]
        for unit, seconds, resources in precompile(wanted, arch):
            count += 1
            registers = max((used.registers for used in resources.values()), default=0)
            spills = [used.spill_bytes for used in resources.values() if used.spill_bytes is not None]
            spilled = sum(spills) if len(spills) == len(resources) else "unknown"
            print(f"{arch} {unit.name}: {seconds:.2f} s, {registers} registers, {spilled} bytes spilled")
    print(f"{count} units in {time.perf_counter() - start:.1f} s, in {cache_folder()}")


def _bench(options: argparse.Namespace, bundle: Bundle, console: Console) -> None:
    """Prints the table; progress goes to standard error."""
    from runtime.bench import compare, table
    from runtime.hf import load_causal_lm
    from runtime.hf_decoder import HFDecoder

    model, _ = load_causal_lm(options.model, options.dtype, options.device, sharded=_ranks() > 1)
    with console.status("loading") as status:
        rows = compare(
            HFDecoder(model, bundle, options.compile),
            bundle,
            options.batch,
            options.prompt_tokens,
            options.new_tokens,
            status.update,
        )
    Console(quiet=not _first()).print(table(rows, options.prompt_tokens, options.new_tokens, _ranks()))


def _generate(options: argparse.Namespace, sampling: Sampling, bundle: Bundle, console: Console) -> None:
    import torch

    from runtime.hf import SignpostCache, TextStreamer, load_causal_lm
    from runtime.hf_model import with_cache

    model, tokenizer = load_causal_lm(options.model, options.dtype, options.device, sharded=_ranks() > 1)
    # Not verbose: of a prompt that is too long we say so ourselves.
    prompt = tokenizer(_prompt(options.prompt), return_tensors="pt", verbose=False).to(model.device)
    length = prompt["input_ids"].shape[1]
    if not length:
        raise SignpostError("the prompt is empty: give some text")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and length + options.max_new_tokens > limit:
        raise SignpostError(
            f"prompt of {length} tokens and {options.max_new_tokens} new ones exceed the model's {limit} positions: "
            "shorten one of them"
        )
    cache = SignpostCache(model, bundle, max_tokens=length + options.max_new_tokens)
    drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature:
        torch.manual_seed(sampling.seed)
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    start = time.perf_counter()
    ids = cast(Any, model).generate(
        **prompt, **with_cache(model, cache), **drawn, max_new_tokens=options.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=False, skip_special_tokens=True) if _first() else None,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    new = ids.shape[1] - length
    assert cache.kv is not None
    each = f" of each of {_ranks()} ranks" if _ranks() > 1 else ""
    # The last token is never fed back, so it is not in the cache. A short text does not fill what it is given.
    console.print(
        f"{new} tokens in {seconds:.2f} s ({new / seconds:.1f} tokens/s, prompt of {length} included) · "
        f"cache {cache.nbytes} bytes{each} for {cache.kv.lengths[0]} tokens · "
        f"{cache.bits:.2f} bits per number, everything counted, {bundle.geometry.bits(LONG):.2f} at {LONG} tokens",
        highlight=False,
        soft_wrap=True,
    )


def _prompt(given: str) -> str:
    """The text to continue. Raises SignpostError where it is not UTF-8, which Python may smuggle through."""
    try:
        text = _standard_input() if given == "-" else given
        text.encode()
    except UnicodeError as error:
        raise SignpostError("the prompt is not UTF-8 text: convert it first") from error
    return text


def _standard_input() -> str:
    """All of it. Ranks share one, which the first reads for all."""
    texts = [sys.stdin.read() if _first() else ""]
    if _ranks() > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(texts, src=0)
    return texts[0]


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is _quit:  # all is loaded
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
