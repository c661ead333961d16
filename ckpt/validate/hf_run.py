"""The converted model, run by transformers in fp32 on the CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.progress import Progress


@dataclass(frozen=True)
class HfAnswer:
    """Logits [B, S, V] and the residual stream behind each layer [B, S, H], fp32."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


def load_model(directory: Path) -> Any:  # noqa: ANN401 - a transformers model
    """The model in ``directory``, every weight from its files.

    Raises ModelError when transformers cannot build it, or would leave a weight as it was
    made or a stored tensor aside.
    """
    import transformers  # noqa: PLC0415 - heavy

    auto: Any = transformers.AutoModelForCausalLM  # its annotations know no loading report
    verbosity: Any = transformers.logging

    config = read_config(directory)
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    try:
        model, report = auto.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"transformers cannot load it: {error}", file=directory) from error
    further = _further_layers(config)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(kind) or ())
        keys = [key for key in keys if not key.startswith(further)]
        if keys:
            raise ModelError(
                f"{len(keys)} {kind.replace('_', ' ')}: {', '.join(keys[:5])}", file=directory
            )
    return model.eval()


def _further_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Prefixes of layers that predict further tokens, which transformers does not build."""
    layers = int(config.get("num_hidden_layers") or 0)
    count = int(config.get("num_nextn_predict_layers") or 0)
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + count))


def read_config(directory: Path) -> dict[str, Any]:
    """The content of config.json; raises ModelError when it is absent or no JSON."""
    file = directory / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read: {error}", file=file) from error
    if not isinstance(content, dict):
        raise ModelError("not a JSON object", file=file)
    return content


def run_hf(directory: Path, input_ids: torch.Tensor, progress: Progress) -> HfAnswer:
    """What the converted model answers to ``input_ids`` [B, S], one sequence at a time."""
    model = load_model(directory)
    progress.start("running the converted model", input_ids.shape[0], "sequences")
    logits, hidden = [], []
    with torch.no_grad():
        for row in input_ids:
            answer = model(row[None], output_hidden_states=True, use_cache=False)
            logits.append(answer.logits.float())
            hidden.append(answer.hidden_states or ())
            progress.advance(1)
    progress.finish()
    # The last state has passed the final norm, so it is no residual stream.
    layers = range(min((len(states) for states in hidden), default=1) - 1)
    streams = {layer: torch.cat([states[layer].float() for states in hidden]) for layer in layers}
    return HfAnswer(torch.cat(logits), streams)
