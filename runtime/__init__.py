"""The slim inference runtime: loads a bundle, keeps K and V in packed pages, attends over them.

Needs torch, numba and cuda-python, which are loaded with the first of its names; its modules are to be imported by
name. Transformers is imported by `runtime.hf*` and `runtime.lm_eval` alone.
"""

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Of a command, before torch is loaded: threads that wait for each other sleep. Spinning, which is the default, makes
# tokens on the CPU take ten times as long and more where something else uses the same cores.
if sys.argv[:1] == ["-m"]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before numba is loaded: its threads are OpenMP's, and as many as it starts torch uses as well from then on.
if "numba" not in sys.modules and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
    os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])


def _quit(*_: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


# Of `python -m runtime`: while modules are loaded, which takes a second, an interruption is no error of theirs. Who has
# us ignore it, as a shell does in the background, is heeded.
_started = sys.orig_argv[1:3] == ["-m", "runtime"] and sys.argv[:1] == ["-m"]
if _started and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _quit)

if TYPE_CHECKING:
    from artifacts import Bundle, load
    from runtime.cache import KVCache
    from runtime.codec import Codec, PagePool
    from runtime.engine import Engine
    from runtime.jit import KernelError
    from runtime.pages import CacheFullError
    from runtime.requests import Generation, Prefix, RequestError
    from runtime.sampling import Sampling, SamplingError

__all__ = [
    "Bundle",
    "CacheFullError",
    "Codec",
    "Engine",
    "Generation",
    "KVCache",
    "KernelError",
    "PagePool",
    "Prefix",
    "RequestError",
    "Sampling",
    "SamplingError",
    "load",
]
_HOMES = {
    "artifacts": ("Bundle", "load"),
    "runtime.cache": ("KVCache",),
    "runtime.codec": ("Codec", "PagePool"),
    "runtime.engine": ("Engine",),
    "runtime.jit": ("KernelError",),
    "runtime.pages": ("CacheFullError",),
    "runtime.requests": ("Generation", "Prefix", "RequestError"),
    "runtime.sampling": ("Sampling", "SamplingError"),
}


if not TYPE_CHECKING:  # who checks types is to find names that there are not

    def __getattr__(name: str) -> Any:
        """Loads what a name needs when it is first asked for: importing the package is quick."""
        for home, names in _HOMES.items():
            if name in names:
                found = getattr(import_module(home), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
