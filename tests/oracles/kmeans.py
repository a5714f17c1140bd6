"""Oracles for weighted one-dimensional k-means, in plain numpy float64: slow, simple, and without a histogram."""

import itertools

import numpy as np
from numpy.typing import NDArray


def cost_over_all_assignments(numbers: NDArray[np.float64], weights: NDArray[np.float64], k: int) -> float:
    """The least cost over all k^n ways to put n numbers `[n]` in k clusters, intervals or not. For n of 7 or so."""
    labels = np.array(list(itertools.product(range(k), repeat=numbers.size)))  # [k^n, n]
    cost = np.zeros(len(labels))
    for cluster in range(k):
        member_weights = np.where(labels == cluster, weights, 0.0)
        total = member_weights.sum(axis=1, keepdims=True)
        mean = (member_weights * numbers).sum(axis=1, keepdims=True) / np.where(total > 0, total, 1.0)
        cost += (member_weights * (numbers - mean) ** 2).sum(axis=1)
    return float(cost.min())


def interval_costs(numbers: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cost of every interval of ascending numbers `[n]`, of positive weights, as one cluster: `[i, j]` covers i to j.

    Entries with j < i are infinite. Column by column, by West's update of mean and squared error (1979).
    """
    n = numbers.size
    costs = np.full((n, n), np.inf)
    weight, mean, error = np.zeros(n), np.zeros(n), np.zeros(n)  # of the interval from each start to the current end
    for end in range(n):
        started = slice(0, end + 1)
        delta = numbers[end] - mean[started]
        error[started] += weights[end] * (weight[started] / (weight[started] + weights[end])) * delta**2
        weight[started] += weights[end]
        mean[started] += delta * (weights[end] / weight[started])
        costs[started, end] = error[started]
    return costs


def optimal_cost(numbers: NDArray[np.float64], weights: NDArray[np.float64], k: int) -> float:
    """The least cost of at most k clusters of `[n]` numbers in any order, by the textbook O(k n^2) dynamic program."""
    order = np.argsort(numbers)
    order = order[weights[order] > 0]
    costs = interval_costs(numbers[order].astype(np.float64), weights[order].astype(np.float64))
    best = costs[0]  # best[j]: the first j + 1 numbers
    for _ in range(k - 1):
        split = (best[:-1, None] + costs[1:, :]).min(axis=0)  # the last cluster starts at 1, 2, ...
        best = np.minimum(best, split)
    return float(best[-1])
