"""Multi-latent attention: its sizes, and YaRN with the rule of its softmax scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.training.fields import Fields


_LATENT_EPSILON = 1e-6  # fixed in transformers' modeling_deepseek_v2.py and its successors


def latent_attention(fields: Fields) -> dict[str, Any]:
    """The sizes of multi-latent attention and its YaRN, as fields of ``TrainingArgs``."""
    mla = bool(fields.get("multi_latent_attention", default=False))
    factor = float(fields.value("rotary_scaling_factor", default=1.0))
    yarn = mla and fields.get("rope_type", default=None) in {None, "yarn"} and factor > 1
    original = fields.get("original_max_position_embeddings", default=None)
    if yarn:  # defaults of MLATransformerConfig, which the command line does not store
        original = fields.assume("original_max_position_embeddings", 4096)
        fields.assume("beta_fast", 32)
        fields.assume("beta_slow", 1)
    _note_epsilon(fields, mla=mla)
    return {
        **_sparse(fields),
        "fused_down": any(name.endswith(".linear_qkv_down_proj.weight") for name in fields.shapes),
        "mla_softmax_known": not yarn or _softmax_known(fields),
        "q_lora_rank": fields.get("q_lora_rank", default=None),
        "kv_lora_rank": int(fields.value("kv_lora_rank", default=0) or 0),
        "qk_nope_dim": int(fields.value("qk_head_dim", default=0) or 0),
        "qk_rope_dim": int(fields.value("qk_pos_emb_head_dim", default=0) or 0),
        "v_head_dim": int(fields.value("v_head_dim", default=0) or 0),
        "rope_type": fields.get("rope_type", default=None),
        "yarn_factor": factor,
        "yarn_original_positions": original,
        "yarn_beta_fast": float(fields.value("beta_fast", default=32)),
        "yarn_beta_slow": float(fields.value("beta_slow", default=1)),
        "yarn_mscale": float(fields.value("mscale", default=1.0)),
        "yarn_mscale_all_dim": float(fields.value("mscale_all_dim", default=0.0)),
    }


def _note_epsilon(fields: Fields, *, mla: bool) -> None:
    """Say where transformers norms the latents with another epsilon than training did."""
    epsilon = fields.get("layernorm_epsilon", "norm_epsilon", default=None)
    if mla and epsilon not in {None, _LATENT_EPSILON}:
        fields.notes.append(
            f"transformers norms MLA's latents with epsilon {_LATENT_EPSILON}, training did with "
            f"{epsilon}; vLLM follows config.json, which says {epsilon}"
        )


def _sparse(fields: Fields) -> dict[str, Any]:
    """DeepSeek sparse attention (experimental_attention_variant/dsa.py)."""
    interleaved = fields.get("dsa_indexer_rope_interleaved", default=None)
    epsilon = fields.value(
        "dsa_indexer_k_norm_epsilon", "layernorm_epsilon", "norm_epsilon", default=1e-5
    )
    return {
        "sparse_attention": fields.get("experimental_attention_variant", default=None) == "dsa",
        "indexer_heads": int(fields.value("dsa_indexer_n_heads", default=0)),
        "indexer_head_dim": int(fields.value("dsa_indexer_head_dim", default=0)),
        "indexer_topk": int(fields.value("dsa_indexer_topk", default=0)),
        "indexer_interleaved": None if interleaved is None else bool(interleaved),
        "indexer_norm_eps": float(epsilon),
    }


def _softmax_known(fields: Fields) -> bool:
    """Whether it is sure that the softmax scale follows mscale_all_dim.

    Older versions of Megatron-Core (0.12) took mscale instead. It does not matter where the
    two are equal; ``layernorm_epsilon`` among the arguments shows 0.16 or newer.
    """
    mscale = float(fields.value("mscale", default=1.0))
    all_dim = float(fields.value("mscale_all_dim", default=0.0))
    known = "layernorm_epsilon" in fields.values
    known = known or fields.get("mla_softmax_mscale", default=None) == "mscale_all_dim"
    return mscale == all_dim or known
