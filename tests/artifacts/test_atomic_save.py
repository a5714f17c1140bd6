"""Saving over a bundle: whatever fails, and whenever, what is there is whole."""

import ctypes
import errno
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from artifacts import BundleError, load
from artifacts.atomic import replace_folder
from tests.artifacts.samples import assert_same, sample_bundle

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = sample_bundle(1), sample_bundle(2)


@pytest.fixture
def saved(tmp_path):
    """A folder that holds the old bundle."""
    return OLD.save(tmp_path / "bundle")


def failing(monkeypatch, module, name, k, code):
    """Makes call number k (from 1) of a function raise OSError(code). Returns what counts the calls."""
    function, calls = getattr(module, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == k:
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)
    return calls


# The disk refuses

SYNCS = 6  # tensors, evaluation, manifest, card, their folder, its parent


@pytest.mark.parametrize(
    "name, k, code",
    [
        *(("fsync", k, errno.ENOSPC) for k in range(1, SYNCS)),
        ("mkdir", 2, errno.EACCES),  # the first one is of the parent, which is there
        ("rename", 1, errno.EROFS),
    ],
)
def test_refused_step_leaves_the_old_bundle(saved, monkeypatch, name, k, code):
    with monkeypatch.context() as patch:
        failing(patch, os, name, k, code)
        with pytest.raises(OSError, match=os.strerror(code)):
            NEW.save(saved)
    assert_same(load(saved), OLD)
    assert os.listdir(saved.parent) == ["bundle"]


def test_refused_last_step_leaves_the_new_bundle(saved, monkeypatch):
    calls = failing(monkeypatch, os, "fsync", SYNCS, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        NEW.save(saved)
    assert len(calls) == SYNCS
    assert_same(load(saved), NEW)
    assert os.listdir(saved.parent) == ["bundle"]


@pytest.mark.parametrize("limit", [0, 1, 500, 1000, 2000])
def test_file_that_cannot_grow_leaves_the_old_bundle(saved, limit):
    """The kernel itself refuses in the middle of a write."""
    assert max(path.stat().st_size for path in saved.iterdir()) > 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            NEW.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(load(saved), OLD)
    assert os.listdir(saved.parent) == ["bundle"]


def test_refused_first_save_leaves_nothing(tmp_path, monkeypatch):
    failing(monkeypatch, os, "fsync", 2, errno.ENOSPC)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        NEW.save(tmp_path / "bundle")
    assert os.listdir(tmp_path) == []


# The file system cannot swap


def no_exchange(monkeypatch, code):
    """renameat2 answers `code`, or is missing if that is None."""

    def renameat2(*_):
        ctypes.set_errno(code)
        return -1

    library = SimpleNamespace() if code is None else SimpleNamespace(renameat2=renameat2)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EBUSY])
def test_file_system_without_exchange(saved, monkeypatch, code):
    with monkeypatch.context() as patch:
        no_exchange(patch, code)
        with pytest.raises(
            BundleError, match=r"bundle cannot be swapped atomically .*: remove the old bundle first, or"
        ):
            NEW.save(saved)
        assert_same(load(saved), OLD)
        assert os.listdir(saved.parent) == ["bundle"]
        assert_same(load(NEW.save(saved.parent / "new")), NEW)  # and the way out works


def test_other_failure_of_the_exchange(saved, monkeypatch):
    no_exchange(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as info:
        NEW.save(saved)
    assert info.value.filename == str(saved)
    assert_same(load(saved), OLD)


# The destination


def test_destination_is_a_file(tmp_path):
    (tmp_path / "bundle").write_text("notes")
    with pytest.raises(BundleError, match="bundle is a file: name a folder"):
        NEW.save(tmp_path / "bundle")
    assert (tmp_path / "bundle").read_text() == "notes"


@pytest.mark.parametrize("own", [[], ["manifest.json", "tensors.safetensors"]])
def test_folder_with_foreign_files_is_not_replaced(tmp_path, own):
    for name in ["thesis.tex", *own]:
        (tmp_path / name).write_text("years")
    with pytest.raises(
        BundleError, match=r"holds thesis\.tex, so it is not ours to replace: name a new or empty folder"
    ):
        NEW.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [*own, "thesis.tex"]


def test_empty_folder_and_new_parents(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_same(load(NEW.save(tmp_path / "empty")), NEW)
    assert_same(load(NEW.save(tmp_path / "a" / "b" / "c")), NEW)


def test_damaged_bundle_is_replaced(saved):
    (saved / "manifest.json").write_text("{")
    (saved / "tensors.safetensors").unlink()
    assert_same(load(NEW.save(saved)), NEW)


@pytest.mark.parametrize("there", [True, False])
def test_link_is_followed_and_stays(tmp_path, there):
    target, link = tmp_path / "disk" / "target", tmp_path / "link"
    if there:
        OLD.save(target)
    link.symlink_to(target)
    assert NEW.save(link) == target
    assert link.readlink() == target
    assert_same(load(link), NEW)
    assert (sorted(os.listdir(tmp_path)), os.listdir(target.parent)) == (["disk", "link"], ["target"])


def test_relative_path_with_dots(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert NEW.save("b/../../c/") == tmp_path / "c"
    assert_same(load("../c"), NEW)


def test_name_as_long_as_the_file_system_allows(tmp_path):
    for bundle in (OLD, NEW):
        assert_same(load(bundle.save(tmp_path / ("n" * 255))), bundle)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = NEW.save(tmp_path / "bundle")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask}


# Other processes


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a Python process that has the two bundles at hand; arguments from sys.argv[3]."""
    shelf = tmp_path_factory.mktemp("shelf")
    both = [str(OLD.save(shelf / "old")), str(NEW.save(shelf / "new"))]
    prelude = "import sys; from artifacts import load; OLD, NEW = map(load, sys.argv[1:3])\n"

    def popen(code, *arguments):
        command = [sys.executable, "-c", prelude + code, *both, *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return popen


def test_another_process_saves_to_the_same_new_path_first(tmp_path, monkeypatch):
    path, rename = tmp_path / "bundle", os.rename

    def late(one, other):
        monkeypatch.setattr(os, "rename", rename)
        OLD.save(path)
        rename(one, other)

    monkeypatch.setattr(os, "rename", late)
    assert_same(load(NEW.save(path)), NEW)
    assert os.listdir(tmp_path) == ["bundle"]


def test_another_process_saves_while_the_folder_is_looked_at(tmp_path, monkeypatch):
    """Its card, which stands there by then, is a bundle's and not a foreign README.md."""
    path, listdir = tmp_path / "bundle", os.listdir
    path.mkdir()

    def late(folder):
        monkeypatch.setattr(os, "listdir", listdir)
        OLD.save(path)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", late)
    assert_same(load(NEW.save(path)), NEW)
    assert os.listdir(tmp_path) == ["bundle"]


def test_two_processes_save_to_the_same_new_paths(tmp_path, start):
    code = "print(flush=True); input()\nfor i in range(40): {}.save(sys.argv[3] + str(i))"
    both = [start(code.format(name), f"{tmp_path}/") for name in ("OLD", "NEW")]
    for process in both:
        process.stdout.readline()
    for process in both:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(os.listdir(tmp_path), key=int) == [str(i) for i in range(40)]
    for i in range(40):
        bundle = load(tmp_path / str(i))
        assert_same(bundle, OLD if bundle.recipe == OLD.recipe else NEW)


def test_two_processes_replace_the_same_bundle(saved, start):
    code = "print(flush=True); input()\nfor i in range(60): {}.save(sys.argv[3])"
    both = [start(code.format(name), str(saved)) for name in ("OLD", "NEW")]
    for process in both:
        process.stdout.readline()
    for process in both:
        process.stdin.write(b"\n")
        process.stdin.flush()
    while any(process.poll() is None for process in both):
        bundle = load(saved)
        assert_same(bundle, OLD if bundle.recipe == OLD.recipe else NEW)
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    assert os.listdir(saved.parent) == ["bundle"]


def test_killed_saves_leave_a_whole_bundle(saved, start):
    """SIGKILL at 25 random moments of a loop that saves two bundles in turn."""
    moments = random.Random(0)
    code = "while True:\n  for b in (NEW, OLD): b.save(sys.argv[3]); print(flush=True)"
    found = set()
    for _ in range(25):
        process = start(code, str(saved))
        process.stdout.readline()
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        process.communicate()
        bundle = load(saved)
        assert_same(bundle, OLD if bundle.recipe == OLD.recipe else NEW)
        found.add(bundle.recipe)
        left = [name for name in os.listdir(saved.parent) if name != "bundle"]
        assert all(name.startswith(".saving-") for name in left)
    assert found == {OLD.recipe, NEW.recipe}
    for name in left:
        shutil.rmtree(saved.parent / name)
    assert_same(load(NEW.save(saved)), NEW)


def test_a_folder_that_cannot_be_made_is_named_as_it_was_given(tmp_path, monkeypatch):
    """Not the one beside it in which it would be prepared."""

    made = Path.mkdir

    def refuse(path, *args, **options):
        if path.name.startswith(".saving-"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        made(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=rf"Permission denied: '{tmp_path}/b'"):
        replace_folder(tmp_path / "b", {}, lambda _: ())
