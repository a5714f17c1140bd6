"""Tokens: from files, from a folder, from the hub, from the model itself."""

import hashlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from calib import data
from calib.config import TextConfig
from calib.data import DataError, Tokens, calibration_tokens, evaluation_tokens, generate
from calib.forward import ActivationError

SEQLEN = 100


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", torch.float32)


def text(path):
    return TextConfig("text", str(path))


def test_windows_are_spread_evenly_over_the_text(model, tokenizer, text_file):
    whole = np.array(tokenizer(text_file.read_text())["input_ids"])
    found = calibration_tokens(text(text_file), model, tokenizer, 6, SEQLEN, 0)
    assert found.ids.dtype == torch.int64
    assert np.array_equal(found.ids.numpy(), whole.reshape(26, SEQLEN)[[0, 5, 10, 15, 20, 25]])
    assert found.source == "text.txt"
    digest = hashlib.sha256(found.ids.numpy().astype("<i8").tobytes()).hexdigest()
    assert found.provenance() == {"source": "text.txt", "sha256": digest, "samples": 6, "seqlen": SEQLEN}


@pytest.mark.parametrize("samples", [1, 25, 26])
def test_windows_are_distinct(model, tokenizer, text_file, samples):
    found = calibration_tokens(text(text_file), model, tokenizer, samples, SEQLEN, 0)
    assert len({tuple(row) for row in found.ids.tolist()}) == samples


def test_evaluation_takes_the_first_windows(model, tokenizer, text_file):
    whole = torch.tensor(tokenizer(text_file.read_text())["input_ids"])
    for limit, windows in ((None, 26), (250, 2), (100, 1), (10**9, 26)):
        found = evaluation_tokens(text(text_file), model, tokenizer, limit, SEQLEN, 0)
        assert torch.equal(found.ids, whole[: windows * SEQLEN].view(-1, SEQLEN))


def test_a_folder_is_read_in_name_order(model, tokenizer, tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in (("b/late.txt", "later " * 40), ("a.txt", "first " * 40), ("c.md", "not this")):
        (tmp_path / name).write_text(content)
    found = evaluation_tokens(text(tmp_path), model, tokenizer, None, 50, 0)
    assert tokenizer.decode(found.ids.flatten()).startswith("first " * 40 + "\nlater ")
    assert found.source == tmp_path.name


def test_tokenizers_that_add_a_bos_add_none_here(model, tokenizer, bos_tokenizer, text_file):
    assert bos_tokenizer("a")["input_ids"][0] == 256
    plain, other = (calibration_tokens(text(text_file), model, t, 3, SEQLEN, 0) for t in (tokenizer, bos_tokenizer))
    assert torch.equal(plain.ids, other.ids)
    assert plain.digest == other.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text.txt is empty: name a file with text"),
        (b" \n\t\n ", "text.txt is empty"),
        (b"caf\xe9 au lait", r"text.txt is not UTF-8 text \(invalid continuation byte at byte 3\): convert it first"),
        (b"too short", "text.txt has 9 tokens, samples=2 x seqlen=100 needs 200: give more text"),
    ],
)
def test_text_that_cannot_be_used(model, tokenizer, tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        calibration_tokens(text(path), model, tokenizer, 2, SEQLEN, 0)


def test_text_that_is_not_there(model, tokenizer, tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist: name a UTF-8 text file or a folder"):
        calibration_tokens(text(tmp_path / "nowhere"), model, tokenizer, 2, SEQLEN, 0)
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        calibration_tokens(text(tmp_path), model, tokenizer, 2, SEQLEN, 0)


def test_evaluation_needs_one_window(model, tokenizer, text_file):
    with pytest.raises(DataError, match=r"text\.txt: 2600 tokens do not fill one window of eval\.seqlen=2601"):
        evaluation_tokens(text(text_file), model, tokenizer, None, 2601, 0)
    with pytest.raises(DataError, match=r"generated text: 99 tokens do not fill one window of eval\.seqlen=100"):
        evaluation_tokens(TextConfig("generated"), model, tokenizer, 99, SEQLEN, 0)


def test_a_foreign_tokenizer_is_refused(tiny_model, tokenizer, text_file):
    small = tiny_model("llama", torch.float32, vocab_size=100, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    with pytest.raises(DataError, match=r"makes token 2.., the model knows 100: they do not belong together"):
        calibration_tokens(text(text_file), small, tokenizer, 2, SEQLEN, 0)


def test_generated_text_follows_the_seed_alone(model, monkeypatch):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = generate(model, 5, 30, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(generate(model, 5, 30, seed=1), first)
    assert not torch.equal(generate(model, 5, 30, seed=2), first)
    assert first.shape == (5, 30)
    assert (first[:, 0] == 256).all()  # BOS
    monkeypatch.setattr(data, "BATCH", 2)
    assert generate(model, 5, 30, seed=1).shape == (5, 30)


def test_generated_text_follows_the_models_distribution(model):
    """Frequencies of the second token against the model's probabilities: chi-square with 11 groups, at 1 in 10^6."""
    drawn = torch.cat([generate(model, 400, 2, seed) for seed in range(5)])[:, 1]
    with torch.no_grad():
        p = model(torch.tensor([[256]])).logits[0, -1].double().softmax(-1)
    groups = torch.arange(260) % 11
    expected = torch.zeros(11).double().index_add(0, groups, p) * drawn.numel()
    found = torch.bincount(groups[drawn], minlength=11)
    assert ((found - expected).square() / expected).sum() < 46.9


def test_generated_text_ignores_the_checkpoints_sampling_settings(model):
    plain = generate(model, 2, 40, seed=0)
    model.generation_config.update(repetition_penalty=100.0, temperature=0.1, top_k=1, min_p=0.9, do_sample=False)
    assert torch.equal(generate(model, 2, 40, seed=0), plain)


@pytest.mark.parametrize(("bos", "eos", "first"), [(7, 3, 7), (None, 3, 3), (None, [5, 6], 5), (None, None, 0)])
def test_documents_start_with_what_the_model_has_for_it(model, bos, eos, first):
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = bos, eos
    assert generate(model, 1, 3, seed=0)[0, 0] == first


def test_generating_counts_its_steps(model, monkeypatch):
    monkeypatch.setattr(data, "BATCH", 2)
    steps = []
    generate(model, 5, 10, seed=0, report=lambda: steps.append(1))
    assert len(steps) == 3 * 9


def test_a_broken_model_cannot_generate(model):
    model.lm_head.weight[5, 5] = torch.nan
    with pytest.raises(ActivationError, match="the model's logits hold NaN or infinity: check the weights"):
        generate(model, 1, 5, seed=0)


def test_evaluation_is_not_on_what_was_calibrated_on(model, tokenizer):
    generated = TextConfig("generated")
    one = calibration_tokens(generated, model, tokenizer, 2, 40, 3)
    other = evaluation_tokens(generated, model, tokenizer, 80, 40, 3)
    assert one.ids.shape == other.ids.shape == (2, 40)
    assert not torch.equal(one.ids, other.ids)
    assert (one.source, other.source) == ("generated by the model, seed 3", "generated by the model, seed 1000006")


def test_digest_is_of_the_ids():
    ids = torch.tensor([[1, 2], [3, 4]])
    assert Tokens(ids, "a").digest == Tokens(ids.clone(), "b").digest != Tokens(ids.flip(0), "a").digest


def test_hub_text_needs_datasets(model, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"c4 needs the package `datasets`: pip install 'signpost-kv\[datasets\]'"):
        calibration_tokens(TextConfig("c4"), model, tokenizer, 1, 10, 0)


@pytest.mark.parametrize(
    ("name", "purpose", "asked", "joined"),
    [
        ("wikitext2", "calibration", ("Salesforce/wikitext", "train", {"name": "wikitext-2-raw-v1"}), "ab"),
        ("wikitext2", "evaluation", ("Salesforce/wikitext", "test", {"name": "wikitext-2-raw-v1"}), "ab"),
        ("c4", "calibration", ("allenai/c4", "train", {"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}}),
         "a\n\nb"),
    ],
)  # fmt: skip
def test_hub_text(model, tokenizer, monkeypatch, name, purpose, asked, joined):
    class Rows(list):
        def __getitem__(self, rows):
            return {"text": list(self)[rows]}

    def load_dataset(path, split, **files):
        assert (path, split, files) == asked
        return Rows("ab")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    take = calibration_tokens if purpose == "calibration" else evaluation_tokens
    ids = take(TextConfig(name), model, tokenizer, 1 if purpose == "calibration" else None, len(joined), 0).ids
    assert tokenizer.decode(ids[0]) == joined


def test_hub_text_without_a_network(model, tokenizer, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise RuntimeError("no route to host\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        DataError, match=r"cannot fetch allenai/c4: no route to host To use a text of your own, set data=text"
    ):
        evaluation_tokens(TextConfig("c4"), model, tokenizer, None, 10, 0)
