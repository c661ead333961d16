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

_EXPERTS_CHOICE_SINCE = 5


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
    plain = {"attn_implementation": "eager"}
    if int(transformers.__version__.split(".")[0]) >= _EXPERTS_CHOICE_SINCE:
        plain["experts_implementation"] = "eager"
    try:
        model, report = auto.from_pretrained(
            directory,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **plain,
        )
    except Exception as error:  # libraries raise all kinds for a directory that is no model
        raise ModelError(f"transformers cannot load it: {error}", file=directory) from error
    _refuse_leftovers(directory, report, _further_layers(config))
    return model.eval()


def _refuse_leftovers(directory: Path, report: Any, further: tuple[str, ...]) -> None:  # noqa: ANN401
    """Raise ModelError for weights that were not in the files, or were not used."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(kind) or ())
        keys = [key for key in keys if not key.startswith(further)]
        if keys:
            raise ModelError(
                f"{len(keys)} {kind.replace('_', ' ')}: {', '.join(keys[:5])}", file=directory
            )


def _further_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Prefixes of layers that predict further tokens, which transformers does not build."""
    layers = int(config.get("num_hidden_layers") or 0)
    count = int(config.get("num_nextn_predict_layers") or 0)
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + count))


def read_config(directory: Path) -> dict[str, Any]:
    """The content of config.json; raises ModelError when it is absent, no JSON, or no model's."""
    file = directory / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = "Give the directory that ckpt convert wrote"
        raise ModelError("no config.json here", file=directory, hint=hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read: {error}", file=file) from error
    if not isinstance(content, dict):
        raise ModelError("not a JSON object", file=file)
    if not isinstance(content.get("vocab_size"), int):
        found = content.get("vocab_size")
        raise ModelError("no vocab_size", file=file, expected="a number", found=found)
    return content


def longest_context(config: dict[str, Any]) -> int | None:
    """The most positions that the model takes, if its config.json names it."""
    names = ("max_position_embeddings", "n_positions")
    found = next((config[name] for name in names if config.get(name)), None)
    return None if found is None else int(found)


def run_hf(directory: Path, input_ids: torch.Tensor, progress: Progress) -> HfAnswer:
    """What the converted model answers to ``input_ids`` [B, S], one sequence at a time."""
    model = load_model(directory)
    progress.start("running the converted model", input_ids.shape[0], "sequences")
    logits, hidden = [], []
    last: list[torch.Tensor] = []
    hook = _hook_last_layer(model, last)
    with torch.no_grad():
        for row in input_ids:
            answer = model(row[None], output_hidden_states=True, use_cache=False)
            logits.append(answer.logits.float())
            # What transformers gives last has passed the final norm, so it is no residual
            # stream; the hook has that of the last layer.
            hidden.append((answer.hidden_states or ())[:-1])
            progress.advance(1)
    progress.finish()
    if hook is not None:
        hook.remove()
    layers = range(min(len(states) for states in hidden))
    streams = {layer: torch.cat([states[layer].float() for states in hidden]) for layer in layers}
    if last and streams:
        streams[len(layers)] = torch.cat(last).float()
    return HfAnswer(torch.cat(logits), streams)


def _hook_last_layer(model: Any, seen: list[torch.Tensor]) -> Any:  # noqa: ANN401 - torch's handle
    """Keep what the last layer gives, if the model has a list of layers; the hook, or None."""
    lists = [part for part in model.base_model.children() if isinstance(part, torch.nn.ModuleList)]
    if not lists:
        return None

    def keep(_module: object, _inputs: object, output: Any) -> None:  # noqa: ANN401
        seen.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    return max(lists, key=len)[-1].register_forward_hook(keep)
