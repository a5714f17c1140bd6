"""A transformers model as the decoder of an `Engine`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from artifacts import Bundle, Split
from artifacts.errors import UnsupportedModelError
from runtime.decoding import Attend
from runtime.hf import AttendingCache
from runtime.hf_model import share_of, tensor_mesh, text_config, with_cache
from runtime.inductor import compiling


class _Relay(AttendingCache):
    """Hands attention on to whoever runs the pass."""

    relay: Attend

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        return self.relay(layer, q, k, v, positions, scaling)


class HFDecoder:
    """Any model that `runtime.hf.fingerprint` supports. The model stays usable for other passes.

    Where transformers shares the model among ranks, every rank has a decoder of its share.
    bundle   of the model, which is then checked
    compile  decode steps run the model's layers through torch.compile, which fuses what transformers launches one by
             one; the first steps of each batch size take seconds to compile. Prompts are not compiled
    Raises BundleMismatchError for a bundle of another model, FormatError for one whose heads the ranks cannot share,
    UnsupportedModelError where `compile` finds no layers, or a share of them.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle | None = None, compile: bool = False):
        self.model = model
        if bundle is not None:
            self.require(bundle)
        if compile and tensor_mesh(model):
            raise UnsupportedModelError("compile: not yet where several ranks share a model; leave it out")
        self._cache = _Relay(model)
        self._layers = _CompiledLayers(model) if compile else None
        config = text_config(model)
        self.positions = cast("int | None", getattr(config, "max_position_embeddings", None))
        self.vocabulary = int(config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where weights and tokens live."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.model.dtype

    @property
    def split(self) -> Split:
        """Which share of the kv heads this process attends with."""
        return self._cache.split

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        mesh = tensor_mesh(self.model)
        return mesh.size() if mesh else 1

    def agree(self, tokens: Tensor) -> Tensor:
        """Those of the first of the ranks that share the model, which all call this."""
        mesh = tensor_mesh(self.model)
        if mesh is not None:
            dist.broadcast(tokens, group=mesh.get_group(), group_src=0)
        return tokens

    def require(self, bundle: Bundle) -> None:
        """Raises BundleMismatchError for a bundle of another model, FormatError for heads that ranks cannot share."""
        share_of(self.model, bundle)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, behind: Tensor | None = None) -> Tensor:
        """Logits float32 [b, vocabulary] behind the last of tokens int64 [b, m] at positions int64 [b, m], or behind
        token behind[row] of each row, int64 [b]."""
        self._cache.reset()
        self._cache.relay = attend
        stepping = self._layers.used(len(tokens)) if self._layers and tokens.shape[1] == 1 else nullcontext()
        try:
            with stepping:
                out = cast(Any, self.model)(
                    input_ids=tokens, position_ids=positions, use_cache=True,
                    logits_to_keep=1 if behind is None else behind,
                    **with_cache(self.model, self._cache),
                )  # fmt: skip
        finally:
            del self._cache.relay  # it holds on to a cache
        if behind is None:
            return out.logits[:, -1].float()
        row = torch.arange(len(tokens), device=tokens.device)
        return out.logits[row, row].float()  # of every row there are those behind all of these tokens


def decoder_layers(model: PreTrainedModel, layers: int) -> nn.ModuleList:
    """The decoder's list of layers. Raises UnsupportedModelError where it has none of that length."""
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} keeps its {layers} layers in no list: they cannot be reached")


class _CompiledLayers:
    """The decoder layers of a model, compiled for passes of one token: twice a layer, around its attention."""

    def __init__(self, model: PreTrainedModel):
        self.layers = decoder_layers(model, text_config(model).num_hidden_layers)
        self.compiled = [torch.compile(layer._call_impl) for layer in self.layers]

    @contextmanager
    def used(self, b: int) -> Iterator[None]:
        """Within it the model runs them in place of its own, for b sequences."""
        own = [layer._compiled_call_impl for layer in self.layers]
        for layer, compiled in zip(self.layers, self.compiled, strict=True):
            layer._compiled_call_impl = compiled
        try:
            with compiling(b):
                yield
        finally:
            for layer, before in zip(self.layers, own, strict=True):
                layer._compiled_call_impl = before
