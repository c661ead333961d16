"""Training arguments that are not where Megatron-LM puts them: elsewhere, by hand, nowhere."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import yaml
from converted import assert_converts
from tiny_megatron import (
    Ranks,
    TinyModel,
    padded_vocab,
    write_dcp,
    write_torch_dist,
    write_zarr,
)

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.errors import CkptError, SourceError
from ckpt.inspection import inspect_directory
from ckpt.sources.provider_config import provider_args
from ckpt.tensors import DType

GPT = "megatron.bridge.models.gpt_provider.GPTModelProvider"
MLA = "megatron.bridge.models.mla_provider.MLAModelProvider"
SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
# Fields that a provider has under the name of Megatron-LM's argument.
SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved",
    "vocab_size", "multi_latent_attention", "moe_layer_freq", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "q_lora_rank",
    "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "mtp_num_layers",
    "layernorm_zero_centered_gamma", "original_max_position_embeddings", "beta_fast", "beta_slow",
)  # fmt: skip


def provider(model: TinyModel, **changes: Any) -> dict[str, Any]:
    """The section ``model`` that Megatron-Bridge writes for the same model."""
    a = vars(model.values)
    found = {name: a[name] for name in SAME if name in a}
    found |= {
        "_target_": MLA if a["multi_latent_attention"] else GPT,
        "activation_func": SILU,
        "gated_linear_unit": True,
        "num_query_groups": a["num_query_groups"] if a["group_query_attention"] else None,
        "num_moe_experts": a["num_experts"],
        "layernorm_epsilon": a["layernorm_epsilon"],
        "share_embeddings_and_output_weights": not a["untie_embeddings_and_output_weights"],
        "seq_length": a["max_position_embeddings"],
        "rope_scaling": a.get("use_rope_scaling", False),
        "params_dtype": {"_target_": "torch.float32", "_call_": False},
        "transformer_layer_spec": {
            "_target_": "megatron.bridge.models.gpt_provider.default_layer_spec",
            "_call_": False,
        },
        "attention_backend": {
            "_target_": "megatron.core.transformer.enums.AttnBackend",
            "_call_": True,
            "_args_": [5],
        },
        "tensor_model_parallel_size": 2,
    }
    return {name: value for name, value in {**found, **changes}.items() if value is not ...}


FAST_GELU = {"_target_": "megatron.core.activations.fast_gelu", "_call_": False}
GEMMA = ("attn_logit_softcapping", "final_logit_softcapping", "interleaved_attn_pattern",
         "query_pre_attn_scalar", "rope_scaling_factor", "softmax_scale",
         "window_size")  # fmt: skip
SPARSE = ("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
          "dsa_indexer_topk", "dsa_indexer_rope_interleaved")  # fmt: skip
EXPERIMENTAL = "get_transformer_block_with_experimental_attention_variant_spec"
# Provider, layer spec, activation and further fields of models that a provider's code adds to.
IN_CODE: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "gemma": ("GemmaModelProvider", "default_layer_spec", FAST_GELU, ()),
    "gemma2": ("Gemma2ModelProvider", "gemma2_layer_spec", FAST_GELU, GEMMA),
    "gemma3": ("Gemma3ModelProvider", "gemma3_layer_spec", FAST_GELU, GEMMA),
    "minimax": ("GPTModelProvider", "minimax_m2_layer_spec", SILU, ()),
    "olmoe": ("OlMoEModelProvider", "olmoe_layer_spec", SILU, ()),
    "deepseek-v32": ("MLAModelProvider", EXPERIMENTAL, SILU, SPARSE),
    "deepseek-glm5": ("MLAModelProvider", EXPERIMENTAL, SILU, SPARSE),
}


def without_args(source):
    (file,) = source.glob("iter_*/common.pt")
    torch.save({"checkpoint_version": 3.0, "iteration": 7}, file)
    return file.parent


def write_config(directory, model: dict[str, Any]):
    file = directory / "run_config.yaml"
    file.write_text(yaml.safe_dump({"model": model, "train": {"lr": 1e-4}}))
    return file


@pytest.mark.parametrize("write", [write_torch_dist, write_zarr])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3moe", "deepseek"])
def test_a16_a19_a_megatron_bridge_checkpoint_is_read_by_its_run_config(tmp_path, write, family):
    """The same config.json as from Megatron-LM's arguments, and the same tensors."""
    model = TinyModel(family)
    source = write(tmp_path / "run", model, Ranks(tp=2), te=True)
    expected = plan_conversion(source, ConvertOptions()).config
    write_config(without_args(source), provider(model))
    plan = plan_conversion(source, ConvertOptions())
    assert plan.config == expected
    assert any("run_config.yaml" in note for note in plan.notes)
    assert plan.checkpoint.parallelism.tensor == 2
    assert_converts(source, model, tmp_path / "out", ConvertOptions())


def test_a19_a_nested_transformer_config_is_read_as_well(tmp_path):
    """The form of newer versions of Megatron-Bridge."""
    flat = provider(TinyModel("llama"))
    outer = ("_target_", "seq_length", "vocab_size", "share_embeddings_and_output_weights")
    nested = {name: flat.pop(name) for name in outer}
    nested["transformer"] = {**flat, "activation_func": "silu", "_target_": GPT}
    nested["_target_"] = "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig"
    args = provider_args(write_config(tmp_path, nested))
    assert args["swiglu"]
    assert args["params_dtype"] is DType.F32
    assert args["num_layers"] == 3


def test_a19_a_gpt_oss_of_megatron_bridge_is_read_by_its_run_config(tmp_path):
    """Its YaRN has names of its own, and magnitudes of None mean the factor's own."""
    model = TinyModel("gptoss")
    source = write_torch_dist(tmp_path / "run", model, Ranks(tp=2, ep=2, etp=1), te=True)
    expected = plan_conversion(source, ConvertOptions()).config
    same = ("window_attn_skip_freq", "softmax_type", "glu_linear_offset",
            "activation_func_clamp_value", "yarn_original_max_position_embeddings",
            "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int")  # fmt: skip
    fields = {
        **{name: getattr(model.values, name) for name in same},
        "activation_func": {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu"},
        "window_size": list(model.values.window_size),
        "yarn_rotary_scaling_factor": model.values.rotary_scaling_factor,
        "rotary_scaling_factor": ...,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "mscale": ...,
        "mscale_all_dim": ...,
    }
    write_config(without_args(source), provider(model, **fields))
    assert plan_conversion(source, ConvertOptions()).config == expected
    assert expected["architectures"] == ["GptOssForCausalLM"]
    assert_converts(source, model, tmp_path / "out", ConvertOptions())


def test_a19_fsdp_dtensor_of_megatron_bridge_is_read_by_its_run_config(tmp_path):
    model = TinyModel("qwen3")
    source = write_dcp(tmp_path / "run", model, fsdp=True, edit=lambda state: state.pop("args"))
    config = provider(model, tensor_model_parallel_size=1)
    write_config(source / "iter_0000007", config)
    assert_converts(source, model, tmp_path / "out", ConvertOptions())


@pytest.mark.parametrize("family", IN_CODE)
def test_a16_what_megatron_bridge_adds_in_code_is_known(tmp_path, family):
    """Gemma's four norms and scaled embeddings, norms over all heads, sparse attention."""
    model = TinyModel(family)
    source = write_torch_dist(tmp_path / "run", model, Ranks(tp=2), te=True)
    chosen = ConvertOptions(family=model.hf_family)
    expected = plan_conversion(source, chosen).config
    target, spec, activation, names = IN_CODE[family]
    values = {name: getattr(model.values, name) for name in names if hasattr(model.values, name)}
    window = values.get("window_size")
    values["window_size"] = list(window) if isinstance(window, tuple) else window
    changes = {"_target_": f"x.{target}", "activation_func": activation,
               "transformer_layer_spec": {"_target_": f"x.{spec}"}, **values}  # fmt: skip
    write_config(without_args(source), provider(model, **changes))
    assert plan_conversion(source, ConvertOptions()).config == expected
    assert_converts(source, model, tmp_path / "out", ConvertOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_target_": "x.Gemma4ModelProvider"}, "provider Gemma4ModelProvider builds a model"),
        ({"_target_": "x.Qwen25VLModelProvider"}, "provider Qwen25VLModelProvider builds"),
        ({"_target_": "x.Llama4ModelProvider"}, "provider Llama4ModelProvider builds"),
        ({"activation_func": {"_target_": "x.situ"}}, "unknown activation.*situ, gated"),
        ({"gated_linear_unit": False}, "unknown activation.*silu, not gated"),
        ({"transformer_layer_spec": {"_target_": "x.my_spec"}}, "transformer_layer_spec.*my_spec"),
        ({"scale_factor": 8.0, "rope_scaling": ...}, "older Megatron-Bridge applied.*8.0"),
        ({"num_layers": ...}, "no model section with num_layers"),
    ],
)
def test_a19_a_provider_with_code_of_its_own_is_refused_by_name(tmp_path, changes, message):
    """Its fields do not say all that the model computes."""
    file = write_config(tmp_path, provider(TinyModel("llama"), **changes))
    with pytest.raises(SourceError, match=f"run_config.yaml: .*{message}"):
        provider_args(file)


@pytest.mark.parametrize("text", ["", "model: 5", "[1, 2", "model: {a: b", "\0", "- x"])
def test_a_run_config_that_is_damaged_is_named(tmp_path, text):
    file = tmp_path / "run_config.yaml"
    file.write_text(text)
    with pytest.raises(SourceError, match=r"run_config\.yaml"):
        provider_args(file)


def supplied(model: TinyModel) -> dict[str, Any]:
    """What a user would have to say, by the message itself."""
    a = vars(model.values)
    given = {
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "layernorm_zero_centered_gamma": False,
        "window_size": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    }
    return {**given, **a, "padded_vocab_size": padded_vocab(model, 2)}


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek"])
def test_a14_a16_arguments_may_be_given_by_hand_if_all_of_them_are(tmp_path, family):
    """The message lists what is lacking; exactly that, given, is enough for the same plan."""
    model = TinyModel(family)
    source = write_torch_dist(tmp_path / "run", model, Ranks(tp=2), te=True)
    expected = plan_conversion(source, ConvertOptions()).config
    without_args(source)
    values = supplied(model)
    given: dict[str, Any] = {}
    while names := asked_for(source, given):  # some only after the one that makes them matter
        given |= {name: values[name] for name in names}
    assert len(given) > 20
    assert plan_conversion(source, overridden(given)).config == expected
    for name in given:
        rest = {other: value for other, value in given.items() if other != name}
        with pytest.raises(CkptError, match=name):
            plan_conversion(source, overridden(rest))


def asked_for(source, given: dict[str, Any]) -> list[str]:
    """What the message still wants; nothing once the plan is made."""
    try:
        plan_conversion(source, overridden(given))
    except SourceError as error:
        return [part.partition("=")[0] for part in str(error).split("--set ")[1:]]
    return []


def overridden(given: dict[str, Any]) -> ConvertOptions:
    texts = (yaml.safe_dump(value, default_flow_style=True) for value in given.values())
    plain = (text.removesuffix("...\n").strip() for text in texts)
    return ConvertOptions(overrides=tuple(map("=".join, zip(given, plain, strict=True))))


def test_a19_nemo_weights_say_where_the_arguments_are(tmp_path):
    """Its common state has none; they are in the directory beside it."""
    source = write_torch_dist(tmp_path / "run", TinyModel("llama"), Ranks(tp=2), prefix="module.")
    weights = tmp_path / "nemo" / "weights"
    (tmp_path / "nemo" / "context").mkdir(parents=True)
    shutil.move(without_args(source), weights)
    message = rf"NeMo keeps them in .*{weights.parent / 'context'} \(model\.yaml\)"
    with pytest.raises(SourceError, match=f"{message}.*--set num_layers=VALUE.*--set num_experts"):
        plan_conversion(weights, ConvertOptions())
    facts = inspect_directory(weights).as_dict()
    assert not facts["convertible"]
    assert "NeMo keeps them" in facts["reason"]


@pytest.mark.parametrize("place", ["dist_ckpt", "model/dist_ckpt"])
def test_a19_verl_weights_say_where_the_arguments_are(tmp_path, place):
    source = write_torch_dist(tmp_path / "run", TinyModel("llama"), Ranks())
    actor = tmp_path / "global_step_20" / "actor"
    (actor / place).parent.mkdir(parents=True)
    (actor / "transformer_config.json").write_text("{}")
    shutil.move(without_args(source), actor / place)
    with pytest.raises(SourceError, match=f"verl keeps them in {actor}"):
        plan_conversion(actor / place, ConvertOptions())
