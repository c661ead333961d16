"""Names of tensors as each framework spells them, brought to one spelling.

The one spelling is Megatron-Core's local layer spec with global numbers:
``decoder.layers.7.input_layernorm.weight``, ``...mlp.experts.12.linear_fc1.weight``.
TransformerEngine fuses norms into the linears that follow; its names are the left column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

PREFIXES = ("module.", "model.", "language_model.")

# What is never a weight of the served model, and why.
SKIPPED: tuple[tuple[str, str], ...] = (
    (r"(.*\.)?_extra_state\d*(/.*)?", "extra state of TransformerEngine"),
    (r"(.*\.)?local_tokens_per_expert", "router statistics of training"),
    (r"(.*\.)?(rotary_pos_emb|rotary_emb)\.(inv_freq|cos_cached|sin_cached)", "recomputed"),
    (r"(chained_\d+\.)?optimizer\..*", "optimizer state"),
    (r"(.*\.)?rng_state(/.*)?", "trainer state"),
    (r"(rerun_state_machine_state|opt_param_scheduler|iteration)(/.*)?", "trainer state"),
)

_OLD: tuple[tuple[str, str], ...] = (
    (r"embedding\.(word|position)_embeddings$", r"embedding.\1_embeddings.weight"),
    (r"^(encoder|transformer)\.layers\.", "decoder.layers."),
    (r"^(encoder|transformer)\.final_(layer)?norm\.", "decoder.final_layernorm."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.attention\.", ".self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"\.self_attention\.linear_proj\.post_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.mlp\.linear_fc2\.post_layernorm\.", ".post_mlp_layernorm."),
    (r"\.self_attention\.linear_qkv(_down_proj)?\.layer_norm_(\w+)$", r".input_layernorm.\2"),
    (r"\.mixer\.in_proj\.layer_norm_(weight|bias)$", r".norm.\1"),
    (r"\.mixer\.conv1d_(weight|bias)$", r".mixer.conv1d.\1"),
    (r"\.self_attention\.in_proj\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.linear_q_up_proj\.layer_norm_(weight|bias)$", r".q_layernorm.\1"),
    (r"\.linear_kv_up_proj\.layer_norm_(weight|bias)$", r".kv_layernorm.\1"),
    (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
    (r"\.mlp\.experts\.local_experts\.(\d+)\.", r".mlp.experts.\1."),
    (r"\.mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$", r".mlp.experts.\3.linear_fc\1.\2"),
)
_RENAMES = tuple((re.compile(pattern), new) for pattern, new in _OLD)
_ANY_OLD = re.compile("|".join(f"(?:{pattern})" for pattern, _ in _OLD))
_SKIPS = tuple((re.compile(pattern), reason) for pattern, reason in SKIPPED)
_ANY_SKIP = re.compile("|".join(f"(?:{pattern})" for pattern, _ in SKIPPED))
_NUMBER = re.compile(r"\.\d+(?=\.)")
_ZEROS = str.maketrans("123456789", "000000000")
_MANY = 2**17  # names that a checkpoint may repeat in every rank's file
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"^(.*\.mlp\.experts\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class Skipped:
    """Entries of one kind that are left out on purpose."""

    reason: str
    count: int
    example: str


def strip_prefixes(name: str) -> str:
    """The name without the prefixes of wrappers, however many there are."""
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


@lru_cache(_MANY)
def canonical(name: str) -> str:
    """The one spelling of a tensor's name; numbers of layers and experts stay as they are."""
    name = strip_prefixes(name)
    if _is_old(_NUMBER.sub(".0", name)):
        for pattern, new in _RENAMES:
            name = pattern.sub(new, name)
    return name


@lru_cache(_MANY)
def _is_old(name: str) -> bool:
    """Whether a name is of an older spelling; its numbers of layers and experts do not matter."""
    return _ANY_OLD.search(name) is not None


@lru_cache(_MANY)
def skip_reason(name: str) -> str | None:
    """Why an entry of that name is no weight of the model, or None."""
    return _skip_reason(name.translate(_ZEROS))  # no reason depends on a number


@lru_cache(_MANY)
def _skip_reason(name: str) -> str | None:
    plain = strip_prefixes(name)
    if not _ANY_SKIP.fullmatch(plain):
        return None
    return next((reason for pattern, reason in _SKIPS if pattern.fullmatch(plain)), None)


def count_skipped(names: list[tuple[str, str]]) -> tuple[Skipped, ...]:
    """(name, reason) pairs summed up by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in names:
        reasons.setdefault(reason, []).append(name)
    return tuple(Skipped(reason, len(all_), all_[0]) for reason, all_ in reasons.items())


@lru_cache(_MANY)
def layer_of(name: str) -> int | None:
    """The layer number in a decoder tensor's name."""
    found = _LAYER.match(name)
    return int(found[2]) if found else None


@lru_cache(_MANY)
def shift_layer(name: str, offset: int) -> str:
    """The name with its decoder layer number raised by ``offset``."""
    return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + offset}{found[3]}", name)


def global_name(name: str, first_layer: int, first_expert: int) -> tuple[str, bool]:
    """A name with the numbers of a stage and an expert rank made global; whether an expert's."""
    head, number, tail = _around_expert(name, first_layer)
    if number is None:
        return head, False
    return f"{head}{number + first_expert}{tail}", True


@lru_cache(_MANY)
def _around_expert(name: str, first_layer: int) -> tuple[str, int | None, str]:
    name = shift_layer(name, first_layer)
    found = _EXPERT.match(name)
    return (found[1], int(found[2]), found[3]) if found else (name, None, "")


@lru_cache(_MANY)
def is_expert(name: str) -> bool:
    """Whether the tensor belongs to one routed expert."""
    return _EXPERT.match(name) is not None
