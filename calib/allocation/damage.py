"""What each candidate costs in quality: measured on the model, one side of one layer at a time.

Damage is KL(full precision || compressed) of the next token, in nats, mean over the tokens of the text, with everything
else in full precision. Damages of sides nearly add up (docs/allocation.md), so a table of them predicts any mixture. A
variant is measured at the first filling, and a filling with the variant of middling size; the damage of any variant at
any filling is taken to be the product.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel

from artifacts import Bundle, Format, PageGeometry
from calib.allocation.candidates import SIDES, Candidates
from calib.allocation.damages import Damages
from calib.evaluate import Both, attend_both, packed
from calib.forward import Head, at_least_float32, blocks, forward_as, hidden_states, kl_divergence, require_finite
from calib.passes import ALONE, Work
from calib.progress import track
from runtime.codec import Codec
from runtime.exact import causal_attention
from runtime.hf import AttendingCache
from runtime.hf_decoder import decoder_layers
from runtime.hf_model import rotary, text_config
from runtime.rope import Rotation

SMALLEST = 1e-9  # nats; a damage below is noise, and products of ratios need numbers above zero


class OneSide(AttendingCache):
    """Keys or values of one layer as a cache in `format` would hold them at each query's turn; all else exact."""

    def __init__(self, model: PreTrainedModel, layer: int, side: int, format: Format, codec: Codec, rotation: Rotation):
        super().__init__(model)
        self.layer, self.side, self.format, self.codec = layer, side, format, codec
        self.rotation = rotation if format.domain == "pre_rope" else None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        if layer != self.layer:
            return causal_attention(q, k, v, scaling, self.window(layer), self.softcap).transpose(1, 2)
        key, value = Both(k, k, self.format), Both(v, v, self.format)
        if self.side == 0:
            key = key._replace(packed=packed(k, self.format, self.codec, self.rotation))
        else:
            value = value._replace(packed=packed(v, self.format, self.codec, None))
        return attend_both(q, key, value, scaling, self.window(layer), self.softcap)


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    ids: Tensor,
    candidates: Candidates,
    fitted: Mapping[str, Bundle],
    progress: Progress | None = None,
    work: Work = ALONE,
) -> Damages:
    """Damages of all candidates on ids, int64 [windows, n]; layers are spread over the ranks of `work`.

    fitted: bundles that hold the tensors, by `<side>.<variant>`. Raises ActivationError for NaN or infinity.
    """
    l = text_config(model).num_hidden_layers
    formats = next(iter(fitted.values())).layers
    mine = [layer for layer in range(l) if formats[layer] and work.ranks.owner(layer) == work.ranks.rank]
    keys, values, fillings = (len(candidates.names("key")), len(candidates.names("value")), len(candidates.fillings))
    found = Damages(np.zeros((l, keys)), np.zeros((l, values)), np.zeros((l, 2, fillings)))
    steps = ids.shape[0] * len(mine) * (keys + values + 2 * (fillings - 1))
    report = track(progress, "measuring damage", steps)
    rope, frequencies = rotary(model)
    for window in ids:
        passes = _Passes(model, window[None].to(model.device), l)
        for layer in mine:
            rotation = Rotation(rope, frequencies, model.device)
            _layer(model, passes, layer, candidates, fitted, rotation, found, report)
    everyone = work.ranks.gather([torch.from_numpy(x) for x in found])
    total = [sum(parts).numpy() / ids.shape[0] for parts in zip(*everyone, strict=True)]
    return Damages(*(np.maximum(x, SMALLEST) for x in total))


def _layer(
    model: PreTrainedModel,
    passes: "_Passes",
    layer: int,
    candidates: Candidates,
    fitted: Mapping[str, Bundle],
    rotation: Rotation,
    found: Damages,
    report: Callable[[], None],
) -> None:
    """Adds one layer's damages on one window."""
    for index, side in enumerate(SIDES):
        example = next(iter(fitted.values())).model
        middle = candidates.middle(side, example.h_kv, example.d)
        for variant, name in enumerate(candidates.names(side)):
            bundle = fitted[f"{side}.{name}"]
            for filling, when in enumerate(candidates.fillings):
                if filling and variant != middle:
                    continue
                fmt = candidates.format(side, name, when)
                geometry = PageGeometry.of(fmt, example.h_kv, example.d, side)
                codec = Codec(geometry, bundle.side_tensors(layer, side), model.device)
                damage = passes.damage(layer, OneSide(model, layer, index, fmt, codec, rotation))
                if not filling:
                    (found.key, found.value)[index][layer, variant] += damage
                if variant == middle:
                    found.fillings[layer, index, filling] += damage
                report()


class _Passes:
    """Forward passes over one window that begin at a layer: what the layers below gave is kept."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, l: int):
        self.model, self.ids, self.modules = model, ids, decoder_layers(model, l)
        self.outputs: list[Any] = []
        with ExitStack() as hooks:
            for module in self.modules:
                hook = module.register_forward_hook(lambda _, args, output: self.outputs.append(output))
                hooks.callback(hook.remove)
            self.full = hidden_states(model, ids)
        require_finite(self.full, "the model's hidden states")
        self.head = Head(model)

    def damage(self, layer: int, cache: AttendingCache) -> float:
        """KL in nats, mean over the tokens, of a pass with `cache`, which changes nothing below `layer`."""
        with _skipped(self.modules[:layer], self.outputs):
            hidden = hidden_states(self.model, self.ids, cache)
        total, n = 0.0, self.ids.shape[1]
        for rows in blocks(n):
            p, q = (F.log_softmax(at_least_float32(self.head(x[:, rows])[0]), -1) for x in (self.full, hidden))
            require_finite(q, "logits with a compressed cache")
            total += kl_divergence(p, q).sum().item()
        return total / n


@contextmanager
def _skipped(modules: nn.ModuleList, outputs: list[Any]) -> Iterator[None]:
    """Lets modules give what they gave before, without computing it."""
    with ExitStack() as replaced:
        for module, output in zip(modules, outputs, strict=False):
            replaced.enter_context(forward_as(module, lambda *args, output=output, **kwargs: output))
        yield
