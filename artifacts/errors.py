"""Errors that a caller may want to tell apart. Every message names the value, what is allowed and the way out."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """`repr` for messages, in at most a few hundred characters whatever the value is."""
    return _SHORT.repr(value)


class SignpostError(Exception):
    """Base of all errors that Signpost raises on purpose."""


class FormatError(SignpostError, ValueError):
    """A page format contradicts itself or does not fit the shape of the model."""


class UnsupportedModelError(SignpostError, ValueError):
    """The model's attention is of a kind that cannot be compressed (yet), or not on this device."""


class BundleError(SignpostError):
    """A bundle cannot be read or written."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """There is no bundle at the path."""


class BundleCorruptError(BundleError, ValueError):
    """The bundle's files are truncated, altered, missing or not what the manifest says."""


class BundleVersionError(BundleError, ValueError):
    """The bundle was written with a newer schema than this version reads."""


class BundleMismatchError(BundleError, ValueError):
    """The bundle was made for another model."""


class BundleInvalidError(BundleError, ValueError):
    """The bundle is what was written, but it holds numbers that no calibration finds: see `artifacts.verify`."""


class HubError(BundleError):
    """A hub could not be reached, refused, or sent something else than a bundle."""
