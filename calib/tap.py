"""The tap: keys before RoPE and values of every layer, and the loss's gradients with respect to both, sample by sample.

Works on any decoder that hands its keys to a transformers cache: the cache is the tap. Gradients are taken of the
activations alone; no gradient of any weight is ever allocated.

A pass without gradients shows each layer as the model comes to it and keeps none. The backward pass goes layer by
layer: the forward pass keeps nothing but what went into each decoder layer, and each layer runs again when its turn
comes, for one more forward pass. So activations take the memory of one layer, whatever their number.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

from calib.forward import Head, at_least_float32, blocks, hidden_states, require_finite
from runtime.hf import UnsupportedModelError
from runtime.hf_decoder import decoder_layers
from runtime.hf_model import kv_heads, require_keys_and_values, rotary_by_layer, text_config
from runtime.rope import Rotation


@dataclass(frozen=True)
class Activations:
    """Keys before and after RoPE and values of one layer and one sample, and their gradients: float32 [n, h_kv, d].

    Gradients are of the summed next-token loss (None without a backward pass).
    """

    layer: int
    key: Tensor
    rotated_key: Tensor
    value: Tensor
    key_gradient: Tensor | None
    rotated_key_gradient: Tensor | None
    value_gradient: Tensor | None


class _Finite:
    """Tensors that have to be finite, looked at together: every look makes the host wait for the GPU."""

    def __init__(self) -> None:
        self.flags: list[tuple[str, Tensor]] = []

    def add(self, x: Tensor, what: str) -> None:
        self.flags.append((what, torch.isfinite(x).all()))

    def check(self) -> None:
        """Raises ActivationError for the first of them that is not."""
        flags, self.flags = self.flags, []
        if not all(torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist()):
            for what, flag in flags:
                require_finite(torch.where(flag, 0.0, torch.nan), what)


class _ShowingCache(DynamicCache):
    """Shows what every layer hands over, [1, h_kv, n, d], keeps nothing and hands it on as it is.

    Raises ActivationError for NaN or infinity, naming the layer.
    """

    def __init__(self, show: Callable[[int, Tensor, Tensor], None]):
        super().__init__()
        self.show = show

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        finite = _Finite()
        finite.add(key_states, f"layer {layer_idx}: keys")
        finite.add(value_states, f"layer {layer_idx}: values")
        finite.check()
        self.show(layer_idx, key_states, value_states)
        return key_states, value_states


class _KeepingCache(DynamicCache):
    """Keeps what every layer hands over, [1, h_kv, n, d], and hands it on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}
        self.finite: _Finite | None = _Finite()  # None: the numbers have been looked at

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.finite:
            self.finite.add(key_states, f"layer {layer_idx}: keys")
            self.finite.add(value_states, f"layer {layer_idx}: values")
        self.taken[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def check(self) -> None:
        """Raises ActivationError for NaN or infinity in anything that has been handed over, naming the layer."""
        if self.finite:
            self.finite.check()
            self.finite = None


class Tap:
    """Runs a model over samples and shows `Activations` layer by layer.

    Raises UnsupportedModelError for a model without keys and values, or whose rotary embedding is none of ours.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        require_keys_and_values(text_config(model))
        by_layer = rotary_by_layer(model)
        distinct = {id(frequencies): Rotation(rope, frequencies, model.device) for rope, frequencies in by_layer}
        self.rotations = [distinct[id(frequencies)] for _, frequencies in by_layer]
        self._elsewhere: dict[tuple[int, torch.device], Rotation] = {}
        self.layers, self.h_kv = len(by_layer), kv_heads(text_config(model))

    def run(self, ids: Tensor, gradients: bool, see: Callable[[Activations], None]) -> None:
        """Calls `see` for every layer of one sample, ids int64 [n]: in order, with gradients from last to first.

        Raises ActivationError for NaN or infinity, naming the layer, and whatever `see` raises.
        """
        ids = ids[None].to(self.model.device)
        if gradients:
            self._backward(ids, see)
            return

        def show(layer: int, k: Tensor, v: Tensor) -> None:
            with pause():
                see(self._activations(layer, k, v, None, None))

        with torch.no_grad(), _deterministic(ids.device) as pause:
            hidden_states(self.model, ids, _ShowingCache(show))

    def _backward(self, ids: Tensor, see: Callable[[Activations], None]) -> None:
        calls, finite = _Calls(self.model, self.layers), _Finite()
        with _deterministic(ids.device):
            hidden = calls.forward(ids)
            calls.cache.check()
            (gradient,) = torch.autograd.grad(hidden, calls.last, _loss_gradient(self.model, hidden, ids))
        del hidden
        for layer in reversed(range(self.layers)):
            with _deterministic(ids.device):
                k, v, k_gradient, v_gradient, gradient = calls.gradients(layer, gradient)
            finite.add(k_gradient, f"layer {layer}: gradients of keys")
            finite.add(v_gradient, f"layer {layer}: gradients of values")
            see(self._activations(layer, k, v, k_gradient, v_gradient))
        finite.check()

    def _rotation(self, layer: int, device: torch.device) -> Rotation:
        """A model's layers may be on several devices."""
        rotation = self.rotations[layer]
        if rotation.inv_freq.device == device:
            return rotation
        key = id(rotation), device
        if key not in self._elsewhere:
            self._elsewhere[key] = Rotation(rotation.rope, rotation.inv_freq, device)
        return self._elsewhere[key]

    def _activations(
        self, layer: int, k: Tensor, v: Tensor, k_gradient: Tensor | None, v_gradient: Tensor | None
    ) -> Activations:
        k, v = (_one_of_each(x, self.h_kv) for x in (k, v))
        positions, rotation = torch.arange(k.shape[2], device=k.device), self._rotation(layer, k.device)
        before, before_gradient = rotation.unrotate(k, positions), None
        if k_gradient is not None and v_gradient is not None:
            k_gradient, v_gradient = (_summed(x, self.h_kv) for x in (k_gradient, v_gradient))
            before_gradient = _by_token(rotation.pull_back(k_gradient, positions))
            k_gradient, v_gradient = _by_token(k_gradient), _by_token(v_gradient)
        return Activations(
            layer, _by_token(before), _by_token(k), _by_token(v), before_gradient, k_gradient, v_gradient
        )


def _by_token(x: Tensor) -> Tensor:
    """[1, h_kv, n, d] as float32 [n, h_kv, d]."""
    return x[0].transpose(0, 1).float()


def _one_of_each(x: Tensor, h_kv: int) -> Tensor:
    """[1, heads, n, d] as [1, h_kv, n, d]: Falcon hands over a copy of a kv head for each of its query heads."""
    return x[:, :: x.shape[1] // h_kv]


def _summed(gradient: Tensor, h_kv: int) -> Tensor:
    """The gradient of a kv head is the sum of those of its copies."""
    return gradient.unflatten(1, (h_kv, -1)).sum(2)


class _Calls:
    """One forward pass of a model, of which every decoder layer can be run again."""

    last: Tensor  # what the last layer gave; the hidden states depend on it

    def __init__(self, model: PreTrainedModel, layers: int):
        self.model, self.modules = model, decoder_layers(model, layers)
        self.cache = _KeepingCache()
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states [1, n, hidden] of ids [1, n], with a graph back to `last` and no further."""
        hooks = [m.register_forward_pre_hook(self._before, with_kwargs=True) for m in self.modules]
        hooks += [m.register_forward_hook(self._after) for m in self.modules]
        try:
            with torch.enable_grad():
                return hidden_states(self.model, ids, self.cache)
        finally:
            for hook in hooks:
                hook.remove()

    def gradients(self, layer: int, of_output: Tensor) -> tuple[Tensor, ...]:
        """The layer's keys and values [1, h_kv, n, d], the gradients of both, and of its input, [1, n, hidden].

        of_output: gradient of the layer's output. Layers are taken from the last to the first.
        """
        args, kwargs = self.inputs.pop()
        hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        args, kwargs = (hidden, *args[1:]) if args else (), kwargs if args else kwargs | {"hidden_states": hidden}
        with torch.enable_grad():
            out = _first(self.modules[layer](*args, **kwargs))
            k, v = self.cache.taken.pop(layer)
            return k.detach(), v.detach(), *torch.autograd.grad(out, (k, v, hidden), of_output.to(out.device))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs.append((args, kwargs))
        torch.set_grad_enabled(False)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.cache.taken.clear()
        torch.set_grad_enabled(True)
        if module is self.modules[-1]:
            self.last = _first(output).requires_grad_()


def _first(output: Any) -> Tensor:
    """A layer's hidden states, which some models return with other things behind."""
    return output[0] if isinstance(output, tuple) else output


def _loss_gradient(model: PreTrainedModel, hidden: Tensor, ids: Tensor) -> Tensor:
    """Gradient of the summed next-token loss of ids [1, n] with respect to the hidden states [1, n, hidden].

    Summed, not averaged: a mean would tie the scale of one sample's gradients to its length.
    """
    of_hidden, ids, head = torch.zeros_like(hidden), ids.to(hidden.device), Head(model)
    for rows in blocks(ids.shape[1] - 1):
        block = hidden[:, rows].detach().requires_grad_()
        with torch.enable_grad():
            logits = at_least_float32(head(block)[0])
            targets = ids[0, rows.start + 1 : rows.stop + 1].to(logits.device)
            loss = F.cross_entropy(logits, targets, reduction="sum")
        require_finite(loss, "behind the last layer: logits")
        of_hidden[:, rows] = torch.autograd.grad(loss, block)[0]
    return of_hidden


@contextmanager
def _deterministic(device: torch.device) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """The same bits every time: attention's backward pass on a GPU adds up in any order unless it is told not to.

    Yields a context in which the caller's own choice holds again.
    """
    if device.type != "cuda":
        yield nullcontext
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    flags: Any = torch.utils.deterministic
    fill = flags.fill_uninitialized_memory

    def require() -> None:
        flags.fill_uninitialized_memory = False  # filling costs time for nothing
        torch.use_deterministic_algorithms(True)  # not `warn_only`: flash attention takes that for no

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        flags.fill_uninitialized_memory = fill

    @contextmanager
    def pause() -> Iterator[None]:
        restore()
        try:
            yield
        finally:
            require()

    require()
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield pause
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(f"this model's gradients differ from run to run on a GPU: {reason}") from error
    finally:
        restore()
