"""A Megatron-Core model built from a checkpoint's own arguments, and its forward on a CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional

from ckpt.validate import megatron_mamba

# Fields that Megatron's configuration calls as the training arguments do, with the defaults
# of arguments that older versions did not store.
_COMMON = {
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "kv_channels": None,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "attention_output_gate": False,
    "rotary_interleaved": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "mtp_num_layers": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
}
# What GPTModel reads from a configuration that does not know it: names of arguments, defaults.
_YARN = {
    "yarn_rotary_scaling_factor": ("rotary_scaling_factor", 1.0),
    "yarn_original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "yarn_beta_fast": ("yarn_beta_fast", 32.0),
    "yarn_beta_slow": ("yarn_beta_slow", 1.0),
    "yarn_mscale": ("mscale", 1.0),
    "yarn_mscale_all_dim": ("mscale_all_dim", 0.0),
    "yarn_correction_range_round_to_int": ("yarn_correction_range_round_to_int", True),
}
_EXPERTS = {
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_grouped_gemm": False,
    "moe_use_legacy_grouped_gemm": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_aux_loss_coeff": 0.0,
}
_LINEAR = {
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": None,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}

# What other code built around Megatron-Core; without it the answers would be another model's.
_BEYOND = (
    "geglu",
    "apply_embedding_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "interleaved_attn_pattern",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "dsa_indexer_n_heads",
    "mla_down_proj_fusion",
)


def _fields(args, names):
    return {name: args.get(name, default) for name, default in names.items()}


def _either(args, *names, default):
    return next((args[name] for name in names if args.get(name) is not None), default)


def make_config(args, *, te):
    """Megatron's configuration in fp32, from the training arguments by name."""
    beyond = [name for name in _BEYOND if args.get(name)]
    if beyond:
        raise ValueError(f"Megatron-Core alone does not build a model with {', '.join(beyond)}")
    values = _fields(args, _COMMON)
    gated, activation = _activation(args)
    values.update(
        layernorm_epsilon=_either(args, "layernorm_epsilon", "norm_epsilon", default=1e-5),
        layernorm_zero_centered_gamma=_either(
            args, "layernorm_zero_centered_gamma", "apply_layernorm_1p", default=False
        ),
        num_query_groups=args.get("num_query_groups")
        if args.get("group_query_attention")
        else None,
        gated_linear_unit=gated,
        activation_func=activation,
        num_layers_in_first_pipeline_stage=args.get("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=args.get("decoder_last_pipeline_num_layers"),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )
    if args.get("num_experts"):
        values.update(_fields(args, _EXPERTS))
        values["num_moe_experts"] = args["num_experts"]
        values["moe_token_dispatcher_type"] = "alltoall"  # noqa: S105 - no password
    if megatron_mamba.pattern_of(args):
        values.update(_fields(args, megatron_mamba.FIELDS))
        # the kernel that saves memory is for CUDA alone
        values.update(use_mamba_mem_eff_path=False, num_layers=len(megatron_mamba.pattern_of(args)))
        values["moe_latent_size"] = args.get("moe_latent_size")
    if args.get("experimental_attention_variant") in {"gated_delta_net", "gdn"}:
        values.update(_fields(args, _LINEAR))
        if values["experimental_attention_variant"] == "gdn":  # its name in newer versions
            values["experimental_attention_variant"] = "gated_delta_net"
        # that mode needs no CUDA kernels; the layer specs exist for TransformerEngine alone
        values.update(deterministic_mode=True, transformer_impl="transformer_engine")
    known = MLATransformerConfig if args.get("multi_latent_attention") else TransformerConfig
    if args.get("multi_latent_attention"):
        values.update(_fields(args, _LATENT), apply_rope_fusion=False)
        values["rope_type"] = values["rope_type"] or "yarn"
    names = known.__dataclass_fields__
    config = known(**{name: value for name, value in values.items() if name in names})
    if args.get("position_embedding_type") == "yarn":
        for name, (argument, default) in _YARN.items():
            setattr(config, name, _either(args, name, argument, default=default))
    if args.get("moe_grouped_gemm") and not te:
        config.bf16 = True  # GroupedMLP asserts it; the stand-in multiplies any type
    return config


def _activation(args):
    if args.get("quick_geglu"):
        return True, quick_gelu
    if args.get("squared_relu"):
        return False, _squared_relu
    gated = args.get("swiglu", False)
    return gated, functional.silu if gated else functional.gelu


def _squared_relu(x):
    return torch.relu(x) ** 2


def build(args, *, te):
    """The model chunks of this rank, fp32, with TransformerEngine's module tree if ``te``."""
    config = make_config(args, te=te)
    size = args.get("virtual_pipeline_model_parallel_size")
    chunks = [_chunk(args, config, stage, te=te) for stage in (range(size) if size else [None])]
    for module in [module for chunk in chunks for module in chunk.float().modules()]:
        if getattr(module, "local_tokens_per_expert", None) is not None:
            module.local_tokens_per_expert = module.local_tokens_per_expert.float()
        if hasattr(module, "input_in_float16"):  # the softmax would round what GroupedMLP made bf16
            module.input_in_float16 = module.input_in_fp16 = module.input_in_bf16 = False
    return [chunk.eval() for chunk in chunks]


def _chunk(args, config, stage, *, te):
    layers = {"use_transformer_engine": te, "normalization": config.normalization}
    at = {"ignore_virtual": False, "vp_stage": stage}
    ends = {
        "pre_process": groups.is_pipeline_first_stage(**at),
        "post_process": groups.is_pipeline_last_stage(**at),
    }
    if megatron_mamba.pattern_of(args):
        return megatron_mamba.build_model(config, args, **ends)
    mtp, block = None, _block_spec(config, stage, layers)
    if config.mtp_num_layers:
        last = _last_layer_spec(config, layers)
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=te, vp_stage=stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        **ends,
        parallel_output=True,
        position_embedding_type=args.get("position_embedding_type", "learned_absolute"),
        share_embeddings_and_output_weights=not args.get("untie_embeddings_and_output_weights"),
        rotary_percent=args.get("rotary_percent", 1.0),
        rotary_base=args.get("rotary_base", 10000),
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor") or 8.0,
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def _block_spec(config, stage, layers):
    if getattr(config, "linear_attention_freq", None):
        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=stage
        )
    return get_gpt_decoder_block_spec(config, **layers, vp_stage=stage)


def _last_layer_spec(config, layers):
    if getattr(config, "linear_attention_freq", None):
        return _block_spec(config, None, layers).layer_specs[-1]
    return get_gpt_decoder_layer_specs(config, **layers)[-1]


@torch.no_grad()
def forward(chunks, args, ids):
    """Logits [B, S, V] of all ranks' columns, None where this rank has no head, and hidden states.

    These are the residual streams [B, S, H] behind this rank's layers by their number, 0 the
    embedding's. Megatron gives no logits beside a loss and computes the loss in place, so they
    are taken by a hook on the head; heads that predict further tokens come first, the main one
    last.
    """
    logits, states = [], {}

    def keep_logits(_module, _inputs, output):
        logits.append(output[0].detach().clone())

    def keeper(layer):
        def keep(_module, _inputs, output):
            state = output[0] if isinstance(output, tuple) else output
            states.setdefault(layer, []).append(state.detach().transpose(0, 1).clone())

        return keep

    hooks = []
    for chunk in chunks:
        if chunk.pre_process:
            hooks.append(chunk.embedding.register_forward_hook(keeper(0)))
        hooks += [
            layer.register_forward_hook(keeper(layer.layer_number))
            for layer in chunk.decoder.layers
        ]
        if chunk.post_process:
            hooks.append(chunk.output_layer.register_forward_hook(keep_logits))
    _run(chunks, _whole_rounds(ids))
    for hook in hooks:
        hook.remove()
    count = len(ids)
    # the embedding is asked again for the tokens that further heads predict from
    hidden = {layer: torch.cat(_main_calls(seen, ids)[:count]) for layer, seen in states.items()}
    if not logits:
        return None, hidden
    calls = 1 + (args.get("mtp_num_layers") or 0)
    return torch.cat([_gather(part) for part in logits[calls - 1 :: calls]])[:count], hidden


def _whole_rounds(ids):
    """Rows repeated until Megatron's interleaved schedule takes their number."""
    stages = groups.get_pipeline_model_parallel_world_size()
    missing = -len(ids) % stages
    return torch.cat([ids, *[ids[:1]] * missing])


def _main_calls(seen, ids):
    calls = len(seen) // len(_whole_rounds(ids))
    return seen[::calls]


def _run(chunks, ids):
    """One forward pass of Megatron's pipeline schedule, one row a microbatch."""
    length = ids.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    batches = list(zip(ids.split(1), torch.roll(ids, -1, dims=1).split(1), strict=True))

    def step(iterator, model):
        tokens, targets = next(iterator)
        return model(tokens, positions, mask, labels=targets), lambda out: (out.mean(), {})

    iterators = [iter(batches) for _ in chunks]
    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
    )


def _gather(local):
    group = groups.get_tensor_model_parallel_group()
    local = local.float().contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, -1).transpose(0, 1).contiguous()
