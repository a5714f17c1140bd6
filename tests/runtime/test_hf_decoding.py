"""Decoding through transformers: every way to generate gives the tokens of the plain model over the same numbers.

The reference is the plain model with its plain attention and transformers' own cache, in which the tokens that would
have been packed by then are replaced by what the codec makes of them. With a window that never fills nothing is
replaced: the reference is the plain model itself. Both compute in float32, so tokens agree unless the two best tie.
"""

import copy

import pytest
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from runtime.codec import Codec
from runtime.hf import SignpostCache
from runtime.hf_model import sliding_windows, text_config
from runtime.rope import Rotation
from tests.formats import exact_window, kivi, kvquant
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

FORMATS = {
    "exact": exact_window(400),
    "kvquant-3": kvquant(3, t=32),
    "kivi-2": kivi(2, t=32, recent=5),
    "kivi-8": kivi(8, t=32, recent=0, sinks=2),
}
GREEDY = {"do_sample": False, "pad_token_id": 0}


class ReferenceCache(DynamicCache):
    """Transformers' cache; keys and values of packed tokens come out as the codec decodes them."""

    def __init__(self, bundle):
        super().__init__()
        self.layer_formats = bundle.layers
        self.rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"])
        self.codecs = [
            [Codec(geometry, bundle.side_tensors(layer, geometry.shape.side)) for geometry in pair or ()]
            for layer, pair in enumerate(bundle.geometry.layers)
        ]
        self.mask = None  # padding mask of the prompt, [b, tokens]; later tokens are real
        self.known = {}  # what the codec made of the same numbers a step ago

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        past = self.get_seq_length(layer_idx)
        states = [x.clone() for x in super().update(key_states, value_states, layer_idx, *args, **kwargs)]
        b, m = key_states.shape[0], key_states.shape[2]
        mask = self.mask.repeat_interleave(b // self.mask.shape[0], 0).bool()
        real = pad(mask, (0, past + m), value=True)[:, :past]
        formats = self.layer_formats[layer_idx]
        if formats is None:
            return tuple(states)
        for x, fmt, codec in zip(states, (formats.key, formats.value), self.codecs[layer_idx], strict=True):
            for i in range(b):
                columns = real[i].nonzero()[:, 0]
                pages, sinks = fmt.window.pages(columns.numel(), fmt.t), fmt.window.sinks
                packed = columns[sinks : sinks + pages * fmt.t]
                if pages:
                    numbers = x[i][:, packed]
                    key = (id(codec), numbers.numpy().tobytes())
                    if key not in self.known:
                        self.known[key] = self._decoded(numbers, fmt, codec, sinks)
                    x[i][:, packed] = self.known[key]
        return tuple(states)

    def _decoded(self, x, fmt, codec, first):
        positions = torch.arange(first, first + x.shape[1])
        pre_rope = fmt.domain == "pre_rope"
        x = self.rotation.unrotate(x, positions) if pre_rope else x
        x = codec.encode(x.transpose(0, 1).unflatten(0, (-1, fmt.t)))[1].flatten(0, 1).transpose(0, 1)
        return self.rotation.rotate(x, positions) if pre_rope else x


def batch(*lengths, seed=0):
    """Random prompts of these lengths, padded on the left, and their mask."""
    longest = max(lengths)
    ids = torch.randint(2, 64, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def padded_batch(model, cache):
    """Prompts shorter and longer than a page."""
    ids, cache.mask = batch(3, 40, 77)
    return model.generate(ids, attention_mask=cache.mask, past_key_values=cache, max_new_tokens=30, **GREEDY)


def one_prompt(model, cache):
    ids, cache.mask = batch(70)
    return model.generate(ids, past_key_values=cache, max_new_tokens=40, **GREEDY)


def chunked_prompt(model, cache):
    """In several forward passes: a short one, one of many queries, one token, few tokens; the rest by `generate`."""
    ids, cache.mask = batch(60, 90)
    start = 0
    for m in (5, 40, 1, 6):
        rows = slice(start, start + m)
        mask = cache.mask[:, : start + m]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, rows]
        model(ids[:, rows], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        start += m
    return model.generate(ids, attention_mask=cache.mask, past_key_values=cache, max_new_tokens=20, **GREEDY)


def chat(model, cache):
    """Three turns on one cache; later turns have padding between the answer and the next question.

    Not where layers slide: transformers counts that padding as a part of the window (its flash attention does not).
    """
    lengths_of_turns = ((1, (30, 4)), (2, (1, 12)), (3, None))
    if sliding_windows(text_config(model)):
        lengths_of_turns = ((1, (30, 30)), (2, (12, 12)), (3, None))
    ids, cache.mask = batch(20, 45)
    for seed, lengths in lengths_of_turns:
        ids = model.generate(ids, attention_mask=cache.mask, past_key_values=cache, max_new_tokens=12, **GREEDY)
        if lengths:
            more, mask = batch(*lengths, seed=seed)
            cache.mask = torch.cat([pad(cache.mask, (0, 12), value=1), mask], 1)
            ids = torch.cat([ids, more], 1)
    return ids


def beams(model, cache):
    ids, cache.mask = batch(25, 50)
    many = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 40}
    return model.generate(ids, attention_mask=cache.mask, past_key_values=cache, **many, **GREEDY)


def samples(model, cache):
    """Three samples of each prompt."""
    ids, cache.mask = batch(10, 50)
    torch.manual_seed(0)
    many = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 30, "pad_token_id": 0}
    return model.generate(ids, attention_mask=cache.mask, past_key_values=cache, **many)


SCENARIOS = [padded_batch, one_prompt, chunked_prompt, chat, beams, samples]


every_model = pytest.mark.parametrize("model", CONFIGS, indirect=True)


@pytest.fixture(scope="module")
def model(request):
    return tiny(CONFIGS[request.param])


# Every model in every scenario, by one format or the other: every two of the three meet.
TAKEN = [
    pytest.param(model, scenario, ["exact", "kvquant-3"][(i + j) % 2], id=f"{model}-{scenario.__name__}")
    for i, model in enumerate(CONFIGS)
    for j, scenario in enumerate(SCENARIOS)
]


@torch.no_grad()
@pytest.mark.parametrize(("model", "scenario", "name"), TAKEN, indirect=["model"])
def test_tokens_are_the_references(model, scenario, name):
    check(model, FORMATS[name], scenario)


@torch.no_grad()
@pytest.mark.parametrize("model", ["llama-yarn", "cohere-interleaved"], indirect=True)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
@pytest.mark.parametrize("name", ["kivi-2", "kivi-8"])
def test_tokens_with_keys_packed_after_rope(model, name, scenario):
    check(model, FORMATS[name], scenario)


def check(model, formats, scenario):
    bundle = bundle_for(model, formats)
    expected = scenario(model, ReferenceCache(bundle))
    cache = SignpostCache(model, bundle)
    assert torch.equal(scenario(model, cache), expected)
    packed = cache.kv.paged[0].key.used[-1] > 0
    assert packed == (formats is not FORMATS["exact"])


@torch.no_grad()
@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("name", ["kvquant-3", "kivi-2"])
def test_a_reserve_is_enough(model, name):
    """A prompt of 70 tokens and 40 new ones: the last of them is never fed back."""
    bundle = bundle_for(model, FORMATS[name])
    cache = SignpostCache(model, bundle, max_tokens=109)
    assert torch.equal(one_prompt(model, cache), one_prompt(model, ReferenceCache(bundle)))
    assert cache.nbytes == bundle.geometry.cache_bytes(109, 4)
    assert cache.bits == bundle.geometry.bits(109, 4)


def logits(model, ids, mask, cache=None):
    """Logits of real tokens, the prompt in chunks if there is a cache."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    if cache is None:
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
    parts, start = [], 0
    for m in (50, 3, 1, ids.shape[1] - 54):
        rows = slice(start, start := start + m)
        parts.append(
            model(
                ids[:, rows], attention_mask=mask[:, :start], position_ids=positions[:, rows], past_key_values=cache,
                use_cache=True,
            ).logits
        )  # fmt: skip
    return torch.cat(parts, 1)[mask.bool()]


@torch.no_grad()
@every_model
def test_nothing_packed_is_exact(model):
    """Off from the same model in float64 by at most twice what the plain model in float32 is off, eager or fused."""
    # Where there is only eager attention, padding in float64 makes NaN: the least number minus something is -inf.
    ids, mask = batch(57 if model._supports_sdpa else 90, 90)
    exact = logits(copy.deepcopy(model).double(), ids, mask)
    plain = []
    for implementation in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        model.set_attn_implementation(implementation)
        plain.append((logits(model, ids, mask) - exact).abs().max().item())
    ours = logits(model, ids, mask, SignpostCache(model, bundle_for(model, FORMATS["exact"])))
    assert (ours - exact).abs().max().item() <= 2 * max(plain)


@torch.no_grad()
@pytest.mark.parametrize("config", ["llama", "qwen3-norm"])
def test_bfloat16(config):
    """Off from float32 by at most twice what the plain model in bfloat16 is; quantized formats run as well."""
    model = tiny(CONFIGS[config], dtype=torch.bfloat16)
    ids, mask = batch(57, 90)
    exact = logits(copy.deepcopy(model).float(), ids, mask)
    plain = (logits(model, ids, mask) - exact).square().mean().sqrt()
    ours = logits(model, ids, mask, SignpostCache(model, bundle_for(model, FORMATS["exact"])))
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).square().mean().sqrt() <= 2 * plain
    for name in ("kvquant-3", "kivi-2"):
        cache = SignpostCache(model, bundle_for(model, FORMATS[name]))
        padded_batch(model, cache)
        assert cache.kv.layers[0].key.window.dtype == torch.bfloat16


@torch.no_grad()
def test_more_bits_are_closer_to_the_plain_model():
    model = tiny(copy.deepcopy(CONFIGS["llama"]).from_dict(CONFIGS["llama"].to_dict() | {"initializer_range": 0.08}))
    ids, mask = batch(200)
    exact = logits(model, ids, mask)
    errors = [
        (logits(model, ids, mask, SignpostCache(model, bundle_for(model, kivi(bits, 32, recent=0)))) - exact)
        .square().mean().sqrt().item()
        for bits in (2, 4, 8)
    ]  # fmt: skip
    # Steps shrink by 5 from 2 to 4 bits and by 17 from 4 to 8; at 2 bits the error no longer grows with the step.
    assert errors[0] > 2 * errors[1]
    assert errors[1] > 8 * errors[2]
    assert errors[2] < 0.01 * exact.std().item()


def test_a_reserve_of_no_tokens():
    model = tiny(CONFIGS["llama"])
    with pytest.raises(ValueError, match="max_tokens=-1: must be at least 1, or None to grow"):
        SignpostCache(model, bundle_for(model, kvquant(3)), max_tokens=-1)


@pytest.mark.parametrize("most", [100.5, "64", True])
def test_a_reserve_that_is_no_number(most):
    model = tiny(CONFIGS["llama"])
    with pytest.raises(ValueError, match=rf"max_tokens={most!r}: must be at least 1, or None to grow"):
        SignpostCache(model, bundle_for(model, kvquant(3)), max_tokens=most)


def test_a_cache_that_holds_another_text():
    """What it cannot go on with is refused before anything has changed."""
    model = tiny(CONFIGS["llama"])
    cache = SignpostCache(model, bundle_for(model, kvquant(3)))
    ids, mask = torch.arange(2, 11)[None], torch.ones(1, 9, dtype=torch.int64)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"no new tokens behind the 9 that this cache holds: begin another text with a"
        ):
            model(ids[:, :0], past_key_values=cache)
        padded = torch.tensor([[0, 1, 1], [1, 1, 1]])
        with pytest.raises(ValueError, match=r"a batch of 2 sequences, but this cache holds 1: use a new cache"):
            model(
                ids[:, :3].expand(2, -1),
                attention_mask=torch.cat((mask.expand(2, -1), padded), 1),
                past_key_values=cache,
            )
    assert cache.get_seq_length() == 9


def test_padding_on_the_right():
    model = tiny(CONFIGS["llama"])
    cache = SignpostCache(model, bundle_for(model, kvquant(3)))
    ids, mask = torch.arange(2, 12).reshape(2, 5), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"Pad batches on the left \(tokenizer\.padding_side='left'\)"):
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
