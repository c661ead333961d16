"""Patterns of layers and Mamba's sizes: what is read, derived, asked for and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_families import BASE, FAMILIES

from ckpt.arch import choose_architecture
from ckpt.convert.hf_files import build_config
from ckpt.errors import FamilyError
from ckpt.tensors import DType
from ckpt.training import parse_training_args

VALUES = {**BASE, **FAMILIES["nemotron3"], "padded_vocab_size": 384}


def parse(**changes):
    values = {**VALUES, **changes}
    return parse_training_args({k: v for k, v in values.items() if v is not ...}, {})


def test_a_letter_is_a_layer_of_one_block():
    """M is Mamba, * attention, - an MLP, E experts."""
    args = parse(hybrid_override_pattern="M-*E", num_layers=4)
    assert args.mixers == ("mamba", "", "attention", "")
    assert args.feed_forwards == ("", "dense", "", "moe")
    kinds = ("mamba", "attention", "dense", "moe")
    found = [[kind for kind in kinds if args.has_kind(layer, kind)] for layer in range(4)]
    assert found == [["mamba"], ["dense"], ["attention"], ["moe"]]
    assert args.moe_layers == (False, False, False, True)


@pytest.mark.parametrize("stored", [None, ..., 8, 5])
def test_the_pattern_decides_the_number_of_layers(stored):
    """Newer versions store it without one; separators of pipeline stages are no layers."""
    changes = {"hybrid_override_pattern": None, "hybrid_layer_pattern": "MEM*|ME*E"}
    args = parse(num_layers=stored, **changes)
    assert (args.layers, args.hybrid_pattern) == (8, "MEM*ME*E")
    assert choose_architecture(args).name == "nemotron_h"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("MEX*", "MEX"), ("MG*-", "MG"), ("M D", "M D")],
)
def test_a12_patterns_with_other_layers_are_refused(pattern, found):
    """Newer versions have gated delta nets (G), sparse attention (D) and layers for MTP."""
    with pytest.raises(FamilyError) as caught:
        parse(hybrid_override_pattern=pattern)
    assert found in str(caught.value)
    with pytest.raises(FamilyError, match="no text"):
        parse(hybrid_override_pattern=["M", "E"])


def test_the_number_of_heads_may_follow_from_the_hidden_size():
    """Megatron makes them twice as wide as the hidden state, with a note in the report."""
    args = parse(mamba_num_heads=None, mamba_head_dim=16)
    assert args.mamba_heads == 2 * 80 // 16
    assert any("derived mamba_num_heads = 10" in note for note in args.notes)


def test_layers_for_further_tokens_behind_the_pattern_are_counted():
    """They are not written; where they are dropped on purpose the rest converts."""
    args = parse(hybrid_override_pattern=None, hybrid_layer_pattern="ME*M|ME*E/*E/*E")
    assert (args.hybrid_pattern, args.mtp_layers) == ("ME*MME*E", 2)
    with pytest.raises(FamilyError, match="mtp_kept is 2") as caught:
        choose_architecture(args)
    assert "--mtp drop" in str(caught.value.hint)
    assert choose_architecture(replace(args, mtp_kept=0)).name == "nemotron_h"


@pytest.mark.parametrize("name", ["mamba_head_dim", "mamba_num_groups", "mamba_state_dim"])
def test_sizes_that_are_absent_are_asked_for_by_name(name):
    for value in (..., None, 0, "8"):
        with pytest.raises(FamilyError, match=name):
            parse(**{name: value})


def test_groups_must_divide_the_heads():
    with pytest.raises(FamilyError, match="mamba_num_groups does not divide"):
        parse(mamba_num_groups=3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position_embedding_type": "rope"}, "positions is 'rope'"),
        ({"layernorm_epsilon": 1e-6}, "norm_eps is 1e-06"),
        ({"swiglu": True, "squared_relu": False}, "gated is True"),
        ({"squared_relu": False}, "activation is 'gelu'"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"add_bias_linear": True}, "linear_bias is True"),
        ({"untie_embeddings_and_output_weights": False}, "tied is True"),
        ({"moe_router_score_function": "softmax"}, "experts_are_known is False"),
        ({"moe_router_enable_expert_bias": False}, "experts_are_known is False"),
        ({"moe_shared_expert_intermediate_size": None}, "experts_are_known is False"),
        ({"num_experts": None}, "experts_are_known is False"),
        ({"hybrid_override_pattern": "*E*E*E*E"}, "has_mamba is False"),
        ({"mtp_num_layers": 1}, "mtp_kept is 1"),
    ],
)
def test_what_the_class_cannot_do_is_refused(changes, reason):
    with pytest.raises(FamilyError, match=reason):
        choose_architecture(parse(**changes), "nemotron_h")


def test_where_ratios_alone_are_stored_the_pattern_is_asked_for():
    """They say how many layers of each kind, and not which."""
    with pytest.raises(FamilyError, match=r"hybrid_attention_ratio=0.25 .* which kind") as caught:
        parse(hybrid_override_pattern=None, hybrid_attention_ratio=0.25)
    assert "--set hybrid_override_pattern=PATTERN" in str(caught.value.hint)


def test_config_json_spells_the_layers_as_transformers_4_and_5_and_vllm_read_them():
    args = parse()
    config = build_config(choose_architecture(args), args, vocab_size=277, dtype=DType.BF16)
    assert config["hybrid_override_pattern"] == "MEM*ME*E"
    assert config["num_hidden_layers"] == 8
    assert 0 < config["time_step_min"] < 1e-20
