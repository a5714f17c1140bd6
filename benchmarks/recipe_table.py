"""The table of docs/choosing.md, from the committed results: python -m benchmarks.recipe_table"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
MODELS = ("gqa", "mha")
ROWS = {  # experiment: what to write on the command line
    "methods/nuq4-1": "`bits=4`",
    "methods/nuq3-1": "`bits=3`",
    "methods/nuq2-1": "`bits=2`",
    "methods/kivi4": "`method=kivi bits=4`",
    "methods/kivi2": "`method=kivi bits=2`",
    "methods/gear4": "`method=gear bits=4`",
    "methods/gear-l2": "`method=gear-l bits=2`",
    "methods/turboquant-mse4": "`method=turboquant-mse bits=4`",
    "methods/turboquant-mse3": "`method=turboquant-mse bits=3`",
    "methods/qjl": "`method=qjl`",
    "methods/nf4": "NormalFloat, 4 bits (`experiment=methods/nf4`)",
    "methods/int4": "integers per token, 4 bits (`experiment=methods/int4`)",
}


def main() -> None:
    """Prints the table."""
    print(table())


def table() -> str:
    """Markdown."""
    found = [_rows(model) for model in MODELS]
    lines = ["| recipe | bits, gqa | loss, gqa | bits, mha | loss, mha | text needed |", "|---|---|---|---|---|---|"]
    for name, words in ROWS.items():
        cells = [f"{r[name]['bits_long']:.2f} | {r[name]['loss_increase']:+.4f}" for r in found]
        lines.append(f"| {words} | {' | '.join(cells)} | {'yes' if 'nuq' in name or name == 'methods/qjl' else 'no'} |")
    return "\n".join(lines)


def _rows(model: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((RESULTS / f"methods-llama-{model}.json").read_text())["rows"]
    return rows


if __name__ == "__main__":
    main()
