"""The runs of `benchmarks.decode_attention` as one Markdown table, and a picture of their ratios to fp16.

python -m benchmarks.decode_table docs/results/decode-attention-v6*.json --plot docs/images/decode-attention.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def size(shape: str) -> tuple[str, int, int]:
    """Model, batch and tokens of `model@batch x tokens`."""
    model, _, rest = shape.partition("@")
    b, n = rest.split("x")
    return model, int(b), int(n)


def rows_of(files: list[Path]) -> list[dict[str, Any]]:
    """All rows by model, batch and tokens; a later file's row takes the place of an earlier one's of the same shape and
    format."""
    found = {(row["shape"], row["format"]): row for file in files for row in json.loads(file.read_text())["rows"]}
    return sorted(found.values(), key=lambda row: size(row["shape"]))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| model | batch | tokens | format | bits | us | merge, us | TB/s | of copy | fp16, us | against fp16 |"]
    lines.append("|" + "---|" * 11)
    for row in rows:
        model, b, n = size(row["shape"])
        lines.append(
            f"| {model} | {b} | {n} | {row['format']} | {row['bits']:.2f} | {row['us']:.1f} | {row['merge_us']:.1f} | "
            f"{row['tb_s']:.2f} | {row['of_copy']:.0%} | {row['fp16_us']:.1f} | {row['ratio']:.2f}x |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], to: Path) -> None:
    """A group of bars for every shape: how many times as fast as fp16."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    figure, axes = plt.subplots(figsize=(12, 5), layout="constrained")
    places, ticks, at = {name: i for i, name in enumerate(formats)}, [], 0.0
    colors = plt.get_cmap("tab10")
    for shape in shapes:
        mine = [row for row in rows if row["shape"] == shape]
        for i, row in enumerate(mine):
            axes.bar(at + i, row["ratio"], color=colors(places[row["format"]] % 10))
        ticks.append((at + (len(mine) - 1) / 2, "{}\n{} x {}".format(*size(shape))))
        at += len(mine) + 1
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set_ylabel("times as fast as fp16 (cuDNN)")
    axes.legend([plt.Rectangle((0, 0), 1, 1, color=colors(i % 10)) for i in range(len(formats))], formats, ncols=5)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110)


def main() -> None:
    """Prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of benchmarks.decode_attention")
    parser.add_argument("--plot", type=Path, help="PNG file")
    options = parser.parse_args()
    rows = rows_of(options.results)
    print(table(rows))
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
