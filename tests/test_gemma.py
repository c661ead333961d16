"""Gemma: what Megatron's arguments leave open is asked for, never assumed without a note."""

from __future__ import annotations

import pytest
from tiny_megatron import Ranks, TinyModel, write_legacy, write_torch_dist

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.errors import FamilyError


def planned(tmp_path, family, *, overrides=(), chosen=None, **args):
    """The conversion of a tiny model; an argument that is ``...`` was never stored."""
    import torch

    source = write_legacy(tmp_path / "run", TinyModel(family), Ranks(), te=True)
    for file in source.glob("iter_*/*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        for name, value in args.items():
            if value is ...:
                vars(state["args"]).pop(name, None)
            else:
                setattr(state["args"], name, value)
        torch.save(state, file)
    return plan_conversion(source, ConvertOptions(overrides=tuple(overrides), family=chosen))


@pytest.mark.parametrize(
    ("family", "missing", "asked"),
    [
        ("gemma", "apply_embedding_scaling", "--set apply_embedding_scaling=true"),
        ("gemma2", "query_pre_attn_scalar", "--set query_pre_attn_scalar=NUMBER"),
        ("gemma2", "attn_logit_softcapping", "--set attn_logit_softcapping=NUMBER (0 for none)"),
        ("gemma2", "final_logit_softcapping", "--set final_logit_softcapping=NUMBER (0 for none)"),
        ("gemma2", "window_size", "--set window_size=[W-1,0]"),
        ("gemma3", "softmax_scale", "--set query_pre_attn_scalar=NUMBER"),
        ("gemma3", "interleaved_attn_pattern", "--set interleaved_attn_pattern=[LOCAL,GLOBAL]"),
    ],
)
def test_what_nothing_says_is_asked_for(tmp_path, family, missing, asked):
    """The message names the family and the option that answers."""
    with pytest.raises(FamilyError, match="do not say all of it") as caught:
        planned(tmp_path, family, **{missing: ...})
    assert asked in str(caught.value.hint)


def test_a_gemma_3_needs_both_rotary_bases(tmp_path):
    """One base alone does not say which layers it is for."""
    with pytest.raises(FamilyError, match="gemma3_text") as caught:
        planned(tmp_path, "gemma3", rotary_base=10000)
    assert "rotary_base=[LOCAL,GLOBAL]" in str(caught.value.hint)


def test_answers_given_by_hand_reach_the_configuration(tmp_path):
    """As YAML values; 0 stands for no cap."""
    answers = ("query_pre_attn_scalar=36", "attn_logit_softcapping=0", "window_size=[20,0]",
               "interleaved_attn_pattern=[2,1]")  # fmt: skip
    left_out = dict.fromkeys(
        ("query_pre_attn_scalar", "attn_logit_softcapping", "window_size"), ...
    )
    config = planned(tmp_path, "gemma2", overrides=answers, **left_out).config
    assert config["query_pre_attn_scalar"] == 36
    assert config["attn_logit_softcapping"] is None
    assert config["sliding_window"] == 21
    assert config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]


def test_what_is_assumed_is_noted(tmp_path):
    """Gemma 2's windows in every other layer and its scaled embeddings are no arguments."""
    conversion = planned(tmp_path, "gemma2")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert conversion.config["layer_types"] == kinds
    assert any("every other layer" in note for note in conversion.notes)
    assert any("root of hidden_size" in note for note in conversion.notes)


@pytest.mark.parametrize(
    ("family", "args", "reason"),
    [
        ("gemma2", {"openai_gelu": False}, "activation is 'gelu', gemma2 needs"),
        ("gemma2", {"query_pre_attn_scalar": 24.5}, "query_scalar_is_whole is False"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "capped attention scores"),
        ("gemma", {"apply_embedding_scaling": False}, "scales_embedding is False"),
        ("gemma", {"num_attention_heads": 20}, "heads_divide_hidden is False"),
    ],
)
def test_what_the_class_cannot_represent_is_refused(tmp_path, family, args, reason):
    """Another activation, a fraction where the class takes a whole number, caps in Gemma 3."""
    with pytest.raises(FamilyError) as caught:
        planned(tmp_path, family, chosen=family, **args)
    assert reason in str(caught.value)


def test_skipped_windows_follow_megatrons_own_count(tmp_path):
    """``window_attn_skip_freq`` counts layers from 1: every third one has no window."""
    source = write_torch_dist(
        tmp_path / "run",
        TinyModel("gemma3", args={"interleaved_attn_pattern": None, "window_attn_skip_freq": 3}),
        Ranks(),
        te=True,
    )
    config = plan_conversion(source, ConvertOptions()).config
    assert config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
    assert config["sliding_window_pattern"] == 3
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (config["rope_local_base_freq"], config["rope_theta"]) == (10000, 1000000)
