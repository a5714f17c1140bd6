"""How many blocks of attention and of the merge share a step's work."""


def aligned_blocks(heads: int, blocks: int) -> tuple[int, int, float]:
    """Where no block is to end in the middle of one of `heads` sequences' heads, or several share one: (how many of
    `blocks` take part, heads of each, or 1, its share of the line of units), for cuda/line.cuh.

    The last block may have fewer heads than the others.
    """
    if heads <= blocks:
        aligned = blocks // heads * heads
        return aligned, 1, 1 / aligned
    whole = -(-heads // blocks)
    return -(-heads // whole), whole, whole / heads


def merged(at_once: int, most: int, warps: int, results: int, processors: int) -> int:
    """Sequences of a block of the merge: as few for each of its warps as leave one block a multiprocessor; if that is
    more than it takes at once, as often as leaves two, at most `most`. results: rows of all sequences and kv heads."""
    each = warps * -(-results // (processors * warps))
    return each if each <= at_once else min(most, at_once * -(-results // (2 * processors * at_once)))
