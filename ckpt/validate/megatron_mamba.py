"""Megatron-Core's model of several kinds of layers (Mamba-2, attention, MLP, experts) on a CPU.

Megatron computes state-space layers with CUDA kernels alone. ``install()`` puts a plain recurrence
in the place of the scan, and names for the packages that are not there, so that Megatron's own
modules (``MambaModel``, ``MambaMixer``) build, shard and run the model.
"""

from __future__ import annotations

import math
import re
import sys
import types

import torch
from torch.nn import functional

_TRITON_OPS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


def _module(name, **content):
    made = types.ModuleType(name)
    made.__dict__.update(content)
    sys.modules.setdefault(name, made)


def install():
    """Let megatron-core's state-space modules be imported; does nothing where they are known."""
    if "megatron.core.ssm.mamba_mixer" in sys.modules:
        return
    _module("einops", rearrange=_rearrange, repeat=None)
    unused = dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"))
    _module(_TRITON_OPS, **unused)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        _module(name)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_GatedNorm)
    _module(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=_scan,
        mamba_split_conv1d_scan_combined=None,
    )


def _rearrange(x, pattern, **sizes):
    """einops.rearrange for names that are split and joined in the order they have."""
    before, after = (re.findall(r"\([^)]*\)|\S+", side) for side in pattern.split("->"))
    names: list[str] = []
    shape: list[int] = []
    for token, length in zip(before, x.shape, strict=True):
        parts = token.strip("()").split()
        known = math.prod(sizes.get(part, 1) for part in parts)
        lengths = [sizes.get(part, length // known) for part in parts]
        names += [part for part in parts if part != "1"]
        shape += [n for part, n in zip(parts, lengths, strict=True) if part != "1"]
    places = dict(zip(names, shape, strict=True))
    joined = [token.strip("()").split() for token in after]
    order = [names.index(part) for parts in joined for part in parts if part != "1"]
    result = [math.prod(places.get(part, 1) for part in parts) for parts in joined]
    return x.reshape(shape).permute(order).reshape(result)


class _GatedNorm(torch.nn.Module):
    """RMSNorm over each group of channels of ``x * silu(z)`` (mamba_ssm, layernorm_gated.py)."""

    def __init__(self, size, *, eps, group_size, norm_before_gate, device=None, dtype=None):
        super().__init__()
        if norm_before_gate:
            raise NotImplementedError("a norm before the gate")
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x, z):
        dtype, shape = x.dtype, x.shape
        x = (x.float() * functional.silu(z.float())).unflatten(-1, (-1, self.group_size))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.reshape(shape) * self.weight.float()).to(dtype)


def _scan(x, dt, a, b, c, chunk_size, *, D, dt_bias, dt_softplus, z=None, **unused):  # noqa: N803
    """Token by token what MambaMixer's ``_ssm_decode`` does for one token without kernels.

    x [B, L, H, P], dt [B, L, H], a [H], b and c [B, L, G, N].
    """
    unused = {name: value for name, value in unused.items() if value not in (None, False)}
    if z is not None or not dt_softplus or unused:
        raise NotImplementedError(f"a scan with {unused or 'other options'}")
    heads, groups = x.shape[2], b.shape[2]
    b, c = (side.float().repeat_interleave(heads // groups, dim=2) for side in (b, c))
    dt = functional.softplus(dt.float() + dt_bias)
    state = x.new_zeros(x.shape[0], heads, x.shape[3], b.shape[3], dtype=torch.float32)
    outputs = []
    for place in range(x.shape[1]):
        step, token = dt[:, place], x[:, place].float()
        decay = torch.exp(step * a)[..., None, None]
        state = decay * state + (step[..., None] * token)[..., None] * b[:, place, :, None]
        outputs.append((state * c[:, place, :, None]).sum(-1) + D[:, None] * token)
    return torch.stack(outputs, 1).to(x.dtype)


FIELDS = {
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
}


def pattern_of(args):
    """The pattern of layers in training arguments by name, without stages' separators."""
    found = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern") or ""
    return found.replace("|", "")


def build_model(config, args, **parts):
    """A ``MambaModel`` with TransformerEngine's module tree, which is the only one there is.

    ``parts`` are the arguments that it shares with ``GPTModel``.
    """
    install()
    from megatron.core.models.mamba import MambaModel

    return MambaModel(
        config=config,
        mamba_stack_spec=_stack_spec(config),
        hybrid_override_pattern=pattern_of(args),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        parallel_output=True,
        position_embedding_type=args.get("position_embedding_type", "none"),
        share_embeddings_and_output_weights=not args.get("untie_embeddings_and_output_weights"),
        **parts,
    )


def _stack_spec(config):
    """As models/mamba/mamba_layer_specs.py, with the stand-ins for TransformerEngine's modules."""
    import megatron.core.ssm.mamba_block as block
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from ckpt.validate import megatron_te as te

    block.TENorm = te.Norm
    experts = get_moe_module_spec_for_backend(
        backend=te.Provider(),
        num_experts=8,  # any number; the configuration decides
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=False,
    )
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(te.NormColumn, te.Row))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=te.NormColumn, core_attention=te.Attention, linear_proj=te.Row
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=te.NormColumn, linear_fc2=te.Row))
    add = get_bias_dropout_add
    return ModuleSpec(
        block.MambaStack,
        submodules=block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add)
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=add),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=add)
            ),
            moe_layer=ModuleSpec(
                MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=te.Norm, mlp=experts, mlp_bda=add
                ),
            ),
        ),
    )
