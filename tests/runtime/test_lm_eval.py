"""The model class for lm-evaluation-harness: its methods on tiny models, its command on the embedded one.

What scoring means is tested without lm_eval, in test_lm_eval_scoring.py; tolerances are its. Nothing is fetched.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from artifacts.errors import SignpostError, UnsupportedModelError
from runtime.hf import SignpostCache, fingerprint, load_causal_lm
from runtime.lm_eval.__main__ import main
from runtime.lm_eval.scoring import Request, score
from tests.formats import exact_window, kivi, random_bundle
from tests.runtime.test_lm_eval_scoring import tolerance
from tests.runtime.tiny_models import CONFIGS, bundle_for, tiny

pytest.importorskip("lm_eval", reason="the extra `lm-eval` is not installed")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from runtime.lm_eval.model import REFUSED, SignpostLM

WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 64))]
PACKED, EXACT = kivi(2, t=32, recent=0), exact_window(400)


def tokenizer():
    """A word is a token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )


def text(n, seed):
    ids = torch.randint(4, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in ids)


def instances(kind, *arguments):
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


def ids(string):
    return tuple(tokenizer()(string)["input_ids"])


@pytest.fixture(scope="module")
def model():
    return tiny(CONFIGS["llama"], dtype=torch.float64)


def signpost(model, formats=PACKED, **arguments):
    return SignpostLM(model, bundle_for(model, formats), tokenizer=tokenizer(), device="cpu", **arguments)


PAIRS = [(text(n, 0), f" {text(m, n)}") for n, m in ((70, 3), (40, 20), (40, 1), (5, 2))]
PAIRS += [(text(70, 0), f" {text(4, 9)}"), ("", text(50, 3))]


def close(found, expected):
    return abs(found - expected) <= tolerance(expected)


def test_lm_eval_knows_the_name():
    assert get_model("signpost") is SignpostLM


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tail", [0, 1])
def test_log_likelihoods_are_those_of_the_tokens(model, batch_size, tail):
    lm = signpost(model, batch_size=batch_size, tail=tail, chunk=8)
    found = lm.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True)
    for (likelihood, greedy), (context, continuation) in zip(found, PAIRS, strict=True):
        request = Request(ids(context) or (1,), ids(continuation))
        expected = score(model, lm.bundle, [request], tail, 8)[0]
        assert close(likelihood, expected[0])
        assert greedy is expected[1]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_packed_is_what_lm_eval_finds_itself(model, batch_size):
    """Log-likelihoods, a text longer than the model's positions, and written text, with its own model `hf`."""
    ours, theirs = signpost(model, EXACT, batch_size=batch_size), HFLM(model, tokenizer=tokenizer(), batch_size=1)
    pairs = instances("loglikelihood", *PAIRS)
    for (found, greedy), (expected, greedy_) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        assert close(found, expected)
        assert greedy is greedy_
    ours._max_length = theirs._max_length = 64  # windows of 64 tokens
    texts = instances("loglikelihood_rolling", (text(150, 1),), (text(20, 2),))
    both = zip(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True)
    assert all(close(found, expected) for found, expected in both)
    ours._max_length = theirs._max_length = None
    prompts = [(text(n, n), {"until": [], "max_gen_toks": 12}) for n in (20, 45, 50)]
    written = instances("generate_until", *prompts)
    assert ours.generate_until(written) == theirs.generate_until(written)


def test_perplexity_reads_chunks_over_earlier_ones(model):
    string = text(90, 4)
    found = [
        signpost(model, chunk=chunk).loglikelihood_rolling(instances("loglikelihood_rolling", (string,)))[0]
        for chunk in (1, 32, 512)
    ]
    cache, logits = SignpostCache(model, bundle_for(model, PACKED)), []
    with torch.no_grad():
        for token in (1, *ids(string))[:-1]:
            logits.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0])
    by_token = torch.cat(logits).log_softmax(-1).gather(1, torch.tensor(ids(string))[:, None]).sum().item()
    assert close(found[0], by_token)
    whole = HFLM(model, tokenizer=tokenizer()).loglikelihood_rolling(instances("loglikelihood_rolling", (string,)))[0]
    assert close(found[2], whole)  # one pass reads nothing that is packed
    assert not close(found[1], whole)


def test_text_is_written_over_the_cache(model):
    lm = signpost(model, batch_size=3)
    prompts = [text(n, n) for n in (20, 45, 70)]
    found = lm.generate_until(instances("generate_until", *((p, {"until": [], "max_gen_toks": 12}) for p in prompts)))
    for prompt, written in zip(prompts, found, strict=True):
        sequence = model.generate(
            torch.tensor([ids(prompt)]), past_key_values=SignpostCache(model, lm.bundle), max_new_tokens=12,
            do_sample=False, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
        assert written == tokenizer().decode(sequence[0, len(ids(prompt)) :], skip_special_tokens=True)
    stopped = lm.generate_until(
        instances("generate_until", (prompts[0], {"until": [found[0].split()[3]], "max_gen_toks": 12}))
    )[0]
    assert found[0].startswith(stopped)
    assert len(stopped.split()) <= 3


def test_long_contexts_lose_their_beginning(model, caplog):
    lm = signpost(model, max_length=50)
    context, continuation = text(60, 0), text(5, 1)
    ((found, _),) = lm.loglikelihood(instances("loglikelihood", (context, f" {continuation}")))
    kept = Request(ids(context)[-46:], ids(continuation))
    assert close(found, score(model, lm.bundle, [kept])[0][0])
    assert "14 tokens too long" in caplog.text
    with pytest.raises(SignpostError, match="51 tokens to score exceed the model's 50 positions"):
        lm.loglikelihood(instances("loglikelihood", (context, f" {text(51, 2)}")))


def test_results_say_what_the_cache_was(model):
    info = signpost(model, tail=3).get_model_info()
    assert info["signpost_tail"] == 3
    assert info["signpost_chunk"] == 32
    assert info["signpost_bits"] == bundle_for(model, PACKED).geometry.bits(512)
    json.dumps({name: value for name, value in info.items() if name.startswith("signpost")})


def test_logits_do_not_come_around_the_cache(model):
    with pytest.raises(NotImplementedError, match="take --model hf"):
        signpost(model)._model_call(torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_make_no_sense(model, name):
    with pytest.raises(SignpostError, match=f"^{name}=auto: "):
        signpost(model, **{name: "auto"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": "auto:4"}, "batch_size=auto:4: .* give a number"),
        ({"batch_size": 0}, "batch_size=0: must be an integer of 1 or more; set it so, or leave it out"),
        ({"tail": -1}, "tail=-1: must be an integer of 0 or more"),
        ({"chunk": "all"}, "chunk=all: must be an integer of 1 or more"),
        ({"backend": "seq2seq"}, "llama with backend=seq2seq: only causal models"),
    ],
)
def test_values_that_make_no_sense(model, arguments, message):
    with pytest.raises(SignpostError, match=message):
        signpost(model, **arguments)


def test_devices_that_are_not_there(model):
    with pytest.raises(SignpostError, match="device=nonsense: allowed are"):
        SignpostLM(model, bundle_for(model, PACKED), tokenizer=tokenizer(), device="nonsense")


def test_bundles_that_do_not_fit(model, tmp_path):
    with pytest.raises(SignpostError, match="no bundle: add bundle=FOLDER"):
        SignpostLM(model, tokenizer=tokenizer(), device="cpu")
    with pytest.raises(SignpostError, match="no bundle at"):
        SignpostLM(model, str(tmp_path / "none"), tokenizer=tokenizer(), device="cpu")
    other = bundle_for(tiny(CONFIGS["qwen3-norm"]), PACKED)
    with pytest.raises(SignpostError, match="architecture: bundle has Qwen3ForCausalLM"):
        SignpostLM(model, other, tokenizer=tokenizer(), device="cpu")


def test_encoders_are_refused(model):
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="t5 with backend=seq2seq"):
        SignpostLM(t5, bundle_for(model, PACKED), tokenizer=tokenizer(), device="cpu")


# The command


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
PERPLEXITY = "metric_list: [{metric: word_perplexity}]"
WRITTEN = 'generation_kwargs: {until: ["."], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]'


@pytest.fixture
def folder(tmp_path):
    """Tasks of one question, and a bundle of the embedded model."""
    row = {"question": "The history of the city is", "answer": 1, "choices": ["old", "long"]}
    (tmp_path / "data.json").write_text(json.dumps(row))
    for name, kind, more in [
        ("choices", "multiple_choice", CHOICES),
        ("texts", "loglikelihood_rolling", PERPLEXITY),
        ("written", "generate_until", WRITTEN),
    ]:
        task = TASK.format(name=name, kind=kind, data=tmp_path / "data.json", more=more)
        if name == "texts":
            task = task.replace("{{question}}", "").replace("{{answer}}", "{{question}}")
        (tmp_path / f"{name}.yaml").write_text(task)
    embedded = load_causal_lm("tiny", "float32", "cpu")[0]
    of = fingerprint(embedded)
    random_bundle(
        [kivi(8, 32, recent=0)] * of.l, of.h_q, of.h_kv, of.d, model=of,
        inv_freq=embedded.model.rotary_emb.inv_freq.numpy(),
    ).save(tmp_path / "bundle")  # fmt: skip
    return tmp_path


def command(folder, *arguments):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    words = [sys.executable, "-m", "runtime.lm_eval", *arguments]
    return subprocess.run(words, env=os.environ | offline, capture_output=True, text=True)


def test_command(folder):
    found = folder / "found"
    done = command(
        folder, "--model", "signpost", "--model_args", f"pretrained=tiny,bundle={folder / 'bundle'},dtype=float32",
        "--device", "cpu", "--tasks", "choices,texts,written", "--include_path", str(folder), "--batch_size", "2",
        "--output_path", str(found),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = found.rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["results"].keys() == {"choices", "texts", "written"}
    assert results["results"]["texts"]["word_perplexity,none"] > 1
    assert results["config"]["signpost_tail"] == 1


def test_wrong_arguments_are_one_line_and_code_2(folder, monkeypatch, capsys):
    words = ["--model", "signpost", "--model_args", "pretrained=tiny", "--tasks", "choices"]
    monkeypatch.setattr(sys, "argv", ["lm-eval", *words, "--include_path", str(folder)])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no bundle: add bundle=FOLDER")
