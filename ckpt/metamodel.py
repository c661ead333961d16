"""The model that transformers builds from a config.json, as names and shapes without weights.

Loading torch and transformers takes seconds and hundreds of megabytes. So a process of its own
does it, beside whatever its parent reads meanwhile; a process that has them loaded already
builds the model itself. What was built is kept (``ckpt.model_memo``) and not built again.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt.errors import ModelError
from ckpt.model_memo import ModelMemo

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, ...]
_LOADED = "transformers.modeling_utils"
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from ckpt.metamodel import answer; answer()"
_DEADLINE_SECONDS = 600.0


@dataclass(frozen=True)
class MetaModel:
    """Names and shapes of a model, or in ``lacks`` why the installed transformers has none.

    ``stored`` are the tensors as transformers would save them, ``loaded`` the same as they
    are named in memory, where experts may be fused. ``tied`` are names in memory that share
    another tensor and are not saved. ``ignored`` are patterns of names that its class passes
    over when it loads, and ``prefix`` is that of the model without its head. ``built`` says
    whether it was built now or by an earlier run of the same libraries.
    """

    model_class: str
    transformers: str
    stored: Mapping[str, Shape] = field(default_factory=dict)
    loaded: Mapping[str, Shape] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    lacks: str = ""
    built: Literal["now", "memo"] = "now"


class ModelBuilder(AbstractContextManager["ModelBuilder"]):
    """Builds one model, with transformers loaded in the background from its making on.

    Where models of these libraries are kept under ``cache`` it loads nothing until it is asked
    for one that is not.
    """

    def __init__(self, cache: Path | None = None) -> None:
        """Start loading, unless this process has transformers at hand or a memo may answer."""
        self._child: subprocess.Popen[str] | None = None
        self._memo = ModelMemo(cache) if cache else None
        self._known: MetaModel | None = None
        if self._memo is None or not self._memo.knows_libraries():
            self._start()

    def _start(self) -> None:
        if self._child is not None or _LOADED in sys.modules:
            return
        root = str(Path(__file__).resolve().parent.parent)
        self._child = subprocess.Popen(  # noqa: S603 - this Python and a constant program
            [sys.executable, "-c", _PROGRAM, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def __exit__(self, *_: object) -> None:
        """End the process if it was not asked, or is still at work."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.kill()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        child.wait()

    def build(self, config: Mapping[str, Any]) -> MetaModel:
        """The model of a config.json's content; may be called once.

        Raises ModelError when transformers cannot build a model from it.
        """
        self.expect(config)
        model = self._known or self._build(config)
        if self._memo is not None and model.built == "now" and not model.lacks:
            self._memo.save(config, asdict(model))
        return model

    @property
    def keeps(self) -> bool:
        """Whether what is built will be found by the next run."""
        return self._memo is not None

    def must_build(self, config: Mapping[str, Any]) -> bool:
        """Whether :meth:`build` has to build this model, and so to wait for it."""
        self.expect(config)
        return self._known is None

    def expect(self, config: Mapping[str, Any]) -> None:
        """Look whether the model of this config.json is kept; start loading if it is not.

        Called as soon as the content is known, so that the libraries load beside other work.
        """
        if self._known is None and self._memo is not None:
            found = self._memo.load(config)
            self._known = replace(_from_json(found), built="memo") if found else None
        if self._known is None:
            self._start()

    def _build(self, config: Mapping[str, Any]) -> MetaModel:
        self._start()
        if self._child is None:
            return build_meta_model(config)
        try:
            out, errors = self._child.communicate(json.dumps(config), timeout=_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"transformers did not build the model within {_DEADLINE_SECONDS:.0f} s"
            ) from error
        return _parse_answer(out, errors, self._child.returncode, config)


def _parse_answer(out: str, errors: str, code: int, config: Mapping[str, Any]) -> MetaModel:
    try:
        content = json.loads(out)
    except ValueError:
        last = (errors.strip().splitlines() or [f"its process ended with code {code}"])[-1]
        return MetaModel(_class_name(config), "", lacks=f"transformers cannot be loaded: {last}")
    if "error" in content:
        raise ModelError(content["error"])
    return _from_json(content)


def _from_json(content: dict[str, Any]) -> MetaModel:
    for key in ("stored", "loaded"):
        content[key] = {name: tuple(shape) for name, shape in content[key].items()}
    for key in ("tied", "ignored"):
        content[key] = tuple(content[key])
    return MetaModel(**content)


def _class_name(config: Mapping[str, Any]) -> str:
    """The class that config.json names, or an empty text."""
    return str((config.get("architectures") or [""])[0])


def answer() -> None:
    """What the process of :class:`ModelBuilder` runs: a config from stdin, a model to stdout.

    Prints nothing where transformers cannot be loaded; the parent then shows the last line of
    stderr.
    """
    gc.disable()  # a third of the time: loading makes millions of objects, and frees none
    os.environ["HF_HUB_OFFLINE"] = "1"
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print; stdout is for the answer alone
    import transformers  # noqa: PLC0415 - seconds, spent while the parent plans

    _ = transformers.PreTrainedModel
    text = sys.stdin.read()
    try:
        content = asdict(build_meta_model(json.loads(text))) if text else {}
    except ModelError as error:
        content = {"error": str(error)}
    json.dump(content, stream)
    stream.flush()
    os._exit(0)  # without taking the libraries down piece by piece


def build_meta_model(config: Mapping[str, Any]) -> MetaModel:
    """The model of a config.json's content, built here, on torch's meta device.

    Raises ModelError when transformers has the class and cannot build it.
    """
    import torch  # noqa: PLC0415 - seconds
    import transformers  # noqa: PLC0415

    version, wanted = str(transformers.__version__), _class_name(config)
    kind, reason = _find_class(wanted, str(config.get("model_type", "")))
    if kind is None:
        return MetaModel(wanted, version, lacks=f"transformers {version} has {reason}")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            settings = kind.config_class.from_dict(dict(config))
            model = kind._from_config(settings, attn_implementation="eager")  # noqa: SLF001
            return _describe(model, version)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"transformers {version} cannot build {kind.__name__} from config.json: {reason}"
        ) from error


def _find_class(name: str, model_type: str) -> tuple[Any, str]:
    """The model class, or None and what is not there; only its own module is loaded."""
    import transformers  # noqa: PLC0415 - seconds
    from transformers.models.auto import configuration_auto, modeling_auto  # noqa: PLC0415

    if model_type not in configuration_auto.CONFIG_MAPPING_NAMES:
        return None, f"no model_type {model_type or '(none is named)'}"
    name = name or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    kind: Any = getattr(transformers, name, None) if name else None
    if not hasattr(kind, "config_class"):
        return None, f"no class {name or 'for ' + model_type}"
    if kind.config_class is None or kind.config_class.model_type != model_type:
        raise ModelError(
            "config.json names a class of another model_type",
            expected=getattr(kind.config_class, "model_type", None),
            found=model_type,
        )
    return kind, ""


def _describe(model: Any, version: str) -> MetaModel:  # noqa: ANN401 - transformers has no types
    state = {k: v for k, v in model.state_dict().items() if k not in _unsaved(model)}
    tied = _tied(model)
    single = {name: tensor for name, tensor in state.items() if name not in tied}
    return MetaModel(
        model_class=type(model).__name__,
        transformers=version,
        stored={name: tuple(tensor.shape) for name, tensor in _as_saved(model, single).items()},
        loaded={name: tuple(tensor.shape) for name, tensor in state.items()},
        tied=tuple(tied),
        ignored=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        prefix=str(getattr(model, "base_model_prefix", "")),
    )


def _unsaved(model: Any) -> set[str]:  # noqa: ANN401 - transformers has no types
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _tied(model: Any) -> list[str]:  # noqa: ANN401 - transformers has no types
    """Names that share another's parameter: of each group one is saved, as save_pretrained does."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    patterns = list(getattr(model, "_tied_weights_keys", None) or ())
    tied = []
    for names in groups.values():
        kept = [name for name in names if not any(re.search(p, name) for p in patterns)]
        tied += [name for name in names if name != (kept or names)[0]]
    return tied


def _as_saved(model: Any, state: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - likewise
    """The tensors as save_pretrained names and cuts them; transformers 4 changes nothing."""
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415
    except ImportError:
        return state
    saved: dict[str, Any] = revert_weight_conversion(model, state)
    return saved
