"""The card in a bundle: what it says, and that foreign texts stay texts."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from artifacts import BundleError, load
from artifacts.card import MARK, TEXT_LIMIT, bundle_card, code
from tests.artifacts.samples import sample_bundle

BUNDLE = sample_bundle()
HOSTILE = [
    "# Heading\n\n[click](http://evil.example)",
    "<script>alert(1)</script>",
    "`` `tick` ```",
    "`<img src=x onerror=alert(1)>`",
    "| cell | cell |",
    "---\nlicense: mit\n---",
    "![x](http://evil.example/x.png)",
    "www.evil.example https://evil.example",
    "\u202egnp.exe\u2066",
    "\x1b[31mred\x00\r\n",
    "&lt;b&gt; <!-- ",
    "\\`\\",
    " ",
    "",
    "a" * 100_000,
]
OURS = {"code_inline", "text", "softbreak"}


def named(text):
    """The sample with a hostile text wherever there is room for one."""
    model = replace(BUNDLE.model, name=text, architecture=text)
    data = {"source": text, text: text}
    return replace(
        BUNDLE,
        model=model,
        recipe=text,
        calibration={"data": data, "packages": data},
        evaluation={"text": {"source": text}, "loss": 1.0},
    )


def parts(card):
    """Front matter as data, and the body's tokens as Markdown with HTML and links in plain text understands them."""
    _, front, body = card.split("---\n", 2)
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(body)
    return yaml.safe_load(front), tokens, [child for token in tokens for child in token.children or []]


def test_card_of_a_bundle():
    front, _, _ = parts(bundle_card(BUNDLE))
    assert front == {"library_name": "signpost-kv", "tags": ["kv-cache", "quantization", "signpost"]}
    card = bundle_card(BUNDLE)
    for text in ("`tiny`", "`sample-0`", "| 0 | key |", "| 1 | value |", "dense bits=3", "131072", "increase: 0.0125"):
        assert text in card


def test_model_of_a_hub_is_named_as_base():
    model = replace(BUNDLE.model, name="meta-llama/Llama-2-7b-hf")
    front, _, _ = parts(bundle_card(replace(BUNDLE, model=model)))
    assert (front["base_model"], front["base_model_relation"]) == ("meta-llama/Llama-2-7b-hf", "quantized")


@pytest.mark.parametrize("name", ["a/b/c", "../x", "a/..b\n", 'a/b"', "a/b: c", "-a/b", "a /b", "a/" + "b" * 200])
def test_other_names_stay_out_of_the_front_matter(name):
    front, _, _ = parts(bundle_card(named(name)))
    assert "base_model" not in front


def check_tokens(text):
    front, tokens, children = parts(bundle_card(named(text)))
    assert front["library_name"] == "signpost-kv"
    assert {child.type for child in children} <= OURS
    html = [token.content for token in tokens if token.type == "html_block"]
    assert html == [MARK + "\n"]
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1"] + ["h2"] * 5
    plain = [child.content for child in children if child.type == "text"]
    assert not [word for word in plain if "evil" in word or "www" in word]
    spans = [child.content for child in children if child.type == "code_inline"]
    assert max(map(len, spans)) < 3 * TEXT_LIMIT


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_stay_texts(text):
    check_tokens(text)


@given(st.text("`\\|<>[]()#*_!&~-=: \nab\u202e", max_size=30))
def test_any_text_stays_text(text):
    check_tokens(text)


@given(st.text())
def test_code_is_one_span_with_the_printable_text(text):
    tokens = MarkdownIt("commonmark").parseInline(code(text))[0].children
    assert [token.type for token in tokens] == ["code_inline"]
    if text.isprintable() and text.strip() and len(text) <= TEXT_LIMIT:
        assert tokens[0].content.strip() == text.strip()


def test_unevaluated_and_unknown_provenance():
    card = bundle_card(replace(BUNDLE, evaluation=None, calibration={}))
    assert "Not evaluated." in card
    odd = replace(BUNDLE, evaluation={"loss": "<b>", "text": ["x"]}, calibration={"data": "text", "packages": None})
    assert "<b>" not in bundle_card(odd)


def test_a_card_that_people_edited_does_not_matter_to_loading(tmp_path):
    folder = BUNDLE.save(tmp_path / "b")
    (folder / "README.md").write_text("my notes")
    assert load(folder).recipe == BUNDLE.recipe
    (folder / "README.md").unlink()
    assert load(folder).recipe == BUNDLE.recipe


def test_saving_replaces_a_card_but_no_other_readme(tmp_path):
    folder = BUNDLE.save(tmp_path / "b")
    replace(BUNDLE, recipe="another").save(folder)
    assert "`another`" in (folder / "README.md").read_text()
    (folder / "README.md").write_text("# Thesis")
    with pytest.raises(BundleError, match=r"holds README\.md, so it is not ours to replace"):
        BUNDLE.save(folder)
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"holds README\.md, so it is not ours to replace"):
        BUNDLE.save(folder)
