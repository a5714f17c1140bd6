"""The runs of `benchmarks.decode_attention` as Markdown tables, and a picture of their ratios to fp16.

    python -m benchmarks.decode_table docs/results/decode-attention-v13.json --detail llama2-7b@1x131072 --plot all.png

Of every model all formats by all shapes, and whatever was measured of the shapes of --detail.
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


def matrix(rows: list[dict[str, Any]]) -> str:
    """Markdown of one model: formats down, batch x tokens across, microseconds and how many times as fast as fp16."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    found = {(row["format"], row["shape"]): row for row in rows}
    lines = [
        "| us (times as fast as fp16) | " + " | ".join("{1} x {2}".format(*size(shape)) for shape in shapes) + " |"
    ]
    lines.append("|" + "---|" * (1 + len(shapes)))
    fp16 = {row["shape"]: row["fp16_us"] for row in rows}
    lines.append("| fp16 (cuDNN) | " + " | ".join(f"{fp16[shape]:.1f}" for shape in shapes) + " |")
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = [found.get((name, shape)) for shape in shapes]
        lines.append(
            f"| {name} | " + " | ".join(f"{x['us']:.1f} ({x['ratio']:.2f})" if x else "" for x in cells) + " |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], to: Path) -> None:
    """A panel for each model, a group of bars for every shape: how many times as fast as fp16."""
    models = list(dict.fromkeys(size(row["shape"])[0] for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    figure, panels = plt.subplots(len(models), figsize=(13, 4.5 * len(models)), layout="constrained", squeeze=False)
    colors = plt.get_cmap("tab20")
    for axes, model in zip(panels[:, 0], models, strict=True):
        mine = [row for row in rows if size(row["shape"])[0] == model]
        shapes = list(dict.fromkeys(row["shape"] for row in mine))
        for row in mine:
            place = shapes.index(row["shape"]) * (len(formats) + 1.5) + formats.index(row["format"])
            axes.bar(place, row["ratio"], color=colors(formats.index(row["format"]) % 20))
        axes.axhline(1.0, color="black", linewidth=1)
        middles = [i * (len(formats) + 1.5) + (len(formats) - 1) / 2 for i in range(len(shapes))]
        axes.set_xticks(middles, ["{1} x {2}".format(*size(shape)) for shape in shapes])
        axes.set_ylabel(f"{model}: times as fast as fp16 (cuDNN)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors(i % 20)) for i in range(len(formats))]
    panels[0, 0].legend(handles, formats, ncols=5)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110)


def main() -> None:
    """Prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of benchmarks.decode_attention")
    parser.add_argument("--detail", nargs="*", default=[], metavar="SHAPE", help="model@batch x tokens")
    parser.add_argument("--plot", type=Path, help="PNG file")
    options = parser.parse_args()
    rows = rows_of(options.results)
    for model in dict.fromkeys(size(row["shape"])[0] for row in rows):
        print(f"{model}:\n\n{matrix([row for row in rows if size(row['shape'])[0] == model])}\n")
    if detail := [row for row in rows if row["shape"] in options.detail]:
        print(table(detail))
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
