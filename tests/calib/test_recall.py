"""Texts in which a model must find a number again, and how finding is counted over packed prompts."""

import random
import re

import pytest
import torch

from artifacts import Dense, Format, LayerFormat, LowRank, Window
from artifacts.errors import SignpostError
from calib import recall
from calib.evaluate import SimulatedCache
from calib.recall import Prompts, Trial, as_cached, lookup, passkey, prompts, score, trials
from runtime import pages, side
from runtime.hf import SignpostCache, fingerprint
from runtime.hf_model import rotary
from tests.formats import exact_window, kivi, kvquant, random_bundle

H_Q, H, D = 4, 2, 32
FILLER = "A quiet road ran along the river, past fields and low walls. " * 200


def factors(recent):
    """Uniform codes and factors, whose segments depend on how many pages are packed at once."""
    dense, window = Dense(2, "token", 32), Window(1, recent)
    return LayerFormat(
        Format(32, dense, window=window, lowrank=LowRank(4, 2)), Format(32, dense, window=window, lowrank=LowRank(2, 1))
    )


FORMATS = {
    "kvquant": kvquant(3),
    "kvquant, 4 sinks, 5 recent": kvquant(2, sinks=4, recent=5),
    "kivi": kivi(2, recent=64),
    "factors": factors(0),
    "factors, 40 recent": factors(40),
    "exact": exact_window(400),
}


def texts_of(*shapes, seed=0):
    """Random trials of the given lengths of prompt and answer."""
    draw = torch.Generator().manual_seed(seed)
    return [Trial(*(torch.randint(0, 260, (m,), generator=draw) for m in shape)) for shape in shapes]


def text_of(tokenizer, trial):
    return tokenizer.decode(trial.prompt), tokenizer.decode(trial.answer)


# --- texts


@pytest.mark.parametrize("task", ["passkey", "lookup"])
@pytest.mark.parametrize("n", [250, 1000])
def test_texts_are_as_long_as_asked_and_the_same_for_the_same_seed(tokenizer, task, n):
    texts = trials(tokenizer, FILLER, task, n, 20)
    assert {text.prompt.numel() + text.answer.numel() for text in texts} == {n}
    again, other = trials(tokenizer, FILLER, task, n, 20), trials(tokenizer, FILLER, task, n, 20, seed=1)
    assert [text_of(tokenizer, x) for x in texts] == [text_of(tokenizer, x) for x in again]
    assert [text_of(tokenizer, x) for x in texts] != [text_of(tokenizer, x) for x in other]


def test_a_pass_key_stands_twice_in_its_text_and_is_asked_for_at_the_end(tokenizer):
    places = []
    for seed in range(30):
        prompt, answer = text_of(tokenizer, passkey(tokenizer, FILLER, 600, random.Random(seed)))
        key = re.fullmatch(r" ([1-9]\d{4})", answer)[1]
        place = prompt.index(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
        places.append(place / len(prompt))
        assert prompt.endswith("\nWhat is the pass key? The pass key is")
        assert prompt.count(key) == 2
    assert min(places) < 0.2
    assert max(places) > 0.6


@pytest.mark.parametrize("records", [1, 4, 12])
def test_the_record_asked_for_holds_the_answer(tokenizer, records):
    for seed in range(20):
        prompt, answer = text_of(tokenizer, lookup(tokenizer, FILLER, 600, random.Random(seed), records))
        table = prompt[1:].split("\n")[0]
        assert prompt[0] == "\n"
        assert re.fullmatch(r"record \d{3} holds \d{3,5}\.( record \d{3} holds \d{3,5}\.)*", table)
        held = dict(re.findall(r"record (\d+) holds (\d+)\.", table))
        assert len(held) == records
        assert answer == " " + held[re.search(r"\nQuestion: record (\d+)\? Answer:$", prompt)[1]]


@pytest.mark.parametrize("task", ["passkey", "lookup"])
def test_a_text_too_short_for_its_task_is_refused(tokenizer, task):
    with pytest.raises(SignpostError, match=r"a text of 100 tokens has no room for the task, which takes \d+"):
        trials(tokenizer, FILLER, task, 100, 1)


def test_unknown_task(tokenizer):
    with pytest.raises(SignpostError, match="task 'needle': known are passkey, lookup"):
        trials(tokenizer, FILLER, "needle", 100, 1)


# --- scores


@pytest.fixture
def bundle_for():
    """Random bundle of a format for a model."""

    def make(model, formats):
        return random_bundle([formats] * 2, H_Q, H, D, model=fingerprint(model), inv_freq=rotary(model)[1].numpy())

    return make


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [20, 130, 300])
def test_packed_prompts_answer_as_the_real_cache_does(tiny_model, bundle_for, monkeypatch, name, n):
    """Both encode the same numbers; the cache's page kernels then compute in float32, this in float64."""
    for module in (recall, pages, side):
        monkeypatch.setattr(module, "SEGMENT_PAGES", 3)
    model = tiny_model("llama")
    bundle = bundle_for(model, FORMATS[name])
    texts = texts_of((n, 5), (n, 5), (n, 5))
    (group,) = prompts(model, texts)
    with torch.no_grad():
        together = model(
            group.tail, past_key_values=recall._Answering(model, SimulatedCache(model, bundle), group), use_cache=True
        ).logits
        for i, text in enumerate(texts):
            real = SignpostCache(model, bundle)
            model(text.prompt[None, :-1], past_key_values=real, use_cache=True)
            tail = torch.cat([text.prompt[-1:], text.answer[:-1]])[None]
            expected = model(tail, past_key_values=real, use_cache=True).logits[0]
            exact = model(torch.cat([text.prompt[:-1], tail[0]])[None]).logits[0, -5:]
            assert (together[i] - expected).abs().max() <= 1e-4
            quantized = (together[i] - exact).abs().max()
            assert quantized <= 1e-9 if name == "exact" or n == 20 else quantized > 0.01


def test_full_precision_is_the_plain_model(tiny_model):
    model = tiny_model("llama")
    texts = texts_of((90, 3), (70, 3), (90, 4), (90, 3))
    with torch.no_grad():
        best = [
            model(torch.cat([text.prompt, text.answer[:-1]])[None]).logits[0, -text.answer.numel() :].argmax(-1)
            for text in texts
        ]
    assert score(model, prompts(model, texts), None) == (0, 0)
    # The first choice depends on the answer so far: it is taken over digit by digit, greedily.
    greedy = []
    for text in texts:
        answer = text.answer.clone()
        for i in range(answer.numel()):
            with torch.no_grad():
                answer[i] = model(torch.cat([text.prompt, answer[:i]])[None]).logits[0, -1].argmax()
        greedy.append(Trial(text.prompt, answer))
    assert score(model, prompts(model, greedy), None) == (1, 1)
    half = [
        Trial(text.prompt, torch.cat([first[:1], text.answer[1:]])) for text, first in zip(texts, best, strict=True)
    ]
    assert score(model, prompts(model, [*half[:2], *greedy[2:]]), None) == (0.5, pytest.approx((1 + 1 + 4 + 3) / 13))


def test_texts_of_equal_length_stand_together(tiny_model):
    model, texts = tiny_model("llama"), texts_of((50, 3), (40, 3), (50, 4), (50, 3))
    groups = prompts(model, texts)
    assert [tuple(group.answer.shape) for group in groups] == [(1, 3), (2, 3), (1, 4)]
    assert all(isinstance(group, Prompts) and len(group.layers) == 2 for group in groups)
    assert [group.layers[0][0].shape for group in groups] == [(1, H, 39, D), (2, H, 49, D), (1, H, 49, D)]
    assert torch.equal(
        groups[1].tail, torch.stack([torch.cat([texts[i].prompt[-1:], texts[i].answer[:-1]]) for i in (0, 3)])
    )


@pytest.mark.parametrize("n", [1, 32, 33, 40, 100])
def test_only_whole_pages_behind_sinks_are_packed(tiny_model, bundle_for, n):
    model, formats = tiny_model("llama"), factors(0)
    codecs = SimulatedCache(model, bundle_for(model, formats))
    x = torch.randn(2, H, n, D, generator=torch.Generator().manual_seed(0))
    found = as_cached(x, formats.key, codecs.codecs[0][0], None)
    stop = 1 + (n - 1) // 32 * 32
    assert torch.equal(found[:, :, :1], x[:, :, :1])
    assert torch.equal(found[:, :, stop:], x[:, :, stop:])
    assert (found[:, :, 1:stop] != x[:, :, 1:stop]).any(-1).all()
