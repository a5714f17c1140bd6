"""Parts in torch, one file each: `encode`, `decode`, and `select` where a part takes numbers away from the others."""

from types import ModuleType

from runtime.parts import center, dense, lowrank, rotate, sketch, sparse

MODULES: dict[str, ModuleType] = {
    "center": center,
    "rotate": rotate,
    "dense": dense,
    "sparse": sparse,
    "lowrank": lowrank,
    "sketch": sketch,
}
