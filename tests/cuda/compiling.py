"""Compiling units of kernels in tests that ask whether they compile at all."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime import jit


@contextmanager
def fast() -> Iterator[None]:
    """Within it NVRTC optimizes little: the same code is instantiated and assembled in a third of the time.

    What registers and spills there are, such units do not say. tests/gpu compiles all formats as they are used.
    """
    flags = jit._flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_flags", lambda arch: [*flags(arch), "--Ofast-compile=max"])
        yield
