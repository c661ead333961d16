"""Training arguments that most families do not have are refused by name, never overlooked."""

from __future__ import annotations

import pytest
from builders import Model, write_legacy

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.errors import FamilyError
from ckpt.training.unusual import UNUSUAL, unusual_arguments

IN_USE = {
    "softmax_type": "learnable",
    "softmax_scale": 0.25,
    "hybrid_layer_pattern": "*-*",
    "hybrid_override_pattern": "*-*",
    "hybrid_attention_ratio": 0.08,
    "hybrid_mlp_ratio": 0.5,
    "experimental_attention_variant": "dsa",
    "linear_attention_type": "lightning",
    "mrope_section": [2, 3, 4],
    "heterogeneous_layers_config_path": "layers.json",
    "heterogeneous_layers_config_encoded_json": "{}",
    "moe_router_force_biased": 0.5,
}


def value_in_use(name, plain):
    if name in IN_USE:
        return IN_USE[name]
    return True if False in plain else 3


@pytest.mark.parametrize(("name", "plain", "meaning"), UNUSUAL, ids=[row[0] for row in UNUSUAL])
def test_an_argument_that_changes_the_network_stops_a_family_without_it(
    tmp_path, name, plain, meaning
):
    """The refusal names the argument, its value and what it does; nothing is written."""
    value = value_in_use(name, plain)
    source = write_legacy(tmp_path / "run", Model(args={name: value}))
    with pytest.raises(FamilyError) as caught:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert f"{name}={value!r}" in str(caught.value)
    assert meaning in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "plain", "meaning"), UNUSUAL, ids=[row[0] for row in UNUSUAL])
def test_the_plain_values_of_every_such_argument_are_accepted(name, plain, meaning):
    """Megatron stores each argument whether it is used or not."""
    del meaning
    for value in plain:
        assert unusual_arguments({name: value}) == ()


def test_sinkhorn_routing_is_refused(tmp_path):
    """Its choice of experts is not that of any Hugging Face class."""
    args = {"moe_router_load_balancing_type": "sinkhorn"}
    source = write_legacy(tmp_path / "run", Model(args=args))
    with pytest.raises(FamilyError, match="sinkhorn"):
        plan_conversion(source, ConvertOptions())


def test_dropped_tokens_in_training_are_reported(tmp_path):
    """The weights are right, but the served model does not drop tokens as training did."""
    from tiny_megatron import Ranks, TinyModel
    from tiny_megatron import write_legacy as write_tiny

    model = TinyModel("mixtral", args={"moe_expert_capacity_factor": 1.25})
    source = write_tiny(tmp_path / "run", model, Ranks())
    notes = plan_conversion(source, ConvertOptions()).notes
    assert any("capacity (factor 1.25)" in note for note in notes)
