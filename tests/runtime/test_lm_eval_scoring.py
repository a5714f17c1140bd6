"""Log-likelihoods over a compressed cache are those of a loop that feeds one token at a time; lm_eval is not needed.

Models compute in float64: batches sum in another order than single sequences do, and in float32 that rounding moves a
number over the edge between two codes now and then, which is then no rounding any more. Page kernels attend in float32.
A logit is a sum of 64 products, through two layers of such sums: 2^-18 of what is compared is 64 roundings of float32.
"""

import pytest
import torch

from runtime.hf import SignpostCache
from runtime.lm_eval.scoring import Request, score
from tests.formats import exact_window, kivi, kvquant
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

FORMATS = {"kvquant-3": kvquant(3, t=32), "kivi-2": kivi(2, t=32, recent=5), "exact": exact_window(400)}
MODELS = ["cohere-interleaved", "mistral-sliding"]


def tolerance(likelihood):
    return 2**-18 * (10 + abs(likelihood))


def double(name):
    return tiny(CONFIGS[name], dtype=torch.float64)


def text(n, seed):
    return tuple(torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


# Contexts shorter and longer than a page, one of one token; answers short and long; one context with three answers.
REQUESTS = [
    Request(text(70, 0), text(1, 1)),
    Request(text(45, 2), text(25, 3)),
    Request(text(45, 2), text(4, 4)),
    Request(text(45, 2), text(1, 5)),
    Request(text(1, 6), text(40, 7)),
    Request(text(3, 8), text(2, 9)),
]


@torch.no_grad()
def one_by_one(model, bundle, request, tail):
    """One sequence without padding: all but `tail` tokens of the context as a prompt, then token by token."""
    cache, log_probabilities = SignpostCache(model, bundle), []
    tokens = torch.tensor([request.context + request.continuation])
    first = max(0, len(request.context) - tail)
    if first:
        log_probabilities += list(model(tokens[:, :first], past_key_values=cache, use_cache=True).logits[0])
    for i in range(first, tokens.shape[1] - 1):
        log_probabilities += list(model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0])
    of_answer = torch.stack(log_probabilities).double().log_softmax(-1)[len(request.context) - 1 :]
    answer = torch.tensor(request.continuation)
    likelihood = of_answer.gather(1, answer[:, None]).sum().item()
    return likelihood, bool((of_answer.argmax(1) == answer).all())


@torch.no_grad()
def plain(model, request):
    tokens = torch.tensor([request.context + request.continuation])
    logs = model(tokens[:, :-1]).logits[0].double().log_softmax(-1)[len(request.context) - 1 :]
    return logs.gather(1, torch.tensor(request.continuation)[:, None]).sum().item()


def check(found, expected):
    assert len(found) == len(expected)
    for (likelihood, greedy), (likelihood_, greedy_) in zip(found, expected, strict=True):
        assert abs(likelihood - likelihood_) <= tolerance(likelihood_)
        assert greedy is greedy_


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return double(request.param)


@pytest.mark.parametrize("tail", [0, 1, 5])
@pytest.mark.parametrize("name", ["kvquant-3", "kivi-2"])
def test_token_by_token(model, name, tail):
    bundle = bundle_for(model, FORMATS[name])
    expected = [one_by_one(model, bundle, request, tail) for request in REQUESTS]
    check(score(model, bundle, REQUESTS, tail, chunk=1), expected)
    differs = [abs(plain(model, r) - e[0]) > 100 * tolerance(e[0]) for r, e in zip(REQUESTS, expected, strict=True)]
    assert differs[1]  # answers behind packed contexts are not read from full precision
    assert differs[2]
    assert not differs[5]  # nothing fills a page


@pytest.mark.parametrize("chunk", [7, 32])
@pytest.mark.parametrize("name", ["kvquant-3", "kivi-2"])
def test_batches_are_their_requests_one_at_a_time(model, name, chunk):
    bundle = bundle_for(model, FORMATS[name])
    alone = [score(model, bundle, [request], chunk=chunk)[0] for request in REQUESTS]
    check(score(model, bundle, REQUESTS, chunk=chunk), alone)
    check(score(model, bundle, REQUESTS[::-1], chunk=chunk), alone[::-1])


@pytest.mark.parametrize("tail, chunk", [(0, 32), (1, 1), (1, 7), (200, 32)])
def test_nothing_packed_is_the_plain_model(model, tail, chunk):
    bundle = bundle_for(model, FORMATS["exact"])
    for request, (likelihood, _) in zip(REQUESTS, score(model, bundle, REQUESTS, tail, chunk), strict=True):
        expected = plain(model, request)
        assert abs(likelihood - expected) <= tolerance(expected)


def test_without_a_tail_one_token_tells_nothing_of_the_cache():
    model = double("llama")
    bundle, request = bundle_for(model, FORMATS["kivi-2"]), REQUESTS[0]
    expected = plain(model, request)
    assert abs(score(model, bundle, [request], tail=0)[0][0] - expected) <= tolerance(expected)
    assert abs(score(model, bundle, [request], tail=1)[0][0] - expected) > 100 * tolerance(expected)


def test_passes_see_earlier_ones_packed():
    """The same continuation in passes of 32: what a pass has not finished is exact in it, unlike token by token."""
    model = double("llama")
    bundle, request = bundle_for(model, FORMATS["kivi-2"]), Request(text(1, 6), text(40, 7))
    cache, logits = SignpostCache(model, bundle), []
    tokens = torch.tensor([request.context + request.continuation])[:, :-1]
    with torch.no_grad():
        for part in tokens.split(32, 1):
            logits.append(model(part, past_key_values=cache, use_cache=True).logits[0].double())
    expected = torch.cat(logits).log_softmax(-1).gather(1, torch.tensor(request.continuation)[:, None]).sum().item()
    likelihood = score(model, bundle, [request], chunk=32)[0][0]
    assert abs(likelihood - expected) <= tolerance(expected)
    assert abs(likelihood - score(model, bundle, [request], chunk=1)[0][0]) > 100 * tolerance(expected)


@torch.no_grad()
def test_greedy_continuations_are_told():
    model = double("llama")
    bundle, context = bundle_for(model, FORMATS["kivi-2"]), text(45, 2)
    ids = model.generate(
        torch.tensor([context]), past_key_values=SignpostCache(model, bundle), max_new_tokens=6, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    written = tuple(ids[0, 45:].tolist())
    wrong = (*written[:-1], (written[-1] + 1) % 64)
    both = [Request(context, written), Request(context, wrong)]
    assert [greedy for _, greedy in score(model, bundle, both, tail=0, chunk=1)] == [True, False]


def test_dtype_of_probabilities():
    """That of one token is then a number of float16, of whose 11 bits rounding on the way leaves 7 at least."""
    model = double("llama")
    bundle, request = bundle_for(model, FORMATS["kivi-2"]), REQUESTS[0]
    exact, half = (score(model, bundle, [request], softmax_dtype=dtype)[0][0] for dtype in (None, torch.float16))
    assert half == torch.tensor(half).half().item() != exact
    assert abs(half - exact) <= 2**-7 * abs(exact)


@pytest.mark.parametrize("context, continuation", [((), (1,)), ((1,), ())])
def test_requests_that_ask_nothing(context, continuation):
    with pytest.raises(ValueError, match="both need one at least"):
        Request(context, continuation)
