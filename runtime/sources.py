"""Where the CUDA sources lie: inside the package in a wheel, in the folder cuda/ of a checkout."""

from pathlib import Path

_SENTINEL = "codes.cuh"  # cuda-python's own package is also called cuda: only a file of ours tells the two apart


def kernel_folder() -> Path:
    """Folder of the `.cuh` files. Raises FileNotFoundError where the installation lacks them."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_kernels", here.parent / "cuda"):
        if (folder / _SENTINEL).is_file():
            return folder
    raise FileNotFoundError(f"no CUDA sources beside {here}: the installation is incomplete, install signpost-kv again")
