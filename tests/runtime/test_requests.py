"""What an engine and its requests are given by mistake, and what is said about it."""

import re
import threading

import numpy as np
import pytest
import torch

from runtime import Engine, RequestError, Sampling
from runtime.hf import SignpostCache
from runtime.hf_decoder import HFDecoder
from runtime.requests import ends, known
from runtime.sampling import SamplingError
from tests.formats import kvquant
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

MODEL = tiny(CONFIGS["llama"])
BUNDLE = bundle_for(MODEL, kvquant(3, t=32))
TOKENS = [5, 6, 7]


def engine(**options):
    return Engine(HFDecoder(MODEL, BUNDLE), BUNDLE, **{"sequences": 2, "max_tokens": 100} | options)


@pytest.mark.parametrize("steps", [0, 3])
def test_another_engines_requests_are_left_alone(steps):
    """Waiting or running: both engines go on as if nobody had asked."""
    one, other = engine(), engine()
    mine, theirs = one.submit(TOKENS, 9), other.submit(TOKENS, 9)
    for _ in range(steps):
        one.step(), other.step()
    for call in (other.cancel, other.stream):
        with pytest.raises(RequestError, match=r"a prompt of 3 tokens and 9 new ones: another engine's request"):
            call(mine)
    one.run(), other.run()
    assert mine.tokens == theirs.tokens
    assert (mine.reason, theirs.reason) == ("length", "length")
    other.cancel(mine)  # it has ended
    assert list(other.stream(mine)) == mine.tokens


def test_what_is_no_request():
    serving = engine(prefixes=1)
    prefix = serving.prefix(TOKENS)
    for call in (serving.cancel, serving.stream):
        with pytest.raises(RequestError, match=r"prefix 1 of 3 tokens is no request: Engine\.drop ends a prefix"):
            call(prefix)
        with pytest.raises(RequestError, match=r"3 is no request: give what Engine\.submit returned"):
            call(3)


def test_what_is_no_prefix():
    with pytest.raises(RequestError, match=r"\[1, 2\] is no prefix: give what `Engine\.prefix` returned"):
        engine(prefixes=1).submit(TOKENS, 5, prefix=[1, 2])


@pytest.mark.parametrize("sampling", [{"temperature": 1}, 0.8])
def test_what_is_no_sampling(sampling):
    with pytest.raises(RequestError, match=re.escape(f"sampling={sampling!r}: give runtime.Sampling(temperature=")):
        engine().submit(TOKENS, 5, sampling=sampling)


@pytest.mark.parametrize(
    "prompt",
    ["The history of", b"The history of", {"input_ids": TOKENS}, None, 5, (x for x in TOKENS)],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("what", ["prompt", "prefix"])
def test_prompts_that_are_no_lists_of_tokens(prompt, what):
    call = engine(prefixes=1).prefix if what == "prefix" else lambda tokens: engine().submit(tokens, 5)
    with pytest.raises(
        RequestError, match=rf" as {what}: must be a list of tokens, as tokenizer\(text\)\.input_ids is"
    ):
        call(prompt)


@pytest.mark.parametrize("prompt", [torch.tensor([TOKENS]), np.array([TOKENS]), torch.tensor(5), np.array(5)], ids=repr)
def test_prompts_of_other_shapes(prompt):
    with pytest.raises(RequestError, match=rf"a prompt of shape {re.escape(str(list(prompt.shape)))}: must be the tok"):
        known(prompt, 64)


@pytest.mark.parametrize("prompt", [torch.tensor(TOKENS).float(), np.array([1.0]), [True, False], [1, [2]], ["a"]])
def test_tokens_that_are_no_integers(prompt):
    with pytest.raises(RequestError, match=r"of the prompt: must be an integer from 0 to 63"):
        known(prompt, 64)


@pytest.mark.parametrize(
    "prompt", [TOKENS, tuple(TOKENS), torch.tensor(TOKENS), np.array(TOKENS), list(torch.tensor(TOKENS)), range(5, 8)]
)
def test_lists_of_tokens(prompt):
    assert known(prompt, 64) == (5, 6, 7)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), ()), (2, ((2,),)), (np.int64(2), ((2,),)), (torch.tensor(2), ((2,),)), ([2, 3], ((2,), (3,))),
        ([np.int64(2)], ((2,),)), (torch.tensor([2, 3]), ((2,), (3,))), ([[2, 3], 4], ((2, 3), (4,))),
        ([torch.tensor([2, 3])], ((2, 3),)), ({2}, ((2,),)), ((x for x in (2, 3)), ((2,), (3,))),
        ([(2, 10**7)], ((2, 10**7),)), ([torch.tensor(2), 3], ((2,), (3,))),
    ],
)  # fmt: skip
def test_stops(stop, expected):
    assert ends(stop) == expected


@pytest.mark.parametrize(
    "stop",
    [
        "the",
        b"the",
        ["the"],
        np.array(2.0),
        torch.tensor(2.0),
        None,
        [None],
        -5,
        True,
        [True],
        2.0,
        [2.0],
        [[[1]]],
        [[1, "a"]],
        {2: 3},
    ],
    ids=repr,
)
def test_what_stops_nothing(stop):
    with pytest.raises(RequestError, match=r"stop.*must be a token, or tokens or sequences of tokens, not text"):
        engine().submit(TOKENS, 5, stop=stop)


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed"])
@pytest.mark.parametrize("value", ["1", None, True])
def test_sampling_by_what_is_no_number(name, value):
    with pytest.raises(SamplingError, match=rf"{name}={value!r}: must be a (whole )?number"):
        Sampling(**{name: value})


def test_seeds_are_whole_numbers():
    with pytest.raises(SamplingError, match=r"seed=1\.5: must be a whole number"):
        Sampling(seed=1.5)
    assert Sampling(temperature=np.float32(1), seed=np.int64(3)) == Sampling(temperature=1, seed=3)
    serving = engine()
    requests = [serving.submit(TOKENS, 8, Sampling(1.0, seed=seed)) for seed in (3, np.int64(3))]
    serving.run()
    assert requests[0].tokens == requests[1].tokens


def test_an_engine_steps_once_at_a_time():
    """Another thread's step is refused, and the one that runs is not disturbed."""
    serving, alone = engine(), engine()
    request, expected = serving.submit(TOKENS, 6), alone.submit(TOKENS, 6)
    forward, said = serving.decoder.forward, []

    def step():
        try:
            serving.step()
        except RuntimeError as error:
            said.append(str(error))

    def interrupted(*args, **kwargs):
        other = threading.Thread(target=step)
        other.start()
        other.join()
        return forward(*args, **kwargs)

    serving.decoder.forward = interrupted
    serving.run()
    alone.run()
    assert request.tokens == expected.tokens
    assert said
    assert all(message.startswith("a step of this engine is running: an engine is for one") for message in said)


@pytest.mark.parametrize("make", [HFDecoder, lambda model: SignpostCache(model, BUNDLE)])
@pytest.mark.parametrize("model", ["tiny", None, BUNDLE], ids=lambda x: type(x).__name__)
def test_what_is_no_model(make, model):
    with pytest.raises(
        TypeError, match=rf"a {type(model).__name__} is no model: load one with transformers, or runtime\.hf"
    ):
        make(model)


def test_models_and_bundles_that_have_changed_places():
    with pytest.raises(TypeError, match=r"\Aa LlamaForCausalLM, not a Bundle: load it with runtime\.load\(path\)\Z"):
        SignpostCache(BUNDLE, MODEL)
