"""A reader of bundles made from docs/bundle-format.md and nothing else: it imports numpy and the standard library."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.dtype("<f4"), "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I16": np.dtype("<i2")}


def read(folder):
    """Manifest, tensors by name and evaluation (or None) of the bundle in `folder`. Raises ValueError if it is none."""
    manifest = parse(plain(folder, "manifest.json", 262144))
    need(type(manifest["schema_version"]) is int and manifest["schema_version"] == 1, "schema_version")
    need(manifest["sha256"] == seal(manifest), "seal")
    data = {}
    for name, record in manifest["files"].items():
        need(name in ("tensors.safetensors", "evaluation.json"), f"file {name}")
        data[name] = plain(folder, name, record["size"])
        need(len(data[name]) == record["size"], f"size of {name}")
        need(hashlib.sha256(data[name]).hexdigest() == record["sha256"], f"hash of {name}")
    tensors = safetensors(data["tensors.safetensors"])
    expected = declared(manifest)
    need(tensors.keys() == expected.keys(), "names of tensors")
    for name, (dtype, shape) in expected.items():
        need((tensors[name].dtype, tensors[name].shape) == (DTYPES[dtype], shape), name)
        need(bool(np.isfinite(tensors[name]).all()), name)
    return manifest, tensors, parse(data["evaluation.json"]) if "evaluation.json" in data else None


def need(condition, what):
    if not condition:
        raise ValueError(f"not a bundle: {what}")


def plain(folder, name, limit):
    path = Path(folder) / name
    need(path.is_file() and not path.is_symlink() and path.stat().st_size <= limit, name)
    return path.read_bytes()


def parse(data):
    def table(pairs):
        need(len(dict(pairs)) == len(pairs), "a key twice")
        return dict(pairs)

    def finite(text):
        need(np.isfinite(float(text)), "a number that is not finite")
        return float(text)

    value = json.loads(data.decode("utf-8"), object_pairs_hook=table, parse_float=finite, parse_constant=finite)
    need(isinstance(value, dict), "no object at the top")
    return value


def seal(manifest):
    content = {key: value for key, value in manifest.items() if key not in ("created", "sha256")}
    return hashlib.sha256((json.dumps(content, indent=2) + "\n").encode()).hexdigest()


def safetensors(data):
    start = 8 + int.from_bytes(data[:8], "little")
    header = parse(data[8:start])
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        need(entry["data_offsets"][0] == end, "a gap")
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[start + begin : start + end], DTYPES[entry["dtype"]])
        tensors[name] = tensors[name].reshape(entry["shape"])
    need(start + end == len(data), "bytes behind the tensors")
    return tensors


def declared(manifest):
    """dtype and shape of every tensor that the manifest asks for."""
    model = manifest["model"]
    h, d = model["h_kv"], model["d"]
    found = {"rope.inv_freq": ("F32", (model["rope"]["dim"] // 2,))}
    need(len(manifest["layers"]) == model["l"], "layers")
    need(len(model.get("sliding", manifest["layers"])) == model["l"], "sliding")
    for layer, index in enumerate(manifest["layers"]):
        for side, fmt in manifest["formats"][index].items() if index is not None else ():
            names = {}
            if "center" in fmt:
                names["mean"] = ("F32", (h, d))
            if "rotate" in fmt:
                learned = fmt["rotate"]["kind"] == "learned"
                names["rotation"] = ("I8", (h, d, d)) if learned else ("F32", (d, d))
            if banded := fmt.get("banded"):
                names |= {name: ("F32", (h, d)) for name in ("scale", "zero")} | {"widths": ("U8", (h, d // 32))}
                names["signposts"] = ("F32", (h, d // 32, 1 << banded.get("most", 4)))
            if dense := fmt.get("dense"):
                codes, book = 1 << dense["bits"], dense.get("codebook", "uniform")
                if dense.get("scales", "online") == "bundle":
                    names |= {"scale": ("F32", (h, d)), "zero": ("F32", (h, d))}
                nuq, edges = {"signposts": ("F32", (codes,))}, {"edges": ("F32", (codes - 1,))}
                fitted = {"nuq": nuq, "nuq-qnorm": nuq | edges, "uniform-fit": {"spacing": ("I16", (2,))}}
                names |= fitted.get(book, {})
            if "sparse" in fmt and fmt["sparse"]["thresholds"] == "bundle":
                shape = (1, 1) if fmt["sparse"]["axis"] == "matrix" else (h, d)
                names |= {"lower": ("F32", shape), "upper": ("F32", shape)}
            if sketch := fmt.get("sketch"):
                names["sketch"] = ("F32", (sketch["m"], d))
                if sketch.get("outliers", 0):
                    names |= {"outlier_sketch": ("F32", (sketch["outlier_m"], d)), "outlier_mask": ("U8", (h, d))}
            found |= {f"layers.{layer}.{side}.{name}": spec for name, spec in names.items()}
    return found


def values(bits, signposts):
    """What the codes of a dense part stand for that has signposts."""
    n = np.float32(63 if bits == 4 else 127)
    return signposts if bits == 8 else np.round(signposts * n) / n


def evenly_spaced(bits, spacing):
    """The same of one that has `spacing`."""
    return (spacing[0] + spacing[1] * np.arange(1 << bits, dtype=np.float32)) / np.float32(2047)


def coarse(matrix):
    """What the numbers of a random rotation, or of a sketch, are taken for."""
    bits = matrix.view(np.uint32)
    eight = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return eight.astype(np.float16).astype(np.float32)


if __name__ == "__main__":
    print(*(f"{name} {tensor.dtype} {tensor.shape}" for name, tensor in read(sys.argv[1])[1].items()), sep="\n")
