"""`python -m runtime generate`, on the embedded model with a random bundle."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import runtime
from artifacts import load
from runtime.__main__ import main
from runtime.hf import fingerprint, load_causal_lm
from tests.formats import kivi, random_bundle

PROMPT = "The history of the city"


@pytest.fixture(scope="module")
def tiny():
    return load_causal_lm("tiny", "float32", "cpu")[0]


@pytest.fixture
def bundle(tiny, tmp_path):
    """A saved bundle of 8-bit codes for the embedded model."""
    model = fingerprint(tiny)
    inv_freq = tiny.model.rotary_emb.inv_freq.numpy()
    layers = [kivi(8, 32, recent=0)] * model.l
    return random_bundle(layers, model.h_q, model.h_kv, model.d, model=model, inv_freq=inv_freq).save(tmp_path / "b")


def run(capsys, *arguments):
    code = main(["generate", "--model", "tiny", "--dtype", "float32", "--device", "cpu", *arguments])
    return code, *capsys.readouterr()


def test_text_and_the_line_on_its_cost(bundle, capsys):
    code, out, err = run(capsys, "--bundle", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "40")
    assert code == 0
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 40
    assert "40 tokens in" in err
    assert "tokens/s" in err
    assert "bits per number, everything counted" in err
    assert err.endswith(f" {load(bundle).geometry.bits(131072):.2f} at 131072 tokens\n")
    assert "Loading weights" not in err


def test_sampling_follows_the_seed(bundle, capsys):
    texts = [
        run(
            capsys,
            "--bundle",
            str(bundle),
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            "12",
            "--temperature",
            "1",
            "--seed",
            s,
        )[1]
        for s in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_standard_input(bundle, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert run(capsys, "--bundle", str(bundle), "--prompt", "-", "--max-new-tokens", "2")[1].startswith(PROMPT)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", PROMPT, "--max-new-tokens", "5000"], "exceed the model's 4096 positions"),
        (["--prompt", "\udcff"], "the prompt is not UTF-8 text: convert it first"),
        (
            ["--prompt", PROMPT, "--temperature", "-1"],
            "temperature=-1.0: must be 0 (greedy), or finite and 1e-06 or more",
        ),
        (["--prompt", PROMPT, "--temperature", "nan"], "temperature=nan: must be 0"),
        (["--prompt", PROMPT, "--temperature", "inf"], "temperature=inf: must be 0"),
        (["--prompt", PROMPT, "--seed", "-1"], "seed=-1: must be 0 or more"),
        (["--prompt", PROMPT, "--device", "nonsense"], "device=nonsense: allowed are auto, cpu"),
        (["--prompt", PROMPT, "--model", "no/such/model"], "cannot load the model 'no/such/model'"),
    ],
)
def test_what_cannot_work_is_one_line_and_code_2(bundle, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run(capsys, "--bundle", str(bundle), *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "command, option, given, least",
    [
        ("generate", "--max-new-tokens", "0", 1),
        ("generate", "--max-new-tokens", "nan", 1),
        ("generate", "--max-new-tokens", "2147483648", 1),
        ("bench", "--batch", "-1", 1),
        ("bench", "--prompt-tokens", "1.5", 1),
        ("bench", "--new-tokens", "1", 2),
        ("compile", "--ranks", "0", 1),
    ],
)
def test_what_counts_something_names_itself(capsys, command, option, given, least):
    with pytest.raises(SystemExit) as info:
        main([command, option, given])
    assert info.value.code == 2
    assert f"argument {option}: {given}: must be an integer from {least} to 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, message",
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            " for 2.00 GiB more: ",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            " for 8 bytes more: ",
        ),
        (MemoryError(), ": "),
    ],
)
def test_out_of_memory(bundle, capsys, monkeypatch, error, message):
    def exhausted(*_):
        raise error

    monkeypatch.setattr("runtime.__main__._generate", exhausted)
    code, _, err = run(capsys, "--bundle", str(bundle), "--prompt", PROMPT)
    assert (code, err) == (
        2,
        f"error: out of memory{message}take fewer tokens or sequences, --dtype bfloat16, or several GPUs by torchrun\n",
    )


def test_other_errors_of_torch_are_not_hidden(bundle, capsys, monkeypatch):
    monkeypatch.setattr("runtime.__main__._generate", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        run(capsys, "--bundle", str(bundle), "--prompt", PROMPT)


def test_a_long_prompt_is_refused_by_us_alone(bundle, capsys):
    code, _, err = run(capsys, "--bundle", str(bundle), "--prompt", PROMPT * 2000)
    assert (code, err.count("\n")) == (2, 1)
    assert "exceed the model's 4096 positions" in err


def test_bundles_that_do_not_load(bundle, tiny, tmp_path, capsys):
    assert "no bundle at" in run(capsys, "--bundle", str(tmp_path / "none"), "--prompt", PROMPT)[2]
    other = replace(fingerprint(tiny), config_hash="0", name="another")
    layers = [kivi(8, 32, recent=0)] * other.l
    path = random_bundle(layers, 4, 2, 64, model=other).save(tmp_path / "other")
    assert "config_hash: bundle has 0" in run(capsys, "--bundle", str(path), "--prompt", PROMPT)[2]
    tensors = bundle / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    code, _, err = run(capsys, "--bundle", str(bundle), "--prompt", PROMPT)
    assert (code, "Fetch the bundle again" in err) == (2, True)
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    assert "schema version 99" in run(capsys, "--bundle", str(bundle), "--prompt", PROMPT)[2]


def test_names_that_look_like_markup(tmp_path, capsys):
    code, out, err = run(capsys, "--bundle", str(tmp_path / "[/x]"), "--prompt", PROMPT)
    assert (code, out) == (2, "")
    assert "[/x]" in err


def test_interrupted(bundle, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.__main__._generate", interrupt)
    code, out, err = run(capsys, "--bundle", str(bundle), "--prompt", PROMPT)
    assert (code, out, err) == (130, "", "interrupted\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run(capsys, "--bundle", str(bundle), "--prompt", PROMPT) == (130, "", "\ninterrupted\n")  # behind the text


def started(folder, torch, **options):
    """The command, in a process that finds `torch` in the place of the real one."""
    (folder / "torch.py").write_text(torch)
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "runtime", "generate", "--bundle", "b", "--model", "tiny", "--prompt", "hi"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, **options,
    )  # fmt: skip


def test_interrupted_while_modules_are_loaded(tmp_path):
    torch = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    # Not ignored, which it would inherit where tests run in the background.
    done = started(tmp_path, torch, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_interruptions_that_are_ignored_stay_so(tmp_path):
    """As a shell sets it for what runs in the background."""
    torch = "import signal\nprint(signal.getsignal(signal.SIGINT))\nraise SystemExit(3)\n"
    done = started(tmp_path, torch, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout.strip()) == (3, str(signal.SIG_IGN)), done.stderr


def test_names_of_the_runtime_are_loaded_when_they_are_asked_for():
    code = (
        "import sys, runtime; assert 'torch' not in sys.modules; assert set(runtime.__all__) <= set(dir(runtime)); "
        "print(all(getattr(runtime, name).__module__ for name in runtime.__all__), 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr
    with pytest.raises(AttributeError, match="module 'runtime' has no attribute 'nothing'"):
        runtime.nothing  # noqa: B018


def test_drawing_from_the_likeliest_tokens(bundle, capsys):
    options = ("--bundle", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "12")
    greedy = run(capsys, *options)[1]
    assert run(capsys, *options, "--temperature", "1", "--top-p", "1e-9")[1] == greedy
    code, out, err = run(capsys, *options, "--top-p", "2")
    assert (code, out) == (2, "")
    assert "top_p=2.0: must lie above 0 and be at most 1" in err


def test_a_pipe_that_is_not_our_output(bundle, capsys, monkeypatch):
    def broken(*given):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("runtime.__main__._generate", broken)
    code, out, err = run(capsys, "--bundle", str(bundle), "--prompt", PROMPT)
    assert (code, out, err) == (2, "", "error: [Errno 32] Broken pipe\n")


def test_a_reader_that_has_enough(bundle):
    """As `| head -1`: no error, and the status that a shell knows."""
    words = ["generate", "--model", "tiny", "--device", "cpu", "--bundle", str(bundle), "--prompt", PROMPT]
    with subprocess.Popen(
        [sys.executable, "-m", "runtime", *words, "--max-new-tokens", "200"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stdout
        assert command.stdout.read(1)
        command.stdout.close()
        assert command.wait(120) == 128 + signal.SIGPIPE
        assert command.stderr
        assert "rror" not in command.stderr.read()


@pytest.mark.parametrize("variables, threads", [
    ({"OMP_NUM_THREADS": "1"}, 1), ({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}, 2),
])  # fmt: skip
def test_threads_on_the_cpu(variables, threads):
    """Numba's are as many as torch's, unless it is told otherwise: it would change torch's."""
    code = "import runtime.cpu, numba; print(numba.config.NUMBA_NUM_THREADS)"
    own = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=own | variables, capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads
