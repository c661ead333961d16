"""Arguments of linear attention: which layers have it, and sizes that must be there."""

from __future__ import annotations

import pytest
from megatron_families import BASE, FAMILIES

from ckpt.arch import choose_architecture
from ckpt.errors import FamilyError
from ckpt.training import parse_training_args

VALUES = {**BASE, **FAMILIES["qwen3next"], "padded_vocab_size": 384}
SHAPES = {"decoder.layers.0.mlp.shared_experts.gate_weight": (1, 80)}


def parse(**changes):
    values = {**VALUES, **changes}
    return parse_training_args({k: v for k, v in values.items() if v is not ...}, SHAPES)


@pytest.mark.parametrize(
    ("freq", "kinds"),
    [(2, "dada"), (4, "ddda"), (3, "ddad"), (1, "aaaa"), ([1, 0, 0, 1], "daad")],
)
def test_a_frequency_gives_attention_to_every_nth_layer(freq, kinds):
    """A list says it layer by layer."""
    names = {"d": "linear_attention", "a": "attention"}
    assert parse(linear_attention_freq=freq).mixers == tuple(names[kind] for kind in kinds)


@pytest.mark.parametrize("freq", [0, -1, True, "4", None, [1, 0], [1, 0, 2, 0], 2.0])
def test_a12_a_frequency_that_does_not_fit_is_refused(freq):
    with pytest.raises(FamilyError, match="linear_attention_freq does not fit"):
        parse(linear_attention_freq=freq)


@pytest.mark.parametrize(
    "changes",
    [
        {"experimental_attention_variant": "gdn"},
        {"experimental_attention_variant": ..., "linear_attention_type": "gated_delta_net"},
        {"experimental_attention_variant": None, "linear_attention_type": "gated_delta_net"},
    ],
)
def test_older_and_newer_names_mean_the_same(changes):
    args = parse(**changes)
    assert args.linear_attention == "gated_delta_net"
    assert choose_architecture(args).name == "qwen3_next"


@pytest.mark.parametrize(
    "name",
    [
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ],
)
def test_a_size_that_is_absent_or_no_number_is_asked_for_by_name(name):
    for value in (..., None, 0, "4", True):
        with pytest.raises(FamilyError, match=name):
            parse(**{name: value})


def test_value_heads_are_a_multiple_of_key_heads():
    with pytest.raises(FamilyError, match="no multiple of linear_num_key_heads"):
        parse(linear_num_value_heads=10)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_output_gate": False}, "attention_gate is False"),
        ({"experimental_attention_variant": "dsa"}, "linear_attention is None"),
        ({"experimental_attention_variant": "gdn2"}, "linear_attention is None"),
        ({"use_rope_scaling": True}, "rope_is_scaled is True"),
        ({"qk_layernorm": False}, "qk_norm is False"),
        ({"mtp_num_layers": 2}, "mtp_kept is 2"),
        ({"mtp_num_layers": 1, "linear_attention_freq": 3}, "further_layers_attend is False"),
        ({"moe_router_score_function": "sigmoid"}, "router_score is 'sigmoid'"),
    ],
)
def test_what_qwen3_nexts_class_cannot_do_is_refused(changes, reason):
    with pytest.raises(FamilyError, match=reason):
        choose_architecture(parse(**changes), "qwen3_next")
