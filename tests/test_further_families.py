"""Norms over all heads, sparse attention, latents: what does not fit is refused or said."""

from __future__ import annotations

import pytest
import torch
from tiny_megatron import Ranks, TinyModel, write_legacy, write_torch_dist

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.errors import FamilyError, PlanError

NORM = "decoder.layers.1.self_attention.{}_layernorm.weight"


def changed(source, change):
    """The checkpoint with ``change(model, args, rank)`` made to each rank's file."""
    for rank, file in enumerate(sorted(source.glob("iter_*/*/model_optim_rng.pt"))):
        state = torch.load(file, weights_only=False)
        change(state["model"], state["args"], rank)
        torch.save(state, file)
    return source


def test_a_norm_over_all_heads_is_not_taken_for_one_over_each(tmp_path):
    """Qwen 3 norms each head; the message names the tensor and both numbers of rows."""

    def widen(model, _args, _rank):
        model[NORM.format("q")] = torch.ones(192)

    source = changed(write_legacy(tmp_path / "run", TinyModel("qwen3"), Ranks()), widen)
    with pytest.raises(PlanError, match=r"expected 16 \(head_dim\), found 192") as caught:
        plan_conversion(source, ConvertOptions())
    assert caught.value.tensor == NORM.format("q")


def test_a_stored_shape_tells_norms_over_all_heads(tmp_path):
    """torch_dist says it, rank files do not: there OLMoE looks like Qwen 3 and is asked for."""
    model = TinyModel("olmoe")
    source = write_torch_dist(tmp_path / "dist", model, Ranks(), te=True)
    assert plan_conversion(source, ConvertOptions()).architecture.name == "olmoe"
    source = write_legacy(tmp_path / "run", model, Ranks(), te=True)
    with pytest.raises(PlanError, match="Another --family may fit"):
        plan_conversion(source, ConvertOptions())
    chosen = plan_conversion(source, ConvertOptions(family="olmoe"))
    assert chosen.architecture.name == "olmoe"


def test_key_norms_that_ranks_share_are_refused(tmp_path):
    """More ranks than groups of keys: each then holds another rank's part as well."""

    def repeat(model, _args, _rank):
        model[NORM.format("k")] = torch.ones(48)

    source = changed(write_legacy(tmp_path / "run", TinyModel("minimax"), Ranks(tp=2)), repeat)
    with pytest.raises(PlanError, match=r"expected 64 \(key_rows\), found 96 on 2 rank"):
        plan_conversion(source, ConvertOptions())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"dsa_indexer_rope_interleaved": ...}, "do not say all of it"),
        ({"dsa_indexer_topk_freq": 4}, "an indexer in some layers only"),
        ({"dsa_indexer_scoring_relu": False}, "indexer scores of either sign"),
        ({"layernorm_epsilon": 1e-5}, "indexer_norm_eps is 1e-05"),
        ({"q_lora_rank": None}, "has_q_lora is False"),
    ],
)
def test_sparse_attention_that_the_class_lacks_is_refused(tmp_path, args, reason):
    """By the argument that says so."""

    def set_args(_model, stored, _rank):
        for name, value in args.items():
            if value is ...:
                delattr(stored, name)
            else:
                setattr(stored, name, value)

    source = write_legacy(tmp_path / "run", TinyModel("deepseek-v32"), Ranks(), te=True)
    with pytest.raises(FamilyError) as caught:
        plan_conversion(changed(source, set_args), ConvertOptions(family="deepseek_v32"))
    assert reason in str(caught.value)


def test_the_question_about_the_indexer_says_what_depends_on_it(tmp_path):
    """Megatron-Core before 0.19 computed something else under the same names."""
    source = write_legacy(tmp_path / "run", TinyModel("deepseek-v32"), Ranks())
    source = changed(source, lambda _m, args, _r: delattr(args, "dsa_indexer_rope_interleaved"))
    with pytest.raises(FamilyError) as caught:
        plan_conversion(source, ConvertOptions())
    assert "--set dsa_indexer_rope_interleaved=false (true for GLM-5)" in str(caught.value.hint)
    assert "0.19 or newer" in str(caught.value.hint)
    answer = ConvertOptions(overrides=("dsa_indexer_rope_interleaved=true",))
    assert plan_conversion(source, answer).architecture.name == "glm_moe_dsa"


def test_another_epsilon_for_the_latents_is_said(tmp_path):
    """transformers fixes it at 1e-6 in its MLA classes; the weights are right all the same."""
    model = TinyModel("deepseek", args={"layernorm_epsilon": 1e-5})
    source = write_legacy(tmp_path / "run", model, Ranks())
    notes = plan_conversion(source, ConvertOptions()).notes
    assert any("latents with epsilon 1e-06, training did with 1e-05" in note for note in notes)


def test_a_single_expert_keeps_its_score(tmp_path):
    """Megatron makes sigmoid scores sum to 1 only where several experts are chosen."""
    args = {"moe_router_topk": 1, "moe_router_num_groups": None, "moe_router_group_topk": None}
    source = write_legacy(tmp_path / "run", TinyModel("deepseek", args=args), Ranks())
    assert plan_conversion(source, ConvertOptions()).config["norm_topk_prob"] is False
    source = write_legacy(tmp_path / "other", TinyModel("minimax", args=args), Ranks())
    with pytest.raises(FamilyError, match="normalises_scores is False"):
        plan_conversion(source, ConvertOptions(family="minimax"))
