"""Small changes to megatron-core's own modules for models that megatron-core alone cannot build.

Each follows what Megatron-Bridge or slime does with the same modules: a norm behind attention and
behind the MLP (stored under either of two spellings), capped scores, windows in some layers, a
rotary base of their own for those. ``adapt_config``, ``adapt_spec`` and ``adapt_model`` do nothing
for other models.
"""

from __future__ import annotations

import copy

import torch
from megatron.core import parallel_state as groups
from megatron.core.activations import fast_gelu
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from ckpt.validate import megatron_te


class NormedRow(megatron_te.Row):
    """A row-parallel linear with a norm on its output (TERowParallelLinearLayerNorm)."""

    def __init__(self, input_size, output_size, *, config, **kw):
        super().__init__(input_size, output_size, config=config, **kw)
        self.post_layernorm = megatron_te.Norm(config, output_size)

    def forward(self, x):
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class CappedAttention(DotProductAttention):
    """Scores through ``cap * tanh(score / cap)``; a window in local layers only."""

    def __init__(self, config, layer_number, *args, **kw):
        config = copy.copy(config)
        config.window_size = None
        if config.local_layers[layer_number - 1]:
            config.window_size = (config.window - 1, 0)
        super().__init__(config, layer_number, *args, **kw)
        softmax, cap = self.scale_mask_softmax, config.score_cap
        if cap:
            del self.scale_mask_softmax
            self.scale_mask_softmax = lambda scores, *rest: softmax(
                cap * torch.tanh(scores / cap), *rest
            )


class TwoBaseAttention(SelfAttention):
    """Local layers turn queries and keys by positions of another base than the model's."""

    def __init__(self, config, submodules, layer_number, **kw):
        super().__init__(config, submodules, layer_number, **kw)
        self.local_positions = None
        if config.local_layers[layer_number - 1] and config.local_base:
            self.local_positions = RotaryEmbedding(
                config.kv_channels, 1.0, rotary_base=config.local_base, use_cpu_initialization=True
            )

    def forward(self, hidden_states, attention_mask, *, rotary_pos_emb=None, **kw):
        if self.local_positions is not None:
            rotary_pos_emb = self.local_positions(rotary_pos_emb.shape[0])
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **kw)


class NormedLayer(TransformerLayer):
    """A layer with norms on the outputs of attention and MLP, under slime's names."""

    def __init__(self, config, *args, **kw):
        super().__init__(config, *args, **kw)
        self.post_self_attn_layernorm = megatron_te.Norm(config, config.hidden_size)
        self.post_mlp_layernorm = megatron_te.Norm(config, config.hidden_size)
        for block, norm in (
            (self.self_attention, self.post_self_attn_layernorm),
            (self.mlp, self.post_mlp_layernorm),
        ):
            block.register_forward_hook(
                lambda _m, _i, output, norm=norm: (norm(output[0]), output[1])
            )


class FullWidthNorm(torch.nn.Module):
    """An RMSNorm over the heads of all tensor-parallel ranks together; each holds its part."""

    heads = "num_attention_heads"

    def __init__(self, config, hidden_size, **_):
        super().__init__()
        self.whole = getattr(config, self.heads) * hidden_size
        self.eps = config.layernorm_epsilon
        size = self.whole // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, x):
        flat = x.flatten(2).float()
        squares = flat.pow(2).sum(-1, keepdim=True)
        torch.distributed.all_reduce(squares, group=groups.get_tensor_model_parallel_group())
        scaled = flat * torch.rsqrt(squares / self.whole + self.eps)
        return (self.weight * scaled.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=groups.get_tensor_model_parallel_group(),
            dp_cp_group=groups.get_data_parallel_group(with_context_parallel=True),
        )


class FullWidthKeyNorm(FullWidthNorm):
    heads = "num_query_groups"


class Indexer(dsa.DSAIndexer):
    """As Megatron-Core 0.19 turns the indexer's queries and keys: the first rows of a head.

    Its Hadamard transform is left out: it is orthogonal and needs a GPU.
    """

    def _apply_rope(self, x, rotary_pos_emb, mscale):
        size = self.qk_pos_emb_head_dim
        config = copy.copy(self.config)
        config.multi_latent_attention = self.config.dsa_indexer_rope_interleaved
        turned = apply_rotary_pos_emb(
            x[..., :size], rotary_pos_emb, config, mscale=mscale, cp_group=self.pg_collection.cp
        )
        return torch.cat([turned, x[..., size:]], dim=-1)


def _make_sparse(own):
    """DeepSeek sparse attention as Megatron-Core 0.19 composes it: norms before the linears."""
    dsa.rotate_activation = lambda x: x
    parts = dict.fromkeys(
        ("linear_wq_b", "linear_wk", "linear_weights_proj"), megatron_te.Duplicated
    )
    indexer = dsa.DSAIndexerSubmodules(**parts, k_norm=megatron_te.Norm)
    own.core_attention = ModuleSpec(
        dsa.DSAttention,
        submodules=dsa.DSAttentionSubmodules(indexer=ModuleSpec(Indexer, submodules=indexer)),
    )
    own.linear_q_up_proj = own.linear_kv_up_proj = megatron_te.Column
    own.q_layernorm = own.kv_layernorm = megatron_te.Norm


def is_gemma(args):
    return getattr(args, "geglu", False)


def adapt_config(args, config):
    """Settings that Megatron's configuration has no fields for, or checks before they are."""
    for name in [name for name in vars(args) if name.startswith(("dsa_", "experimental_"))]:
        setattr(config, name, getattr(args, name))
    if not is_gemma(args):
        return
    config.gated_linear_unit, config.activation_func = True, fast_gelu
    pattern = getattr(args, "interleaved_attn_pattern", None)
    window = getattr(args, "window_size", None)
    config.window = window if isinstance(window, int) else (window[0] + 1 if window else None)
    local, every = pattern or ((1, 2) if window else (0, 1))
    every = every if pattern is None else sum(pattern)
    config.local_layers = [layer % every < local for layer in range(args.num_layers)]
    config.score_cap = getattr(args, "attn_logit_softcapping", None)
    bases = args.rotary_base
    config.local_base = bases[0] if isinstance(bases, list) else None
    scalar = getattr(args, "query_pre_attn_scalar", None)
    config.softmax_scale = scalar**-0.5 if scalar else getattr(args, "softmax_scale", None)


def adapt_spec(args, block):
    """The layers' modules, changed in place."""
    for layer in block.layer_specs:
        if getattr(args, "post_self_attn_layernorm", False):
            layer.module = NormedLayer
        if getattr(args, "dsa_indexer_n_heads", None):
            _make_sparse(layer.submodules.self_attention.submodules)
        if getattr(args, "full_width_qk_norm", False):
            own = layer.submodules.self_attention.submodules
            own.q_layernorm, own.k_layernorm = FullWidthNorm, FullWidthKeyNorm
    if not is_gemma(args):
        return block
    for layer in block.layer_specs:
        attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
        attention.module = TwoBaseAttention
        attention.submodules.core_attention = CappedAttention
        if getattr(args, "window_size", None):  # Gemma 2 and 3
            attention.submodules.linear_proj = mlp.submodules.linear_fc2 = NormedRow
    return block


def adapt_model(args, model):
    """Scaled embeddings, capped logits, linear scaling of the global layers' positions."""
    if not is_gemma(args):
        return model
    if model.pre_process:
        scale = args.hidden_size**0.5
        model.embedding.register_forward_hook(lambda _m, _i, output: output * scale)
    cap = getattr(args, "final_logit_softcapping", None)
    if model.post_process and cap:
        model.output_layer.register_forward_hook(
            lambda _m, _i, output: (cap * torch.tanh(output[0] / cap), output[1])
        )
    if isinstance(args.rotary_base, list):
        model.rotary_pos_emb.inv_freq /= args.rope_scaling_factor
    return model


def global_base(args):
    """The rotary base of layers without a window."""
    return args.rotary_base[-1] if isinstance(args.rotary_base, list) else args.rotary_base
