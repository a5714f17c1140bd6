"""The bundle floor: formats, page geometry, schema, save, load, verify. Needs numpy and safetensors only."""

from artifacts.bundle import Bundle
from artifacts.checks import verify
from artifacts.errors import (
    BundleCorruptError,
    BundleError,
    BundleInvalidError,
    BundleMismatchError,
    BundleNotFoundError,
    BundleVersionError,
    FormatError,
    HubError,
    SignpostError,
    UnsupportedModelError,
)
from artifacts.fields import PageShape
from artifacts.format import Format, LayerFormat
from artifacts.geometry import CacheGeometry, PageGeometry
from artifacts.loading import load
from artifacts.model import ModelFingerprint, Rope, Split
from artifacts.parts import Banded, Center, Dense, LowRank, Rotate, Sketch, Sparse, Window

__all__ = [
    "Banded",
    "Bundle",
    "BundleCorruptError",
    "BundleError",
    "BundleInvalidError",
    "BundleMismatchError",
    "BundleNotFoundError",
    "BundleVersionError",
    "CacheGeometry",
    "Center",
    "Dense",
    "Format",
    "FormatError",
    "HubError",
    "LayerFormat",
    "LowRank",
    "ModelFingerprint",
    "PageGeometry",
    "PageShape",
    "Rope",
    "Rotate",
    "SignpostError",
    "Sketch",
    "Sparse",
    "Split",
    "UnsupportedModelError",
    "Window",
    "load",
    "verify",
]
