"""`python -m runtime bench`: the figures are those of the caches; times are only there."""

import io

import pytest
import torch
from rich.console import Console

from artifacts.errors import SignpostError
from runtime.__main__ import main
from runtime.bench import Measured, compare, table
from runtime.dense import DenseCache
from runtime.hf_decoder import HFDecoder
from tests.formats import kvquant
from tests.runtime.test_engine import MODEL, prompt
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

BUNDLE = bundle_for(MODEL, kvquant(3, t=32))


def test_both_caches_are_measured():
    stages = []
    dense, ours = compare(HFDecoder(MODEL, BUNDLE), BUNDLE, 2, 100, 5, stages.append)
    assert dense.cache_bytes == 2 * 105 * 2 * 2 * 2 * 32 * 4  # sequences, tokens, layers, sides, heads, channels, bytes
    assert ours.cache_bytes == 2 * BUNDLE.geometry.cache_bytes(105, 4, 100)
    assert (dense.name, ours.name, dense.peak_bytes) == ("float32", "random", None)
    assert min(dense.first_s, dense.step_s, ours.first_s, ours.step_s) > 0
    assert [stage.split(": ")[1] for stage in stages] == ["prompts", "steps", "loading kernels", "prompts", "steps"]


def test_a_model_that_slides_is_held_against_a_cache_that_drops_what_nobody_sees():
    model = tiny(CONFIGS["gemma2-capped"])
    bundle = bundle_for(model, kvquant(3, t=32))
    dense, ours = compare(HFDecoder(model, bundle), bundle, 2, 100, 5, lambda stage: None)
    assert dense.cache_bytes == 2 * (105 + 20) * 2 * 2 * 32 * 4  # sequences, tokens of both layers, sides, heads, ...
    assert ours.cache_bytes == 2 * bundle.geometry.cache_bytes(105, 4, 100)


def test_ratios_are_to_the_first_cache():
    rows = [
        Measured("fp16", 4, 1000, None, 0.5, 0.02),
        Measured("nuq", 4, 250, 7000, 0.6, 0.01),
        Measured("short", 4, 1150, 7000, 0.6, 0.04),
    ]
    columns = table(rows, 10, 5).columns
    assert [str(column.header) for column in columns] == ["cache", "fp16", "nuq", "short"]
    assert [list(column.cells) for column in columns[1:]] == [
        ["1,000", "-", "0.500", "20.000", "200.0", "1.00x less", "1.00x"],
        ["250", "7,000", "0.600", "10.000", "400.0", "4.00x less", "2.00x"],
        ["1,150", "7,000", "0.600", "40.000", "100.0", "1.15x more", "0.50x"],
    ]


def test_the_table_fits_80_columns():
    large = Measured("bfloat16", 4096, 10**14, 10**14, 9e4, 9e4)
    ours = Measured("auto-2.5bits@32K[/x]", 4096, 10**13, 10**14, 9e4, 9e-9)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([large, ours], 131072, 4096, 8))
    text = console.export_text()
    assert "batch 4096, 131072 tokens in, 4096 out, each of 8 ranks" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for whole in (
        large.name,
        ours.name,
        f"{10**14:,}",
        "90000.000",
        "90000000.000",
        "10.00x less",
        "10000000000000.00x",
    ):
        assert whole in text


def test_the_dense_cache_is_the_plain_model():
    tokens = torch.tensor([prompt(30), prompt(30, 1)])
    decoder = HFDecoder(MODEL)
    cache = DenseCache(decoder, BUNDLE.model, 2, 40)
    for part in tokens.split([20, 1, 9], 1):
        logits = cache.append(part)
    assert torch.allclose(logits, MODEL(tokens).logits[:, -1], atol=1e-4)


@pytest.mark.parametrize("sizes, message", [
    ((0, 5, 5), "batch=0, prompt=5, new=5: at least 1 prompt of 1 token, and 2 new ones"),
    ((1, 0, 5), "prompt=0"),
    ((1, 5, 1), "new=1"),
    ((1, 500, 13), "prompts of 500 tokens and 13 new ones exceed the model's 512 positions: shorten one"),
])  # fmt: skip
def test_sizes_that_make_no_sense(sizes, message):
    with pytest.raises(SignpostError, match=message):
        compare(HFDecoder(MODEL, BUNDLE), BUNDLE, *sizes)


def test_the_command(tmp_path, capsys):
    from runtime.hf import load_causal_lm

    bundle = bundle_for(load_causal_lm("tiny", "float32", "cpu")[0], kvquant(4)).save(tmp_path / "b")
    options = ["bench", "--bundle", str(bundle), "--model", "tiny", "--dtype", "float32", "--device", "cpu"]
    assert main([*options, "--prompt-tokens", "70", "--new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "batch 1, 70 tokens in, 3 out" in out
    assert "float32" in out
    assert main([*options, "--new-tokens", "5000"]) == 2
    assert "exceed the model's 4096 positions" in capsys.readouterr().err
