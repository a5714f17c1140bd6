"""Parts in torch, one file each: `encode`, `decode`, and `select` where a part takes numbers away from the others."""

from types import ModuleType

from runtime.parts import banded, center, dense, lowrank, rotate, sketch, sparse

MODULES: dict[str, ModuleType] = {
    "center": center,
    "rotate": rotate,
    "dense": dense,
    "banded": banded,
    "sparse": sparse,
    "lowrank": lowrank,
    "sketch": sketch,
}
