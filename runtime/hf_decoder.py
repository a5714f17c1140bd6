"""A transformers model as the decoder of an `Engine`."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from artifacts import Bundle
from runtime.decoding import Attend
from runtime.hf import AttendingCache, require_fit, text_config


class _Relay(AttendingCache):
    """Hands attention on to whoever runs the pass."""

    relay: Attend

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        return self.relay(layer, q, k, v, positions, scaling)


class HFDecoder:
    """Any model that `runtime.hf.fingerprint` supports. The model stays usable for other passes.

    Raises BundleMismatchError for a bundle of another model.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle | None = None):
        self.model = model
        if bundle is not None:
            self.require(bundle)
        self._cache = _Relay(model)
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

    def require(self, bundle: Bundle) -> None:
        """Raises BundleMismatchError for a bundle of another model."""
        require_fit(self.model, bundle)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits float32 [b, vocabulary] behind the last of tokens int64 [b, m] at positions int64 [b, m]."""
        self._cache.reset()
        self._cache.relay = attend
        try:
            out = cast(Any, self.model)(
                input_ids=tokens, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        finally:
            del self._cache.relay  # it holds on to a cache
        return out.logits[:, -1].float()
