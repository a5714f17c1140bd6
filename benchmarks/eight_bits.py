"""What rotations in eight bits cost: squared error of vectors that are rotated, coded and rotated back.

    python -m benchmarks.eight_bits --out eight-bits.json

Random vectors, TurboQuant's codes (`codebook: lloyd`, norms in full); rows: head dimension, bits, mean squared error
over the vectors' squared norm with a rotation in float64 and with the same one in eight bits.
"""

import argparse
import json

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from artifacts.codebooks import lloyd_max
from artifacts.matrices import eight_bits

VECTORS = 65536


def error(x: NDArray[np.float64], rotation: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Of unit vectors x [n, d]."""
    edges = (values[1:] + values[:-1]) / 2
    coded = values[np.searchsorted(edges, x @ rotation)]
    return float(np.mean(np.sum((coded @ rotation.T - x) ** 2, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    for d in (64, 128, 256):
        q, r = np.linalg.qr(rng.normal(size=(d, d)))
        rotation = q * np.sign(np.diag(r))
        coarse = eight_bits(rotation).astype(np.float64)
        x = rng.normal(size=(VECTORS, d))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        back = float(np.mean(np.linalg.norm(x @ coarse @ coarse.T - x, axis=1)))
        for bits in (2, 3, 4, 8):
            values = np.asarray(lloyd_max(bits, d), np.float64)
            found = {"exact": error(x, rotation, values), "eight_bits": error(x, coarse, values)}
            rows.append({"d": d, "bits": bits, **found, "back": back})
    with open(args.out, "w") as file:
        json.dump({"numpy": np.__version__, "vectors": VECTORS, "rows": rows}, file, indent=1)
    table = Table("d", "bits", "float64", "eight bits", "more", "rotated and back")
    for row in rows:
        exact, coarse = row["exact"], row["eight_bits"]
        more, back = f"{coarse / exact - 1:.2%}", f"{row['back']:.2%}"
        table.add_row(str(row["d"]), str(row["bits"]), f"{exact:.6f}", f"{coarse:.6f}", more, back)
    Console().print(table)


if __name__ == "__main__":
    main()
