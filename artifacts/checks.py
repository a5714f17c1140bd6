"""What `load` does not ask: whether the numbers of a whole bundle are such that calibration can have found them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from artifacts.bundle import SIDES, Bundle, Tensor
from artifacts.errors import BundleInvalidError
from artifacts.format import Format
from artifacts.loading import load
from artifacts.parts.dense import GRID


@dataclass(frozen=True)
class Finding:
    """A tensor (or entry) and what is wrong with it."""

    name: str
    problem: str


def verify(path: str | Path) -> Bundle:
    """Loads the bundle in folder `path` and holds its numbers against what its formats mean.

    `load` has by then checked hashes, schema, names, dtypes, shapes, finiteness, the order of signposts and the sign of
    scales. Here: matrices orthogonal, masks of zeros and ones with no more channels than the format allows, thresholds
    the right way round, codebooks within the range that numbers are normalized to, frequencies not negative.
    Raises what `load` raises, and BundleInvalidError that names the first finding and their number.
    """
    bundle = load(path)
    if found := list(findings(bundle)):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise BundleInvalidError(f"{path}: {found[0].name} {found[0].problem}{more}. Calibrate again")
    return bundle


def findings(bundle: Bundle) -> Iterator[Finding]:
    """Everything in a loaded bundle that no calibration finds."""
    if bundle.tensors["rope.inv_freq"].astype(np.float64).min() < 0:
        yield Finding("rope.inv_freq", "holds a negative frequency")
    for layer, formats in enumerate(bundle.layers):
        for side in SIDES if formats else ():
            tensors = bundle.side_tensors(layer, side)
            for name, problem in _problems(getattr(formats, side), tensors):
                yield Finding(f"layers.{layer}.{side}.{name}", problem)


def _problems(fmt: Format, tensors: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    if fmt.rotate and fmt.rotate.kind == "learned":
        for head, matrix in enumerate(tensors["rotation"]):
            if np.linalg.matrix_rank(matrix.astype(np.float64)) < len(matrix):
                yield "rotation", f"of head {head} is singular"
                break
    elif fmt.rotate:
        yield from _not_orthogonal("rotation", tensors["rotation"], 1.0)
        flat = np.abs(tensors["rotation"].astype(np.float64)) * np.sqrt(tensors["rotation"].shape[0])
        if fmt.rotate.kind == "hadamard" and not np.allclose(flat, 1, rtol=0, atol=2.0**-8):
            yield "rotation", "is no Hadamard matrix: its entries are not all of one size"
    if fmt.sketch and fmt.sketch.rows == "orthogonal":
        for name in ("sketch", "outlier_sketch"):
            if name in tensors:
                yield from _not_orthogonal(name, tensors[name], float(tensors[name].shape[1]))
    if fmt.sketch and fmt.sketch.outliers:
        yield from _bad_mask(tensors["outlier_mask"], fmt.sketch.outliers)
    if "lower" in tensors and (np.subtract(tensors["upper"], tensors["lower"], dtype=np.float64) < 0).any():
        yield "lower", "is above upper"
    if fmt.dense and fmt.dense.codebook == "nuq" and np.abs(tensors["signposts"]).max() > 1:
        yield "signposts", "lie outside [-1, 1], to which numbers are normalized"
    if fmt.dense and "spacing" in tensors:
        start, step = (int(x) for x in tensors["spacing"])
        if start < -GRID or start + step * ((1 << fmt.dense.bits) - 1) > GRID:
            yield "spacing", "lies outside [-1, 1], to which numbers are normalized"
    if "edges" in tensors and np.abs(tensors["edges"]).max() > 1:
        yield "edges", "lie outside [-1, 1], to which numbers are normalized"


def _not_orthogonal(name: str, matrix: NDArray[np.generic], square: float) -> Iterator[tuple[str, str]]:
    """square: squared norm that every row must have; rows come in blocks of d that are orthogonal among themselves.

    An entry's rounding is at most 2^-8 of it, so a product of two rows is off by at most 2 * 2^-8 of the product of
    their norms (and 2^-16), and twice that is allowed.
    """
    rows, d = matrix.astype(np.float64), matrix.shape[1]
    for start in range(0, len(rows), d):
        block = rows[start : start + d]
        off = np.abs(block @ block.T / square - np.eye(len(block))).max()
        if off > 2.0**-6:
            yield name, f"rows {start} to {start + len(block) - 1} are not orthogonal: a product is off by {off:.2g}"
            return


def _bad_mask(mask: Tensor, most: int) -> Iterator[tuple[str, str]]:
    if mask.max() > 1:
        yield "outlier_mask", f"holds {int(mask.max())}: a channel is in the mask (1) or not (0)"
    elif (counts := mask.sum(1, dtype=np.int64)).max() > most:
        yield "outlier_mask", f"marks {int(counts.max())} channels of a head, the format allows {most}"
