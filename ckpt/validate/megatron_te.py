"""TransformerEngine's layer backend for megatron-core, as plain CPU modules.

``install()`` puts them where Megatron's layer specs look for TransformerEngine's, so that
Megatron itself builds a model with that module tree, its parameter names and its replication:
norms fused into the linears, MLA's down projections whole on every rank, grouped experts as
``weight0`` .. ``weightN``. How ``_extra_state`` looks is set by ``extra``.
"""

from __future__ import annotations

import io

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

_extra_form = "uint8"


def _extra():
    """What version 2 (``uint8``) or version 1 (``bytesio``) keeps for a module without fp8."""
    if _extra_form == "uint8":
        return torch.empty(0, dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(None, buffer)
    return buffer


def _data_group():
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


class _Extra:
    def get_extra_state(self):
        return _extra()

    def set_extra_state(self, state):
        pass


def _norm(config, x, weight, bias):
    if config.layernorm_zero_centered_gamma:
        weight = 1 + weight
    if config.normalization == "RMSNorm":
        return functional.rms_norm(x, x.shape[-1:], weight, config.layernorm_epsilon)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, config.layernorm_epsilon)


def _add_norm(module, config, size, prefix):
    start = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = torch.nn.Parameter(start(size, dtype=config.params_dtype))
    module.register_parameter(prefix + "weight", weight)
    if config.normalization == "LayerNorm":
        bias = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        module.register_parameter(prefix + "bias", bias)


class Norm(_Extra, torch.nn.Module):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.config = config
        _add_norm(self, config, hidden_size, "")

    def forward(self, x):
        return _norm(self.config, x, self.weight, getattr(self, "bias", None))


class Column(_Extra, ColumnParallelLinear):
    pass


class Row(_Extra, RowParallelLinear):
    pass


class NormColumn(_Extra, ColumnParallelLinear):
    def __init__(self, input_size, output_size, *, config, **kw):
        super().__init__(input_size, output_size, config=config, **kw)
        _add_norm(self, config, input_size, "layer_norm_")

    def forward(self, x, *args, **kw):
        bias = getattr(self, "layer_norm_bias", None)
        return super().forward(_norm(self.config, x, self.layer_norm_weight, bias), *args, **kw)


class Duplicated(_Extra, torch.nn.Module):
    """TELinear with ``parallel_mode="duplicated"``."""

    def __init__(self, input_size, output_size, *, config, init_method, **_):
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        init_method(self.weight)

    def forward(self, x):
        return functional.linear(x, self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=_data_group(),
        )


class PlainAttention(torch.nn.Module):
    """Causal attention that takes the head sizes of MLA, which DotProductAttention does not."""

    def __init__(self, config, *_, k_channels=None, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(self, query, key, value, *_, **__):
        length, batch, heads, _ = query.shape
        key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query.float(), key.float()) * self.scale
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).reshape(length, batch, -1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}


def _attention_state(module, prefix, sharded_offsets):
    values = {"_extra_state": _extra()}
    if getattr(module, "softmax_offset", None) is not None:
        values["softmax_offset"] = module.softmax_offset
    return make_sharded_tensors_for_checkpoint(
        values,
        prefix,
        {"softmax_offset": 0},
        sharded_offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=_data_group(),
    )


class LatentAttention(_Extra, PlainAttention):
    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _attention_state(self, prefix, sharded_offsets)


class Attention(_Extra, DotProductAttention):
    """Megatron's own, with TransformerEngine's entry in the state."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _attention_state(self, prefix, sharded_offsets)


class _Grouped(_Extra, torch.nn.Module):
    split = 0  # which axis of an expert's weight the expert-tensor-parallel group cuts

    def __init__(
        self, num_gemms, input_size, output_size, *, config, init_method, pg_collection, **options
    ):
        super().__init__()
        self.num_gemms, self.groups = num_gemms, pg_collection
        self.has_bias, self.returns_bias = options["bias"], options["skip_bias_add"]
        size = [output_size, input_size]
        size[self.split] //= pg_collection.expt_tp.size()
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
            init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{index}", weight)
            if self.has_bias:  # Megatron has expert biases only where no group cuts an expert
                bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
                bias.allreduce = weight.allreduce
                self.register_parameter(f"bias{index}", bias)

    def forward(self, x, tokens_per_expert):
        parts = torch.split(x, [int(count) for count in tokens_per_expert])
        weights, biases = (
            [getattr(self, f"{kind}{index}", None) for index in range(self.num_gemms)]
            for kind in ("weight", "bias")
        )
        added = [None] * self.num_gemms if self.returns_bias else biases
        done = [functional.linear(*part) for part in zip(parts, weights, added, strict=True)]
        return torch.cat(done), biases if self.has_bias and self.returns_bias else None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        values = self.state_dict(prefix="", keep_vars=True)
        single = (metadata or {}).get("singleton_local_shards", False)
        first = self.groups.ep.rank() * self.num_gemms
        result = {}
        for index in range(self.num_gemms):
            local = {
                f"{index}.weight": values[f"weight{index}"],
                f"{index}._extra_state": values["_extra_state"],
            }
            if self.has_bias:
                local[f"{index}.bias"] = values[f"bias{index}"]
            expert = (len(sharded_offsets), first + index, self.groups.ep.size() * self.num_gemms)
            made = make_sharded_tensors_for_checkpoint(
                local,
                "",
                {f"{index}.weight": self.split},
                (*sharded_offsets, *(() if single else (expert,))),
                tp_group=self.groups.expt_tp,
                dp_cp_group=_data_group(),
            )
            key = f"{first + index}.{prefix}" if single else prefix
            replace_prefix_for_sharding(made, f"{index}.", key)
            result[f"{prefix}weight{index}"] = made[f"{index}.weight"]
            if self.has_bias:
                result[f"{prefix}bias{index}"] = made[f"{index}.bias"]
            result[f"{prefix}_extra_state{index or ''}"] = made[f"{index}._extra_state"]
        for item in result.values():
            item.replica_id = (*item.replica_id[:2], self.groups.expt_dp.rank())
        return result


class GroupedColumn(_Grouped):
    split = 0


class GroupedRow(_Grouped):
    split = 1


class Provider(LocalSpecProvider):
    def linear(self):
        return Duplicated

    def column_parallel_linear(self):
        return Column

    def row_parallel_linear(self):
        return Row

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormColumn

    def layer_norm(self, rms_norm=False, for_qk=False):  # noqa: FBT002 - Megatron's signature
        return Norm

    def core_attention(self):
        return Attention

    def grouped_mlp_modules(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm):
        if not moe_use_grouped_gemm:
            return SequentialMLP, MLPSubmodules(linear_fc1=Column, linear_fc2=Row)
        if moe_use_legacy_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)
        return TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)


def install(extra="uint8"):
    """Let Megatron's layer specs find these modules as TransformerEngine's."""
    global _extra_form  # noqa: PLW0603 - one model family a process
    _extra_form = extra
    import megatron.core.models.gpt.experimental_attention_variant_module_specs as variants
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.models.gpt.moe_module_specs as moe
    import megatron.core.transformer.multi_token_prediction as mtp
    import megatron.core.transformer.transformer_block as block
    from megatron.core.transformer.moe import moe_layer

    specs.TESpecProvider = moe.TESpecProvider = variants.TESpecProvider = Provider
    specs.TENorm = block.LayerNormImpl = Norm
    specs.HAVE_TE = moe_layer.HAVE_TE = True
    moe_layer.TELinear = Duplicated
    for name, module in (("TENorm", Norm), ("TEColumnParallelLinear", Column)):
        if hasattr(mtp, name):
            setattr(mtp, name, module)


def install_missing(*, mla):
    """Names that megatron-core 0.16 leaves undefined without TransformerEngine."""
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.multi_latent_attention as attention

    moe.te_general_gemm = None
    _replace_fla()
    attention.TELinear, attention.TEColumnParallelLinear = Duplicated, Column
    attention.Linear = Column
    attention.set_save_original_input = lambda module: None
    if mla:
        LocalSpecProvider.core_attention = lambda self: PlainAttention
        Provider.core_attention = lambda self: LatentAttention


def _replace_fla():
    """Megatron's gated delta net asks for a CUDA package even where it computes without it."""
    import megatron.core.ssm.gated_delta_net as delta

    def l2norm(x):  # fla.modules.l2norm: 1e-6 under the root
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    delta.HAVE_FLA, delta.l2norm = True, l2norm
