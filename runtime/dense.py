"""A plain cache in full precision: what a compressed one is measured against, in the same engine."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from artifacts import ModelFingerprint
from runtime.decoding import Decoder, captured
from runtime.exact import causal_attention


class DenseCache:
    """Keys and values of `b` sequences of one length, for at most `capacity` tokens each, in layers that slide as well.

    model: the decoder's; dtype and device are the decoder's.
    """

    def __init__(self, decoder: Decoder, model: ModelFingerprint, b: int, capacity: int):
        self.decoder, self.model, self.length = decoder, model, 0
        size = (model.l, 2, b, model.h_kv, capacity, model.d)
        self.numbers = torch.zeros(size, dtype=decoder.dtype, device=decoder.device)
        self.tokens = torch.zeros(b, 1, dtype=torch.int64, device=decoder.device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.numbers.nbytes

    def append(self, tokens: Tensor) -> Tensor:
        """A pass over tokens int64 [b, m]: logits [b, vocabulary] behind the last."""
        m = tokens.shape[1]
        positions = torch.arange(self.length, self.length + m, device=tokens.device).expand(tokens.shape[0], m)
        logits = self.decoder.forward(tokens, positions, self._attend)
        self.length += m
        return logits

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
        end = self.length + k.shape[2]
        keys, values = self.numbers[layer]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        # cuDNN is the fastest of PyTorch's for one query over many keys; prompts are left to PyTorch's choice.
        one = k.shape[2] == 1 and k.device.type == "cuda" and k.dtype != torch.float32
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if one else nullcontext():
            window, softcap = self.model.window(layer), self.model.softcap
            return causal_attention(q, keys[:, :, :end], values[:, :, :end], scaling, window, softcap).transpose(1, 2)

    def capture(self, length: int) -> torch.cuda.CUDAGraph:
        """A CUDA graph of the step that appends token `length`, over and over: its time is that of this length."""
        self.length = length - 1
        return captured(self._again)[0]

    def _again(self) -> Tensor:
        logits = self.append(self.tokens)
        self.length -= 1
        return logits
