"""Models with sliding windows, capped logits and layers in full precision on a GPU, against the CPU and float64."""

import copy

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig  # noqa: E402

from runtime import Engine, KVCache  # noqa: E402
from runtime.decoding import DeviceSteps, HostSteps  # noqa: E402
from runtime.exact import capped, causal_attention, visible  # noqa: E402
from runtime.hf_decoder import HFDecoder  # noqa: E402
from runtime.prompts import Prompt, PromptGraphs, Prompts  # noqa: E402
from tests.formats import kivi, kvquant  # noqa: E402
from tests.runtime.test_engine import prompt  # noqa: E402
from tests.runtime.tiny_models import LOCAL, SIZE, TWO_ROPES, bundle_for, tiny  # noqa: E402

WINDOW = 100
LARGE = SIZE | {"hidden_size": 256, "head_dim": 64}
MIXED = LOCAL | {"sliding_window": WINDOW, "query_pre_attn_scalar": 64}
MODELS = {
    "mistral": tiny(MistralConfig(**LARGE, sliding_window=WINDOW)),
    "gemma2": tiny(Gemma2Config(**LARGE, **MIXED, attn_logit_softcapping=3.0)),
    "gemma3": tiny(Gemma3TextConfig(**LARGE | {"head_dim": 256}, **MIXED, rope_parameters=TWO_ROPES)),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
LENGTHS = (30, 99, 400)  # of prompts
# Nothing is packed, so attention is off by its rounding to halves alone; and codes, of which a few are others'.
FORMATS = {"exact": (kivi(2, 32, recent=600), 0.02), "packed": (kvquant(3, t=32), 0.2)}
every_format = pytest.mark.parametrize(("formats", "allowed"), FORMATS.values(), ids=FORMATS)


def steps_logits(model, bundle, device: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Of steps behind three prompts, whose tokens are given."""
    decoder = HFDecoder(copy.deepcopy(model).to(device, dtype), bundle)
    kv = KVCache(bundle, 3, 600, dtype, device)
    for i, n in enumerate(LENGTHS):
        Prompt(decoder, kv, i, prompt(n, n), None).advance()
    steps = DeviceSteps(decoder, kv, [3]) if device == "cuda" else HostSteps(decoder, kv)
    found = [steps.run(dict.fromkeys(range(3), 7 + token % 50)).float().cpu() for token in range(count)]
    return torch.stack(found)


@every_model
@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_captured_steps(model, formats, allowed, dtype) -> None:
    """Over the ends of pages, and of rings. The model itself rounds, too: by what the CPU's says."""
    bundle = bundle_for(model, formats)
    gpu = steps_logits(model, bundle, "cuda", dtype, 110)
    own, cpu = (steps_logits(model, bundle, "cpu", of, 110) for of in (dtype, torch.float32))
    assert rms(gpu - cpu) <= allowed * cpu.std() + 2 * rms(own - cpu)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()


@every_model
@every_format
def test_prompts_from_graphs_and_in_chunks(model, formats, allowed) -> None:
    bundle, found = bundle_for(model, formats), []
    decoder = HFDecoder(copy.deepcopy(model).to("cuda", torch.float16), bundle)
    for way in ("whole", "graphs", "chunks"):
        kv = KVCache(bundle, 2, 600, torch.float16, "cuda")
        graphs = PromptGraphs(decoder, kv, 512, 2, torch.cuda.graph_pool_handle()) if way == "graphs" else None
        logits = []
        for n in (3, 130, 450):
            if way == "chunks":
                one = Prompt(decoder, kv, 0, prompt(n, n), 64)
                while (of_one := one.advance()) is None:
                    pass
            else:
                of_one = Prompts(decoder, kv, [0], [prompt(n, n)], graphs).advance()[0]
            step = DeviceSteps(decoder, kv, [1], capture=False).run({0: 5})[0]
            logits += [of_one.float(), step.float()]
            kv.release(0)
        found.append(torch.stack(logits))
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 0.1 * found[0].std()


@every_model
@every_format
def test_behind_prefixes_and_kept_texts(model, formats, allowed) -> None:
    """First tokens are those of the CPU; steps are the same captured or not."""
    bundle, found = bundle_for(model, formats), []
    for device, capture in (("cpu", False), ("cuda", True), ("cuda", False)):
        decoder = HFDecoder(copy.deepcopy(model).to(device), bundle)
        engine = Engine(decoder, bundle, sequences=3, max_tokens=700, prefixes=1, reuse=2, capture=capture)
        prefix = engine.prefix(prompt(200, 1))
        requests = [engine.submit(prompt(n, n), 20, prefix=prefix) for n in (3, 70, 20)]
        engine.run()
        for text in (prompt(300, 1), [*prompt(300, 1), *prompt(80, 2)]):
            requests.append(engine.submit(text, 20))
            engine.run()
        engine.drop(prefix)
        engine.reuse.clear()
        assert engine.kv.lengths == [0] * 6
        found.append([request.tokens for request in requests])
    cpu, captured, eager = found
    assert [tokens[0] for tokens in captured] == [tokens[0] for tokens in cpu]
    assert captured == eager


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("m", "n"), [(1, 900), (700, 700), (200, 900), (900, 900), (50, 60)])
@pytest.mark.parametrize("sizes", [(8, 2, 128), (4, 4, 64), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dense_attention_behind_a_window(m, n, sizes, softcap, dtype) -> None:
    (h_q, h_kv, d), drawn = sizes, torch.Generator().manual_seed(n)
    q = torch.randn(2, h_q, m, d, generator=drawn).to("cuda", dtype)
    k, v = (torch.randn(2, h_kv, n, d, generator=drawn).to("cuda", dtype) for _ in range(2))
    found = causal_attention(q, k, v, d**-0.5, WINDOW, softcap)
    keys, values = (x.double().repeat_interleave(h_q // h_kv, 1) for x in (k, v))
    scores = capped(q.double() @ keys.mT * d**-0.5, softcap)
    wanted = scores.masked_fill(~visible(m, n, WINDOW, q.device), -torch.inf).softmax(-1) @ values
    # Weights and the result are rounded; as float32 sums of a hundred products.
    assert (found.double() - wanted).norm() <= max(2 * torch.finfo(dtype).eps, 1e-5) * wanted.norm()


@every_model
def test_compiled_layers_are_those_of_the_model(model) -> None:
    """Around their attention, as of models without windows (`tests.gpu.test_engine`)."""
    model, bundle, logits = copy.deepcopy(model).to("cuda", torch.float16), bundle_for(model, FORMATS["exact"][0]), []
    for compile in (False, True):
        decoder = HFDecoder(model, bundle, compile=compile)
        kv = KVCache(bundle, 2, 400, torch.float16, "cuda")
        steps = DeviceSteps(decoder, kv, [2])
        for i in range(2):
            Prompt(decoder, kv, i, prompt(150 + i, i), None).advance()
        given = [steps.run(dict.fromkeys(range(2), 7 + token)).clone() for token in range(20)]
        logits.append(torch.stack(given))
    # Of halves, which this model's weights make as many hundredths of its own logits.
    assert rms(logits[0] - logits[1]) < 0.1 * logits[0].std()
