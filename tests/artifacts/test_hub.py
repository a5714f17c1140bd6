"""`push` and `pull` against a hub on this machine, well-behaved and not."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from artifacts import BundleCorruptError, BundleError, BundleInvalidError, BundleVersionError, HubError, load
from artifacts import hub as hub_module
from artifacts.__main__ import main
from artifacts.hub import pull, push
from tests.artifacts.samples import assert_same, read_manifest, sample_bundle, write_sealed
from tests.artifacts.stand_in_hub import cut, dripping, endless, running, silent

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = sample_bundle(1), sample_bundle(2)
REPO = "someone/kv.test-1"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The stand-in takes any token; offline mode, in which CI runs, would refuse even the loopback interface."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def hub():
    with running() as hub:
        yield hub


@pytest.fixture
def pushed(hub, tmp_path):
    """A hub that holds the new bundle."""
    push(NEW.save(tmp_path / "new"), REPO, endpoint=hub.url)
    return hub


def test_what_is_pulled_is_what_was_pushed(pushed, tmp_path):
    assert_same(pull(REPO, tmp_path / "b", endpoint=pushed.url), NEW)
    assert_same(load(tmp_path / "b"), NEW)
    assert pushed.repos[REPO][-1].keys() == {
        ".gitattributes",
        "README.md",
        "manifest.json",
        "tensors.safetensors",
        "evaluation.json",
    }
    assert pushed.repos[REPO][-1]["README.md"].startswith(b"---\nlibrary_name: signpost-kv\n")


def test_push_again_is_one_commit_and_drops_an_evaluation_that_is_gone(pushed, tmp_path):
    commits = len(pushed.repos[REPO])
    push(replace(OLD, evaluation=None).save(tmp_path / "old"), REPO, endpoint=pushed.url)
    assert len(pushed.repos[REPO]) == commits + 1
    assert "evaluation.json" not in pushed.repos[REPO][-1]
    assert_same(pull(REPO, tmp_path / "b", endpoint=pushed.url), replace(OLD, evaluation=None))


def test_private(hub, tmp_path):
    push(NEW.save(tmp_path / "new"), REPO, private=True, endpoint=hub.url)
    assert hub.private == {REPO}


def test_pull_of_a_commit(pushed, tmp_path):
    first = pushed.sha(REPO)
    push(OLD.save(tmp_path / "old"), REPO, endpoint=pushed.url)
    assert_same(pull(REPO, tmp_path / "b", revision=first, endpoint=pushed.url), NEW)
    assert_same(pull(REPO, tmp_path / "c", endpoint=pushed.url), OLD)


def test_all_files_are_of_one_commit_whatever_is_pushed_meanwhile(pushed, tmp_path):
    """Somebody pushes just after the manifest was sent."""
    files = dict(pushed.repos[REPO][-1])

    def answer(request):
        pushed.answers.clear()
        sha = pushed.sha(REPO)
        pushed.repos[REPO].append(files | {"tensors.safetensors": b"other"})
        request.reply(200, files["manifest.json"], x_repo_commit=sha)

    pushed.answers.append((r"resolve/main/manifest\.json", answer))
    assert_same(pull(REPO, tmp_path / "b", endpoint=pushed.url), NEW)


def test_push_sends_only_the_bundle_and_only_a_sound_one(hub, tmp_path):
    folder = NEW.save(tmp_path / "new")
    (folder / "secret.txt").write_text("secret")
    (folder / "README.md").write_text("secret")
    push(folder, REPO, endpoint=hub.url)
    assert "secret.txt" not in hub.repos[REPO][-1]
    assert b"secret" not in hub.repos[REPO][-1]["README.md"]
    requests = len(hub.requests)
    odd = replace(NEW, tensors=dict(NEW.tensors) | {"rope.inv_freq": -NEW.tensors["rope.inv_freq"]})
    with pytest.raises(BundleInvalidError):
        push(odd.save(tmp_path / "odd"), REPO, endpoint=hub.url)
    assert len(hub.requests) == requests


def test_commands(hub, tmp_path, capsys):
    folder = NEW.save(tmp_path / "new")
    assert main(["push", str(folder), REPO, "--endpoint", hub.url, "--message", "first"]) == 0
    assert "pushed: http://127.0.0.1" in capsys.readouterr().out
    assert main(["pull", REPO, str(tmp_path / "b"), "--endpoint", hub.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(tmp_path / "b"),
        "recipe": NEW.recipe,
        "model": NEW.model.name,
    }
    assert main(["pull", REPO, str(tmp_path / "b"), "--endpoint", hub.url]) == 0
    assert f"{NEW.recipe} for {NEW.model.name}, verified" in capsys.readouterr().out
    assert main(["pull", "no one/x", str(tmp_path / "b"), "--endpoint", hub.url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# The hub misbehaves: an error, and the old bundle stays


def answering(pattern, answer):
    def prepare(hub):
        hub.answers.append((pattern, answer))

    return prepare


def with_file(name, change):
    def prepare(hub):
        files = hub.repos[REPO][-1]
        files[name] = change(files[name])

    return prepare


def without(name):
    def prepare(hub):
        del hub.repos[REPO][-1][name]

    return prepare


def compressed(request):
    request.reply(200, b"x" * 100, content_encoding="gzip")


def claims(size):
    """A manifest whose own hash fits, and that lies about the tensors' size."""

    def prepare(hub):
        folder = Path(hub.scratch)
        manifest = read_manifest(folder)
        manifest["files"]["tensors.safetensors"]["size"] = size
        write_sealed(folder, manifest)
        hub.repos[REPO][-1]["manifest.json"] = (folder / "manifest.json").read_bytes()

    return prepare


BAD = {
    "no such repository": (lambda hub: hub.repos.clear(), HubError, f"the hub: 404 .* Not Found for url: .*/{REPO}"),
    "no bundle in it": (without("manifest.json"), HubError, r"the hub: 404 .* Not Found for url: .*/manifest\.json"),
    "no tensors": (
        without("tensors.safetensors"),
        HubError,
        r"the hub: 404 .* Not Found for url: .*/tensors\.safetensors",
    ),
    "server error": (answering("resolve", lambda r: r.reply(500, {})), HubError, "the hub: .*500"),
    "login needed": (answering("resolve", lambda r: r.reply(401, {})), HubError, "the hub: .*401"),
    "silent": (answering("manifest", silent(3)), HubError, r"did not answer within 1 s: try again, or raise --timeout"),
    "dripping": (answering("manifest", dripping(60, 0.05)), HubError, "the hub is too slow, .* raise --timeout"),
    "endless manifest": (answering("manifest", endless), HubError, "manifest.json is longer than 262144 bytes"),
    "endless tensors": (answering("tensors", endless), HubError, r"tensors\.safetensors is longer than \d+ bytes"),
    "compressed": (answering("manifest", compressed), HubError, "comes compressed, which was not asked for"),
    "broken off": (answering("tensors", cut(bytes(10**6), 100)), HubError, "the hub: "),
    "half a file": (with_file("tensors.safetensors", lambda d: d[:-9]), BundleCorruptError, "the manifest says"),
    "altered": (with_file("tensors.safetensors", lambda d: d[:-1] + b"?"), BundleCorruptError, "altered since"),
    "web page": (answering("manifest", lambda r: r.reply(200, b"<html>")), BundleCorruptError, "not valid JSON"),
    "newer": (
        with_file("manifest.json", lambda d: b'{"schema_version": 2}'),
        BundleVersionError,
        "reads up to 1: install a newer one",
    ),
    "terabytes": (claims(1 << 40), HubError, "tensors.safetensors of 1099511627776 bytes, at most 1073741824 are"),
    "negative": (claims(-1), HubError, "tensors.safetensors of -1 bytes"),
}

SLOW = {"silent", "dripping"}  # the others answer, if a busy machine lets them


@pytest.mark.parametrize("name", BAD)
def test_misbehaving_hub(pushed, tmp_path, name):
    prepare, error, message = BAD[name]
    pushed.scratch = tmp_path / "new"
    prepare(pushed)
    OLD.save(tmp_path / "there")
    start = time.monotonic()
    with pytest.raises(error, match=message):
        pull(REPO, tmp_path / "there", endpoint=pushed.url, timeout=1 if name in SLOW else 20)
    assert time.monotonic() - start < 60  # a bound on hanging, not a measurement
    assert_same(load(tmp_path / "there"), OLD)
    assert sorted(os.listdir(tmp_path)) == ["new", "there"]


def test_card_of_a_hub_is_not_taken_over(pushed, tmp_path):
    pushed.repos[REPO][-1]["README.md"] = b"<script>"
    pull(REPO, tmp_path / "b", endpoint=pushed.url)
    assert "<script>" not in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.parametrize("pattern", ["repos/create", "preupload", "commit"])
def test_push_to_a_silent_hub(hub, tmp_path, pattern):
    hub.answers.append((pattern, silent(3)))
    with pytest.raises(HubError, match="did not answer within 1 s: try again, or raise --timeout"):
        push(NEW.save(tmp_path / "new"), REPO, endpoint=hub.url, timeout=1)
    assert not [commit for commit in hub.repos.get(REPO, []) if "manifest.json" in commit]


def test_push_to_something_that_is_no_hub(hub, tmp_path):
    hub.answers.append(("", lambda request: request.reply(200, [1])))
    with pytest.raises(HubError, match="the hub: "):
        push(NEW.save(tmp_path / "new"), REPO, endpoint=hub.url)


def test_nobody_answers(tmp_path):
    with running() as hub:
        url = hub.url
    with pytest.raises(
        HubError, match=rf"no hub answers at {url} \(.*\): check the network, HF_ENDPOINT and --endpoint"
    ):
        pull(REPO, tmp_path / "b", endpoint=url, timeout=5)


def test_a_revision_that_is_not_there(pushed, tmp_path):
    with pytest.raises(HubError, match=r"the hub: 404 .* Not Found for url: .*/resolve/nope/"):
        pull(REPO, tmp_path / "b", revision="nope", endpoint=pushed.url)


@pytest.mark.parametrize("repo", ["", "a/b/c", "../..", "a b/c", "a/--b", "x" * 200])
def test_names_that_no_repository_has(hub, tmp_path, repo):
    with pytest.raises(HubError, match="the hub: "):
        pull(repo, tmp_path / "b", endpoint=hub.url)
    assert hub.requests == []


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeout_that_is_none(tmp_path, timeout):
    with pytest.raises(HubError, match=r"timeout=.* must be above 0 seconds"):
        pull(REPO, tmp_path / "b", timeout=timeout)


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"pip install 'signpost-kv\[hub\]'"):
        pull(REPO, tmp_path / "b")


def test_offline_mode(monkeypatch, tmp_path, hub):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="offline mode"):
        pull(REPO, tmp_path / "b", endpoint=hub.url)


def test_other_users_of_the_library_get_no_deadline(pushed, tmp_path):
    pull(REPO, tmp_path / "b", endpoint=pushed.url, timeout=30)
    assert huggingface_hub.get_session().timeout.read is None


def test_foreign_files_at_the_destination(pushed, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("years")
    with pytest.raises(BundleError, match=r"holds thesis\.tex, so it is not ours to replace"):
        pull(REPO, tmp_path / "there", endpoint=pushed.url)


def test_limit_of_tensors_is_far_above_any_model():
    # 126 layers of 128 channels with a rotation of both sides and a sketch of 1024 rows
    assert hub_module.SIZE_LIMIT / 10 > 126 * 128 * 4 * (2 * 128 + 1024)


def test_killed_pulls_leave_a_whole_bundle(pushed, tmp_path):
    """SIGKILL at moments spread over a pull; tests/fuzz/kills.py does it 200 times."""
    OLD.save(tmp_path / "there")
    code = (
        "import sys, huggingface_hub; from artifacts.hub import pull; print(flush=True)\n"
        "while True: pull(sys.argv[1], sys.argv[2], endpoint=sys.argv[3])"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    for i in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", code, REPO, str(tmp_path / "there"), pushed.url],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(0.04 * i)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        bundle = load(tmp_path / "there")
        assert_same(bundle, OLD if bundle.recipe == OLD.recipe else NEW)
    assert_same(pull(REPO, tmp_path / "there", endpoint=pushed.url), NEW)
