"""Folders that somebody prepared, and folders that change while they are read."""

import errno
import json
import os
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from artifacts import BundleCorruptError, BundleError, BundleNotFoundError, load
from artifacts.bundle import TENSORS
from artifacts.loading import listed_files
from artifacts.reader import FolderReader
from tests.artifacts.samples import assert_same, read_manifest, sample_bundle, write_sealed

OLD, NEW = sample_bundle(1), sample_bundle(2)
FILES = ["manifest.json", "tensors.safetensors", "evaluation.json"]


@pytest.fixture
def folder(tmp_path):
    return OLD.save(tmp_path / "bundle")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["beside", "outside", "nothing", "itself", "/dev/zero"])
def test_links_are_not_followed(folder, name, target):
    file = folder / name
    places = {"beside": folder / "copy", "outside": folder.parent / "copy", "nothing": folder / "x", "itself": file}
    place = places.get(target, Path(target))
    if target in ("beside", "outside"):
        shutil.copy(file, place)
    file.unlink()
    file.symlink_to(place)
    with pytest.raises(BundleCorruptError, match=rf"{name} is a symbolic link, and bundles hold plain files: copy"):
        load(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["folder", "pipe", "socket"])
def test_what_is_no_file_is_refused_and_never_waited_for(folder, name, kind, monkeypatch):
    (folder / name).unlink()
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        monkeypatch.chdir(folder)  # names of sockets are short
        socket.socket(socket.AF_UNIX).bind(name)
    with pytest.raises(BundleCorruptError, match=rf"{name} is not a plain file"):
        load(folder)


def test_the_folder_itself_may_be_a_link(folder):
    (folder.parent / "link").symlink_to(folder)
    assert_same(load(folder.parent / "link"), OLD)


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc/hostname", "x\0y"])
def test_names_that_lead_elsewhere(folder, name):
    with FolderReader(folder) as reader, pytest.raises(BundleCorruptError, match="is not the name of a file in it"):
        reader.read(name, 100)


def test_nothing_is_allocated_that_only_the_manifest_claims(folder):
    manifest = read_manifest(folder)
    manifest["files"]["tensors.safetensors"]["size"] = 2**62
    write_sealed(folder, manifest)
    with pytest.raises(BundleCorruptError, match=r"tensors\.safetensors: \d+ bytes, the manifest says 46116860184273"):
        load(folder)


def test_a_file_larger_than_its_formats_can_ask_for_is_not_read(folder):
    """A terabyte that takes no room on the disk."""
    size = 1 << 40
    os.truncate(folder / "tensors.safetensors", size)
    manifest = read_manifest(folder)
    manifest["files"]["tensors.safetensors"]["size"] = size
    write_sealed(folder, manifest)
    with pytest.raises(BundleCorruptError, match=rf"{size} bytes, at most \d+ can be right"):
        load(folder)


def test_half_a_download(folder):
    for name in FILES:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(BundleError, match="Fetch the bundle again"):
            load(folder)
        (folder / name).write_bytes(data)
    assert_same(load(folder), OLD)


def test_many_layers_in_few_bytes(folder):
    manifest = read_manifest(folder)
    manifest["model"]["l"] = 10**6
    manifest["layers"] = [0] * 5 * 10**4
    write_sealed(folder, manifest)
    with pytest.raises(BundleCorruptError, match="a model of l=1000000 layers: at most 4096"):
        load(folder)


def test_many_tables_in_few_bytes(folder):
    text = '{"schema_version": 1, "x": [' + "[]," * (1 << 16)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BundleCorruptError, match="65538 tables and lists, at most 65536 are read"):
        load(folder)


def test_listed_files_of_a_broken_list(folder):
    write_sealed(folder, read_manifest(folder) | {"files": {"tensors.safetensors": {"size": "3", "sha256": ""}}})
    with (
        FolderReader(folder) as reader,
        pytest.raises(BundleCorruptError, match=r"files\.tensors\.safetensors\.size='3' must be of type int"),
    ):
        listed_files(reader)


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    for name, problem in (("missing", "there is no such folder"), ("file", "it is a file")):
        with pytest.raises(BundleNotFoundError, match=problem):
            load(tmp_path / name)


def test_a_folder_of_folders(tmp_path):
    """Links and what cannot be looked at hold no bundle that is named; of many folders only some are looked at."""
    for i in range(3):
        (tmp_path / f"b{i}").mkdir()
        (tmp_path / f"b{i}" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "b0")
    (tmp_path / "b2").chmod(0)
    with FolderReader(tmp_path) as reader:
        found = reader.holding("manifest.json", 10)
        assert found in (["b0", "b1"], ["b0", "b1", "b2"])  # root may look everywhere
        assert len(reader.holding("manifest.json", 1)) <= 1
    (tmp_path / "b2").chmod(0o700)


# Mapped


def test_mapped_is_the_same_and_private(folder):
    before = (folder / "tensors.safetensors").read_bytes()
    bundle = load(folder, mapped=True)
    assert_same(bundle, OLD)
    bundle.tensors["rope.inv_freq"][:] = 7
    assert (folder / "tensors.safetensors").read_bytes() == before
    assert_same(load(folder), OLD)


def test_mapped_survives_its_replacement(folder):
    bundle = load(folder, mapped=True)
    NEW.save(folder)
    assert_same(bundle, OLD)
    assert_same(load(folder, mapped=True), NEW)


def test_empty_file_cannot_be_mapped_but_is_refused_alike(folder):
    (folder / "tensors.safetensors").write_bytes(b"")
    manifest = read_manifest(folder)
    manifest["files"]["tensors.safetensors"] = {
        "size": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    write_sealed(folder, manifest)
    for mapped in (False, True):
        with pytest.raises(BundleCorruptError, match="0 bytes are too few for the length of the header"):
            load(folder, mapped=mapped)


# Changes while it is read


def test_a_file_that_becomes_shorter_while_it_is_read(folder, monkeypatch):
    readv = os.readv

    def cut(handle, buffers):
        os.truncate(folder / "manifest.json", 0)
        return readv(handle, buffers)

    monkeypatch.setattr(os, "readv", cut)
    with pytest.raises(BundleCorruptError, match=r"manifest\.json became shorter while it was read"):
        load(folder)


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(folder, monkeypatch):
    opened, swap = os.open, iter([True])

    def replaced(name, *rest, **options):
        if name == "tensors.safetensors" and next(swap, False):
            NEW.save(folder)
        return opened(name, *rest, **options)

    monkeypatch.setattr(os, "open", replaced)
    assert_same(load(folder), NEW)


def test_a_bundle_that_is_taken_away_while_it_is_read(folder, monkeypatch):
    opened = os.open

    def gone(name, *rest, **options):
        if name == "tensors.safetensors":
            shutil.rmtree(folder)
        return opened(name, *rest, **options)

    monkeypatch.setattr(os, "open", gone)
    with pytest.raises(BundleNotFoundError):
        load(folder)


def test_readers_beside_a_writer_always_find_a_whole_bundle(folder):
    done = threading.Event()

    def write():
        for i in range(60):
            (NEW, OLD)[i % 2].save(folder)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    found = set()
    while not done.is_set():
        bundle = load(folder)
        assert_same(bundle, OLD if bundle.recipe == OLD.recipe else NEW)
        found.add(bundle.recipe)
    writer.join()
    assert found == {OLD.recipe, NEW.recipe}


# What saving refuses because nobody could read it back


@pytest.mark.parametrize("value", [2**64, "\ud800", {1: 0, "1": 0}])
def test_provenance_that_could_not_be_read_back(tmp_path, value):
    with pytest.raises(ValueError, match="not valid JSON"):
        sample_bundle(calibration={"x": value}).save(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_evaluation_that_could_not_be_read_back(tmp_path):
    with pytest.raises(BundleError, match=r"evaluation\.json would take \d+ bytes, .*: keep less in `evaluation`"):
        sample_bundle(evaluation={"x": "y" * (1 << 18)}).save(tmp_path / "b")


def test_read_only_destination():
    """The kernel itself says no, to root as well."""
    with pytest.raises(OSError, match="/proc/"):
        OLD.save("/proc/self/bundle")


def test_float_subnormal_and_extreme_numbers_survive(tmp_path):
    data = {"small": 5e-324, "large": 1.7976931348623157e308, "integer": -(2**63)}
    assert load(sample_bundle(calibration=data).save(tmp_path / "b")).calibration == json.loads(json.dumps(data))
    extreme = dict(OLD.tensors) | {"rope.inv_freq": np.full(16, np.float32(1e-45))}
    assert load(sample_bundle(tensors=extreme).save(tmp_path / "c")).tensors["rope.inv_freq"][0] > 0


def test_a_file_that_may_not_be_read_is_named_with_its_folder(folder, monkeypatch):
    opened = os.open

    def refuse(path, *args, **options):
        if path == TENSORS:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=f"'{folder / TENSORS}'"):
        load(folder)
