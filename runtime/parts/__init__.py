"""Parts in torch, one file each: `encode` and `decode`, and `select` where a part takes numbers away from the others."""

from types import ModuleType

from runtime.parts import dense, sparse

MODULES: dict[str, ModuleType] = {"dense": dense, "sparse": sparse}
