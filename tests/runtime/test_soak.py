"""The soak with a few requests: clean as the engine is, and what it is there to find is found."""

import json
from dataclasses import replace

import pytest
import torch

import runtime.engine
import runtime.reuse
from benchmarks import soak
from benchmarks.soak import Load, Wish, could_be, row_by_row, verdict
from runtime import Sampling
from runtime.pages import PageBook
from tests.formats import kvquant
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

MODEL = tiny(CONFIGS["llama"])
BUNDLE = bundle_for(MODEL, kvquant(3, t=32))
LOAD = Load(requests=24, checked=8, sequences=8, longest_prompt=50, most_new=30, chunk=15, pool=170, cancelled=0.5)


def soaked(exact=True, load=LOAD):
    return soak.soak(MODEL, BUNDLE, load, exact, lambda task, n: None)


def test_nothing_leaks_and_no_token_is_wrong():
    found = soaked()
    assert (found["leaks"], found["wrong"]) == ({}, [])
    assert (found["checked"], found["same"], found["bound"]) == (8, 8, 0)
    assert sum(found["ended"].values()) == 24
    assert found["ended"]["cancelled"] == sum(found["cancelled"].values())
    assert set(found["cancelled"]) == {"waiting", "prompt", "decoding"}
    assert {"length", "stop"} <= set(found["ended"])
    assert 0.5 < found["mean_fill"] <= 1
    again = soaked(load=replace(LOAD, checked=0))
    for name in ("ended", "cancelled", "tokens", "steps", "mean_fill"):
        assert again[name] == found[name]


def test_whole_batches_on_the_cpu():
    """As on a GPU: the bound is measured, small beside logits of random models, and explains what differs."""
    found = soaked(exact=False)
    assert (found["leaks"], found["wrong"]) == ({}, [])
    assert found["bound"] > 0
    assert found["same"] + found["near"] == 8


CHATS = replace(LOAD, longest_prompt=90, pool=400, reuse=3, alike=0.7)


def test_with_kept_texts(monkeypatch):
    """Texts are let go at the end; who came behind none has the tokens of a fresh engine."""
    monkeypatch.setattr(runtime.reuse, "LEAST", 32)
    found = soaked(load=replace(CHATS, requests=24, checked=4))
    assert (found["leaks"], found["wrong"]) == ({}, [])
    assert found["same"] == found["checked"] == 4
    assert 0 < found["behind_others"] < 24
    assert found["reused_tokens"] >= 32 * found["behind_others"]


def test_a_forgotten_page_is_found(monkeypatch):
    release, forgotten = PageBook.release, []

    def forget(book, sequence):
        if book.tables[sequence] and len(book.free) < book.capacity - 2 and not forgotten:
            forgotten.append(book.tables[sequence].pop())
        release(book, sequence)

    monkeypatch.setattr(PageBook, "release", forget)
    found = soaked(load=replace(LOAD, checked=0))
    assert len(forgotten) == 1
    assert found["leaks"]["pages in use"] == [0, 1]
    assert found["leaks"]["users of pages"] == [0, 1]


def test_kept_requests_and_memory_are_found(monkeypatch):
    end, kept = runtime.engine.Engine._end, []

    def keep(engine, request, reason):
        end(engine, request, reason)
        if len(request.prompt) == LOAD.longest_prompt or len(kept) >= 4:
            return
        kept.extend([request, torch.zeros(7)])

    monkeypatch.setattr(runtime.engine.Engine, "_end", keep)
    leaks = soaked(load=replace(LOAD, checked=0))["leaks"]
    assert leaks["generations"][1] - leaks["generations"][0] == 2  # other tests may hold some
    assert leaks["tensor bytes"][1] - leaks["tensor bytes"][0] >= 2 * 28


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bound"])
def test_a_wrong_token_is_found(exact, monkeypatch):
    """Every seventh step of a batch chooses the likeliest token's opposite for one sequence."""
    choose, count = runtime.engine.choose, [0]

    def wrong(logits, samplings, draws):
        tokens = choose(logits, samplings, draws)
        count[0] += len(samplings) > 2
        if len(samplings) > 2 and count[0] % 7 == 0:
            tokens[0] = int(logits[0].argmin())
        return tokens

    monkeypatch.setattr(runtime.engine, "choose", wrong)
    found = soaked(exact)
    assert found["wrong"]
    assert found["same"] + found["near"] + len(found["wrong"]) == found["checked"]
    assert "alone" in found["wrong"][0]


def test_verdicts():
    logits = [torch.tensor([0.0, 1.0, 0.9])]
    wish = Wish((1,), 1, Sampling(), (), "", 1)
    assert verdict(wish, [1], [1], logits, 0) == "same"
    assert verdict(wish, [2], [1], logits, 0.06) == "near"
    assert verdict(wish, [2], [1], logits, 0.04).startswith("token 0 is 2, alone 1 whose logit is 0.1 above")
    assert verdict(wish, [2], [1], logits, 0).startswith("token 0 is 2")
    assert verdict(wish, [1], [1, 2], logits, 1) == "ended after 1 tokens, alone after 2"


def test_draws_that_changes_of_logits_explain():
    """Two tokens of nearly equal chances are reached from each other, one of no chance is not."""
    logits, sampling = torch.tensor([1.0, 1.0001, -40.0]), Sampling(1.0, seed=3)
    generator = torch.Generator().manual_seed(3)
    drawn = [soak.choose(logits[None], [sampling], [generator])[0] for _ in range(8)]
    for at, token in enumerate(drawn):
        assert could_be(sampling, logits, at, 1 - token, token, 0.01)
        assert not could_be(sampling, logits, at, 2, token, 0.01)
        assert could_be(sampling, logits, at, token, 1 - token, 1e-6)  # number `at` of the draws, no other


def test_small_changes_are_found_below_a_large_bound():
    """Changes of the bound's size give thousands of likely tokens another order, so that no try chooses this one."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, generator=generator) * 0.3
    changed = logits + 1e-4 * torch.randn(4096, generator=generator)
    for seed in range(40):
        sampling = Sampling(1.5, seed=seed)
        token, other = (
            soak.choose(x[None], [sampling], [torch.Generator().manual_seed(seed)])[0] for x in (logits, changed)
        )
        assert token == other or could_be(sampling, logits, 0, other, token, 0.3)


def test_rows_do_not_depend_on_the_batch():
    """And whole batches do, or there would be nothing to do row by row."""
    x = torch.randint(0, 64, (7, 1), generator=torch.Generator().manual_seed(0))
    whole = MODEL(x, use_cache=False).logits
    assert not torch.equal(whole, torch.cat([MODEL(row, use_cache=False).logits for row in x.split(1)]))
    with row_by_row(MODEL):
        rows = MODEL(x, use_cache=False).logits
        assert torch.equal(rows, torch.cat([MODEL(row, use_cache=False).logits for row in x.split(1)]))
    assert torch.equal(MODEL(x, use_cache=False).logits, whole)


def given(folder, monkeypatch):
    BUNDLE.save(folder / "bundle")
    monkeypatch.setattr(soak, "load_causal_lm", lambda *_: (MODEL, None))
    options = {name.replace("_", "-"): value for name, value in vars(replace(LOAD, requests=12, checked=3)).items()}
    return ["--bundle", str(folder / "bundle"), *(f"--{name}={value}" for name, value in options.items())]


def test_the_command(tmp_path, monkeypatch, capsys):
    soak.main([*given(tmp_path, monkeypatch), "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert (found["requests"], found["row_by_row"], found["wrong"]) == (12, True, [])


def test_the_command_fails(tmp_path, monkeypatch):
    command = given(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match=r"requests of 590 tokens .* holds 512; ask for shorter ones"):
        soak.main([*command, "--longest-prompt=560", "--pool=5000"])
    release = PageBook.release
    monkeypatch.setattr(PageBook, "release", lambda book, i: (book.free[:1] and book.free.pop(0), release(book, i)))
    with pytest.raises(SystemExit, match=r"leaked: \{'pages in use'"):
        soak.main([*command, "--requests=1"])
