"""Settings of families, each by what a megatron-core model with that setting answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_checkpoints import Layout, first_of_each, wanted

from ckpt.config import ConvertOptions, ValidateOptions
from ckpt.convert import convert_checkpoint
from ckpt.validate import validate_checkpoint
from ckpt.validate.hf_run import load_model

pytestmark = pytest.mark.megatron

LONG = (1, 320)


@dataclass(frozen=True)
class Case:
    """A layout, the family that is asked for, and the class that must come out."""

    layout: Layout
    model_class: str
    family: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


def case(model_class: str, source: str, *, family: str | None = None, **options: Any) -> Case:
    """A case whose checkpoint is of the family ``source``, with long sequences."""
    options.setdefault("positions", LONG)
    overrides = {"max_position_embeddings": 512, **options.pop("overrides", {})}
    return Case(Layout(source, overrides=overrides, **options), model_class, family)


NEOX, V2, V3 = "GPTNeoXForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
GPT_OSS = "GptOssForCausalLM"
GLM, GLM_LITE = "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"
QWEN2_MOE = "Qwen2MoeForCausalLM"
NO_GROUPS = {"moe_router_num_groups": None, "moe_router_group_topk": None}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
}
CASES = [
    case(NEOX, "neox", tp=2, te=True),
    case(NEOX, "neox", format="torch", pp=2),
    case(NEOX, "neox", tp=2, format="torch", overrides={"rotary_percent": 1.0}),
    case(NEOX, "neox", te=True, overrides={"rotary_seq_len_interpolation_factor": 3}),
    case(NEOX, "neox", te=True, overrides={"use_rope_scaling": True}),
    case("GPT2LMHeadModel", "gpt", tp=2, format="torch",
         overrides={"untie_embeddings_and_output_weights": True}),
    case("MistralForCausalLM", "llama1p", tp=2, te=True),
    case("LlamaForCausalLM", "llama1p", te=True, format="torch",
         overrides={"hidden_size": 84}),
    case(QWEN2_MOE, "qwen2moe", tp=2, ep=2, te=True),
    case(QWEN2_MOE, "qwen2moe", format="torch", overrides={"moe_router_pre_softmax": False}),
    case(V2, "deepseek-v2", tp=2, ep=2, te=True),
    case(V2, "deepseek-v2", tp=2, format="torch"),
    case(V2, "deepseek-lite", tp=2, te=True),
    case(V2, "deepseek-lite", tp=2, format="torch", ep=2),
    case(V3, "deepseek", tp=2, te=True, overrides=NO_GROUPS, family="moonlight"),
    case(V3, "deepseek", format="torch", family="kimi_k2",
         overrides={"moe_router_num_groups": 1, "moe_router_group_topk": 1}),
    case(V3, "deepseek", tp=2, te=True, format="torch",
         overrides={**NO_GROUPS, "rope_type": "rope", "rotary_scaling_factor": 1.0}),
    case(V3, "deepseek", te=True, overrides={**NO_GROUPS, "moe_router_topk": 1}),
    case(GLM, "glm4moe", tp=2, ep=2, te=True),
    case(GLM, "glm4moe", tp=2, format="torch"),
    case(GLM, "glm4moe", te=True, format="torch", ep=2, overrides={"mtp_num_layers": 1,
         "moe_grouped_gemm": True}),
    case(GLM, "glm4moe", tp=2, te=True, overrides={"rotary_percent": 1.0, "qk_layernorm": False,
         "add_qkv_bias": False, "moe_router_num_groups": 3, "moe_router_group_topk": 2,
         "moe_router_topk": 4}),
    case(GLM_LITE, "deepseek", tp=2, ep=2, te=True, family="glm4_moe_lite"),
    case(GLM_LITE, "deepseek", tp=2, format="torch", family="glm4_moe_lite",
         overrides={"q_lora_rank": None, **NO_GROUPS}),
    case("Qwen3ForCausalLM", "qwen3", tp=2, te=True, overrides=YARN),
    case("MistralForCausalLM", "llama", overrides={**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}),
    case("MixtralForCausalLM", "mixtral", format="torch", ep=2,
         overrides={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    case(GPT_OSS, "gptoss", tp=2, ep=2, etp=1, te=True),
    case(GPT_OSS, "gptoss", tp=2, ep=2, etp=1, format="torch"),
    case(GPT_OSS, "gptoss", te=True, ep=2, format="torch", overrides={"moe_grouped_gemm": True}),
    case(GPT_OSS, "gptoss", te=True, ep=2, overrides={"moe_grouped_gemm": True,
         "yarn_correction_range_round_to_int": True, "mscale": 0.8, "mscale_all_dim": 1.1}),
    case(GPT_OSS, "gptoss", single=True, overrides={"position_embedding_type": "rope",
         "window_size": None}),
    *(
        case(model_class, source, tp=2, te=True, overrides={"mscale": one, "mscale_all_dim": all_,
             "rope_type": "yarn", "rotary_scaling_factor": 5.0})
        for model_class, source, one, all_ in (
            (V3, "deepseek", 0.707, 0.0), (V3, "deepseek", 0.707, 0.9), (V3, "deepseek", 0.0, 0.9),
            (V3, "deepseek", 0.0, 0.0), (V2, "deepseek-lite", 1.3, 0.0),
            (V2, "deepseek-v2", 0.0, 0.6),
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(request, megatron_checkpoints):
    layouts = [item.layout for item in wanted(request, "item")]
    return {item.layout.name: item for item in megatron_checkpoints(layouts)}


def kind(item):
    return item.layout.family, item.model_class, item.family


@pytest.mark.parametrize("item", first_of_each(CASES, kind), ids=lambda item: item.layout.name)
def test_the_converted_model_answers_as_megatron_did(made, item, tmp_path):
    """fp32 logits at every position, past the original context of stretched positions."""
    checkpoint = made[item.layout.name]
    convert_checkpoint(checkpoint.directory, tmp_path / "out", ConvertOptions(family=item.family))
    model = load_model(tmp_path / "out")
    assert type(model).__name__ == item.model_class
    with torch.no_grad():
        found = model(checkpoint.input_ids).logits
    original = checkpoint.logits_fp32[..., : found.shape[-1]]
    assert original.std() > 0.1
    assert (found - original).abs().max() <= 1e-4


LIVE = [item for item in CASES if item.layout.family in {"gptoss", "glm4moe", "neox"}][::3]


@pytest.mark.parametrize(
    "item", first_of_each(LIVE, lambda item: "live"), ids=lambda item: item.layout.name
)
def test_a_live_megatron_model_is_the_reference(made, item, tmp_path):
    """What `ckpt validate` builds from the stored arguments answers as the model that trained."""
    checkpoint = made[item.layout.name]
    convert_checkpoint(checkpoint.directory, tmp_path / "out", ConvertOptions(family=item.family))
    options = ValidateOptions(reference="megatron", max_positions=128, max_abs_diff=1e-4)
    report = validate_checkpoint(checkpoint.directory, tmp_path / "out", options)
    assert report.passed, report.as_text()
