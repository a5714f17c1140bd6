"""The compressed KV cache: sinks and newest tokens in full precision, everything between them in packed pages.

One query step is `attend`: exact attention over what is cached and the step's own tokens, then the tokens are appended.
A number is quantized once, when its page fills, and never again. Sequences own lists of page ids, so batches of
different lengths, reordering, sharing and freeing are edits of tables (`runtime.pages`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts import Bundle, Format, PageGeometry
from artifacts.fields import SideName
from runtime import jit, pack_units, project, unpack
from runtime.attention import PagedAttention
from runtime.codec import Codec
from runtime.exact import capped, causal_attention, visible
from runtime.exact_layer import ExactLayer
from runtime.joined import has_flash, join_unit
from runtime.layer import CacheLayer
from runtime.pack import Packer, check_all, forget_all
from runtime.pack_factors import most_work_bytes
from runtime.pages import CacheFullError
from runtime.room import Room
from runtime.rope import Rotation
from runtime.sampling import whole
from runtime.side import Filling, Side, filling, has_kernels
from runtime.step import LayerStep, SidePackers, StepInputs, pack
from runtime.units import Sharing, spans, units
from runtime.unpack import Unpacker

__all__ = ["CacheFullError", "KVCache", "LayerCache"]

FUSED_QUERIES = (
    8  # up to this many new tokens are attended by the CPU's page kernels; more make decoding to dense cheaper
)


class LayerCache(CacheLayer):
    """A layer with a format: keys and values in pages, sinks and newest tokens beside them."""

    def __init__(self, bundle: Bundle, layer: int, room: Room, dtype: torch.dtype, rotation: Rotation):
        super().__init__(bundle.model, layer, room)
        formats, model, b = bundle.layers[layer], bundle.model, room.b
        assert formats is not None
        self._turning = rotation
        self.rotation = rotation if formats.key.domain == "pre_rope" else None  # of packed keys

        def side(name: SideName, fmt: Format, turning: Rotation | None) -> Side:
            geometry = PageGeometry.of(fmt, model.h_kv, model.d, name)
            codec = Codec(geometry, bundle.side_tensors(layer, name), self.device)
            return room.join(Side(codec, turning, room.tables[filling(fmt)], room.next_rows(geometry), b, dtype))

        self.key, self.value = side("key", formats.key, self.rotation), side("value", formats.value, None)
        self._unpacker: Unpacker | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As of `CacheLayer`."""
        return super().__getstate__() | {"_unpacker": None}

    @property
    def sides(self) -> tuple[Side, ...]:
        """Keys and values."""
        return self.key, self.value

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.key.nbytes + self.value.nbytes

    def _append(self, i: int, k: Tensor, v: Tensor, offset: int) -> None:
        """Appends k and v [h_kv, m, d] to sequence i: both or, if one cannot be packed, neither."""
        n = self.lengths[i]
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        try:
            self.key.pack(i, k, n, offset, self.room.checks)
            self.value.pack(i, v, n, offset, self.room.checks)
        except Exception:  # whatever it is: pages taken for tokens that did not come go back, and it goes on
            self.room.trim()
            raise
        self.key.append(i, k, n)
        self.value.append(i, v, n)
        self.offsets[i], self.lengths[i] = offset, n + k.shape[0]

    def _make_step(self, h_q: int) -> LayerStep:
        key, value = self.key, self.value
        dtype = key.buffer.dtype
        kernels = PagedAttention(
            key.geometry,
            value.geometry,
            key.codec.tables,
            value.codec.tables,
            self._turning,
            h_q,
            dtype,
            self.device,
            self.scoring,
            self.room.workspace,
        )
        return LayerStep(kernels, key, value)

    def _device_step(self, q: Tensor, k: Tensor, v: Tensor, starts: list[int], scaling: float) -> Tensor:
        """One token for every sequence, on the page kernels."""
        before = list(self.key.used), list(self.value.used)
        out = super()._device_step(q, k, v, starts, scaling)
        if before != (self.key.used, self.value.used):
            inputs = self.room.inputs(self.lengths, self.offsets)
            for side in self.sides:
                pack(side.packer, [side], inputs.lengths, inputs.offsets)
        return out

    def advance(self, sequences: Iterable[int]) -> None:
        """Counts a token that a device step has appended to each of these sequences."""
        super().advance(sequences)
        for side in self.sides:
            side.advance(self.lengths, sequences)

    def _attend_one(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        m = q.shape[1]
        if m > FUSED_QUERIES or has_kernels(self.device) or not self.lengths[i]:
            return self._attend_dense(i, q, k, v, scaling)
        h_kv, d = k.shape[0], k.shape[2]
        rows = q.float().reshape(h_kv, -1, d)  # query heads of a kv head are neighbours: [h_kv, g * m, d]
        scores = capped(self._scores(i, rows, k.float()) * scaling, self.softcap).unflatten(1, (-1, m))
        hidden = ~visible(m, scores.shape[-1], self.window, scores.device)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).flatten(1, 2)
        return self._values(i, weights, v.float()).reshape(q.shape)

    def _scores(self, i: int, rows: Tensor, k: Tensor) -> Tensor:
        """Unscaled scores float32 [h_kv, g * m, tokens] of all cached and the new tokens."""
        sinks, newest = (x.float().permute(1, 2, 0) for x in self.key.exact(i, self.lengths[i]))
        return torch.cat([rows @ sinks, self._paged_scores(i, rows), rows @ newest, rows @ k.transpose(1, 2)], -1)

    def _paged_scores(self, i: int, rows: Tensor) -> Tensor:
        """Zeros for pages that nobody sees: their tokens are masked."""
        pages, unseen, t = self.key.pages_of(i), self._unseen(i, self.key), self.key.format.t
        if not pages.numel():
            return rows.new_empty(*rows.shape[:2], 0)
        position = self.offsets[i] + self.key.format.window.sinks + unseen * t
        seen = pages[unseen:]
        scores = self.key.reader.scores(rows, seen, self.rotation, position) if seen.numel() else rows[..., :0]
        return F.pad(scores, (unseen * t, 0))

    def _unseen(self, i: int, side: Side) -> int:
        """Pages of a sequence that are wholly behind the window of whatever comes next."""
        behind = self.lengths[i] - self.window + 1 - side.format.window.sinks
        return min(max(0, behind) // side.format.t, side.used[i]) if self.window else 0

    def _values(self, i: int, weights: Tensor, v: Tensor) -> Tensor:
        """Weighted sum float32 [h_kv, g * m, d] of all cached and the new values."""
        sinks, newest = (x.float().transpose(0, 1) for x in self.value.exact(i, self.lengths[i]))
        pages, unseen, t = self.value.pages_of(i), self._unseen(i, self.value), self.value.format.t
        sizes = [sinks.shape[1], unseen * t, (pages.numel() - unseen) * t, newest.shape[1], v.shape[1]]
        to_sinks, _, to_pages, to_newest, to_fresh = weights.split(sizes, -1)
        out = to_sinks @ sinks + to_newest @ newest + to_fresh @ v
        seen = pages[unseen:]
        return out + self.value.reader.weighted_sum(to_pages, seen) if seen.numel() else out

    def _attend_dense(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The same by decoding all pages first: for many queries at once."""
        if has_kernels(self.device) and self.lengths[i]:
            keys, values = self._unpacked(i, k, v)
        else:
            keys, values = (self._dense_side(i, side, x, q.dtype) for side, x in ((self.key, k), (self.value, v)))
        return causal_attention(q[None], keys[None], values[None], scaling, self.window, self.softcap)[0]

    def _unpacked(self, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens of both sides after RoPE, cached and fresh, [h_kv, tokens, d], by the GPU's kernel."""
        n, dtype = self.lengths[i], self.key.buffer.dtype
        size = (n + k.shape[1], k.shape[0], k.shape[2])
        keys, values = (torch.empty(size, dtype=dtype, device=self.device) for _ in range(2))
        self.unpack(self.room.which(i, n, self.offsets[i]), keys[:n], values[:n])
        keys[n:], values[n:] = k.transpose(0, 1), v.transpose(0, 1)
        return keys.transpose(0, 1).to(k.dtype), values.transpose(0, 1).to(v.dtype)

    def unpack(self, which: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `Unpacker.run`, on a GPU."""
        if self._unpacker is None:
            self._unpacker = Unpacker(self.key, self.value, self._turning)
        self._unpacker.run(which, keys, values)

    def _dense_side(self, i: int, side: Side, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """All tokens of a side after RoPE, cached and fresh, [h_kv, tokens, d]."""
        sinks, newest = (x.transpose(0, 1).to(dtype) for x in side.exact(i, self.lengths[i]))
        if not side.used[i]:
            return torch.cat([sinks, newest, fresh], 1)
        paged = side.dense(i).transpose(0, 1)
        if side is self.key and self.rotation is not None:
            first = self.offsets[i] + side.format.window.sinks
            paged = self.rotation.rotate(paged, torch.arange(first, first + paged.shape[1], device=paged.device))
        return torch.cat([sinks, paged.to(dtype), newest, fresh], 1)

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences, in this order; `KVCache.select` does the tables."""
        super().select(sequences)
        self.key.select(sequences)
        self.value.select(sequences)

    def share(self, source: int, sequence: int, n: int) -> None:
        """Lets an empty sequence begin with the first n tokens of another; `KVCache.fork` does the tables."""
        super().share(source, sequence, n)
        self.key.share(source, sequence, n)
        self.value.share(source, sequence, n)

    def rewind(self, sequence: int, n: int) -> None:
        """As `CacheLayer.rewind`: the window still holds what a page was packed from, all but the newest token."""
        super().rewind(sequence, n)
        for side in (self.key, self.value):
            side.used[sequence] = side.format.window.pages(n, side.format.t)

    def release(self, sequence: int) -> None:
        """Forgets a sequence; `KVCache.release` does the tables."""
        super().release(sequence)
        self.key.used[sequence] = self.value.used[sequence] = 0


def _begin_kernels(
    bundle: Bundle, b: int, max_tokens: int | None, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Begins to compile what steps and packing will load, all at once."""
    processors = jit.processors(device)
    sizes = {min(1 << i, b) for i in range(b.bit_length() + 1)}  # of an engine's steps
    batches = [(sequences, tokens, processors) for sequences in sizes for tokens in spans(max_tokens)]
    steps, arch = units(bundle, [dtype], batches), jit.arch_of(device)
    jit.begin([*pack_units.units(bundle, arch, [dtype]), *steps, *project.units(bundle, [dtype])], device)


def _work_bytes(bundle: Bundle, b: int, max_tokens: int) -> int:
    """Bytes that packing takes for a moment on a GPU: where factors are found, in a step and in a prompt, which have
    memory of their own if steps are captured in graphs."""
    alike = Counter(side for side in bundle.geometry.sides if side.format.lowrank)
    found = [
        most_work_bytes(side, layers, b, side.format.window.pages(max_tokens, side.format.t))
        for side, layers in alike.items()
    ]
    return sum(max(kind) for kind in zip(*found, strict=True))


class KVCache:
    """Compressed cache of a whole model for `b` sequences.

    bundle      loaded by `artifacts.load`
    b           sequences
    max_tokens  tokens to reserve for, per sequence, and the most that one may hold: `nbytes` is
                `b * bundle.geometry.cache_bytes(max_tokens, itemsize)` from the start and no step allocates any more.
                None: pages are allocated by doubling
    prompt      with max_tokens, how many of them will come as one prompt: formats with factors per segment need less
                room then, and `nbytes` is `b * bundle.geometry.cache_bytes(max_tokens, itemsize, prompt)`
    dtype       of sinks and window: the model's
    device      where the cache lives. On the CPU decode steps run on the page kernels (numba), on CUDA devices on
                `runtime.attention` and `runtime.pack`
    budget      bytes for everything, with max_tokens: pages are a pool for all sequences, as many as fit; `reserve`
                says whether a sequence will find room. On a GPU that includes the work space in which factors are
                found, which `nbytes` does not. Raises CacheFullError if not even one page of each side fits
    """

    def __init__(
        self,
        bundle: Bundle,
        b: int,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prompt: int = 0,
        budget: int | None = None,
    ):
        if not isinstance(bundle, Bundle):
            raise TypeError(f"bundle={bundle!r}: load it with runtime.load(path)")
        if not all(whole(n) and n >= 1 for n in (b, 1 if max_tokens is None else max_tokens)):
            raise ValueError(f"b={b}, max_tokens={max_tokens}: both must be at least 1, whole numbers")
        if budget is not None and not whole(budget):
            raise ValueError(f"budget={budget!r}: must be a whole number of bytes")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype!r}: must be a model's, torch.float16, torch.bfloat16 or torch.float32")
        if budget is not None and max_tokens is None:
            raise ValueError(f"budget={budget}: say the most that a sequence may hold, too (max_tokens=)")
        if has_kernels(torch.device(device)):
            _begin_kernels(bundle, b, max_tokens, dtype, device)
        self.bundle, self.dtype = bundle, dtype
        self.rotation = Rotation(bundle.model.rope, bundle.tensors["rope.inv_freq"], device)
        device = self.rotation.inv_freq.device
        work = _work_bytes(bundle, b, max_tokens) if max_tokens and has_kernels(device) else 0
        self.room = Room(bundle.geometry, b, max_tokens, prompt, budget, dtype.itemsize, device, work)
        self.layers: list[LayerCache | ExactLayer] = [
            LayerCache(bundle, layer, self.room, dtype, self.rotation) if formats
            else ExactLayer(bundle, layer, self.room, dtype, self.rotation)
            for layer, formats in enumerate(bundle.layers)
        ]  # fmt: skip
        self._packers: SidePackers | None = None
        self._prompt_packers: SidePackers | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copied cache loads its kernels anew: these look at the memory of this one."""
        return self.__dict__ | {"_packers": None, "_prompt_packers": None}

    def __iter__(self) -> Iterator[LayerCache | ExactLayer]:
        return iter(self.layers)

    @property
    def paged(self) -> list[LayerCache]:
        """Layers with a format."""
        return [layer for layer in self.layers if isinstance(layer, LayerCache)]

    @property
    def b(self) -> int:
        """Sequences."""
        return len(self.layers[0].lengths)

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence."""
        return list(self.layers[-1].lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all layers. The table of rotation angles, shared by all layers, is work space on top."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bits(self) -> float:
        """Bits per cached number with everything counted, as `CacheGeometry.bits` counts them."""
        geometry = self.bundle.geometry
        numbers = sum(geometry.numbers(n) for n in self.lengths)
        return 8 * (self.nbytes + geometry.bundle_bytes) / numbers if numbers else float("nan")

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the given old sequences: reorders, repeats (sharing pages) or drops them."""
        self.room.select(sequences)
        for layer in self.layers:
            layer.select(sequences)

    def reserve(self, sequence: int, tokens: int, prompt: int = 0, source: int | None = None) -> None:
        """Keeps room for an empty sequence until it holds so many tokens, `prompt` of them its prompt.

        Then no step of it can fail for want of pages. Raises CacheFullError, nothing changed, where there is none.
        source: it will begin as a fork of this sequence as that is now. Those tokens count among `tokens`, but not
        among the prompt, which comes behind them, and no room is kept for the pages that both will share.
        """
        if self.lengths[sequence]:
            raise ValueError(f"sequence {sequence} holds {self.lengths[sequence]} tokens already: release it first")
        shared = 0 if source is None else self.lengths[source]
        if tokens < shared:
            raise ValueError(f"{tokens} tokens, but sequence {source} holds {shared}: a fork of it has at least these")
        self.room.promise(sequence, tokens, prompt, shared)

    def free_tokens(self) -> int:
        """Tokens that one more sequence can be sure of now, its prompt not known: what admission goes by."""
        return self.room.free_tokens()

    def fork(self, source: int, sequence: int, tokens: int | None = None) -> None:
        """Lets an empty sequence begin as a copy of another one, sharing its full pages.

        tokens: of the first so many alone, which must be as many as `cut` says. Raises ValueError for other numbers.
        """
        n = self.lengths[source]
        if tokens is not None and tokens != n:
            if not 0 <= tokens < n or self.cut(tokens) != tokens:
                raise ValueError(
                    f"tokens={tokens}: of the {n} tokens of sequence {source} a fork has all, or as many as sinks and "
                    f"whole pages hold on all sides: {self.cut(min(max(tokens, 0), n))} here"
                )
            n = tokens
        self.room.share(source, sequence, n)
        for layer in self.layers:
            layer.share(source, sequence, n)

    def cut(self, tokens: int) -> int:
        """The most tokens of so many that a fork can be cut to: what sinks and whole pages hold on all sides. 0 where
        newest tokens are always kept in full precision, which pages have no copy of, or where windows slide."""
        sliding = any(layer.window for layer in self.layers if isinstance(layer, ExactLayer))
        return 0 if sliding else self.room.whole_pages(tokens)

    def release(self, sequence: int) -> None:
        """Ends a sequence: it is empty, and what it held or was promised is free."""
        self.room.release(sequence)
        for layer in self.layers:
            layer.release(sequence)

    def take_step(self, sequences: Sequence[int]) -> None:
        """Pages for one more token of each of these sequences. Raises CacheFullError before anything has changed."""
        self.room.take({i: self.layers[0].lengths[i] + 1 for i in sequences})

    def advance(self, sequences: Sequence[int]) -> None:
        """Counts a token that a device step of all layers has appended to each of these sequences."""
        lengths = self.layers[0].lengths
        for i in sequences:
            lengths[i] += 1
        used: dict[Filling, list[int]] = {}
        for layer in self.layers:  # between steps all hold as many tokens, and pages where they fill alike
            layer.lengths[:] = lengths
            for side in layer.sides:
                known = used.get(filling(side.format))
                if known is None:
                    side.advance(lengths, sequences)
                    used[filling(side.format)] = side.used
                else:
                    side.used[:] = known

    @contextmanager
    def transaction(self, sequences: Sequence[int]) -> Iterator[None]:
        """Around a step of one token for each of these sequences: where it breaks off, nothing has changed.

        Layers come one after the other, so a pass that fails has given the token to some and not to others.
        """
        lengths, promises = self.lengths, self.room.promises()
        try:
            yield
        except BaseException:  # Ctrl-C, too
            for layer in self.layers:
                for i in sequences:
                    layer.rewind(i, lengths[i])
            self.room.trim()
            self.room.promise_again(promises)
            raise

    def spans(self, b: int) -> list[int]:
        """Numbers of tokens up to which device steps of b sequences are dealt out differently; the last is the most."""

        def dealt(tokens: int) -> list[Sharing]:
            return [layer.step(self.bundle.model.h_q).sharing(b, tokens) for layer in self.layers]

        lengths = spans(self.room.max_tokens)
        return [n for n, longer in pairwise(lengths) if dealt(n) != dealt(longer)] + lengths[-1:]

    def filling(self, sequences: Sequence[int]) -> list[int]:
        """Those of these sequences that fill a page with their newest token."""
        lengths, ends = self.layers[0].lengths, [(t, sinks + recent) for t, sinks, recent in self.room.tables]
        return [i for i in sequences if any(lengths[i] > n and (lengths[i] - n) % t == 0 for t, n in ends)]

    def step_inputs(self, b: int) -> StepInputs:
        """Inputs of device steps of the first b sequences, at an address of their own."""
        return StepInputs(b, self.room.device)

    def begin_unpacking(self) -> None:
        """Begins to compile what prompts behind a sequence load, on a GPU: until then only those who need it wait."""
        if self.room.device.type == "cuda":
            joining = [join_unit(self.dtype)] if has_flash(self.dtype, self.room.device) else []
            jit.begin([*unpack.units(self.bundle, [self.dtype]), *joining], self.room.device)

    @property
    def packers(self) -> SidePackers:
        """What packs pages behind a device step of all layers; loads kernels."""
        if self._packers is None:
            self._packers = SidePackers(self.room.sides)
        return self._packers

    @property
    def prompt_packers(self) -> SidePackers:
        """What packs prompts, several layers at a time (`runtime.intake`); loads kernels. What these meet is told apart
        from what those of steps do, which may be queued."""
        if self._prompt_packers is None:
            self._prompt_packers = SidePackers(self.room.sides)
        return self._prompt_packers

    def check(self) -> None:
        """Waits for the device and raises KernelError where a kernel met numbers that it cannot pack."""
        check_all(self._loaded_packers + (self._packers.packers if self._packers else []))

    @property
    def _loaded_packers(self) -> list[Packer]:
        """Of prompts and of single sides; those of steps are others."""
        together = self._prompt_packers.packers if self._prompt_packers else []
        return together + [side.loaded_packer for side in self.room.sides if side.loaded_packer]

    @contextmanager
    def checked_once(self) -> Iterator[None]:
        """Within it, a GPU is not waited for layer by layer to say whether it could pack what is appended, but once.

        Raises KernelError in the end where it could not; tokens were appended all the same: release their sequence.
        """
        self.room.checks = False
        try:
            yield
        except BaseException:
            forget_all(self._loaded_packers)
            raise
        finally:
            self.room.checks = True
        check_all(self._loaded_packers)
