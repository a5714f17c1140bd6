"""What packing finds codes by (cuda/pack_codebook.cuh), and what they stand for, as it lies in shared memory.

Of three and four bits by bins (`Bins`), of others by a search tree (`Search`).

A normalized number a falls into bin round(last * clip(a * factor + offset, 0, 1)). A bin's byte is 4 times the edges
that lie below all numbers that can fall into it, rounding considered; comparisons with the next edges, at most `most`
of them, find the code. There is one edge a bin unless edges are closer than the 255th part of their range, which
signposts of up to four bits are not if they differ: they are whole multiples of 1 / 127, with four bits 1 / 63.
"""

import numpy as np
import torch
from torch import Tensor, nn

WIDTHS = (3, 4)  # bits of the codes that are found so
ROOM = 256  # bins
BYTES = 16 + ROOM  # `Bins::TABLE_BYTES`
ROUNDING = 2.0**-23  # more than the device's product is off, of numbers up to 1


def codebook(values: Tensor, edges: Tensor) -> Tensor:
    """uint8 on the device, made of a codebook's numbers [2^bits] and the edges between them [2^bits - 1], float32:
    nodes, float32 [2^bits], of the tree, or the edges and infinity; the numbers; bins if there are some. All begin at
    multiples of 16 bytes."""
    bits = int(values.numel()).bit_length() - 1
    ends = edges.new_tensor([float("inf")])
    nodes = torch.cat([edges, ends]) if bits in WIDTHS else tree(edges)
    found = [nn.functional.pad(x, (0, -len(x) % 4)).view(torch.uint8) for x in (nodes, values)]
    return torch.cat([*found, table(edges)] if bits in WIDTHS else found)


def tree(edges: Tensor) -> Tensor:
    """The edges [2^bits - 1] as nodes [2^bits] of a search tree: the root is node 1, node k has children 2 k and
    2 k + 1, and there is no node 0."""
    order = [0]
    for i in range(1, len(edges) + 1):
        level = i.bit_length() - 1
        order.append(((2 * (i - (1 << level)) + 1) * (len(edges) + 1) >> level + 1) - 1)
    return edges[order]


def table(edges: Tensor) -> Tensor:
    """uint8 [BYTES] on the device of the edges, float32 ascending: factor, offset, last bin, most edges of a bin; bins.

    128 bins are enough for most codebooks, and lanes never wait for each other then.
    """
    found = [binned(edges[None], room)[0] for room in (ROOM // 2, ROOM)]
    best = min(found, key=lambda each: int(each[12:16].view(torch.int32)))
    return nn.functional.pad(best, (0, BYTES - best.numel()))


def binned(edges: Tensor, room: int) -> Tensor:
    """uint8 [n, 16 + room] on the device: as `table`, of n codebooks' edges [n, e], with so many bins each."""
    found, last = edges.detach().cpu().numpy().astype(np.float32), room - 1
    low, high = found[:, 0].astype(np.float64), found[:, -1].astype(np.float64)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = ((last - 1) / (high - low) / last).astype(np.float32)
    apart = (high > low) & np.isfinite(factor)  # else there is one edge, or all are equal
    factor = np.where(apart, factor, np.float32(0.0))
    offset = np.where(apart, 0.5 / last - low * factor.astype(np.float64), 0.5).astype(np.float32)
    # The outermost edges end the outermost bins.
    ends = (np.arange(last + 1)[:, None] + [-0.5, 0.5]) / last + [-ROUNDING, ROUNDING]
    ends = (ends - offset[:, None, None]) / np.where(apart, factor, 1.0)[:, None, None]
    ends[~apart] = -np.inf, np.inf
    ends[:, 0, 0], ends[:, last, 1] = -np.inf, np.inf
    below = (found[:, None, None, :] < ends[..., None]).sum(-1)
    most = (below[..., 1] - below[..., 0]).max(-1).astype(np.int32)
    heads = (factor, offset, np.full_like(most, last), most)
    bins = (4 * below[..., 0]).astype(np.uint8)
    packed = np.concatenate([np.stack([x.view(np.uint8).reshape(-1, 4) for x in heads], 1).reshape(-1, 16), bins], 1)
    return torch.from_numpy(packed).to(edges.device)
