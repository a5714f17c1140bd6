"""Loss increase against bits of every measured recipe, the Pareto front marked.

python -m benchmarks.quality_plot docs/results/methods-llama-gqa.json --out docs/images/methods-llama-gqa.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON file of benchmarks.quality")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    options = parser.parse_args()
    data = json.loads(options.results.read_text())
    rows = [row for row in data["rows"].values() if "loss" in row]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    _draw(rows, f"{data['model']}: WikiText-2, {rows[0]['tokens']} tokens, windows of {data['context']}").savefig(
        options.out, dpi=120
    )


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that no other row beats in both bits and loss, by ascending bits."""
    best, kept = float("inf"), []
    for row in sorted(rows, key=lambda row: (row["bits_long"], row["loss_increase"])):
        if row["loss_increase"] < best:
            best = row["loss_increase"]
            kept.append(row)
    return kept


def _draw(rows: list[dict[str, Any]], title: str) -> Any:
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    best = front(rows)
    axes.plot([r["bits_long"] for r in best], [r["loss_increase"] for r in best], "-", color="0.75", zorder=1)
    for row in rows:
        on_front = row in best
        axes.plot(row["bits_long"], row["loss_increase"], "o", color="tab:blue" if on_front else "0.55", zorder=2)
        axes.annotate(
            row["recipe"], (row["bits_long"], row["loss_increase"]), xytext=(5, 3), textcoords="offset points",
            fontsize=8, color="black" if on_front else "0.4",
        )  # fmt: skip
    axes.set(
        title=title, yscale="log", xlabel="bits per number at 131072 tokens, everything counted",
        ylabel="loss increase, nats per token",
    )  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    return figure


if __name__ == "__main__":
    main()
