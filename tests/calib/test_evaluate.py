"""What evaluation reports, and that its two modes, simulation and real cache, are the same computation."""

import io
from copy import deepcopy
from math import exp

import numpy as np
import pytest
import torch
from rich.console import Console

from artifacts import Dense, Format, LayerFormat, Sparse, Window
from artifacts.fields import PageShape
from artifacts.geometry import PageGeometry
from calib import forward, progress
from calib.data import Tokens
from calib.evaluate import Comparison, SimulatedCache, cached_logits, evaluate, packed, simulated_logits
from calib.forward import ActivationError, kl_divergence
from calib.progress import bars
from runtime.cache import KVCache
from runtime.codec import Codec
from runtime.hf import fingerprint
from runtime.hf_model import rotary
from tests.formats import exact_window, kivi, kvquant, random_bundle
from tests.oracles.attention import U, attention, float32_bound

N, H_Q, H, D = 200, 4, 2, 32


def matrix(bits, sinks, recent):
    window, sparse = Window(sinks, recent), Sparse(0.01, "matrix", "bundle", 2.0)
    return LayerFormat(
        Format(64, Dense(bits, "channel", 0, "nf", "bundle"), sparse, window, "pre_rope"),
        Format(64, Dense(bits, "token"), sparse, window),
    )


def mixed(sinks, key_recent, value_recent):
    """Keys and values that are packed up to different tokens, in pages of different sizes."""
    one, other = kvquant(4, 64, sinks, key_recent), kvquant(2, 32, sinks, value_recent)
    return LayerFormat(one.key, other.value)


FORMATS = {
    "kvquant": kvquant(3),
    "kvquant, no sinks": kvquant(2, sinks=0),
    "kvquant, 4 sinks, 5 recent": kvquant(4, sinks=4, recent=5),
    "kivi": kivi(2, recent=64),
    "kivi, 1 sink, 5 recent": kivi(4, recent=5, sinks=1),
    "matrix outliers": matrix(3, 1, 0),
    "keys and values apart": mixed(1, 0, 40),
    "exact": exact_window(N),
}


@pytest.fixture
def bundle_for():
    """Random bundle of a format for a model."""

    def make(model, formats, layers=2):
        info = fingerprint(model)
        return random_bundle([formats] * layers, H_Q, H, D, model=info, inv_freq=rotary(model)[1].numpy())

    return make


def ids_of(n, seed=0, b=1):
    return torch.randint(0, 260, (b, n), generator=torch.Generator().manual_seed(seed))


# --- what is reported


def oracle(full, compressed, targets):
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (full, compressed))
    kl = np.sort((np.exp(p) * (p - q)).sum(-1))
    place = 0.999 * (len(kl) - 1)
    low = int(place)
    rows = np.arange(len(targets))
    return {
        "loss_full": -p[rows, targets].mean(),
        "loss": -q[rows, targets].mean(),
        "loss_increase": p[rows, targets].mean() - q[rows, targets].mean(),
        "perplexity_full": exp(-p[rows, targets].mean()),
        "perplexity": exp(-q[rows, targets].mean()),
        "kl_mean": kl.mean(),
        "kl_p999": kl[low] + (place - low) * (kl[low + 1] - kl[low]),
        "top1": (p.argmax(-1) == q.argmax(-1)).mean(),
        "tokens": len(targets),
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
@pytest.mark.parametrize("cuts", [[3000], [1, 1500, 1499]])
def test_comparison_with_plain_formulas(dtype, tolerance, cuts):
    rng = np.random.default_rng(0)
    full = torch.from_numpy(3 * rng.normal(size=(3000, 40))).to(dtype)
    compressed = full + torch.from_numpy(rng.normal(size=(3000, 1)) * rng.normal(size=(3000, 40))).to(dtype)
    targets = torch.from_numpy(rng.integers(0, 40, 3000))
    found = Comparison()
    for rows in torch.arange(3000).split(cuts):
        found.add(full[rows], compressed[rows], targets[rows])
    expected = oracle(full.double().numpy(), compressed.double().numpy(), targets.numpy())
    assert found.result() == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert expected["kl_mean"] > 0.1
    assert 0.5 < expected["top1"] < 1


@pytest.mark.parametrize("apart", [1e-6, 1e-5, 1e-3, 0.1, 3.0, 100.0])
def test_divergence_in_float32(apart):
    """Never below zero. Differences of neighbours are exact, so terms are off by a few 2^-24 of themselves; that sums
    of probabilities are off from 1, by less than 2^-20, counts squared, half as much.
    """
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(200, 500, generator=generator)
    p, q = (torch.log_softmax(y, -1) for y in (x, x + apart * torch.randn(x.shape, generator=generator)))
    exact = oracle(*(y.double().numpy() for y in (p, q)), np.zeros(200, int))["kl_mean"]
    found = kl_divergence(p, q)
    assert (found >= 0).all()
    assert found.double().mean().item() == pytest.approx(exact, rel=1e-5, abs=1e-12)


def test_equal_predictions_differ_by_nothing():
    x, found = torch.randn(50, 9, dtype=torch.float64), Comparison()
    found.add(x, x.clone(), torch.zeros(50, dtype=torch.long))
    result = found.result()
    assert (result["loss_increase"], result["kl_mean"], result["kl_p999"], result["top1"]) == (0, 0, 0, 1)


def test_a_loss_beyond_all_bounds_is_still_a_number():
    found = Comparison()
    found.add(torch.zeros(1, 2), torch.tensor([[0.0, 5000.0]]), torch.tensor([0]))
    assert found.result()["loss"] == 5000
    assert np.isfinite(found.result()["perplexity"])


@pytest.mark.parametrize("which", [0, 1])
def test_logits_that_are_not_finite_are_refused(which):
    logits = [torch.zeros(2, 3), torch.zeros(2, 3)]
    logits[which][1, 1] = torch.nan
    with pytest.raises(ActivationError, match=["in full precision", "with a compressed cache"][which]):
        Comparison().add(*logits, torch.zeros(2, dtype=torch.long))


def test_fields_of_an_evaluation(tiny_model, bundle_for):
    model = tiny_model("llama", torch.float32)
    bundle, text = bundle_for(model, FORMATS["kvquant"]), Tokens(ids_of(N, b=2), "some text")
    result = evaluate(model, bundle, text, cache_tokens=70)
    assert result.keys() == {
        "loss_full", "loss", "loss_increase", "perplexity_full", "perplexity", "kl_mean", "kl_p999", "top1", "tokens",
        "bits", "compression", "context", "mode", "text", "cache_check",
    }  # fmt: skip
    with torch.no_grad():
        full = model(text.ids).logits[:, :-1].flatten(0, 1)
        compressed = torch.cat([simulated_logits(model, bundle, row[None])[:, :-1] for row in text.ids]).flatten(0, 1)
    direct = oracle(full.double().numpy(), compressed.double().numpy(), text.ids[:, 1:].flatten().numpy())
    assert {name: result[name] for name in direct} == pytest.approx(direct, rel=1e-4, abs=1e-6)
    assert result["bits"] == bundle.geometry.bits(N)
    assert (result["compression"], result["context"]) == (16 / result["bits"], N)
    assert (result["mode"], result["text"]) == ("simulated", text.provenance())
    check = result["cache_check"]
    assert check["tokens"] == 70
    assert check["loss_simulated"] == pytest.approx(check["loss_cache"], abs=1e-4)
    assert check["largest_logit_difference"] < 1e-2
    assert "cache_check" not in evaluate(model, bundle, text)
    assert evaluate(model, bundle, text, window=False)["mode"] == "simulated without window"
    assert bundle.with_evaluation(result).evaluation == result


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_the_real_cache(tiny_model, bundle_for, name):
    model = tiny_model("llama", torch.bfloat16)
    bundle = bundle_for(model, FORMATS[name])
    with torch.no_grad():
        _, cache = cached_logits(model, bundle, ids_of(90))
    assert cache.nbytes == bundle.geometry.cache_bytes(90)
    assert cache.bits == pytest.approx(bundle.geometry.bits(90), rel=1e-12)
    assert evaluate(model, bundle, Tokens(ids_of(90), "text"))["bits"] == bundle.geometry.bits(90)


def test_progress_counts_windows_and_tokens(tiny_model, bundle_for):
    model = tiny_model("llama", torch.float32)
    with bars(Console(quiet=True)) as progress:
        evaluate(model, bundle_for(model, FORMATS["kivi"]), Tokens(ids_of(80, b=3), "text"), 10, progress)
    assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
        ("evaluating", 3, 3),
        ("checking the real cache", 10, 10),
    ]


@pytest.mark.parametrize(("every", "between"), [(60.0, []), (0.0, ["a [b]: 2 of 3, 0 s"])])
def test_progress_in_a_file_is_lines(monkeypatch, every, between):
    """Where a stage begins and ends, and where it lasts."""
    monkeypatch.setattr(progress, "EVERY", every)
    file = io.StringIO()
    with bars(Console(file=file)) as shown:
        step = progress.track(shown, "a [b]", 3, done=1)
        for _ in range(2):
            step()
    assert file.getvalue().splitlines() == ["a [b]: 1 of 3", *between, "a [b]: 3 of 3, 0 s"]


def test_a_broken_model_is_named_before_its_cache_is_blamed(tiny_model, bundle_for):
    model = tiny_model("llama", torch.float32)
    bundle = bundle_for(model, FORMATS["kvquant"])
    model.model.layers[0].mlp.up_proj.weight[1, 1] = torch.nan
    with pytest.raises(ActivationError, match="the model's hidden states hold NaN or infinity"):
        evaluate(model, bundle, Tokens(ids_of(N), "text"))


def test_padded_windows_are_refused(tiny_model, bundle_for):
    model = tiny_model("llama", torch.float32)
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :9] = 0
    cache = SimulatedCache(model, bundle_for(model, FORMATS["kvquant"]))
    with torch.no_grad(), pytest.raises(ValueError, match="windows to evaluate on have no padding"):
        model(ids_of(80, b=2), attention_mask=mask, past_key_values=cache, use_cache=True)


# --- the two modes


def layer_inputs(model, seed=0):
    """Queries, keys (after RoPE) and values of one layer, float64 [1, heads, n, d], exact in float32."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, N, D, generator=draw).double() for h in (H_Q, H, H))
    return q, k * torch.logspace(-0.5, 0.5, D), v


def effective(x, x_hat, fmt, query):
    """What `query` sees of tokens 0 ... query: pages that were full before it came, the rest as it was; numpy."""
    out = x[0, :, : query + 1].clone()
    window = fmt.window
    full = max(0, query - window.sinks - window.recent) // fmt.t
    paged = slice(window.sinks, window.sinks + full * fmt.t)
    out[:, paged] = x_hat[0, :, paged]
    return out.numpy()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "yarn"])
def test_one_layer_in_both_modes_against_float64(tiny_model, bundle_for, name, family):
    """Both encode the same numbers, so their codes are the same; both are held against attention over what those say.

    The simulation computes in float64 here, from decoded numbers that are float32: it only has float64's rounding. The
    page kernels compute in float32; `float32_bound` says how far off that may be, given the errors of their keys and
    values. A decoded number zero + scale * value + correction takes three roundings, and each term is at most three
    times the largest number there is (an outlier's correction spans the range): 9 U. Rotation takes 6 U more of a
    pair's norm (see test_tap); converting an exact number, 1. In all less than 12 U of three times the largest pair's
    norm.
    """
    model, formats = tiny_model(family), FORMATS[name]
    bundle = bundle_for(model, formats)
    q, k, v = layer_inputs(model)
    scaling, positions = D**-0.5, torch.arange(N)[None]
    simulation, real = SimulatedCache(model, bundle), KVCache(bundle, 1, N, torch.float64)
    with torch.no_grad():
        simulated = simulation.attend(0, q, k, v, positions, None, scaling)[0].transpose(0, 1)
        steps = [
            real.layers[0].attend(*(x[:, :, [i]] for x in (q, k, v)), positions[:, [i]], None, scaling)[0]
            for i in range(N)
        ]
    rotation = simulation.rotation if formats.key.domain == "pre_rope" else None
    k_hat = packed(k, formats.key, simulation.codecs[0][0], rotation)
    v_hat = packed(v, formats.value, simulation.codecs[0][1], None)
    off = [
        12 * U * 2**0.5 * 3 * max(x.abs().max().item(), x_hat.abs().max().item())
        for x, x_hat in ((k, k_hat), (v, v_hat))
    ]
    for i in range(N):
        keys, values = effective(k, k_hat, formats.key, i), effective(v, v_hat, formats.value, i)
        query = q[0, :, [i]].numpy()
        expected = attention(query, keys, values, scaling)[:, 0]
        bound = float32_bound(query, keys, values, scaling, np.full(keys.shape, off[0]), np.full(values.shape, off[1]))[
            :, 0
        ]
        assert np.abs(simulated[:, i].numpy() - expected).max() <= 1e-12, i
        assert (np.abs(steps[i][0].numpy() - expected) <= bound).all(), (
            i,
            np.abs(steps[i][0].numpy() - expected).max(),
        )


def stored_codes(cache, layer, side):
    """Codes of all pages of the first sequence."""
    pages = getattr(cache.kv.layers[layer], side)
    return pages.pool.read(pages.pages_of(0).long())["codes"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_in_both_modes(tiny_model, bundle_for, monkeypatch, name):
    """Layer 0 sees the same numbers in both modes and must store the same codes. What the float32 arithmetic of its
    page kernels adds reaches layer 1 with a relative 1e-6, where a code may change only by standing that near to a tie.
    """
    model, ids = tiny_model("llama"), ids_of(N)
    bundle, encoded = bundle_for(model, FORMATS[name]), []
    real_encode = Codec.encode
    with torch.no_grad():
        full = model(ids).logits
        with monkeypatch.context() as patch:
            patch.setattr(Codec, "encode", lambda *given: encoded.append(real_encode(*given)) or encoded[-1])
            simulated = simulated_logits(model, bundle, ids)
        real, cache = cached_logits(model, bundle, ids)
    for i, (fields, _) in enumerate(encoded):
        layer, side = i // 2, ("key", "value")[i % 2]
        stored = stored_codes(cache, layer, side)
        different = (fields["codes"][: len(stored)] != stored).sum().item()
        assert different <= (0 if layer == 0 else 1e-3 * stored.numel()), (layer, side)
    # The modes may differ by what float32 does to the model, or, after a tie, by far less than what is measured.
    with torch.no_grad():
        rounding = (deepcopy(model).float()(ids).logits - full).abs().max().item()
    quantized = (simulated - full).abs().max().item()
    assert (simulated - real).abs().max().item() <= max(0.05 * quantized, 2 * rounding)
    assert quantized <= 1e-9 if name == "exact" else quantized > 0.01


def test_a_window_larger_than_the_text_changes_nothing(tiny_model, bundle_for):
    model = tiny_model("llama")
    result = evaluate(model, bundle_for(model, exact_window(N)), Tokens(ids_of(N), "text"))
    assert result["loss"] == pytest.approx(result["loss_full"], rel=1e-12)
    assert abs(result["kl_mean"]) <= 1e-12
    assert result["top1"] == 1


@pytest.mark.parametrize("rows", [1, 64, 199])
def test_blocks_of_queries_and_of_logits_do_not_matter(tiny_model, bundle_for, monkeypatch, rows):
    model, text = tiny_model("llama"), Tokens(ids_of(N), "text")
    bundle = bundle_for(model, FORMATS["kvquant, 4 sinks, 5 recent"])
    whole = evaluate(model, bundle, text)
    monkeypatch.setattr(forward, "ROWS", rows)
    parts = evaluate(model, bundle, text)
    assert {k: parts[k] for k in ("loss", "loss_full", "kl_p999")} == pytest.approx(
        {k: whole[k] for k in ("loss", "loss_full", "kl_p999")}, rel=1e-9
    )


# --- packing a whole window


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 68, 69, 150, 200])
def test_packed_tokens(sinks, n):
    """Whole pages behind the sinks are replaced, with `tail` everything behind them; tokens of such a format are
    independent, so a shorter text holds the same numbers."""
    fmt = Format(64, Dense(4, "token"), None, Window(sinks))
    codec = Codec(PageGeometry(fmt, PageShape(64, H, D, "key")), {})
    x = torch.randn(2, H, 200, D, generator=torch.Generator().manual_seed(0))
    part = x[:, :, :n]
    full = packed(x, fmt, codec, None, tail=True)
    assert torch.equal(full[:, :, :sinks], x[:, :, :sinks])
    assert (full[:, :, sinks:] != x[:, :, sinks:]).any(-1).all()
    assert torch.equal(packed(part, fmt, codec, None, tail=True), full[:, :, :n])
    end = sinks + max(0, n - sinks) // 64 * 64
    whole = packed(part, fmt, codec, None)
    assert torch.equal(whole[:, :, :end], full[:, :, : min(end, n)])
    assert torch.equal(whole[:, :, end:], part[:, :, end:])


def test_without_a_window_every_token_behind_the_sinks_is_packed(tiny_model, bundle_for):
    model = tiny_model("llama")
    bundle = bundle_for(model, FORMATS["kvquant"])
    q, k, v = layer_inputs(model)
    cache = SimulatedCache(model, bundle, newest=False)
    with torch.no_grad():
        found = cache.attend(0, q, k, v, torch.arange(N)[None], None, D**-0.5)[0].transpose(0, 1)
    formats = bundle.layers[0]
    k_hat = packed(k, formats.key, cache.codecs[0][0], cache.rotation, tail=True)
    v_hat = packed(v, formats.value, cache.codecs[0][1], None, tail=True)
    expected = attention(q[0].numpy(), k_hat[0].numpy(), v_hat[0].numpy(), D**-0.5)
    assert np.abs(found.numpy() - expected).max() <= 1e-12
