"""What parts promise, held on a trained model's own queries, keys and values: the embedded model reading a licence."""

from pathlib import Path

import pytest
import torch

from artifacts import Dense, Format, LowRank, PageGeometry, Sketch, Sparse
from benchmarks.sketch_rows import Taken, errors
from calib.forward import hidden_states
from calib.tap import Tap
from runtime.codec import Codec
from runtime.hf import load_causal_lm
from runtime.pages import PageBook
from runtime.side import BlockTables, Side
from tests.calib.taken import taken

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
WINDOWS, TOKENS, T = 2, 512, 64
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained():
    return load_causal_lm("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def ids(trained):
    """Windows int64 [2, 512]."""
    found = trained[1](TEXT.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    return found[: WINDOWS * TOKENS].view(WINDOWS, TOKENS)


@pytest.mark.parametrize("m", [64, 128, 256])
def test_orthogonal_rows_beat_gaussian_ones(trained, ids, m):
    """Of every layer and head; the mean of four sketches each. docs/design.md has the figure of the larger models."""
    taken = Taken(trained[0])
    with torch.no_grad():
        hidden_states(trained[0], ids[:1], taken)
    for q, k in taken.pairs:
        means = [
            torch.stack([errors(q, k, Sketch(m, rows), seed) for seed in range(4)]).mean(0)
            for rows in ("orthogonal", "gaussian")
        ]
        assert (means[0] < means[1]).all()


FORMATS = {
    "key": Format(T, Dense(2, "channel", 64), Sparse(0.02, "channel", "online"), lowrank=LowRank(4, 2)),
    "value": Format(T, Dense(2, "token", 64), Sparse(0.02, "token", "online"), lowrank=LowRank(4, 2)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_factors_in_the_cache_are_within_two_percent_of_the_svd(trained, ids, name):
    """Of every layer, head and sequence of a batch: those of a prompt of six pages at rank 4, and those of the pages
    that decoding fills at rank 2. float16 rounds both factors, so their product is off by 2^-10 |left| |right| more.
    """
    prompt, backbone = 6 * T, Format(T, FORMATS[name].dense, FORMATS[name].sparse)
    samples = [taken(Tap(trained[0]), window, gradients=False) for window in ids]
    for layer in zip(*samples, strict=True):
        numbers = [a.rotated_key if name == "key" else a.value for a in layer]
        h_kv, d = numbers[0].shape[1:]
        codec = Codec(PageGeometry.of(FORMATS[name], h_kv, d, name), {})
        tables = BlockTables(FORMATS[name], 1, 1, WINDOWS, 0, PageBook(WINDOWS, 0, 0, grows=True), CPU)
        side = Side(codec, None, tables, (0, 1), WINDOWS, torch.float32)
        for sequence, x in enumerate(numbers):
            for start, stop in [(0, prompt), *((n, n + 16) for n in range(prompt, TOKENS, 16))]:
                tables.take(tables.wanted({sequence: stop}))
                side.pack(sequence, x[start:stop], start, 0)
                side.append(sequence, x[start:stop], start)
            fields = side.pool.read(side.pages_of(sequence).long())
            left, right = fields["left"].double(), fields["right"].double()[fields["segment"][:, 0].long()]
            rest = x.unflatten(0, (-1, T)) - Codec(PageGeometry.of(backbone, h_kv, d, name), {}).decode(fields)
            rest = rest.transpose(1, 2).double()  # [p, h_kv, t, d]
            assert fields["segment"][:, 0].unique(return_counts=True)[1].tolist().count(1) == 2
            for pages, rank in ((range(6), 4), (range(6, 7), 2), (range(7, 8), 2)):
                matrix = rest[list(pages)].transpose(0, 1).flatten(1, 2)
                factor = left[list(pages)].transpose(0, 1).flatten(1, 2)
                error = torch.linalg.matrix_norm(matrix - factor @ right[pages[0]].transpose(1, 2))
                least = torch.linalg.svdvals(matrix)[:, rank:].norm(dim=-1)
                rounding = 2.0**-10 * torch.linalg.matrix_norm(factor) * torch.linalg.matrix_norm(right[pages[0]])
                assert (error <= 1.02 * least + rounding).all(), (error / least).max()
                assert (least > 10 * rounding).all(), "otherwise this shows nothing"
