"""Parts of a format, one file each: what a part's parameters are, what it stores in a page and in the bundle."""

from artifacts.parts.banded import Banded
from artifacts.parts.center import Center
from artifacts.parts.dense import Dense
from artifacts.parts.lowrank import LowRank
from artifacts.parts.rotate import Rotate
from artifacts.parts.sketch import Sketch
from artifacts.parts.sparse import Sparse
from artifacts.parts.window import Window

__all__ = ["Banded", "Center", "Dense", "LowRank", "Rotate", "Sketch", "Sparse", "Window"]
