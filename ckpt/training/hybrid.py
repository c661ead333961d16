"""Layers of several kinds (Mamba-2, attention, MLP, experts): the pattern, and Mamba's sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from ckpt.training.fields import Fields

# Letters of a pattern (ssm/mamba_hybrid_layer_allocation.py): a layer is one block alone.
LETTERS = {"M": "mamba", "*": "attention", "-": "dense", "E": "moe"}
_MIXERS = {"mamba", "attention"}
_NAMES = ("hybrid_layer_pattern", "hybrid_override_pattern")
_WITHOUT = ("hybrid_attention_ratio", "hybrid_mlp_ratio", "is_hybrid_model")
_EXPAND = 2  # of MambaMixer: how much wider than the hidden state it is where no heads are given


def hybrid_pattern(fields: Fields) -> str:
    """The letters of all layers without the separators of pipeline stages; empty without any.

    What follows a ``/`` are layers that predict further tokens. Raises FamilyError for letters
    that are unknown, and where the arguments say how many layers of each kind there are and not
    which.
    """
    pattern = fields.value(*_NAMES, default=None) or ""
    said = [name for name in _WITHOUT if not pattern and fields.get(name, default=None)]
    if said:
        raise FamilyError(
            f"{said[0]}={fields.get(said[0])!r} (layers of several kinds) does not say which layer "
            "is of which kind",
            hint=f"Supply it with --set {_NAMES[1]}=PATTERN, one letter a layer: "
            + ", ".join(f"{letter} {kind}" for letter, kind in LETTERS.items()),
        )
    if not isinstance(pattern, str):
        raise FamilyError("the pattern of layers is no text", found=repr(pattern)[:40])
    letters = pattern.partition("/")[0].replace("|", "")
    if set(letters) - set(LETTERS):
        raise FamilyError(
            "the pattern has layers that are not supported",
            expected=" ".join(f"{letter} ({kind})" for letter, kind in LETTERS.items()),
            found=letters,
        )
    return letters


def hybrid(fields: Fields, letters: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Kinds of the layers and Mamba's sizes, as fields of ``TrainingArgs``.

    Raises FamilyError for a size that is absent or no number, and for heads that the groups do
    not divide.
    """
    if not letters:
        return {}
    kinds = [LETTERS[letter] for letter in letters]
    found: dict[str, Any] = {
        "hybrid_pattern": letters,
        "mixers": tuple(kind if kind in _MIXERS else "" for kind in kinds),
        "feed_forwards": tuple("" if kind in _MIXERS else kind for kind in kinds),
        "moe_layers": tuple(kind == "moe" for kind in kinds),
        "moe_latent": fields.get("moe_latent_size", default=None),
    }
    further = sum(map(bool, fields.value(*_NAMES).split("/")[1:]))
    if further:
        found |= {"mtp_layers": further, "mtp_kept": further}
    return found | (_mamba(fields, sizes["hidden_size"]) if "M" in letters else {})


def _mamba(fields: Fields, hidden_size: int) -> dict[str, int]:
    head_dim = fields.count("mamba_head_dim")
    groups = fields.count("mamba_num_groups")
    if fields.get("mamba_num_heads", default=None) is None:
        heads = _EXPAND * hidden_size // head_dim
        fields.notes.append(f"derived mamba_num_heads = {heads}: {_EXPAND} times the hidden size")
    else:
        heads = fields.count("mamba_num_heads")
    if heads % groups:
        raise FamilyError(
            "mamba_num_groups does not divide Mamba's heads", expected=heads, found=groups
        )
    return {
        "mamba_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_groups": groups,
        "mamba_state": fields.count("mamba_state_dim"),
    }
