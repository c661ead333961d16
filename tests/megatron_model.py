"""Build, fill, run and save a megatron-core model on a CPU, inside an initialised process group."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import megatron_variants as variants
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as groups
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import experimental_attention_variant_module_specs as attention
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional

from ckpt.validate import megatron_mamba

# Fields that Megatron's configuration calls as the training arguments do.
_COMMON = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "rotary_interleaved",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_layout",
    "mtp_num_layers",
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    "glu_linear_offset",
    "activation_func_clamp_value",
]
_LINEAR = [
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
]
_EXPERTS = [
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_grouped_gemm",
    "moe_use_legacy_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_load_balancing_type",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_aux_loss_coeff",
    "moe_token_dispatcher_type",
]
_LATENT = [
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
]


def make_config(args, dtype):
    values = {name: getattr(args, name) for name in _COMMON}
    values.update(
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        activation_func=_activation(args),
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )
    if args.num_experts:
        values.update({name: getattr(args, name) for name in _EXPERTS})
        values["num_moe_experts"] = args.num_experts
    if args.hybrid_override_pattern:
        values.update({name: getattr(args, name) for name in megatron_mamba.FIELDS})
        values.update(use_mamba_mem_eff_path=False, moe_latent_size=args.moe_latent_size)
    if args.linear_attention_freq:
        values.update({name: getattr(args, name) for name in _LINEAR})
        values.update(deterministic_mode=True, transformer_impl=args.transformer_impl)
    if args.multi_latent_attention:
        values.update({name: getattr(args, name) for name in _LATENT})
        config = MLATransformerConfig(**values, apply_rope_fusion=False)
    else:
        config = TransformerConfig(**values)
        if args.position_embedding_type == "yarn":
            _set_yarn(config, args)
    variants.adapt_config(args, config)
    if args.moe_grouped_gemm and args.transformer_impl == "local":
        config.bf16 = True  # GroupedMLP asserts it; our stand-in multiplies any type
    return config


def _activation(args):
    if args.quick_geglu:
        return quick_gelu
    if args.squared_relu:
        return squared_relu
    return functional.silu if args.swiglu else functional.gelu


def _set_yarn(config, args):
    """As megatron/training/argument_utils.py does: fields that the configuration does not know."""
    config.yarn_rotary_scaling_factor = args.rotary_scaling_factor
    config.yarn_mscale, config.yarn_mscale_all_dim = args.mscale, args.mscale_all_dim
    for name in (
        "yarn_original_max_position_embeddings",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_correction_range_round_to_int",
    ):
        setattr(config, name, getattr(args, name))


def build(args, dtype):
    """The model chunks of this rank."""
    config = make_config(args, dtype)
    chunks = [_chunk(args, config, stage) for stage in _virtual_stages(args)]
    for module in [module for chunk in chunks for module in chunk.to(dtype).modules()]:
        if getattr(module, "expert_bias", None) is not None:  # Megatron keeps it in fp32
            module.expert_bias = module.expert_bias.float()
            module.local_tokens_per_expert = module.local_tokens_per_expert.float()
        if hasattr(module, "input_in_float16") and dtype == torch.float32:
            # where GroupedMLP made the configuration say bf16, the softmax must not round
            module.input_in_float16 = module.input_in_fp16 = module.input_in_bf16 = False
    return chunks


def _virtual_stages(args):
    size = args.virtual_pipeline_model_parallel_size
    return range(size) if size else [None]


def _chunk(args, config, stage):
    layers = dict(
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
    )
    at = dict(ignore_virtual=False, vp_stage=stage)
    ends = dict(
        pre_process=groups.is_pipeline_first_stage(**at),
        post_process=groups.is_pipeline_last_stage(**at),
    )
    if args.hybrid_override_pattern:
        return megatron_mamba.build_model(config, vars(args), **ends)
    mtp, block = None, _block_spec(args, config, layers, stage)
    if args.mtp_num_layers:
        last = _last_layer_spec(args, config, layers)
        te = layers["use_transformer_engine"]
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=te, vp_stage=stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=variants.adapt_spec(args, block),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        **ends,
        parallel_output=True,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        rotary_percent=args.rotary_percent,
        rotary_base=variants.global_base(args),
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    return variants.adapt_model(args, model)


def _block_spec(args, config, layers, stage):
    if args.linear_attention_freq:
        return attention.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=stage
        )
    return get_gpt_decoder_block_spec(config, **layers, vp_stage=stage)


def _last_layer_spec(args, config, layers):
    if args.linear_attention_freq:  # the last stage's own block holds it
        return _block_spec(args, config, layers, None).layer_specs[-1]
    return get_gpt_decoder_layer_specs(config, **layers)[-1]


def sharding(*, single=False):
    return {
        "singleton_local_shards": single,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True),
    }


def fill(chunks):
    """Give every saved tensor values that its global key and its place in the whole decide."""
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata=sharding())
        apply_factories(state)
        for item in nested_values(state):
            if isinstance(item, ShardedTensor) and item.data is not None:
                _fill_shard(item, zero_centered=chunk.config.layernorm_zero_centered_gamma)


def _fill_shard(item, *, zero_centered):
    if not item.data.is_floating_point():
        return
    whole = whole_value(item.key, item.global_shape, zero_centered=zero_centered)
    for _ in range(item.prepend_axis_num):
        whole = whole[item.global_offset[len(item.global_shape) - whole.dim()]]
    places = item.global_offset[item.prepend_axis_num :]
    for axis, (start, size) in enumerate(zip(places, item.data.shape, strict=True)):
        whole = whole.narrow(axis, start, size)
    with torch.no_grad():
        item.data.copy_(whole)


def whole_value(key, shape, *, zero_centered):
    """Gains lie in 0.5 to 1.5; all numbers are the same in bf16 as in fp32."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(seed)
    *_, owner, leaf = key.split(".")
    if leaf.endswith("weight") and "norm" in owner + leaf:
        value = torch.rand(shape, generator=generator) + (-0.5 if zero_centered else 0.5)
    elif leaf.endswith(("bias", "softmax_offset")):
        value = 0.1 * torch.randn(shape, generator=generator)
    else:
        value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return value.to(torch.bfloat16).float()


def run(chunks, ids, *, forward_only):
    """One pass of Megatron's pipeline schedule over ``ids``, one row a microbatch."""
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)[None, None]
    batches = list(zip(ids.split(1), torch.roll(ids, -1, dims=1).split(1), strict=True))

    def step(iterator, model):
        tokens, targets = next(iterator)
        return model(tokens, positions, mask, labels=targets), mean_loss

    def mean_loss(losses):
        mean = losses[:, :-1].float().mean()  # nothing follows the last position
        return mean, {"loss": mean.detach()}

    iterators = [iter(batches) for _ in chunks]
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(batches),
        seq_length=ids.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )


@torch.no_grad()
def forward(chunks, args, ids):
    """Logits of the main head and of MTP's, whole; empty where this rank has no head."""
    seen: list[torch.Tensor] = []
    heads = [chunk for chunk in chunks if chunk.post_process]
    # a hook, since Megatron gives no logits beside a loss and computes that loss in place
    hooks = [head.output_layer.register_forward_hook(_keeper(seen)) for head in heads]
    for chunk in chunks:
        chunk.eval()
    run(chunks, ids, forward_only=True)
    for hook in hooks:
        hook.remove()
    calls = 1 + (args.mtp_num_layers or 0)  # MTP's come first, the main head's last
    wholes = [_gather(local) for local in seen]
    main = wholes[calls - 1 :: calls]
    extra = [logits for index, logits in enumerate(wholes) if index % calls != calls - 1]
    return [torch.cat(part) if part else None for part in (main, extra)]


def _keeper(seen):
    return lambda module, inputs, output: seen.append(output[0].detach().clone())


def _gather(local):
    group = groups.get_tensor_model_parallel_group()
    local = local.float().contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, -1).transpose(0, 1).contiguous()


def exact_logits(chunks, args, ids):
    """What the weights of ``chunks`` answer when everything is computed in fp32."""
    twin = build(args, torch.float32)
    for chunk, other in zip(chunks, twin, strict=True):
        other.load_state_dict(chunk.state_dict(), strict=False)
    return forward(twin, args, ids)[0]


class Trainer:
    """Megatron's own data-parallel wrapper and optimizer around ``chunks``."""

    def __init__(self, chunks, args, *, lr, weight_decay=0.01):
        config = chunks[0].config
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
        )
        self.wrapped = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        options = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr,
            weight_decay=weight_decay,
            clip_grad=1.0,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(options, self.wrapped)

    def step(self, ids, *, lr=None):
        """One optimizer step; the loss, where this rank is on the last stage."""
        for chunk in self.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        done = run(self.wrapped, ids, forward_only=False)
        self.optimizer.step()
        return float(sum(item["loss"] for item in done) / len(done)) if done else None


def save(chunks, args, directory, *, trainer=None, single=False, sharding_type=None):
    """A checkpoint as Megatron-LM lays it out, iteration ``args.iteration``."""
    place = Path(directory) / f"iter_{args.iteration:07d}"
    state = {"args": args, "checkpoint_version": 3.0, "iteration": args.iteration}
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    named = list(zip(names, chunks, strict=True))
    optimizer = trainer.optimizer if trainer else None
    if dist.get_rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if args.ckpt_format == "torch_dist":
        options = dict(single=single, sharding_type=sharding_type)
        _save_sharded(state, named, place, args, optimizer, **options)
    else:
        _save_ranks(state, named, place, args, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        tracker = Path(directory) / "latest_checkpointed_iteration.txt"
        tracker.write_text(str(args.iteration))
    dist.barrier()


def _save_sharded(state, named, place, args, optimizer, *, single, sharding_type):
    metadata = sharding(single=single)
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = sharding_type or "dp_reshardable"
    for name, chunk in named:
        state[name] = chunk.sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = _schedule(args)
    state["num_floating_point_operations_so_far"] = 0
    content = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(state, str(place), content_metadata=content)


def _save_ranks(state, named, place, args, optimizer):
    place /= rank_directory(args)
    if optimizer is not None and args.use_distributed_optimizer:
        place.mkdir(exist_ok=True)
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if groups.get_expert_data_parallel_rank() != 0:
        return
    for name, chunk in named:
        state[name] = chunk.state_dict_for_save_checkpoint()
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
        state["opt_param_scheduler"] = _schedule(args)
    state["rng_state"] = [_rng()]
    state["num_floating_point_operations_so_far"] = 0
    place.mkdir(exist_ok=True)
    torch.save(state, place / "model_optim_rng.pt")


def rank_directory(args):
    """The name of this rank's directory in a checkpoint of the ``torch`` format."""
    name = f"mp_rank_{groups.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{groups.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        name += f"_{groups.get_expert_model_parallel_rank():03d}"
    return name


def _schedule(args):
    return {
        "max_lr": args.lr,
        "min_lr": args.lr,
        "lr_warmup_steps": 0,
        "num_steps": args.consumed_train_samples,
        "lr_decay_style": "constant",
        "lr_decay_steps": 100,
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }


def _rng():
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the state that Megatron stores
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def parallel_fields(layout: Any):
    """Training arguments for the parallel sizes of ``layout``."""
    etp = layout.etp or layout.tp
    world = max(layout.tp * layout.pp, etp * layout.ep * layout.pp)
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=etp,
        context_parallel_size=1,
        decoder_first_pipeline_num_layers=layout.first_layers,
        decoder_last_pipeline_num_layers=None,
        pipeline_model_parallel_layout=layout.layout,
        world_size=world,
        data_parallel_size=world // (layout.tp * layout.pp),
    )


def padded_vocab_size(vocab_size, multiple, tp):
    unit = multiple * tp
    return -(-vocab_size // unit) * unit
