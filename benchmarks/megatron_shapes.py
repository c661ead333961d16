"""What models and their parts Megatron-LM trains: names, shapes, and how ranks share them.

Names are those of TransformerEngine's spec; the arguments are those that Megatron-LM stores.
"""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    Places = list[tuple[tuple[int, ...], tuple[int, ...]]]  # (offset, shape) of chunks


@dataclass(frozen=True)
class Model:
    """The training arguments that make an architecture; those that Megatron-LM would hold."""

    args: dict[str, Any]

    @property
    def values(self) -> argparse.Namespace:
        """The arguments by attribute."""
        return argparse.Namespace(**{**COMMON, **self.args})


@dataclass(frozen=True)
class Ranks:
    """Parallel sizes; ``last`` is how many layers the last pipeline stage holds, if fewer."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    last: int | None = None

    @property
    def world(self) -> int:
        """Ranks of a pipeline stage in the smallest world that holds the model."""
        return max(self.tp, self.ep * self.etp)

    def stages(self, layers: int) -> list[range]:
        """The layers of each stage."""
        count = self.pp
        each = layers // count if self.last is None else (layers - self.last) // (count - 1)
        return [range(n * each, min(layers, (n + 1) * each)) for n in range(count)]


@dataclass(frozen=True)
class Tensor:
    """A weight as one process would hold it, and the dimension that ranks share."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16

    def part(self, ranks: int) -> tuple[int, ...]:
        """The shape that each of ``ranks`` ranks holds."""
        return tuple(n // ranks if axis == self.dim else n for axis, n in enumerate(self.shape))

    def chunks(self, ranks: int) -> list[Places]:
        """For each rank, where its chunks begin and how large they are."""
        if self.dim is None:
            return [[((0,) * len(self.shape), self.shape)], *([] for _ in range(ranks - 1))]
        halves = 2 if self.gated else 1
        length = self.shape[self.dim] // halves // ranks
        shape = tuple(length if axis == self.dim else n for axis, n in enumerate(self.shape))
        return [
            [(self._at((half * ranks + rank) * length), shape) for half in range(halves)]
            for rank in range(ranks)
        ]

    def _at(self, start: int) -> tuple[int, ...]:
        return tuple(start if axis == self.dim else 0 for axis in range(len(self.shape)))


COMMON: dict[str, Any] = dict(  # noqa: C408 - as arguments are written
    normalization="RMSNorm", layernorm_epsilon=1e-5, layernorm_zero_centered_gamma=False,
    swiglu=True, add_bias_linear=False, add_qkv_bias=False, position_embedding_type="rope",
    rotary_percent=1.0, rotary_interleaved=False, rotary_seq_len_interpolation_factor=None,
    use_rope_scaling=False, openai_gelu=False, squared_relu=False, window_size=None,
    untie_embeddings_and_output_weights=True, num_experts=None, moe_layer_freq=1,
    multi_latent_attention=False, qk_layernorm=False, mtp_num_layers=None, seq_length=4096,
    moe_router_enable_expert_bias=False, moe_shared_expert_intermediate_size=None,
    params_dtype=torch.bfloat16,
)  # fmt: skip
DEEPSEEK_V3 = Model(dict(  # noqa: C408 - as arguments are written
    num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128,
    kv_channels=128, group_query_attention=False, num_query_groups=1, vocab_size=129280,
    max_position_embeddings=4096, layernorm_epsilon=1e-6, rotary_base=10000,
    multi_latent_attention=True, qk_layernorm=True, q_lora_rank=1536, kv_lora_rank=512,
    qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, rope_type="yarn",
    rotary_scaling_factor=40.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=1.0, num_experts=256, moe_layer_freq=[0] * 3 + [1] * 58,
    moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=2048, moe_grouped_gemm=True,
    moe_shared_expert_gate=False, moe_router_topk=8, moe_router_score_function="sigmoid",
    moe_router_load_balancing_type="seq_aux_loss", moe_router_enable_expert_bias=True,
    moe_router_pre_softmax=False, moe_router_num_groups=8, moe_router_group_topk=4,
    moe_router_topk_scaling_factor=2.5, moe_aux_loss_coeff=1e-4,
))  # fmt: skip
LLAMA3_405B = Model(dict(  # noqa: C408 - as arguments are written
    num_layers=126, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128,
    kv_channels=128, group_query_attention=True, num_query_groups=8, vocab_size=128256,
    max_position_embeddings=131072, rotary_base=500000, use_rope_scaling=True,
    rope_scaling_factor=8.0,
))  # fmt: skip
MODELS = {"deepseek-v3": DEEPSEEK_V3, "llama-3-405b": LLAMA3_405B}
RANKS = {
    "deepseek-v3": Ranks(tp=8, pp=16, ep=64, last=1),
    "llama-3-405b": Ranks(tp=8, pp=16, last=6),
}


def layer_tensors(a: argparse.Namespace, layer: int) -> list[Tensor]:
    """The tensors of a decoder layer but for its routed experts, without the layer's prefix."""
    return _typed(a, _layer_tensors(a, layer))


def _typed(a: argparse.Namespace, found: list[Tensor]) -> list[Tensor]:
    """The tensors in the type that the model is trained in; a bias of the router is fp32."""
    kept = torch.float32
    return [item if item.dtype is kept else replace(item, dtype=a.params_dtype) for item in found]


def _layer_tensors(a: argparse.Namespace, layer: int) -> list[Tensor]:
    h, attention = a.hidden_size, "self_attention."
    if a.multi_latent_attention:
        rope, heads = a.qk_pos_emb_head_dim, a.num_attention_heads
        query, both = heads * (a.qk_head_dim + rope), heads * (a.qk_head_dim + a.v_head_dim)
        found = [
            Tensor("input_layernorm.weight", (h,)),
            Tensor(attention + "linear_proj.weight", (h, heads * a.v_head_dim), 1),
            Tensor(attention + "linear_q_down_proj.weight", (a.q_lora_rank, h)),
            Tensor(attention + "linear_q_up_proj.weight", (query, a.q_lora_rank), 0),
            Tensor(attention + "linear_q_up_proj.layer_norm_weight", (a.q_lora_rank,)),
            Tensor(attention + "linear_kv_down_proj.weight", (a.kv_lora_rank + rope, h)),
            Tensor(attention + "linear_kv_up_proj.weight", (both, a.kv_lora_rank), 0),
            Tensor(attention + "linear_kv_up_proj.layer_norm_weight", (a.kv_lora_rank,)),
        ]
    else:
        heads, groups, size = a.num_attention_heads, a.num_query_groups, a.kv_channels
        norms = "qk" if a.qk_layernorm else ""
        found = [
            Tensor(attention + "linear_proj.weight", (h, heads * size), 1),
            Tensor(attention + "linear_qkv.weight", ((heads + 2 * groups) * size, h), 0),
            Tensor(attention + "linear_qkv.layer_norm_weight", (h,)),
            *(Tensor(f"{attention}{part}_layernorm.weight", (size,)) for part in norms),
        ]
    if not is_moe(a, layer):
        return [*found, *_mlp("mlp.", h, a.ffn_hidden_size, norm=True)]
    shared = a.moe_shared_expert_intermediate_size
    bias = Tensor("mlp.router.expert_bias", (a.num_experts,), dtype=torch.float32)
    return [
        *found,
        Tensor("pre_mlp_layernorm.weight", (h,)),
        Tensor("mlp.router.weight", (a.num_experts, h)),
        *([bias] if a.moe_router_enable_expert_bias else ()),
        *(_mlp("mlp.shared_experts.", h, shared) if shared else ()),
    ]


def is_moe(a: argparse.Namespace, layer: int) -> bool:
    """Whether a layer has routed experts."""
    frequency = a.moe_layer_freq  # a list, or 1 for all of them
    return bool(a.num_experts and (frequency[layer] if isinstance(frequency, list) else True))


def _mlp(at: str, hidden: int, ffn: int, *, norm: bool = False) -> list[Tensor]:
    gain = [Tensor(at + "linear_fc1.layer_norm_weight", (hidden,))]
    return [
        Tensor(at + "linear_fc1.weight", (2 * ffn, hidden), 0, gated=True),
        *(gain if norm else ()),
        Tensor(at + "linear_fc2.weight", (hidden, ffn), 1),
    ]


def expert_tensors(a: argparse.Namespace) -> list[Tensor]:
    """The tensors of one routed expert, without prefix and number."""
    return _typed(a, _mlp("", a.hidden_size, a.moe_ffn_hidden_size))


def outer_tensors(a: argparse.Namespace) -> tuple[list[Tensor], list[Tensor]]:
    """What the first and what the last stage holds beside its layers."""
    table = (a.vocab_size, a.hidden_size)
    tail = [
        Tensor("decoder.final_layernorm.weight", (a.hidden_size,)),
        Tensor("output_layer.weight", table, 0),
    ]
    return _typed(a, [Tensor("embedding.word_embeddings.weight", table, 0)]), _typed(a, tail)


def training_args(model: Model, ranks: Ranks, format_: str) -> argparse.Namespace:
    """As many arguments as Megatron-LM stores; those that play no part are numbered."""
    unused = {f"unused_argument_{number:03d}": number for number in range(560)}
    return argparse.Namespace(
        **unused,
        **vars(model.values),
        padded_vocab_size=model.values.vocab_size,
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        expert_model_parallel_size=ranks.ep,
        expert_tensor_parallel_size=ranks.etp if ranks.ep > 1 else ranks.tp,
        decoder_last_pipeline_num_layers=ranks.last,
        ckpt_format=format_,
        exit_signal=signal.SIGTERM,
    )
