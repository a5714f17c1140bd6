"""The slim inference runtime: loads a bundle, keeps K and V in packed pages, attends over them.

Needs torch, numba and cuda-python. Transformers is imported by `runtime.hf*` and `runtime.lm_eval` alone.
"""

import os
import sys

# Of a command, before torch is loaded: threads that wait for each other sleep. Spinning, which is the default, makes
# tokens on the CPU take ten times as long and more where something else uses the same cores.
if sys.argv[:1] == ["-m"]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before numba is loaded: its threads are OpenMP's, and as many as it starts torch uses as well from then on.
if "numba" not in sys.modules and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
    os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

from artifacts import Bundle, load
from runtime.cache import CacheFullError, KVCache
from runtime.codec import Codec, PagePool
from runtime.engine import Engine
from runtime.requests import Generation, Prefix, RequestError
from runtime.sampling import Sampling

__all__ = [
    "Bundle",
    "CacheFullError",
    "Codec",
    "Engine",
    "Generation",
    "KVCache",
    "PagePool",
    "Prefix",
    "RequestError",
    "Sampling",
    "load",
]
