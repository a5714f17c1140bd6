"""The slim inference runtime: loads a bundle, keeps K and V in packed pages, attends over them.

Needs torch, numba and cuda-python. Transformers is imported by `runtime.hf` alone.
"""

from artifacts import Bundle, load
from runtime.cache import CacheFullError, KVCache
from runtime.codec import Codec, PagePool

__all__ = ["Bundle", "CacheFullError", "Codec", "KVCache", "PagePool", "load"]
