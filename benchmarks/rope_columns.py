"""How many columns of a query turn all keys of a page: the rank of RoPE over a page's tokens.

    python -m benchmarks.rope_columns

A score of the key at token j of a page sums over channel pairs cos(j f) and sin(j f) times what a query turned by
the page's first position has for them. For slow pairs (small f) these are smooth in j, so a few functions of j make
them all: score_j = sum_m W[j, m] <q_m, k_j>, with queries q_m that do not depend on j, half of them for the even part,
half for the odd. Then a matrix product with the codes as they are gives the scores, and no key has to be turned.
Printed: the largest error of any cos and sin, best in the least-squares sense (singular value decomposition), by tokens
of a page, first pair that goes this way, and columns. Pairs before it are turned one by one.
"""

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table


def error(frequencies: np.ndarray, tokens: int, columns: int) -> float:
    """Largest error of cos and sin of j f over the tokens j, counted from the middle; columns: even number of them."""
    j = np.arange(tokens) - (tokens - 1) / 2
    worst = 0.0
    for function in (np.cos, np.sin):
        exact = function(np.outer(j, frequencies))
        u, s, v = np.linalg.svd(exact, full_matrices=False)
        kept = columns // 2
        worst = max(worst, float(np.abs(exact - (u[:, :kept] * s[:kept]) @ v[:kept]).max()))
    return worst


def main() -> None:
    """Prints a table for each base of the frequencies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=float, nargs="+", default=[1e4, 5e5], help="of RoPE's frequencies")
    parser.add_argument("--dim", type=int, default=128, help="rotated channels of a head")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64], help="of a page")
    parser.add_argument("--first", type=int, nargs="+", default=[0, 8, 16, 24], help="first pair that columns turn")
    parser.add_argument("--columns", type=int, nargs="+", default=[4, 6, 8, 10, 12])
    options = parser.parse_args()
    console = Console()
    for base in options.base:
        frequencies = base ** (-np.arange(options.dim // 2) * 2 / options.dim)
        table = Table("tokens", "first pair", *(f"{m} columns" for m in options.columns), title=f"base {base:g}")
        for tokens in options.tokens:
            for first in options.first:
                found = (error(frequencies[first:], tokens, m) for m in options.columns)
                table.add_row(str(tokens), str(first), *(f"{x:.1e}" for x in found))
        console.print(table)


if __name__ == "__main__":
    main()
