"""Which of the prompts that wait share a pass."""

from collections.abc import Iterable

from runtime.prompts import PromptGraphs
from runtime.requests import Generation, Prefix

TOGETHER, PADDED = 16, 4096  # prompts of a pass at most, and tokens of it, with what fills up shorter ones
UNCAPTURED = 2  # more than so many times the tokens of the largest graph of prompts are worth a pass without one


def sharing(
    waiting: Iterable[Generation | Prefix], most: int, tokens: int, graphs: PromptGraphs | None
) -> list[Generation]:
    """The first of those that wait, at most so many, whose prompts may share a pass of so many tokens, with what fills
    up shorter ones: at most as much again as they have themselves. They come behind the same tokens, or none. Those
    that must be alone share none."""
    found: list[Generation] = []
    for work in waiting:
        if isinstance(work, Prefix) or work.apart or len(found) == min(most, TOGETHER):
            break
        if found and work.source is not found[0].source:
            break
        sizes = [len(request.fresh) for request in (*found, work)]
        if max(sizes) * len(sizes) > min(tokens, 2 * sum(sizes)):
            break
        found.append(work)
    return fitting(found, graphs) if graphs else found


def fitting(few: list[Generation], graphs: PromptGraphs) -> list[Generation]:
    """The first of these, as many as a graph takes; all where that would come to so many tokens, with what fills up
    prompts, that one pass without a graph takes no longer."""
    most, before = UNCAPTURED * graphs.tokens, few[0].before if few else 0
    for n in range(len(few), 1, -1):
        graph = graphs.fitting(n, max(len(request.fresh) for request in few[:n]), before)
        if graph:
            passes = -(-len(few) // n)
            return few[:n] if passes * graph.tokens.numel() <= most else few
    alone = [graphs.fitting(1, len(request.fresh), before) for request in few]
    return few[:1] if sum(graph.tokens.numel() if graph else most for graph in alone) <= most else few
