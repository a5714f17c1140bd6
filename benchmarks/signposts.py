"""Time and quality of one layer's codebook: the exact fit on a histogram against scikit-learn's k-means.

    python -m benchmarks.signposts                                       # 2^24 numbers, 10 starts
    python -m benchmarks.signposts --sklearn-starts 1 --out result.json

Both fit the same float32 numbers: a normal distribution without its 1% outliers, normalized to [-1, 1], weighted by
squared gradients of Student's t with 2 degrees of freedom. Ours is timed after compilation, histogram and dynamic
program apart (medians); scikit-learn start by start with its default stopping rule, and the best start counts. Costs
are exact, on the raw numbers in float64.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.special import ndtri
from sklearn.cluster import KMeans

from calib.signposts import WeightedHistogram, fit_signposts, quantization_cost

Float32s = NDArray[np.float32]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2**24, help="numbers of the layer (default: %(default)s)")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4], help="codebooks of 2^bits (default: 2 3 4)")
    parser.add_argument("--bins", type=int, default=16384, help="bins of the histogram (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="our fits, of which the median (default: %(default)s)")
    parser.add_argument("--sklearn-starts", type=int, default=10, help="its n_init (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


def layer(count: int, seed: int) -> tuple[Float32s, Float32s]:
    """Numbers in [-1, 1] and weights over some 15 orders of magnitude, float32 `[count]` each."""
    rng = np.random.default_rng(seed)
    outliers = 0.005  # at each end
    numbers = ndtri(rng.uniform(outliers, 1 - outliers, count)) / -ndtri(outliers)
    gradients = rng.standard_t(2, count)
    return numbers.astype(np.float32), (gradients**2).astype(np.float32)


def fit_ours(numbers: Float32s, weights: Float32s, k: int, bins: int, repeats: int) -> dict[str, float]:
    """Median seconds of both stages, and the cost on the numbers."""
    fit_signposts(WeightedHistogram.of(numbers[:1000], weights[:1000], bins), 2)  # compiles
    histogram_s, partition_s = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        histogram = WeightedHistogram.of(numbers, weights, bins)
        collected = time.perf_counter()
        fit = fit_signposts(histogram, k)
        partition_s.append(time.perf_counter() - collected)
        histogram_s.append(collected - began)
    return {
        "histogram_s": statistics.median(histogram_s),
        "partition_s": statistics.median(partition_s),
        "total_s": statistics.median(a + b for a, b in zip(histogram_s, partition_s, strict=True)),
        "cost": quantization_cost(numbers, weights, fit.values),
    }


def fit_sklearn(numbers: Float32s, weights: Float32s, k: int, starts: int, seed: int) -> dict[str, Any]:
    """Seconds and cost of every start; n_init = starts would take their sum and keep the least cost."""
    seconds, costs, iterations = [], [], []
    for start in range(starts):
        began = time.perf_counter()
        model = KMeans(k, n_init=1, random_state=seed + start).fit(numbers[:, None], sample_weight=weights)
        seconds.append(time.perf_counter() - began)
        iterations.append(int(model.n_iter_))
        costs.append(quantization_cost(numbers, weights, np.sort(model.cluster_centers_[:, 0].astype(np.float64))))
    best = {"total_s": sum(seconds), "cost": min(costs)}
    return best | {"start_s": seconds, "iterations": iterations, "costs": costs}


def environment() -> dict[str, Any]:
    cpu = platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next((line.split(":", 1)[1].strip() for line in info.open() if line.startswith("model name")), cpu)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.signposts", *sys.argv[1:]]),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "scikit-learn", "scipy")},
    }


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    starts = args.sklearn_starts
    result = Table(title=f"One layer's signposts: {args.count} numbers, {args.bins} bins")
    heads = ("bits", "histogram s", "DP s", "ours s", "sklearn s/start", f"sklearn s, {starts} start(s)", "speedup")
    for head in (*heads, "our cost", "sklearn cost", "sklearn above ours"):
        result.add_column(head, justify="right")
    for row in rows:
        ours, rival = row["ours"], row["sklearn"]
        result.add_row(
            str(row["bits"]),
            f"{ours['histogram_s']:.3f}",
            f"{ours['partition_s']:.4f}",
            f"{ours['total_s']:.3f}",
            f"{rival['total_s'] / starts:.1f}",
            f"{rival['total_s']:.1f}",
            f"{rival['total_s'] / ours['total_s']:.0f}x",
            f"{ours['cost']:.6g}",
            f"{rival['cost']:.6g}",
            f"{100 * (rival['cost'] / ours['cost'] - 1):+.4f}%",
        )
    return result


def main() -> None:
    args = arguments()
    numbers, weights = layer(args.count, args.seed)
    rows = []
    for bits in args.bits:
        ours = fit_ours(numbers, weights, 2**bits, args.bins, args.repeats)
        rival = fit_sklearn(numbers, weights, 2**bits, args.sklearn_starts, args.seed)
        rows.append({"bits": bits, "ours": ours, "sklearn": rival})
    Console(width=150).print(table(rows, args))
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"environment": environment(), "settings": settings, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
