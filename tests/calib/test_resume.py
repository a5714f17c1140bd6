"""A pass that is interrupted anywhere continues, by itself or on several ranks, and the result has the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from calib.collect import collect
from calib.memory import MemoryExhaustedError
from calib.passes import Work
from calib.ranks import Ranks
from calib.store import Store
from tests.calib.conftest import write_text
from tests.calib.test_collect import LAYERS, QUICK, D, FakeTap, H, assert_same

RECIPES = {
    "kvquant": ("method=kvquant",),
    "sums and spectra": ("experiment=methods/gear-spectrum", "++method.key.center={}"),
    "channels of sketches": ("experiment=methods/qjl-share",),
    "one threshold a layer, Q-Norm": ("experiment=ladder/nuq3-1-matrix", "method.value.dense.codebook=nuq-qnorm"),
}


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Killed(BaseException):
    pass


class FragileTap(FakeTap):
    """Dies in the middle of a sample as often as `lives` says, each time one sample later than before."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.left = None
        self.seen = 0

    def run(self, ids, gradients, see):
        def fragile(activations):
            if self.left == 0:
                raise Killed
            see(activations)

        super().run(ids, gradients, fragile)
        self.seen += 1
        if self.left is not None:
            self.left -= 1


def work(tmp_path, **changes):
    defaults = {"store": Store(tmp_path / "work"), "inputs": {"model": "fake"}, "every": 0.0}
    return Work(**defaults | changes)


def calibrate(tap, made, work):
    return collect(tap, tap.ids, made.recipes(LAYERS), made.config.method, H, D, work=work)


@pytest.mark.parametrize("name", RECIPES)
def test_killed_after_every_sample_the_result_has_the_same_bits(settings, tmp_path, name):
    made = settings(*QUICK, *RECIPES[name])
    plain = FakeTap(samples=5)
    expected = plain.calibrate(made)
    tap, kills = FragileTap(samples=5), 0
    while True:
        tap.left = 1
        try:
            found = calibrate(tap, made, work(tmp_path))
            break
        except Killed:
            kills += 1
    assert kills == 5 * len(plain.passes) - 1  # each life gets one sample further, the last one to the end
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


def test_nothing_is_observed_twice_and_recipes_share_what_was_collected(settings, tmp_path):
    """Bits and codebooks are fitted, not collected: a sweep over them sees the samples once."""
    tap = FragileTap(samples=3)
    shared = work(tmp_path)
    first = calibrate(tap, settings(*QUICK, "method=kvquant", "bits=3"), shared)
    assert tap.seen == 6
    again = calibrate(tap, settings(*QUICK, "method=kvquant", "bits=3"), shared)
    four = calibrate(tap, settings(*QUICK, "method=kvquant", "bits=4"), shared)
    assert tap.seen == 6
    assert_same(again[1], first[1])
    assert_same(four[1], FakeTap(samples=3).calibrate(settings(*QUICK, "method=kvquant", "bits=4"))[1])
    calibrate(tap, settings(*QUICK, "method=kvquant", "outliers=0.02"), shared)  # other thresholds: all anew
    assert tap.seen == 12
    calibrate(tap, settings(*QUICK, "method=kvquant", "method.value.dense.codebook=nf"), shared)  # shares thresholds
    assert tap.seen == 15
    calibrate(tap, settings(*QUICK, "method=kvquant"), work(tmp_path, inputs={"model": "another"}))
    assert tap.seen == 21


def test_saves_come_no_closer_than_asked_for(settings, tmp_path):
    tap = FragileTap(samples=5)
    tap.left = 3
    with pytest.raises(Killed):
        calibrate(tap, settings(*QUICK, "method=kvquant"), work(tmp_path, every=3600.0))
    assert not (tmp_path / "work").exists()


def test_running_out_of_memory_says_what_to_lower(settings):
    class Full(FakeTap):
        def run(self, ids, gradients, see):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with pytest.raises(MemoryExhaustedError, match=r"a sample of seqlen=140 tokens: set seqlen=70 .*device=split"):
        Full().calibrate(settings(*QUICK, "method=kvquant"))


@pytest.mark.parametrize("samples", [1, 3, 16, 37])
@pytest.mark.parametrize("world", [1, 2, 3, 16])
def test_every_sample_is_observed_once_and_lanes_stay_whole(samples, world):
    shares = [Ranks(rank, world).samples(samples) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(samples))
    assert max(map(len, shares)) <= -(-samples // 16) * -(-16 // world)


def command(text_file, out, *more, samples=3):
    options = (
        "bits=3",
        f"samples={samples}",
        "seqlen=140",
        "eval=none",
        "device=cpu",
        f"data.path={text_file}",
        f"out={out}",
    )
    return ("-m", "calib", *options, *more)


def bundle_bits(out):
    return (out / "tensors.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one process writes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run([sys.executable, *command(write_text(folder), folder / "bundle")], check=True, capture_output=True)
    return bundle_bits(folder / "bundle")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_by_the_system_the_same_command_continues(text_file, tmp_path, undisturbed, number):
    """Of signals that a process can see it says so, and it leaves nothing but what it continues from."""
    out, scratch = tmp_path / "killed" / "bundle", tmp_path / "scratch"
    scratch.mkdir()
    killed = subprocess.Popen(
        [sys.executable, *command(text_file, out, "checkpoint=0")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(scratch)}, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list((out.parent / ".signpost-work").glob("*-rank0of1-*")) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, number)
    said = killed.communicate()[1]
    assert killed.returncode in (0, -number if number == signal.SIGKILL else 128 + number)
    if killed.returncode > 0:
        kept = out.parent / ".signpost-work"
        assert said.splitlines()[-1] == f"interrupted: the same command continues from {kept}, which is kept for it"
    assert os.listdir(scratch) == []
    subprocess.run([sys.executable, *command(text_file, out, "checkpoint=0")], check=True, capture_output=True)
    assert bundle_bits(out) == undisturbed
    assert os.listdir(out.parent) == ["bundle"]


def torchrun(*arguments):
    return subprocess.run([*LAUNCHER, *arguments], capture_output=True, text=True, timeout=500)


def test_two_ranks_write_the_bits_of_one(text_file, tmp_path, undisturbed):
    done = torchrun(*command(text_file, tmp_path / "two" / "b"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert bundle_bits(tmp_path / "two" / "b") == undisturbed
    assert os.listdir(tmp_path / "two") == ["b"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the rank's process in /proc")
def test_a_rank_that_dies_ends_the_run_and_the_same_command_continues(text_file, tmp_path):
    """Rank 1 is killed in the middle of the first pass; rank 0 does not wait for it for ever."""
    out = tmp_path / "bundle"
    text_file.write_text(10 * text_file.read_text())
    run = subprocess.Popen(
        [*LAUNCHER, *command(text_file, out, "checkpoint=0", samples=32)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list((tmp_path / ".signpost-work").glob("*-rank1of2-*")):
        assert run.poll() is None, run.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    (second,) = (int(c) for c in children if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{c}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    assert run.wait(timeout=300) != 0
    assert not out.exists()
    done = torchrun(*command(text_file, out, "checkpoint=0", samples=32))
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(os.listdir(tmp_path)) == ["bundle", "text.txt"]
