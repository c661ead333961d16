"""Megatron's namespace of training arguments becomes one :class:`TrainingArgs`."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from math import inf
from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError
from ckpt.training.args import TrainingArgs
from ckpt.training.fields import Fields
from ckpt.training.gemma import gemma
from ckpt.training.hybrid import hybrid, hybrid_pattern
from ckpt.training.latent import latent_attention
from ckpt.training.linear import linear_attention
from ckpt.training.unusual import ALSO_READ, UNUSUAL, unusual_arguments, warnings
from ckpt.training.window import windowed_attention
from ckpt.training.yarn import plain_yarn

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def parse_training_args(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> TrainingArgs:
    """The architecture that the namespace ``values`` describes.

    ``shapes`` maps canonical tensor names to whole shapes (None where unknown); they fill
    in for absent fields. Raises FamilyError naming a field that nothing decides.
    """
    return parse_fields(Fields(values, shapes))


def unread_arguments(
    given: Collection[str], values: Mapping[str, Any], shapes: Mapping[str, Any]
) -> list[str]:
    """Those of the names ``given`` by hand that nothing reads and that no checkpoint stored."""
    fields = Fields(values, shapes)
    parse_fields(fields)
    known = fields.asked | {row[0] for row in UNUSUAL} | ALSO_READ
    return [name for name in given if name not in known]


def parse_fields(fields: Fields) -> TrainingArgs:
    """:func:`parse_training_args` of a reader, which keeps what was asked of it."""
    values, shapes = fields.values, fields.shapes
    try:
        letters = hybrid_pattern(fields)
        sizes = _sizes(fields, len(letters))
        parsed = {
            **sizes,
            **_attention(fields, sizes),
            **_block(fields),
            **_rope(fields),
            **_experts(fields, sizes),
            **latent_attention(fields),
            **linear_attention(fields, sizes["layers"]),
            **plain_yarn(fields),
            **windowed_attention(fields),
            **hybrid(fields, letters, sizes),
            "embedding_norm": "embedding.word_embeddings.norm.weight" in shapes,
            "parallel_residual": bool(fields.get("gpt_j_residual", default=False)),
            "residual_post_norm": bool(
                fields.get("apply_residual_connection_post_layernorm", default=False)
            ),
            "unusual": unusual_arguments(values),
        }
        parsed |= gemma(fields, parsed)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise FamilyError(f"a training argument is of the wrong kind: {error}") from error
    args = TrainingArgs(**parsed, notes=(*fields.notes, *warnings(values)))
    _check_kinds(args)
    return args


def _check_kinds(args: TrainingArgs) -> None:
    """Raise FamilyError for a field that is no number where a number must be."""
    kinds = {"int": int, "float": int | float, "bool": bool, "str": str}
    for item in dataclass_fields(args):
        name, _, optional = str(item.type).partition(" | ")
        value, kind = getattr(args, item.name), kinds.get(name)
        if kind is None or (optional and value is None):
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FamilyError(
                "a training argument is of the wrong kind",
                expected=f"{item.name}: {name}",
                found=repr(value)[:40],
            )
    for name in ("layers", "hidden_size", "heads", "groups", "head_dim", "padded_vocab_size"):
        if getattr(args, name) < 1:
            raise FamilyError(f"{name} must be at least 1", found=getattr(args, name))
    for name in ("norm_eps", "rotary_base", "rotary_percent", "max_positions"):
        value = getattr(args, name)
        if not 0 < value < inf:
            raise FamilyError(f"{name} must be a number above 0", found=value)


def _sizes(fields: Fields, pattern_length: int) -> dict[str, Any]:
    """Sizes of the whole; a pattern of layers decides their number."""
    embedding = fields.shape("embedding.word_embeddings.weight")
    layers = pattern_length or fields.value("num_layers", "encoder_num_layers", default=None)
    if layers is None:
        numbers = [_layer_number(name) for name in fields.shapes]
        found = [number for number in numbers if number is not None]
        layers = fields.derived("num_layers", max(found) + 1 if found else None)
    hidden = fields.value("hidden_size", default=None)
    if hidden is None:
        hidden = fields.derived("hidden_size", embedding[1] if embedding else None)
    padded = embedding[0] if embedding else fields.value("padded_vocab_size")
    return {
        "layers": layers,
        "hidden_size": hidden,
        "padded_vocab_size": padded,
        "vocab_size": fields.get("vocab_size", default=None),
        "seq_length": fields.get("seq_length", default=None),
        "max_positions": _max_positions(fields),
    }


def _max_positions(fields: Fields) -> Any:  # noqa: ANN401 - any field
    positions = fields.value("max_position_embeddings", default=None)
    if positions is None:
        positions = fields.value("max_position_embeddings", "seq_length")
        fields.notes.append(
            f"assumed max_position_embeddings = {positions}, the length of training's sequences"
        )
    return positions


def _layer_number(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("decoder.layers.") and parts[2].isdigit() else None


def _attention(fields: Fields, sizes: Mapping[str, int]) -> dict[str, Any]:
    heads = fields.value("num_attention_heads")
    mla = bool(fields.get("multi_latent_attention", default=False))
    grouped = fields.get("group_query_attention", default=None)
    groups = fields.get("num_query_groups", "num_key_value_heads", default=None)
    head_dim = fields.value("kv_channels", default=None)
    qkv = fields.shape("linear_qkv.weight")
    if "num_key_value_heads" in fields.values:  # Megatron-DeepSpeed's name, without a switch
        grouped, groups = True, fields.values["num_key_value_heads"]
    elif grouped is None:
        grouped = groups is not None
    if grouped and groups is None and qkv is not None and head_dim:
        groups = fields.derived("num_query_groups", (qkv[0] // head_dim - heads) // 2)
    groups = groups if grouped and groups else heads
    if head_dim is None and qkv is not None:
        head_dim = fields.derived("kv_channels", qkv[0] // (heads + 2 * groups))
    norm = fields.shape("q_layernorm.weight")
    size = head_dim or sizes["hidden_size"] // heads
    return {
        "heads": heads,
        "groups": groups,
        "head_dim": size,
        "qk_norm": bool(fields.get("qk_layernorm", default=False)),
        "full_qk_norm": None if norm is None else norm[0] == heads * size,
        "mla": mla,
    }


def _block(fields: Fields) -> dict[str, Any]:
    eps = fields.assume("layernorm_epsilon", 1e-5, "norm_epsilon")
    gated = any(fields.get(name, default=False) for name in ("swiglu", "geglu", "quick_geglu"))
    disabled = fields.get("disable_bias_linear", default=None)
    bias = fields.get("add_bias_linear", default=True if disabled is None else not disabled)
    name = str(fields.get("normalization", default="LayerNorm"))
    return {
        "ffn_hidden_size": _ffn(fields, gated=gated),
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(name.lower(), name),
        "norm_eps": float(eps),
        "zero_centered_norm": bool(
            fields.get("layernorm_zero_centered_gamma", "apply_layernorm_1p", default=False)
        ),
        "gated": gated,
        "activation": _activation(fields, gated=gated),
        "linear_bias": bool(bias),
        "qkv_bias": bool(fields.get("add_qkv_bias", default=False) or bias),
        "tied": not fields.get("untie_embeddings_and_output_weights", default=False),
        "dtype": fields.get("params_dtype", default=None),
    }


def _ffn(fields: Fields, *, gated: bool) -> int:
    size = fields.value("ffn_hidden_size", default=None)
    if size is not None:
        return int(size)
    shape = fields.shape("mlp.linear_fc1.weight")
    rows = shape[0] if shape else None
    return fields.derived("ffn_hidden_size", rows // 2 if rows and gated else rows)


def _activation(fields: Fields, *, gated: bool) -> str:
    if fields.get("swiglu", default=False):
        return "silu"
    if fields.get("squared_relu", default=False):
        return "relu2"
    if fields.get("quick_geglu", default=False):
        return "quick_gelu"
    fused = fields.get("bias_gelu_fusion", default=False)  # its kernels are the tanh form
    if not (fused or _asks_for_tanh(fields, gated=gated)):
        return "gelu"
    return "gelu_pytorch_tanh" if gated else "gelu_new"


def _asks_for_tanh(fields: Fields, *, gated: bool) -> bool:
    """Whether ``openai_gelu`` is set and has an effect.

    Megatron-LM's own block of before Megatron-Core reads it (megatron/legacy/model/
    transformer.py); a Megatron-Core model of any version does not. Arguments do not always
    say which one trained: then it counts.
    """
    if not fields.get("openai_gelu", default=False):
        return False
    core = fields.get("use_legacy_models", default=None) is False
    core = core or bool(fields.get("use_mcore_models", default=False))
    if not core or gated:
        return True
    fields.notes.append("openai_gelu has no effect on a Megatron-Core model: exact GELU is written")
    return False


def _rope(fields: Fields) -> dict[str, Any]:
    positions = fields.get("position_embedding_type", default=None)
    if positions is None:
        rotary = fields.get("use_rotary_position_embeddings", default=False)
        positions = "rope" if rotary else "learned_absolute"
    rotary = positions not in {"learned_absolute", "none", "alibi"}
    base = fields.assume("rotary_base", 10000) if rotary else 10000
    return {
        "positions": positions,
        "rotary_base": base,
        "rotary_percent": float(fields.get("rotary_percent", default=1.0)),
        "rotary_interleaved": bool(fields.get("rotary_interleaved", default=False)),
        **_rope_scaling(fields, str(positions)),
    }


def _rope_scaling(fields: Fields, positions: str) -> dict[str, Any]:
    """Llama 3's scaling and interpolated positions; YaRN and MLA read neither of the two.

    rotary_pos_embedding.py applies both where both are set, and no Hugging Face class does.
    """
    read = positions != "yarn" and not fields.get("multi_latent_attention", default=False)
    linear = fields.get("rotary_seq_len_interpolation_factor", default=None) if read else None
    linear = None if linear in {None, 1} else float(linear)
    llama3 = bool(fields.get("use_rope_scaling", default=False)) and read
    if llama3 and linear is not None:
        raise FamilyError(
            "rotary positions are scaled twice, which no Hugging Face class does",
            expected="use_rope_scaling or rotary_seq_len_interpolation_factor",
            found=f"both, the latter {linear}",
        )
    return {
        "rotary_linear_factor": linear,
        "llama3_scaling": llama3,
        "llama3_factor": float(fields.get("rope_scaling_factor", default=8.0)),
    }


def _experts(fields: Fields, sizes: Mapping[str, int]) -> dict[str, Any]:
    experts = int(fields.value("num_experts", "num_moe_experts", default=0) or 0)
    shared = fields.get("moe_shared_expert_intermediate_size", default=None)
    size = fields.value("moe_ffn_hidden_size", "ffn_hidden_size", default=0) if experts else 0
    return {
        "experts": experts,
        "moe_layers": _moe_layers(
            fields.get("moe_layer_freq", default=1), sizes["layers"], experts
        ),
        "router_topk": int(fields.value("moe_router_topk", default=2)) if experts else 0,
        "expert_ffn": int(size),
        "shared_ffn": shared,
        "shared_gate": bool(
            any(name.endswith("shared_experts.gate_weight") for name in fields.shapes)
        ),
        "router_score": str(fields.get("moe_router_score_function", default="softmax")),
        "router_bias": bool(fields.get("moe_router_enable_expert_bias", default=False)),
        "router_pre_softmax": bool(fields.get("moe_router_pre_softmax", default=False)),
        "router_groups": fields.get("moe_router_num_groups", default=None),
        "router_group_topk": fields.get("moe_router_group_topk", default=None),
        "router_scale": fields.get("moe_router_topk_scaling_factor", default=None),
        "aux_loss": _aux_loss(fields.get("moe_aux_loss_coeff", default=0.0)),
        "mtp_layers": int(fields.value("mtp_num_layers", default=0) or 0),
        "mtp_kept": int(fields.value("mtp_num_layers", default=0) or 0),
    }


def _aux_loss(value: object) -> float:
    if isinstance(value, list | tuple):
        return float(value[0]) if value else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _moe_layers(freq: object, layers: int, experts: int) -> tuple[bool, ...]:
    """Which layers have experts; an int N means every Nth, from layer 0 on (gpt_layer_specs.py)."""
    if not experts:
        return (False,) * layers
    if isinstance(freq, int):
        return tuple(index % freq == 0 for index in range(layers))
    if isinstance(freq, list | tuple) and len(freq) == layers:
        return tuple(bool(item) for item in freq)
    raise FamilyError(
        "moe_layer_freq does not fit the number of layers", expected=layers, found=freq
    )
