"""The address of collected statistics changes with every bit of the weights."""

import pytest
import torch

from calib.inputs import of_model, weights_digest


def change_a_bit(weight):
    weight.view(torch.int32)[-1, -1] ^= 1


def swap_two_columns(weight):
    weight[:, [0, 1]] = weight[:, [1, 0]]


def swap_two_rows(weight):
    weight[[0, 1]] = weight[[1, 0]]


@pytest.mark.parametrize("change", [change_a_bit, swap_two_columns, swap_two_rows])
def test_changed_and_moved_weights_are_other_weights(tiny_model, change):
    model, same = tiny_model("llama", torch.float32), tiny_model("llama", torch.float32)
    assert weights_digest(model) == weights_digest(same)
    change(same.model.layers[1].mlp.up_proj.weight)
    assert weights_digest(model) != weights_digest(same)


def test_the_address_names_model_precision_and_versions(tiny_model):
    one, other = of_model(tiny_model("llama", torch.float32)), of_model(tiny_model("llama", torch.float64))
    assert (one["dtype"], other["dtype"]) == ("float32", "float64")
    assert one["versions"]["torch"] == torch.__version__
    assert one["model"]["architecture"] == "LlamaForCausalLM"
    assert "name" not in one["model"]
