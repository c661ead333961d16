"""Options of every stage as frozen dataclasses; YAML in, errors with a path out.

Whatever passes these classes is trusted further inside. Unknown keys, wrong types and
impossible values are an :class:`~ckpt.errors.OptionsError` that names file, stage, key,
value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Sequence

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from ckpt.errors import OptionsError
from ckpt.storage import is_remote, require_local, to_location

T = TypeVar("T")
_WAYS = {  # a value's kinds, as a sentence says them, by pydantic's types of error
    "literal_error": "{expected}",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "greater_than_equal": "at least {ge}",
}
_STRICT = ConfigDict(extra="forbid", defer_build=True)  # a command needs one class of them
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LEAST_WITHOUT_UNIT = 1000  # less is a size whose unit was forgotten
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: object) -> int:
    """Bytes from ``5GB`` (10^9), ``512MiB`` (2^20) or a plain number.

    >>> parse_size("5GB"), parse_size("1MiB"), parse_size(3000)
    (5000000000, 1048576, 3000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not found or found[2].upper() not in _UNITS:
        message = "not a size; write a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise ValueError(message)
    size = int(float(found[1]) * _UNITS[found[2].upper()])
    if not found[2] and 0 < size < _LEAST_WITHOUT_UNIT:
        raise ValueError(f"{found[1]} bytes; did you mean {found[1]}GB? Write {found[1]}B if not")
    if size < 1:
        message = "a size must be at least one byte"
        raise ValueError(message)
    return size


def parse_location(value: object) -> Path:
    """A path, or a place in a store for a text with ``://``; ValueError for what is neither."""
    if not isinstance(value, str | Path) and not is_remote(value):
        raise ValueError("not a path")
    return to_location(value)


Size = Annotated[int, BeforeValidator(parse_size)]
Location = Annotated[Path, PlainValidator(parse_location)]
DTypeChoice = Literal["keep", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, config=_STRICT)
class SourceOptions:
    """Which checkpoint, and ``latest``, ``release`` or an iteration number."""

    path: Location
    iteration: Literal["latest", "release"] | Annotated[int, Field(ge=0)] = "latest"


@dataclass(frozen=True, config=_STRICT)
class ConvertOptions:
    """How the Hugging Face directory is written.

    ``cache`` is a directory for models that transformers built; without it each run builds its
    own.
    """

    dtype: DTypeChoice = "keep"
    max_shard_size: Size = 5 * 10**9
    tokenizer: Location | None = None
    reference: Location | None = None
    family: str | None = None
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    mtp: Literal["keep", "drop"] = "keep"
    overrides: tuple[str, ...] = ()
    allow_nonfinite: bool = False
    overwrite: bool = False
    cache: Path | None = None
    workers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    executor: Literal["processes", "ray"] = "processes"

    def of_content(self) -> dict[str, str]:
        """Those that decide what is written, as text; not those that only say how."""
        how = {"overwrite", "cache", "workers", "executor"}
        return {name: str(value) for name, value in vars(self).items() if name not in how}


@dataclass(frozen=True, config=_STRICT)
class ValidateOptions:
    """What the converted model is held to.

    Differences are between fp32 logits; ``max_abs_diff`` is a share of the logits' spread
    where that is below 1.
    """

    enabled: bool = True
    reference: Literal["auto", "recorded", "megatron"] = "auto"
    recorded: Path | None = None
    min_cosine: Annotated[float, Field(gt=0, le=1)] = 0.9999
    max_abs_diff: Annotated[float, Field(gt=0)] = 1e-3
    max_positions: Annotated[int, Field(ge=2)] = 512
    python: Path | None = None


@dataclass(frozen=True, config=_STRICT)
class QuantizeOptions:
    """What quantization will take; only ``enabled: false`` works so far."""

    enabled: Literal[False] = False
    scheme: Literal["awq-int4"] = "awq-int4"
    group_size: Literal[32, 64, 128] = 128
    calibration: Path | None = None


@dataclass(frozen=True, config=_STRICT)
class ServeOptions:
    """How the OpenAI-compatible server is started and what it must show to be ready."""

    enabled: bool = True
    engine: Literal["auto", "vllm", "embedded"] = "auto"
    python: Path | None = None
    tensor_parallel: Literal["match"] | Annotated[int, Field(ge=1)] = "match"
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    startup_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    foreign: bool = False
    chat_template: Path | None = None
    api_key: Annotated[str, Field(min_length=1)] | None = dataclasses.field(
        default=None, repr=False
    )
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class PipelineOptions:
    """A whole ``pipeline.yaml``."""

    source: SourceOptions
    output: Location
    convert: ConvertOptions = dataclasses.field(default_factory=ConvertOptions)
    validate: ValidateOptions = dataclasses.field(default_factory=ValidateOptions)
    quantize: QuantizeOptions = dataclasses.field(default_factory=QuantizeOptions)
    serve: ServeOptions = dataclasses.field(default_factory=ServeOptions)


def load_pipeline(file: Path) -> PipelineOptions:
    """The options in ``file``; relative paths in it count from the file's directory.

    Raises OptionsError when the file is absent, is not YAML, or holds a key or a value
    that is not allowed; every such fault is listed.
    """
    import yaml  # noqa: PLC0415 - only where there is such a file

    require_local(file, "run")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionsError(f"cannot read the pipeline: {error}", file=file) from error
    options = parse_options(PipelineOptions, content, file=str(file))
    return _resolve_paths(options, file.resolve().parent)


def parse_options(kind: type[T], values: object, *, file: str | None = None) -> T:
    """``values`` as the options class ``kind``; raises OptionsError that lists every fault."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        faults = [_fault(kind, item) for item in _joined(error.errors())]
        raise OptionsError("; ".join(dict.fromkeys(faults)), file=file) from error


def _joined(items: Sequence[Any]) -> list[Any]:
    """The records of pydantic, with one for all the ways in which a value could be right."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        key = tuple(str(part) for part in item["loc"] if str(part).isidentifier())
        found.setdefault(key, []).append(item)
    return [_all_of(alike) for alike in found.values()]


def _all_of(alike: Sequence[Any]) -> Any:  # noqa: ANN401 - pydantic's error records
    if len(alike) == 1:
        return alike[0]
    ways = [_WAYS.get(item["type"], item["msg"]) for item in alike]
    ways = [way.format(**item.get("ctx", {})) for way, item in zip(ways, alike, strict=True)]
    return {**alike[0], "type": "ways", "msg": f"must be {' or '.join(ways)}"}


def _fault(kind: type, item: Any) -> str:  # noqa: ANN401 - pydantic's error record
    path = [str(part) for part in item["loc"] if str(part).isidentifier()]
    key = ".".join(path) or "(the whole file)"
    if item["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        owner = kind
        for part in path[:-1]:
            owner = _field_type(owner, part)
        names = [field.name for field in dataclasses.fields(owner)]
        near = difflib.get_close_matches(path[-1], names, n=1)
        advice = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"
        return f"{key}: unknown key; {advice}"
    if item["type"] in {"missing", "missing_argument"}:
        return f"{key}: required, but missing"
    return f"{key}: {item['msg']} (found {item['input']!r})"


def _field_type(owner: Any, name: str) -> Any:  # noqa: ANN401 - walks annotations
    return get_type_hints(owner)[name]


def _resolve_paths(options: T, base: Path) -> T:
    changes: dict[str, object] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value = getattr(options, field.name)
        if isinstance(value, Path):
            changes[field.name] = base / value
        elif dataclasses.is_dataclass(value):
            changes[field.name] = _resolve_paths(value, base)
    return dataclasses.replace(options, **changes)  # type: ignore[type-var]
