"""Codes by bins, as `Bins` of cuda/pack_codebook.cuh finds them, in numpy."""

import numpy as np
import torch

INF = np.float32(np.inf)


def codes(table: np.ndarray, edges: np.ndarray, x: np.ndarray) -> np.ndarray:
    """As `Bins` of cuda/pack_codebook.cuh; a sum in float64 stands for the fused product."""
    factor, offset = table[:8].view(np.float32).astype(np.float64)
    last, most = table[8:16].view(np.int32)
    with np.errstate(invalid="ignore"):
        share = np.clip(np.nan_to_num(x * factor + offset, nan=0.0, posinf=1.0, neginf=0.0), 0, 1).astype(np.float32)
    places = table[16:][np.rint(share.astype(np.float64) * last).astype(int)].astype(int)
    ends = np.append(edges, INF)
    for _ in range(most):
        places += 4 * (x > ends[places // 4])
    return places // 4


def check_bins(table: np.ndarray, edges: np.ndarray) -> int:
    """Codes of numbers on and beside every edge and bin, and far from all; returns most edges of a bin."""
    spread = np.linspace(edges[0], edges[-1], 2047, dtype=np.float32)
    x = np.concatenate([edges, spread, [0, 1, -1, 1e30, -1e30, INF, -INF]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, INF), np.nextafter(x, -INF)])
    wanted = torch.bucketize(torch.from_numpy(x), torch.from_numpy(edges)).numpy()
    np.testing.assert_array_equal(codes(table, edges, x), wanted)
    assert codes(table, edges, np.array([np.nan], np.float32))[0] < len(edges) + 1
    return int(table[12:16].view(np.int32)[0])
