"""Rotary scaling, windows and sinks: what the arguments say, what config.json says of it."""

from __future__ import annotations

from math import log

import pytest
from test_training import parse
from tiny_megatron import Ranks, TinyModel, write_legacy

from ckpt.arch import choose_architecture
from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.convert.facts import rope_parameters, rope_scaling, yarn_always
from ckpt.errors import FamilyError

YARN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 8.0}
DEEPSEEK = TinyModel("deepseek")


def grown(factor, mscale):
    return 0.1 * mscale * log(factor) + 1


def planned(tmp_path, family, **args):
    source = write_legacy(tmp_path, TinyModel(family, args=args), Ranks())
    return plan_conversion(source, ConvertOptions())


def test_a26_yarn_without_latent_attention_is_read_and_its_defaults_are_noted():
    """The names are those that Megatron-LM stores; absent values are assumed, never silently."""
    args = parse(**YARN)
    assert rope_scaling(args) == {
        "rope_type": "yarn", "type": "yarn", "factor": 8.0, "truncate": True,
        "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    said = " ".join(args.notes)
    for name in ("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"):
        assert f"assumed {name}" in said
    given = parse(
        **YARN,
        yarn_original_max_position_embeddings=500,
        yarn_beta_fast=20.0,
        yarn_beta_slow=2.0,
        yarn_correction_range_round_to_int=False,
    )
    found = rope_scaling(given)
    assert (found["beta_fast"], found["beta_slow"], found["truncate"]) == (20.0, 2.0, False)
    assert found["original_max_position_embeddings"] == 500
    assert not any("yarn" in note for note in given.notes)


@pytest.mark.parametrize(
    ("magnitudes", "expected"),
    [
        ({}, None),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, None),
        ({"yarn_mscale": None, "yarn_mscale_all_dim": None}, None),
        ({"mscale": 0.5, "mscale_all_dim": 0.0}, grown(8, 0.5)),
        ({"mscale": 0.5, "mscale_all_dim": 0.25}, grown(8, 0.5) / grown(8, 0.25)),
        ({"mscale": 0.0, "mscale_all_dim": 0.25}, 1 / grown(8, 0.25)),
    ],
)
def test_a26_yarn_says_its_growth_where_it_is_not_the_factors_own(magnitudes, expected):
    """transformers and vLLM both read attention_factor for ordinary attention."""
    assert rope_scaling(parse(**YARN, **magnitudes)).get("attention_factor") == expected


def test_a26_yarns_factor_decides():
    """1 stretches nothing; below 1 no class can follow."""
    assert rope_scaling(parse(**{**YARN, "rotary_scaling_factor": 1.0})) is None
    with pytest.raises(FamilyError, match="at least 1"):
        parse(**{**YARN, "rotary_scaling_factor": 0.5})


def test_a26_a_class_that_always_has_yarn_gets_one_that_stretches_nothing():
    """gpt-oss trained with plain rotary positions."""
    found = yarn_always(parse())
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("yarn", 1.0, 500000)
    assert yarn_always(parse(**YARN))["factor"] == 8.0
    assert rope_parameters(parse())["rope_type"] == "default"


@pytest.mark.parametrize(
    ("mscale", "all_dim", "said"),
    [
        (1.0, 1.0, None),
        (0.7, 0.9, None),
        (1.0, 0.0, None),
        (0.7, 0.0, grown(4, 0.7)),
        (0.0, 0.9, 1 / grown(4, 0.9)),
        (0.0, 0.0, 1.0),
    ],
)
def test_a26_latent_attentions_growth_is_said_where_transformers_would_not_find_it(
    tmp_path, mscale, all_dim, said
):
    """transformers computes it from the two only if neither is 0."""
    config = planned(tmp_path, "deepseek", mscale=mscale, mscale_all_dim=all_dim).config
    assert config["rope_scaling"].get("attention_factor") == said


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "rotary_scaling_factor": 0.5},
    ],
)
def test_a26_latent_attention_whose_softmax_is_scaled_without_yarn_is_refused(tmp_path, changes):
    """Megatron multiplies the softmax scale whatever the rotary type; Hugging Face does not."""
    with pytest.raises(FamilyError, match="mla_scales_plainly"):
        planned(tmp_path, "deepseek", **changes)


def test_a_factor_that_nothing_uses_is_no_reason_to_refuse(tmp_path):
    """Plain rotary positions and no magnitude: the factor has no effect."""
    changes = {"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.0}
    assert planned(tmp_path, "deepseek", **changes).config["rope_scaling"] is None


@pytest.mark.parametrize(
    ("window", "positions"), [((7, 0), 8), ([7, -1], 8), ((-1, 0), None), (None, None)]
)
def test_a_window_counts_positions_with_the_tokens_own(window, positions):
    """-1 stands for all of them."""
    assert parse(window_size=window).sliding_window == positions


def test_a_window_into_the_future_is_refused():
    with pytest.raises(FamilyError, match=r"\(7, 3\)"):
        parse(window_size=(7, 3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window_attn_skip_freq": 3}, "windows_alternate"),
        ({"window_attn_skip_freq": None}, "windows_alternate"),
        ({"window_attn_skip_freq": [0, 1, 0]}, "windows_alternate"),
        ({"activation_func_clamp_value": None}, "glu_clamp"),
        ({"activation_func_clamp_value": 10.0}, "glu_clamp"),
        ({"glu_linear_offset": 0.0}, "glu_offset"),
        ({"softmax_type": "off-by-one"}, "sinks"),
        ({"enable_gpt_oss": True}, "enable_gpt_oss"),
        ({"moe_router_pre_softmax": True}, "router_pre_softmax"),
    ],
)
def test_a_gpt_oss_that_the_class_or_vllm_computes_otherwise_is_refused(tmp_path, changes, reason):
    """The reason names the setting."""
    source = write_legacy(tmp_path, TinyModel("gptoss", args=changes), Ranks())
    with pytest.raises(FamilyError, match=reason):
        plan_conversion(source, ConvertOptions(family="gpt_oss"))


def test_a_gpt_oss_whose_windows_alternate_by_a_list_converts(tmp_path):
    """The same as every second layer."""
    found = planned(tmp_path, "gptoss", window_attn_skip_freq=[1, 0, 1])
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert found.config["layer_types"] == kinds


def test_what_a_server_computes_otherwise_is_said_first(tmp_path):
    """vLLM's gpt-oss reads no attention_factor; transformers' DeepSeek V2 no norm_topk_prob."""
    odd = planned(tmp_path / "a", "gptoss", mscale=0.5)
    assert odd.notes[0].startswith("YaRN's mscale")
    assert not planned(tmp_path / "b", "gptoss").notes[0].startswith("YaRN")
    summing = planned(tmp_path / "c", "deepseek-lite", moe_router_pre_softmax=False)
    assert summing.notes[0].startswith("training normalised")
    assert summing.config["norm_topk_prob"] is True
    plain = planned(tmp_path / "d", "deepseek-lite")
    assert not any(note.startswith(("YaRN", "training normalised")) for note in plain.notes)


def test_a_single_experts_sigmoid_score_stands_as_it_is(tmp_path):
    """Megatron normalises from two experts on."""
    groups = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    assert planned(tmp_path / "a", "deepseek", moe_router_topk=1, **groups).config[
        "norm_topk_prob"
    ] is False  # fmt: skip
    assert planned(tmp_path / "b", "glm4moe").config["norm_topk_prob"] is True


def test_glm_4_7_flash_is_chosen_by_name_alone(tmp_path):
    """It is the network of DeepSeek V3."""
    source = write_legacy(tmp_path, DEEPSEEK, Ranks())
    args = plan_conversion(source, ConvertOptions()).args
    assert choose_architecture(args).name == "deepseek_v3"
    assert choose_architecture(args, "glm4.7_flash").name == "glm4_moe_lite"


def test_rotary_positions_that_are_scaled_twice_are_refused():
    """Megatron applies both scalings; config.json can say only one."""
    twice = {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4}
    with pytest.raises(FamilyError, match="scaled twice"):
        parse(**twice)
    bases = {"rotary_base": [10000, 1000000], "rotary_seq_len_interpolation_factor": 4}
    with pytest.raises(FamilyError, match="scaled twice"):
        parse(**bases, rope_scaling_factor=8.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 1.0},
        {**vars(TinyModel("deepseek-lite").values)},
    ],
    ids=["yarn", "latent attention"],
)
@pytest.mark.parametrize(
    "unread", [{"use_rope_scaling": True}, {"rotary_seq_len_interpolation_factor": 4}], ids=str
)
def test_scalings_that_megatron_does_not_read_do_not_reach_the_config(changes, unread):
    """YaRN and MLA have rotary settings of their own and look at no others."""
    assert rope_scaling(parse(**changes)) is None
    assert rope_scaling(parse(**{**changes, **unread})) is None


@pytest.mark.parametrize("window", [[7], [7, 0, 0], ["7", 0], [None, None], [7.5, 0]])
def test_a_window_that_is_no_pair_of_numbers_is_an_error_and_no_bug(window):
    with pytest.raises(FamilyError, match="window_size is no pair"):
        parse(window_size=window)
