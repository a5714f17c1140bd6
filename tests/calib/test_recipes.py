"""Every recipe of conf/method: its cache allocates what the geometry says, and both attention paths agree on it."""

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from artifacts import Bundle, LayerFormat, ModelFingerprint, PageShape, Rope
from calib.__main__ import CONF
from calib.config import Settings, register
from runtime import KVCache

RECIPES = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
H_Q, H_KV, D = 4, 2, 64
PROMPT, MORE = 300, 140


def bundle(layer: LayerFormat) -> Bundle:
    """Plain tensors for one layer: whole ranges, even signposts, orthogonal matrices."""
    rng = np.random.default_rng(0)
    plain = {
        "scale": lambda shape: np.full(shape, 3),
        "zero": lambda shape: np.zeros(shape),
        "lower": lambda shape: np.full(shape, -3),
        "upper": lambda shape: np.full(shape, 3),
        "signposts": lambda shape: np.linspace(-1, 1, *shape),
        "rotation": lambda shape: np.linalg.qr(rng.normal(size=shape))[0],
        "sketch": lambda shape: rng.normal(size=shape),
        "outlier_sketch": lambda shape: rng.normal(size=shape),
        "outlier_mask": lambda shape: np.arange(shape[1])[None].repeat(shape[0], 0) < 4,
    }
    tensors = {"rope.inv_freq": (10000.0 ** -(np.arange(0, D, 2) / D)).astype(np.float32)}
    for side, fmt in (("key", layer.key), ("value", layer.value)):
        for name, spec in fmt.bundle_tensors(PageShape(fmt.t, H_KV, D)).items():
            tensors[f"layers.0.{side}.{name}"] = plain[name](spec.shape).astype(spec.dtype)
    model = ModelFingerprint("m", "M", 1, H_Q, H_KV, D, Rope(D, "half", 1.0, "default"), "0", "0")
    return Bundle("recipe", model, (layer,), tensors)


def numbers(m: int, seed: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, h, m, D, generator=g) for h in (H_Q, H_KV, H_KV))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_and_paths(recipe: str, bits: int) -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = Settings.of(compose("config", [f"method={recipe}", f"bits={bits}"]))
    made = bundle(settings.layer_format(0))
    kv = KVCache(made, 1, max_tokens=PROMPT + MORE, prompt=PROMPT)
    expected = made.geometry.cache_bytes(PROMPT + MORE, 4, PROMPT)
    assert kv.nbytes == expected
    layer = kv.layers[0]
    layer.attend(*numbers(PROMPT, 0), torch.arange(PROMPT)[None], None, D**-0.5)
    for i in range(MORE):
        layer.attend(*numbers(1, 1 + i), torch.tensor([[PROMPT + i]]), None, D**-0.5)
    assert kv.nbytes == expected
    shared = sum(side.bundle_bytes for side in made.geometry.layers[0])
    assert kv.bits == 8 * (expected + shared) / (2 * (PROMPT + MORE) * H_KV * D)
    q, k, v = (x[0] for x in numbers(1, 999))
    dense, fused = layer._attend_dense(0, q, k, v, D**-0.5), layer._attend_one(0, q, k, v, D**-0.5)
    # Both sum n d float32 products; a relative 2^-24 each, and scores of a few units: far below 1e-4 of the output.
    assert (dense - fused).abs().max() <= 1e-4 * dense.abs().max()
