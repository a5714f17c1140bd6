"""The model that lm-evaluation-harness knows as `signpost`; importing this registers it."""

import logging
from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from artifacts import Bundle, load
from artifacts.errors import SignpostError, UnsupportedModelError
from runtime.hf import SignpostCache
from runtime.hf_load import model_path, resolve_device
from runtime.hf_model import with_cache
from runtime.lm_eval.scoring import Request, score

_log = logging.getLogger(__name__)

_ONE_DEVICE = "a compressed cache lies on one device: name one, as in device=cuda:0"
_OTHER_WEIGHTS = "a bundle is of the weights that it was calibrated on: save the changed model, and calibrate that one"
REFUSED = {  # arguments of HFLM, and the way out
    "parallelize": _ONE_DEVICE,
    "device_map": _ONE_DEVICE,
    "tp_plan": _ONE_DEVICE,
    "peft": _OTHER_WEIGHTS,
    "delta": _OTHER_WEIGHTS,
    "autogptq": _OTHER_WEIGHTS,
    "gptqmodel": _OTHER_WEIGHTS,
    "gguf_file": _OTHER_WEIGHTS,
    "mixed_precision_dtype": "weights and window have one dtype: give it as dtype=",
    "logits_cache": "it takes what a context is for a part of the text before; equal contexts in a batch are read once "
    "as it is, so leave it out",
}


@register_model("signpost")
class SignpostLM(HFLM):
    """A causal model of transformers whose cache is compressed. Tasks, templates and tokenization are HFLM's.

    pretrained  folder, hub id, `tiny` for the embedded model, or a model; with a model, `tokenizer` as well
    bundle      folder, or a bundle; calibrated for this model
    tail, chunk  as in `runtime.lm_eval.scoring.score`
    device      None: a GPU if there is one
    batch_size  requests at a time
    Other arguments are HFLM's, but for those in REFUSED. Raises SignpostError for arguments that make no sense here,
    and what `artifacts.load` and `SignpostCache` raise.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        bundle: str | Path | Bundle | None = None,
        tail: int = 1,
        chunk: int = 32,
        device: str | None = None,
        batch_size: int | str = 1,
        backend: str = "default",
        **kwargs: Any,
    ):
        if bundle is None:
            raise SignpostError("no bundle: add bundle=FOLDER, as written by `python -m calib`, to --model_args")
        self.tail, self.chunk = _at_least("tail", tail, 0), _at_least("chunk", chunk, 1)
        if str(batch_size).startswith("auto"):
            raise SignpostError(f"batch_size={batch_size}: it is not found out here; give a number, as in batch_size=8")
        for name in REFUSED.keys() & kwargs.keys():
            if kwargs[name] not in (None, False):
                raise SignpostError(f"{name}={kwargs[name]}: {REFUSED[name]}")
        self.bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        super().__init__(
            model_path(pretrained) if isinstance(pretrained, str) else pretrained,
            backend=backend,
            device=str(resolve_device(device or "auto")),
            batch_size=_at_least("batch_size", batch_size, 1),
            **kwargs,
        )
        SignpostCache(self.model, self.bundle)  # raises what does not fit before requests are tokenized

    def _get_backend(self, config: Any, backend: Any = "default", trust_remote_code: bool | None = False) -> None:
        super()._get_backend(config, backend, trust_remote_code)
        if self.backend != "causal":
            raise UnsupportedModelError(
                f"{config.model_type} with backend={self.backend}: only causal models can be compressed; "
                "take --model hf for others"
            )

    def _model_call(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("logits without a compressed cache: take --model hf for the model as it is")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        cache = SignpostCache(self.model, self.bundle)
        return super()._model_generate(context, max_length, stop, **with_cache(self.model, cache), **generation_kwargs)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """As HFLM's. Longest first, so that a batch too large fails at once; equal contexts share a batch."""
        cut = [self._request(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(cut)), key=lambda i: (-len(cut[i].context), cut[i].context, -len(cut[i].continuation)))
        found: dict[int, tuple[float, bool]] = {}
        size = override_bs or self.batch_size
        bar = tqdm(total=len(cut), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            answers = score(self.model, self.bundle, [cut[i] for i in batch], self.tail, self.chunk, self.softmax_dtype)
            for i, answer in zip(batch, answers, strict=True):
                found[i] = answer
                if requests[i][0] is not None:  # windows of a longer text have no name
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
            bar.update(len(batch))
        bar.close()
        return [found[i] for i in range(len(cut))]

    def _request(self, context: list[int], continuation: list[int]) -> Request:
        """Cut on the left, as HFLM does, to what the model has positions for; the last token is not read."""
        if len(continuation) > self.max_length:
            raise SignpostError(
                f"{len(continuation)} tokens to score exceed the model's {self.max_length} positions: "
                "take a shorter text, or a larger max_length= if the model has more"
            )
        excess = len(context) + len(continuation) - (self.max_length + 1)
        if excess > 0:
            _log.warning("a request is %d tokens too long: its context loses as many on the left", excess)
        return Request(tuple(context[max(0, excess) :]), tuple(continuation))

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's, and what the cache was: it goes into the results."""
        bits = self.bundle.geometry.bits(self.max_length)
        ours = {"recipe": self.bundle.recipe, "bits": bits, "tail": self.tail, "chunk": self.chunk}
        return super().get_model_info() | {f"signpost_{name}": value for name, value in ours.items()}


def _at_least(name: str, value: Any, least: int) -> int:
    """As an integer. Raises SignpostError for what is none, or less."""
    if not str(value).isdecimal() or int(value) < least:
        raise SignpostError(f"{name}={value}: must be an integer of {least} or more; set it so, or leave it out")
    return int(value)
