"""Ways to make another bundle out of a whole one. Every function takes the folder's files and a source of chance."""

import copy
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.corpus import Files

MANIFEST, TENSORS, EVALUATION = "manifest.json", "tensors.safetensors", "evaluation.json"
PATHS = [
    "../secret", "/etc/passwd", "..", ".", "", "a/../../secret", "tensors.safetensors/../x", "./tensors.safetensors",
    "tensors.safetensors\0", "x" * 5000, "C:\\secret", "~/secret", "file:///etc/passwd", "README.md", "manifest.json",
]  # fmt: skip
ODD = [
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 255, 256, 4096, 65537, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62,
    2**63 - 1, -(2**63), 2**63, 10**30, 10**400, 0.0, -0.0, 1e-320, 0.5, 1.5, 1e308, -1e308, "", "a", "key", "pre_rope",
    "half", "nuq", "bundle", "\0", "\u202e", "😀", [], {}, [[]], [0], [0, 1, 2], {"a": {}}, {"bits": 4}, "9" * 400,
    "[" * 400, *PATHS[:4],
]  # fmt: skip
LITERALS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "0x10", "01", "1.", ".5", "+1", '"\\ud800"',
            '"\\u0000"', "9" * 5000, "1e" + "9" * 50, "'a'", "tru", "", "//", '"\\x41"', "-", "{", "]"]  # fmt: skip
MARK = "here stands the literal"


def dump(data: Any) -> bytes:
    """As bundles are written."""
    return (json.dumps(data, indent=2) + "\n").encode()


def sealed(manifest: Any) -> bytes:
    """The manifest with a hash of its own that fits, as a hostile hand would write it."""
    if isinstance(manifest, dict):
        content = {k: v for k, v in manifest.items() if k not in ("created", "sha256")}
        manifest = manifest | {"sha256": hashlib.sha256(dump(content)).hexdigest()}
    return json.dumps(manifest).encode()  # the seal does not depend on how the file is written


def with_file(files: Files, name: str, data: bytes) -> Files:
    """Another file, and a manifest that vouches for it."""
    manifest = json.loads(files[MANIFEST])
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return files | {name: data, MANIFEST: sealed(manifest)}


# Bytes


def damaged(data: bytes, rng: Random) -> bytes:
    """Flipped bits, cuts, insertions, repeated and moved pieces, one to eight of them."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, other = (rng.randrange(len(out) + 1) for _ in range(2))
        kind = rng.randrange(7)
        if kind <= 1 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
        elif kind == 4:
            del out[min(at, other) : max(at, other)]
        elif kind == 5:
            out[at:at] = out[other : other + 40]
        else:
            out[at : at + 8] = struct.pack("<q", rng.choice((0, -1, 1, 2**31, 2**62, rng.getrandbits(62))))
    return bytes(out)


# JSON


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all entries of nested tables and lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from places(value, (*path, name))


def changed(data: Any, rng: Random, values: list[Any] = ODD) -> Any:
    """One to three entries replaced, removed, renamed, copied from elsewhere, or grown."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        known = list(places(data))
        if not known:
            return copy.deepcopy(rng.choice(values))
        path, other = rng.choice(known), rng.choice(known)
        table = _at(data, path[:-1])
        kind = rng.randrange(8)
        if kind <= 2:
            table[path[-1]] = copy.deepcopy(rng.choice(values))
        elif kind == 3:
            del table[path[-1]]
        elif kind == 4 and isinstance(table, dict):
            table[rng.choice([*PATHS, "bits", "group", "t"])] = table.pop(path[-1])
        elif kind == 5:
            table[path[-1]] = copy.deepcopy(_at(data, other))
        elif kind == 6 and isinstance(table[path[-1]], list):
            table[path[-1]] = table[path[-1]] * rng.choice((0, 2, 500))
        else:
            old = table[path[-1]]
            number = isinstance(old, (int, float)) and not isinstance(old, bool)
            table[path[-1]] = old + rng.choice((-1, 1, 2**31)) if number else copy.deepcopy(rng.choice(values))
    return data


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        data = data[name]
    return data


def with_literal(data: Any, rng: Random) -> bytes:
    """JSON with a piece in it that no JSON writer makes."""
    data = copy.deepcopy(data)
    path = rng.choice(list(places(data)))
    _at(data, path[:-1])[path[-1]] = MARK
    return dump(data).replace(f'"{MARK}"'.encode(), rng.choice(LITERALS).encode())


def with_key_twice(data: Any, rng: Random) -> bytes:
    """The same key twice in one table, with the same value or with another."""
    lines = dump(data).decode().splitlines(keepends=True)
    single = [i for i, line in enumerate(lines) if '": ' in line and line.rstrip().endswith(",")]
    at = rng.choice(single)
    name, _, value = lines[at].partition('": ')
    lines.insert(at, f'{name}": {rng.choice((value, "0," + chr(10)))}')
    return "".join(lines).encode()


def huge(rng: Random) -> bytes:
    """JSON that is much work for its size, whole or not: up to just above the limit of 256 KiB."""
    size = rng.choice((1000, 10_000, 100_000, (1 << 18) - 100, (1 << 18) + 1))
    unit = rng.choice(("[", '{"a":', "0,", "[],", "[[[]]],", '{"a":0},', '"",', "1e1,", "9", '"', " "))
    body = unit * (size // len(unit))
    if unit.endswith(",") and rng.randrange(2):
        return f'{{"schema_version": 1, "x": [{body[:-40].rpartition(",")[0]}]}}'.encode()
    return (rng.choice(("", "[", '{"schema_version": 1, "x": [', '{"files": {"')) + body).encode()[:size]


# Whole folders, by name


def flipped_files(files: Files, rng: Random) -> Files:
    """Any file damaged, and nobody vouches for it."""
    name = rng.choice((MANIFEST, TENSORS, EVALUATION))
    return files | {name: damaged(files[name], rng)}


def odd_manifest(files: Files, rng: Random) -> Files:
    """Other entries in the manifest, its hash fitting."""
    return files | {MANIFEST: sealed(changed(json.loads(files[MANIFEST]), rng))}


def text_manifest(files: Files, rng: Random) -> Files:
    """A manifest that is no JSON of ours: literals, keys twice, huge ones, damaged ones, other encodings."""
    manifest, kind = json.loads(files[MANIFEST]), rng.randrange(40)
    if kind == 0:
        return files | {MANIFEST: huge(rng)}
    if kind == 1:
        return files | {MANIFEST: files[MANIFEST].decode().encode(rng.choice(("utf-16", "utf-8-sig", "utf-32")))}
    make = with_literal if kind < 20 else with_key_twice
    return files | {MANIFEST: make(manifest, rng)}


def odd_paths(files: Files, rng: Random) -> Files:
    """A manifest that lists files elsewhere, or sizes that are none."""
    manifest = json.loads(files[MANIFEST])
    record = manifest["files"][rng.choice((TENSORS, EVALUATION))]
    if rng.randrange(3):
        manifest["files"][rng.choice(PATHS)] = record
        if rng.randrange(2):
            del manifest["files"][TENSORS]
    else:
        record[rng.choice(("size", "sha256"))] = copy.deepcopy(rng.choice(ODD))
    return files | {MANIFEST: sealed(manifest)}


def odd_header(files: Files, rng: Random) -> Files:
    """Tensors with another header, vouched for."""
    data = files[TENSORS]
    length = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = rng.randrange(10)
    if kind == 0:
        text = with_key_twice(header, rng)
    elif kind == 1:
        text = with_literal(header, rng)
    elif kind == 2:
        text = damaged(data[8 : 8 + length], rng)
    elif kind == 3:
        text = huge(rng) if rng.randrange(20) == 0 else json.dumps(header).encode() + b" " * rng.randrange(99)
    else:
        text = json.dumps(changed(header, rng, [*ODD, "F32", "F16", "BF16", [2, 64], [0, 512]])).encode()
    stated = len(text) if rng.randrange(8) else rng.choice((0, 1, 2**31, 2**62, 2**64 - 1, length + 8, length - 1))
    return with_file(files, TENSORS, struct.pack("<Q", stated) + text + (numbers if rng.randrange(8) else b""))


def damaged_tensors(files: Files, rng: Random) -> Files:
    """Damaged tensors, vouched for."""
    return with_file(files, TENSORS, damaged(files[TENSORS], rng))


def odd_evaluation(files: Files, rng: Random) -> Files:
    """Another evaluation, vouched for."""
    data = json.loads(files[EVALUATION])
    makes: list[Callable[[], bytes]] = [
        lambda: dump(changed(data, rng)),
        lambda: with_literal(data, rng),
        lambda: damaged(files[EVALUATION], rng),
        lambda: huge(rng) if rng.randrange(10) == 0 else dump(changed(data, rng)),
    ]
    return with_file(files, EVALUATION, rng.choice(makes)())


def mixed(files: Files, rng: Random) -> Files:
    """Two of the others on top of each other."""
    for mutate in rng.sample([odd_manifest, odd_evaluation, flipped_files, odd_paths], 2):
        try:
            files = mutate(files, rng)
        except (ValueError, LookupError, TypeError, AttributeError):  # what the first one left is no manifest any more
            break
    return files


BYTES: dict[str, Callable[[Files, Random], Files]] = {
    function.__name__: function
    for function in (
        flipped_files, odd_manifest, text_manifest, odd_paths, odd_header, damaged_tensors, odd_evaluation, mixed,
    )
}  # fmt: skip


def spoil_folder(folder: Path, rng: Random) -> None:
    """Puts something else in the place of a file: links out of the folder, pipes, folders, sparse giants, nothing."""
    name = rng.choice((MANIFEST, TENSORS, EVALUATION))
    path, kind = folder / name, rng.randrange(7)
    if kind == 6:
        os.truncate(path, rng.choice((0, 1 << 20, 1 << 30, 1 << 40)))
        return
    path.unlink()
    if kind == 0:
        path.symlink_to(folder.parent / "secret" / name)
    elif kind == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/stdin", "/proc/self/environ", name, "../..")))
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        (folder / "elsewhere").write_bytes(b"{}")
        path.symlink_to("elsewhere")
