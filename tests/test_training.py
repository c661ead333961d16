"""Training arguments: old and new names, what tensors decide, and what is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import Model, megatron_tensors, training_args

from ckpt.arch import ARCHITECTURES, choose_architecture
from ckpt.convert.facts import rope_scaling
from ckpt.convert.hf_files import build_config
from ckpt.errors import CkptError, FamilyError, OptionsError
from ckpt.tensors import DType
from ckpt.training import parse_overrides, parse_training_args

MODEL = Model()
VALUES = vars(training_args(MODEL, tp=2, pp=1))
SHAPES = {name: tuple(value.shape) for name, value in megatron_tensors(MODEL, 2).items()}
UNKNOWN = dict.fromkeys(SHAPES)  # the legacy format knows no whole shapes


def parse(values=VALUES, shapes=SHAPES, **changes):
    values = {**values, **changes}
    return parse_training_args({k: v for k, v in values.items() if v is not ...}, shapes)


def test_sizes_and_switches_are_read():
    args = parse()
    assert (args.layers, args.hidden_size, args.heads, args.groups) == (3, MODEL.hidden, 12, 6)
    assert (args.head_dim, args.ffn_hidden_size) == (10, 36)
    assert (args.vocab_size, args.padded_vocab_size) == (131, 160)
    assert (args.max_positions, args.seq_length) == (4096, 128)
    assert (args.norm_eps, args.rotary_base, args.normalization) == (3e-5, 500000, "RMSNorm")
    assert (args.gated, args.activation, args.tied) == (True, "silu", False)
    assert not args.linear_bias
    assert not args.is_moe
    assert args.notes == ()


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"layernorm_epsilon": 3e-5}, {"norm_epsilon": ...}),
        ({"layernorm_zero_centered_gamma": False}, {"apply_layernorm_1p": ...}),
        ({"disable_bias_linear": True}, {"add_bias_linear": ...}),
        ({"encoder_num_layers": 3}, {"num_layers": ...}),
        ({"num_key_value_heads": 6}, {"num_query_groups": ..., "group_query_attention": ...}),
        ({"use_rotary_position_embeddings": True}, {"position_embedding_type": ...}),
    ],
)
def test_a16_each_fact_is_found_under_its_older_and_newer_name(new, old):
    assert parse(**new, **old) == parse()


def test_groups_are_ignored_without_grouped_attention():
    """Megatron stores num_query_groups 1 then."""
    args = parse(group_query_attention=False, num_query_groups=1)
    assert args.groups == args.heads == 12


@pytest.mark.parametrize("field", sorted(VALUES))
@pytest.mark.parametrize("shapes", [SHAPES, UNKNOWN], ids=["torch_dist", "torch"])
def test_a16_without_any_one_field_the_result_is_the_same_or_something_is_said(field, shapes):
    """Either derived, or noted, or an error that names field and flag; never silently other."""
    reference = parse(shapes=SHAPES)
    config = build_config(ARCHITECTURES["llama"], reference, vocab_size=131, dtype=DType.F32)
    try:
        args = parse(shapes=shapes, **{field: ...})
        family = choose_architecture(args)
    except FamilyError as error:
        assert field in str(error) or "needs" in str(error)  # noqa: PT017 - both ends are right
        return
    found = build_config(family, args, vocab_size=131, dtype=DType.F32)
    silent = {
        # a wrong choice meets tensors that the family does not have, or misses some
        "add_bias_linear": "linear_bias",
        "untie_embeddings_and_output_weights": "tied",
        # rows of the fused projection do not fit then
        "num_query_groups": "groups",
        "kv_channels": "head_dim",
        # the tokenizer or the padded size decides, with a note of the conversion
        "vocab_size": "vocab_size",
    }
    if found != config:
        assert args.notes or field in silent, field


@pytest.mark.parametrize(
    ("field", "value"),
    [("rotary_base", 10000), ("norm_epsilon", 1e-5)],
)
def test_a16_a_default_that_changes_numbers_is_noted(field, value):
    args = parse(**{field: ...})
    assert value in {args.rotary_base, args.norm_eps}
    assert any("assumed" in note and str(value) in note for note in args.notes)


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("num_attention_heads", "--set num_attention_heads=VALUE"),
        ("hidden_size", "--set hidden_size=VALUE"),
        ("ffn_hidden_size", "--set ffn_hidden_size=VALUE"),
        ("padded_vocab_size", "--set padded_vocab_size=VALUE"),
    ],
)
def test_a16_what_nothing_decides_is_asked_for_by_field_and_flag(field, flag):
    with pytest.raises(FamilyError, match=flag):
        parse(shapes=UNKNOWN, **{field: ...})


def test_a16_what_tensors_decide_is_derived_and_noted():
    removed = ["hidden_size", "num_layers", "ffn_hidden_size", "padded_vocab_size",
               "num_query_groups"]  # fmt: skip
    args = parse(**dict.fromkeys(removed, ...))
    assert args == parse()
    for name in ("hidden_size", "num_layers", "ffn_hidden_size", "num_query_groups"):
        assert any(f"derived {name}" in note for note in args.notes)
    assert parse(kv_channels=...) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", "three"), ("num_layers", 0), ("num_layers", [3]), ("hidden_size", 56.5),
        ("num_attention_heads", None), ("num_attention_heads", "12"), ("num_attention_heads", 0),
        ("norm_epsilon", "tiny"), ("rotary_base", "high"), ("rotary_percent", "all"),
        ("moe_layer_freq", "often"), ("num_experts", "many"), ("kv_channels", -2),
        ("num_query_groups", True), ("rotary_seq_len_interpolation_factor", [2]),
        ("mtp_num_layers", "one"), ("max_position_embeddings", object()),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_an_error_and_no_bug(field, value):
    with pytest.raises(CkptError):
        parse(shapes=UNKNOWN, **{field: value, **({"num_experts": 4} if "moe" in field else {})})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"rotary_seq_len_interpolation_factor": 1}, None),
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ],
)  # fmt: skip
def test_a26_rotary_scaling_reaches_the_config(changes, expected):
    assert rope_scaling(parse(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"swiglu": True}, "silu"),
        ({"swiglu": False}, "gelu"),
        ({"swiglu": False, "squared_relu": True}, "relu2"),
        ({"swiglu": False, "openai_gelu": True}, "gelu_new"),
        ({"swiglu": False, "openai_gelu": True, "use_legacy_models": True}, "gelu_new"),
        ({"swiglu": False, "openai_gelu": True, "use_legacy_models": False}, "gelu"),
        ({"swiglu": False, "openai_gelu": True, "use_mcore_models": True}, "gelu"),
        ({"swiglu": False, "bias_gelu_fusion": True}, "gelu_new"),
        ({"swiglu": False, "geglu": True}, "gelu"),
    ],
)
def test_activations_have_hugging_faces_names(changes, activation):
    assert parse(**changes).activation == activation


@pytest.mark.parametrize(
    ("freq", "layers"),
    [(1, (True,) * 3), (2, (True, False, True)), ([0, 1, 1], (False, True, True))],
)
def test_which_layers_have_experts(freq, layers):
    args = parse(num_experts=4, moe_ffn_hidden_size=8, moe_layer_freq=freq)
    assert args.moe_layers == layers
    with pytest.raises(FamilyError, match="moe_layer_freq"):
        parse(num_experts=4, moe_layer_freq=[1, 1])


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"window_size": (7, 0)}, "mistral"),
    ],
)
def test_the_family_follows_from_the_arguments(changes, family):
    args = parse(**changes)
    args = replace(args, hidden_size=args.heads * args.head_dim)
    assert choose_architecture(args).name == family


def test_a_window_counts_the_token_itself():
    """Megatron's (7, 0) means seven before; Hugging Face counts eight."""
    assert parse(window_size=(7, 0)).sliding_window == 8
    assert parse(window_size=None).sliding_window is None


def test_overrides_are_yaml_values_by_name():
    texts = ("a=1", "b=1e-5", "c=true", "d=[1, 0]", "e=", "f=x=y", "g=null")
    found = parse_overrides(texts)
    assert found["a"] == 1
    assert found["c"] is True
    assert found["d"] == [1, 0]
    assert found["e"] is None
    assert found["f"] == "x=y"
    assert found["g"] is None
    assert found["b"] == 1e-5
    for text in ("a", "=1", "a b=1", "--x=1", "a=[1", "a={"):
        with pytest.raises(OptionsError):
            parse_overrides((text,))


@pytest.mark.parametrize("name", ["num_layers", "num_experts", "mtp_num_layers"])
def test_a_count_beyond_any_model_is_refused_at_once(name):
    """Nothing is counted up to it."""
    values = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": 2, name: 10**30}
    with pytest.raises(FamilyError, match=f"{name} is larger than any model"):
        parse(**values)
