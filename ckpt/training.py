"""The training arguments that fix a model's architecture, under one set of names.

Megatron stores an ``argparse.Namespace`` of several hundred fields whose names have changed
over the years. What decides the architecture is read here once; a field that is absent is
derived from the tensors' shapes where these leave no doubt, or asked for.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from math import log
from typing import TYPE_CHECKING, Any

import yaml

from ckpt.errors import FamilyError, OptionsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.tensors import DType

_REQUIRED = object()


@dataclass(frozen=True)
class TrainingArgs:
    """Architecture of the trained model in Megatron's terms; sizes are those of the whole model.

    ``notes`` holds one line for each value that was derived or assumed.
    """

    layers: int
    hidden_size: int
    heads: int
    groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int | None
    padded_vocab_size: int
    max_positions: int
    normalization: str
    norm_eps: float
    zero_centered_norm: bool
    gated: bool
    activation: str
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    positions: str
    rotary_base: float
    rotary_percent: float
    rotary_interleaved: bool
    rotary_linear_factor: float | None
    llama3_scaling: bool
    llama3_factor: float
    sliding_window: int | None
    dtype: DType | None
    experts: int
    moe_layers: tuple[bool, ...]
    router_topk: int
    expert_ffn: int
    shared_ffn: int | None
    shared_gate: bool
    router_score: str
    router_bias: bool
    router_pre_softmax: bool
    router_groups: int | None
    router_group_topk: int | None
    router_scale: float | None
    aux_loss: float
    mla: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_head_dim: int
    rope_type: str | None
    yarn_factor: float
    yarn_original_positions: int | None
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float
    yarn_mscale_all_dim: float
    mtp_layers: int
    mtp_kept: int
    mla_softmax_known: bool
    embedding_norm: bool
    parallel_residual: bool
    seq_length: int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def qkv_bias_alone(self) -> bool:
        """Whether queries, keys and values have biases and the other linears have none."""
        return self.qkv_bias and not self.linear_bias

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return self.experts > 0

    @property
    def first_dense(self) -> int:
        """How many layers come before the first one with experts."""
        return self.moe_layers.index(True) if True in self.moe_layers else self.layers

    @property
    def moe_is_suffix(self) -> bool:
        """Whether the dense layers all come first."""
        return all(self.moe_layers[self.first_dense :])

    @property
    def all_moe(self) -> bool:
        """Whether every layer has routed experts."""
        return all(self.moe_layers) and self.is_moe

    @property
    def has_shared_expert(self) -> bool:
        """Whether an expert is there that every token visits."""
        return bool(self.shared_ffn)

    @property
    def shared_divides(self) -> bool:
        """Whether the shared expert is as wide as a whole number of routed ones."""
        return bool(self.shared_ffn and self.expert_ffn and self.shared_ffn % self.expert_ffn == 0)

    @property
    def limits_groups(self) -> bool:
        """Whether choosing groups of experts first changes which experts are chosen.

        It does not with one group, with all groups chosen, nor when each group counts by
        its best expert and as many groups as experts are chosen: the best k experts then
        lie in the best k groups.
        """
        if not self.router_groups or not self.router_group_topk or self.router_groups == 1:
            return False
        every = self.router_group_topk >= self.router_groups
        return not every and self.router_topk != self.router_group_topk

    @property
    def experts_per_group_topk(self) -> int | None:
        """How many experts' scores rank a group of experts, None without groups (moe_utils.py)."""
        if not self.limits_groups:
            return None
        return self.router_topk // (self.router_group_topk or 1)

    @property
    def multi_head(self) -> bool:
        """Whether every query head has a key and value head of its own."""
        return self.groups == self.heads

    @property
    def plain_head_dim(self) -> bool:
        """Whether the heads together are as wide as the hidden state."""
        return self.head_dim * self.heads == self.hidden_size

    @property
    def fits_llama_class(self) -> bool:
        """Whether transformers' Llama takes these sizes: it wants hidden to divide by heads.

        Its Mistral is the same network without that wish, but has no biases.
        """
        return self.hidden_size % self.heads == 0 or self.linear_bias

    @property
    def four_times_ffn(self) -> bool:
        """Whether the MLP is four times as wide as the hidden state."""
        return self.ffn_hidden_size == 4 * self.hidden_size

    @property
    def uses_yarn(self) -> bool:
        """Whether MLA's rotary positions are stretched; the type's default is yarn."""
        return self.mla and self.rope_type in {None, "yarn"} and self.yarn_factor > 1

    @property
    def kv_down_rows(self) -> int:
        """Rows of MLA's key-value down projection: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def q_down_rows(self) -> int:
        """Rows of MLA's query down projection, 0 without one."""
        return self.q_lora_rank or 0


_COUNTS = {"num_layers", "encoder_num_layers", "hidden_size", "num_attention_heads"}
_COUNTS |= {"num_query_groups", "num_key_value_heads", "kv_channels", "ffn_hidden_size"}
_COUNTS |= {"padded_vocab_size", "vocab_size", "max_position_embeddings", "seq_length"}
_COUNTS |= {"num_experts", "moe_router_topk", "moe_ffn_hidden_size", "mtp_num_layers"}
_COUNTS |= {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}


def _checked(name: str, value: Any) -> Any:  # noqa: ANN401 - any field
    """The value; raises FamilyError for a size that is no whole number."""
    if name in _COUNTS and value is not None and type(value) is not int:
        raise FamilyError(f"training argument {name} is no whole number", found=repr(value)[:40])
    return value


class _Fields:
    """Reads fields of the namespace, accepting old names, and keeps notes."""

    def __init__(self, values: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        self.values, self.shapes = values, shapes
        self.notes: list[str] = []

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:  # noqa: ANN401 - any field
        """The first of the names that the namespace has; its default if none is there."""
        for name in names:
            if name in self.values:
                return _checked(name, self.values[name])
        if default is _REQUIRED:
            raise FamilyError(
                f"the training arguments lack {' / '.join(names)}",
                hint=f"Supply it with --set {names[0]}=VALUE",
            )
        return default

    def value(self, *names: str, default: Any = _REQUIRED) -> Any:  # noqa: ANN401 - any field
        """As ``get``, but a stored None counts as absent."""
        found = self.get(*names, default=default)
        return (
            self.get(*names[1:], default=default)
            if found is None and names[1:]
            else (default if found is None and default is not _REQUIRED else found)
        )

    def assume(self, name: str, value: Any, *names: str) -> Any:  # noqa: ANN401 - any field
        """A value whose default changes numbers: assumed only with a note."""
        missing = object()
        found = self.get(name, *names, default=missing)
        if found is missing or found is None:
            self.notes.append(f"assumed {name} = {value}: the training arguments do not say it")
            return value
        return found

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        """The whole shape of the first tensor whose name ends so."""
        return next((s for name, s in self.shapes.items() if s and name.endswith(suffix)), None)

    def derived(self, name: str, value: int | None) -> int:
        """A size that tensors decide, noted; raises FamilyError when they cannot."""
        if value is None:
            raise FamilyError(
                f"the training arguments lack {name}, and no tensor decides it",
                hint=f"Supply it with --set {name}=VALUE",
            )
        self.notes.append(f"derived {name} = {value} from the tensors")
        return value


def parse_training_args(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> TrainingArgs:
    """The architecture that the namespace ``values`` describes.

    ``shapes`` maps canonical tensor names to whole shapes (None where unknown); they fill
    in for absent fields. Raises FamilyError naming a field that nothing decides.
    """
    fields = _Fields(values, shapes)
    try:
        sizes = _sizes(fields)
        parsed = {
            **sizes,
            **_attention(fields, sizes),
            **_block(fields),
            **_rope(fields),
            **_experts(fields, sizes),
            **_latent_attention(fields),
            "embedding_norm": "embedding.word_embeddings.norm.weight" in shapes,
            "parallel_residual": bool(fields.get("gpt_j_residual", default=False)),
        }
    except (ArithmeticError, TypeError, ValueError) as error:
        raise FamilyError(f"a training argument is of the wrong kind: {error}") from error
    args = TrainingArgs(**parsed, notes=tuple(fields.notes))
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


def _sizes(fields: _Fields) -> dict[str, Any]:
    embedding = fields.shape("embedding.word_embeddings.weight")
    layers = fields.value("num_layers", "encoder_num_layers", default=None)
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


def _max_positions(fields: _Fields) -> Any:  # noqa: ANN401 - any field
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


def _attention(fields: _Fields, sizes: Mapping[str, int]) -> dict[str, Any]:
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
    return {
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim or sizes["hidden_size"] // heads,
        "qk_norm": bool(fields.get("qk_layernorm", default=False)),
        "sliding_window": _window(fields),
        "mla": mla,
    }


def _window(fields: _Fields) -> int | None:
    window = fields.get("window_size", default=None)
    if isinstance(window, list | tuple):
        return int(window[0]) + 1
    return None


def _block(fields: _Fields) -> dict[str, Any]:
    eps = fields.assume("layernorm_epsilon", 1e-5, "norm_epsilon")
    gated = bool(fields.get("swiglu", default=False) or fields.get("geglu", default=False))
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


def _ffn(fields: _Fields, *, gated: bool) -> int:
    size = fields.value("ffn_hidden_size", default=None)
    if size is not None:
        return int(size)
    shape = fields.shape("mlp.linear_fc1.weight")
    rows = shape[0] if shape else None
    return fields.derived("ffn_hidden_size", rows // 2 if rows and gated else rows)


def _activation(fields: _Fields, *, gated: bool) -> str:
    if fields.get("swiglu", default=False):
        return "silu"
    if fields.get("squared_relu", default=False):
        return "relu2"
    if fields.get("quick_geglu", default=False):
        return "quick_gelu"
    fused = fields.get("bias_gelu_fusion", default=False)  # its kernel is the tanh form
    tanh = (fields.get("openai_gelu", default=False) or fused) and not gated
    return "gelu_new" if tanh else "gelu"


def _rope(fields: _Fields) -> dict[str, Any]:
    positions = fields.get("position_embedding_type", default=None)
    if positions is None:
        rotary = fields.get("use_rotary_position_embeddings", default=False)
        positions = "rope" if rotary else "learned_absolute"
    rotary = positions not in {"learned_absolute", "none", "alibi"}
    base = fields.assume("rotary_base", 10000) if rotary else 10000
    linear = fields.get("rotary_seq_len_interpolation_factor", default=None)
    return {
        "positions": positions,
        "rotary_base": base,
        "rotary_percent": float(fields.get("rotary_percent", default=1.0)),
        "rotary_interleaved": bool(fields.get("rotary_interleaved", default=False)),
        "rotary_linear_factor": None if linear in {None, 1} else float(linear),
        "llama3_scaling": bool(fields.get("use_rope_scaling", default=False)),
        "llama3_factor": float(fields.get("rope_scaling_factor", default=8.0)),
    }


def _experts(fields: _Fields, sizes: Mapping[str, int]) -> dict[str, Any]:
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


def _latent_attention(fields: _Fields) -> dict[str, Any]:
    mla = bool(fields.get("multi_latent_attention", default=False))
    factor = float(fields.value("rotary_scaling_factor", default=1.0))
    yarn = mla and fields.get("rope_type", default=None) in {None, "yarn"} and factor > 1
    original = fields.get("original_max_position_embeddings", default=None)
    if yarn:  # defaults of MLATransformerConfig, which the command line does not store
        original = fields.assume("original_max_position_embeddings", 4096)
        fields.assume("beta_fast", 32)
        fields.assume("beta_slow", 1)
    return {
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


def _softmax_known(fields: _Fields) -> bool:
    """Whether it is sure that the softmax scale follows mscale_all_dim.

    Older versions of Megatron-Core (0.12) took mscale instead. It does not matter where the
    two are equal; ``layernorm_epsilon`` among the arguments shows 0.16 or newer.
    """
    mscale = float(fields.value("mscale", default=1.0))
    all_dim = float(fields.value("mscale_all_dim", default=0.0))
    known = "layernorm_epsilon" in fields.values
    known = known or fields.get("mla_softmax_mscale", default=None) == "mscale_all_dim"
    return mscale == all_dim or known


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction, 0.1 * mscale * ln(factor) + 1 (yarn_rotary_pos_embedding.py)."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 and mscale else 1.0


def parse_overrides(texts: tuple[str, ...]) -> dict[str, Any]:
    """Training arguments given as ``NAME=VALUE``; the value is read as YAML.

    Raises OptionsError for a text without ``=``.
    """
    values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise OptionsError("--set needs NAME=VALUE", found=text)
        values[name] = _plain_value(text, value)
    return values


def _plain_value(text: str, value: str) -> object:
    try:
        found: object = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionsError("--set needs NAME=VALUE with a value in YAML", found=text) from error
    if isinstance(found, str):
        with suppress(ValueError):  # YAML 1.1 takes 1e6 for text
            return float(found)
    return found
