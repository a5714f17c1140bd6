"""Registers of the attention kernels: what they have, what they spill, and what they would take. Needs no GPU.

    python -m benchmarks.attend_registers [--arch sm_90a] [--models llama2-7b ...] [--formats kivi2-g32 ...]

--way says how work is dealt out, as that of `benchmarks.decode_attention`. `wanted` is what the compiler takes with
room for 255 registers a thread. A kernel that wants more than it has waits for what it looks up, or spills.
"""

import argparse
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from artifacts import LayerFormat, PageGeometry, Rope
from benchmarks.decode_attention import FORMATS, MODELS, WAYS, D
from runtime import jit
from runtime.units import Sharing, attend_unit

BOUNDS, WIDE = "__maxnreg__(Plan::REGISTERS)\nattend", "__maxnreg__(255)\nattend"
MOST_BYTE_ROWS = 2  # query rows a kv head that go by bytes


def unit_of(formats: LayerFormat, h_q: int, h_kv: int, way: Sharing) -> jit.Unit:
    """The kernels of a decode step of one token, for float16."""
    key, value = PageGeometry.of(formats.key, h_kv, D, "key"), PageGeometry.of(formats.value, h_kv, D, "value")
    rows = h_q // h_kv
    return attend_unit(key, value, Rope(D, "half", 1.0, "default"), "__half", rows, rows <= MOST_BYTE_ROWS, way)


def main() -> None:
    """Compiles all of them, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--way", default="one", choices=list(WAYS), help="as of benchmarks.decode_attention")
    args = parser.parse_args()
    table = Table(title=f"attention kernels, {args.arch}, {args.way}")
    for title in ("model", "format", "registers", "spilled, bytes", "wanted"):
        table.add_column(title, justify="left" if title in ("model", "format") else "right")
    for model in args.models:
        for name in args.formats:
            unit = unit_of(FORMATS[name], *MODELS[model], WAYS[args.way])
            wide = replace(unit, source=unit.source.replace(BOUNDS, WIDE))
            assert wide != unit, "the unit states its bounds in another way"
            has, wanted = (jit.report(each, args.arch)["attend"] for each in (unit, wide))
            table.add_row(model, name, str(has.registers), str(has.spill_bytes), str(wanted.registers))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
