"""The argument of the kernels that pack pages: `signpost::PackParams` of each layer."""

import ctypes
import functools

LAYERS_AT_ONCE = 64  # of a launch: a kernel's parameters have 32764 bytes


class Source(ctypes.Structure):
    """Numbers: strides of sequences, tokens and heads."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("sequence", "token", "head")))


_POINTERS = (
    *(
        "table",
        "lengths",
        "offsets",
        "rows",
        "heads",
        "records",
        "codebook",
        "factors",
        "bands",
        "scale",
        "lower",
        "upper",
        "mean",
    ),
    *("rotation", "inv_freq", "sketch", "outlier_sketch", "outlier_mask", "kept_words", "outlier_channels"),
    *("residual", "segments", "segment_ids", "start", "gram", "directions", "workspace", "status"),
)


class Params(ctypes.Structure):
    """`signpost::PackParams`."""

    _fields_ = (
        ("prompt", Source),
        ("ring", Source),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in ("table_stride", "segment_stride")),
        *((name, ctypes.c_int) for name in ("ring_capacity", "prompt_first", "first_page", "fresh")),
        *(
            (name, ctypes.c_int)
            for name in ("capacity_pages", "capacity_segments", "pages", "sequences", "heads_each", "splits")
        ),
        ("scaling", ctypes.c_float),
        ("unscaling", ctypes.c_float),
    )

    def from_sequence(self, first: int, itemsize: int) -> "Params":
        """The same for sequences from number `first` on, whose numbers have `itemsize` bytes."""
        found = Params.from_buffer_copy(self)
        strides = {"table": 4 * self.table_stride, "segment_ids": 4 * self.segment_stride}
        strides |= dict.fromkeys(("lengths", "offsets", "rows"), 4)
        for name, stride in strides.items():
            if address := getattr(self, name):
                setattr(found, name, address + first * stride)
        # Where rows are given, they say where prompt and ring have a sequence.
        for numbers in () if self.rows else (found.prompt, found.ring):
            if numbers.data:
                numbers.data += first * numbers.sequence * itemsize
        return found


@functools.cache
def layers_type(count: int) -> type[ctypes.Structure]:
    """The kernel's argument: the parameters of so many layers."""
    return type("Layers", (ctypes.Structure,), {"_fields_": (("layer", Params * count),)})
