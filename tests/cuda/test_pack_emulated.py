"""Pack kernels on the CPU (tests/cuda/emulator.h) against the torch codec, byte for byte. Needs g++, no GPU."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts import PageGeometry, Rope
from runtime import pack
from runtime.codec import Codec
from runtime.rope import Rotation
from runtime.sources import kernel_folder
from tests.packing import differences, exact_tensors, numbers, poisoned, reference, sides

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HERE = Path(__file__).parent
SIDES = sides()


class HostRotation(Rotation):
    """Sines and cosines of the C library, as emulated kernels have them, and products as torch on CUDA rounds them."""

    def _angles(self, positions):
        angles = (positions.float()[..., None] * self.inv_freq).numpy()
        cos, sin = (np.array([f(x) for x in angles.ravel()], np.float32).reshape(angles.shape) for f in (_libm.cosf, _libm.sinf))
        return torch.from_numpy(cos) * self.rope.scaling, torch.from_numpy(sin) * self.rope.scaling

    def unrotate(self, keys, positions):
        cos, sin = self._angles(positions)
        unscaling = pack.scalings(self.rope)[1]
        return self._turn(keys, cos * unscaling, -sin * unscaling)


_libm = ctypes.CDLL("libm.so.6")
for _name in ("sinf", "cosf"):
    getattr(_libm, _name).argtypes, getattr(_libm, _name).restype = [ctypes.c_float], ctypes.c_float


@functools.cache
def folder():
    return Path(tempfile.mkdtemp(prefix="signpost-emulated-"))


def build(unit, plan):
    """The unit as a library of this machine; `launch(blocks, sequences, params)` runs it."""
    source = folder() / f"{abs(hash(unit.source))}.cpp"
    library = source.with_suffix(".so")
    if not library.exists():
        source.write_text(
            f'#include "emulator.h"\n{unit.source}'
            'extern "C" void launch(int blocks, int sequences, const signpost::PackParams* params) {\n'
            "    emulator::launch([&] { pack(*params); }, blocks, sequences, Plan::THREADS, "
            f"{plan.ctas if plan.cluster else 1}, {plan.shared}, 0xFF);\n}}\n"
        )
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{HERE}", f"-I{kernel_folder()}"]
        done = subprocess.run([*command, "-o", str(library), str(source)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


class Emulated:
    """`runtime.pack.Packer` without a GPU."""

    def __init__(self, codec, rotation, dtype, arch):
        geometry = codec.geometry
        rope = rotation.rope if geometry.format.domain == "pre_rope" else None
        self.plan = pack.plan(geometry, rope, dtype, arch)
        self.library = build(pack.pack_unit("pack", geometry, rope, dtype, arch), self.plan)
        self.tables = pack.device_tables(codec, rotation if rope else None)
        self.status = torch.zeros(1, dtype=torch.int32)
        self.params = pack.Params(status=self.status.data_ptr(), scaling=1.0, unscaling=1.0, prompt_first=pack.NO_PROMPT)
        for field, tensor in self.tables.items():
            setattr(self.params, field, tensor.data_ptr())
        if rope:
            self.params.scaling, self.params.unscaling = pack.scalings(rope)

    def run(self, pool, table, b, pages, **fields):
        for name, value in fields.items():
            setattr(self.params, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        self.params.table, self.params.table_stride = table.data_ptr(), table.stride(0)
        self.params.heads, self.params.records = pool.heads.data_ptr(), pool.records.data_ptr()
        self.params.capacity_pages = pool.capacity
        workspace = torch.empty(self.plan.ctas * pages * b * self.plan.workspace, dtype=torch.uint8)
        self.params.workspace = workspace.data_ptr()
        self.library.launch(pages * self.plan.ctas, b, ctypes.byref(self.params))


def loose(geometry: PageGeometry) -> list[str]:
    return [name for name in ("norm", "outlier_norm") if name in geometry.fields]


def made(geometry: PageGeometry, rope: Rope, dtype, arch):
    shape = geometry.shape
    codec = Codec(geometry, exact_tensors(geometry.format, shape.h_kv, shape.d))
    inv_freq = (10000.0 ** -(np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32)
    rotation = HostRotation(rope, inv_freq)
    return codec, rotation, Emulated(codec, rotation, dtype, arch)


def check_prompt(geometry, rope, dtype, arch, kind, b=1, pages=2, first_page=1):
    codec, rotation, packer = made(geometry, rope, dtype, arch)
    shape, sinks = geometry.shape, geometry.format.window.sinks
    n = sinks + (first_page + pages) * shape.t + 3
    x = numbers(kind, (b, n, shape.h_kv, shape.d), 1, dtype)
    table = torch.full((b, first_page + pages + 1), 99, dtype=torch.int32)
    ids = torch.randperm(b * pages + 2)[: b * pages].view(b, pages)
    table[:, first_page : first_page + pages] = ids
    offsets = torch.arange(b, dtype=torch.int32) * 1000 + 7
    got, wanted = (poisoned(geometry, b * pages + 2) for _ in range(2))
    packer.run(got, table, b, pages, prompt=pack.source(x), prompt_first=0, first_page=first_page, offsets=offsets)
    for i in range(b):
        fields = reference(codec, rotation, x[i], first_page, pages, int(offsets[i]))
        if "segment" in fields:  # factors are torch's, and what comes after them
            fields = {k: v for k, v in fields.items() if k in ("codes", "scale", "zero", "start", "count", "index", "correction")}
        wanted.write(ids[i], fields)
    assert packer.status.item() == 0
    problems = differences(got, wanted, [] if geometry.format.lowrank else loose(geometry))
    assert not problems, f"{packer.plan}\n" + "\n".join(problems)


@pytest.mark.parametrize("name, geometry, rope", SIDES, ids=[side[0] for side in SIDES])
def test_prompts(name, geometry, rope):
    check_prompt(geometry, rope, torch.float16, "sm_90a", "grid")
