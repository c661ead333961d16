"""Reads single fields of Megatron's namespace: old names, noted defaults, sizes from shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from collections.abc import Mapping

_REQUIRED = object()
_COUNTS = {"num_layers", "encoder_num_layers", "hidden_size", "num_attention_heads"}
_COUNTS |= {"num_query_groups", "num_key_value_heads", "kv_channels", "ffn_hidden_size"}
_COUNTS |= {"padded_vocab_size", "vocab_size", "max_position_embeddings", "seq_length"}
_COUNTS |= {"num_experts", "moe_router_topk", "moe_ffn_hidden_size", "mtp_num_layers"}
_COUNTS |= {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}

_LARGEST = 10**8


def _checked(name: str, value: Any) -> Any:  # noqa: ANN401 - any field
    """The value; raises FamilyError for a size that is no whole number."""
    if name in _COUNTS and value is not None and type(value) is not int:
        raise FamilyError(f"training argument {name} is no whole number", found=repr(value)[:40])
    if name in _COUNTS and value is not None and value > _LARGEST:
        raise FamilyError(
            f"training argument {name} is larger than any model",
            expected=f"at most {_LARGEST:,}",
            found=repr(value)[:40],
        )
    return value


class Fields:
    """Reads fields of the namespace, accepting old names, and keeps notes."""

    def __init__(self, values: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        """``values`` is the namespace, ``shapes`` the tensors' whole shapes by canonical name."""
        self.values, self.shapes = values, shapes
        self.asked: set[str] = set()
        self.notes: list[str] = []

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:  # noqa: ANN401 - any field
        """The first of the names that the namespace has; its default if none is there."""
        self.asked.update(names)
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

    def count(self, name: str) -> int:
        """A number that must be there and be at least 1."""
        found = self.get(name)
        if type(found) is not int or found < 1:
            raise FamilyError(
                f"training argument {name} is no count",
                expected="a whole number from 1",
                found=repr(found)[:40],
                hint=f"Supply it with --set {name}=VALUE",
            )
        return found

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
