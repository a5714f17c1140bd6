"""Errors that a caller may want to tell apart. Every message names the value, what is allowed and the way out."""


class SignpostError(Exception):
    """Base of all errors that Signpost raises on purpose."""


class FormatError(SignpostError, ValueError):
    """A page format contradicts itself or does not fit the shape of the model."""


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
