"""YaRN, which stretches rotary positions: its scale, and its settings outside of MLA."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from ckpt.training.fields import Fields


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction, 0.1 * mscale * ln(factor) + 1 (yarn_rotary_pos_embedding.py)."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 and mscale else 1.0


def plain_yarn(fields: Fields) -> dict[str, Any]:
    """YaRN as position embedding of ordinary attention, as fields of ``TrainingArgs``.

    Megatron-LM stores some settings under MLA's names (argument_utils.py, ``_set``), models of
    Megatron-Bridge under names with ``yarn_``. Without both magnitudes the factor's own counts.
    Raises FamilyError for a factor below 1, which no Hugging Face class has.
    """
    mla = fields.get("multi_latent_attention", default=False)
    if mla or fields.get("position_embedding_type", default=None) != "yarn":
        return {}
    factor = float(fields.assume("yarn_rotary_scaling_factor", 1.0, "rotary_scaling_factor"))
    if factor < 1:
        raise FamilyError("YaRN's factor shrinks positions", expected="at least 1", found=factor)
    mscale, all_dim = (
        fields.value(f"yarn_{name}", name, default=None) for name in ("mscale", "mscale_all_dim")
    )
    known = mscale is not None and all_dim is not None
    truncates = fields.get("yarn_correction_range_round_to_int", default=None)
    return {
        "yarn_factor": factor,
        "yarn_original_positions": fields.assume("yarn_original_max_position_embeddings", 4096),
        "yarn_beta_fast": float(fields.assume("yarn_beta_fast", 32.0)),
        "yarn_beta_slow": float(fields.assume("yarn_beta_slow", 1.0)),
        "yarn_mscale": float(mscale) if known else 1.0,
        "yarn_mscale_all_dim": float(all_dim) if known else 0.0,
        "yarn_truncates": True if truncates is None else bool(truncates),
    }
