"""The convert stage: a Megatron checkpoint becomes a Hugging Face directory, or nothing does."""

from __future__ import annotations

import difflib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ckpt import __version__
from ckpt.arch import choose_architecture, refuse_foreign
from ckpt.completeness import prove
from ckpt.convert.conversion import Conversion, ConvertReport, Copied, PartReport
from ckpt.convert.hf_files import Tokenizer, build_config, read_tokenizer
from ckpt.convert.needs import needs_of
from ckpt.convert.plan import Plan, build_plan
from ckpt.convert.reference import (
    Reference,
    compare_reference,
    copied_files,
    read_reference,
)
from ckpt.convert.share import WHOLE, Share
from ckpt.convert.vocabulary import find_vocabulary
from ckpt.errors import FamilyError, OptionsError, SourceError
from ckpt.manifest import fingerprint
from ckpt.metamodel import ModelBuilder
from ckpt.progress import Progress, Silent
from ckpt.shards import REFERENCE_FILE, assign, file_names
from ckpt.sources import open_source, reading
from ckpt.sources.unpickle import unhurried_collector
from ckpt.storage import stamp
from ckpt.tensors import DType
from ckpt.terminal import format_bytes, plural
from ckpt.training import (
    TrainingArgs,
    lacking_arguments,
    parse_overrides,
    parse_training_args,
    unread_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt.arch import Architecture
    from ckpt.config import ConvertOptions
    from ckpt.shards import TensorSpec
    from ckpt.sources import Checkpoint
    from ckpt.sources.locate import IterationChoice

__all__ = [
    "Conversion",
    "ConvertReport",
    "PartReport",
    "Share",
    "carry_out",
    "convert_checkpoint",
    "plan_conversion",
    "plan_with_proof",
    "source_identity",
]
REFERENCE_NAME = "ckpt-reference.safetensors"
_DTYPES = {"bf16": DType.BF16, "fp16": DType.F16, "fp32": DType.F32}


def training_values(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The stored training arguments with the user's own in their place.

    Raises SourceError where nothing is stored and the user's do not say everything.
    """
    lacking = () if checkpoint.args else lacking_arguments(overrides)
    if lacking:
        raise SourceError(
            f"the checkpoint holds no training arguments: {checkpoint.missing_args}",
            file=checkpoint.directory,
            hint="Or supply them all: " + " ".join(f"--set {name}=VALUE" for name in lacking),
        )
    return {**checkpoint.args, **overrides}


def plan_conversion(
    source: Path, options: ConvertOptions, *, iteration: IterationChoice = "latest"
) -> Conversion:
    """Everything a conversion will do, decided without reading a tensor.

    Raises SourceError, FamilyError, PlanError or OptionsError for whatever cannot be
    converted exactly.
    """
    with unhurried_collector(), reading(source):
        return _plan(open_source(source, iteration), options)


def _plan(checkpoint: Checkpoint, options: ConvertOptions) -> Conversion:
    overrides = parse_overrides(options.overrides)
    values = training_values(checkpoint, overrides)
    refuse_foreign([tensor.name for tensor in checkpoint.tensors], values)
    args = parse_training_args(values, checkpoint.shapes)
    _check_overrides(overrides, checkpoint, values)
    if options.mtp == "drop":
        args = replace(args, mtp_kept=0)
    reference = read_reference(options.reference) if options.reference else None
    architecture = _choose_family(args, options.family, reference)
    by_reference = reference is not None and options.family is None
    tokenizer = _find_tokenizer(options, reference)
    vocab_size, vocabulary_note = find_vocabulary(args, options, tokenizer, reference)
    cast = _DTYPES.get(options.dtype)
    plan = build_plan(checkpoint, args, architecture, vocab_size=vocab_size, dtype=cast)
    specs = [target.spec for target in plan.targets]
    groups = assign(specs, options.max_shard_size)
    files = tuple(
        (name, tuple(group)) for name, group in zip(file_names(len(groups)), groups, strict=True)
    )
    config = build_config(architecture, args, vocab_size=vocab_size, dtype=_main_dtype(specs))
    if tokenizer:
        config |= tokenizer.special
    compared = compare_reference(reference, config, architecture, args) if reference else None
    # Without these keys every class of transformers has numbers of its own.
    unknown = {"bos_token_id": None, "eos_token_id": None}
    config = unknown | (dict(compared.config) if compared else config)
    copied = _copied(checkpoint, tokenizer, reference)
    notes = _notes(checkpoint, args, plan, tokenizer, vocabulary_note)
    notes += _oversized(specs, options.max_shard_size)
    identity = source_identity(checkpoint)
    return Conversion(
        checkpoint=checkpoint,
        args=args,
        architecture=architecture,
        plan=plan,
        files=files,
        config=config,
        copied=copied,
        notes=(
            *architecture.warnings(args),
            *([f"family {architecture.name}, as the reference's"] if by_reference else []),
            *notes,
            *(compared.notes if compared else ()),
        ),
        identity=identity,
        fingerprint=_fingerprint(identity, options, config, copied),
        reference=compared,
    )


def convert_checkpoint(
    source: Path,
    output: Path,
    options: ConvertOptions,
    *,
    iteration: IterationChoice = "latest",
    progress: Progress | None = None,
    share: Share = WHOLE,
) -> ConvertReport | PartReport:
    """Convert a training checkpoint to ``output``, which appears complete or not at all.

    A run that was killed goes on where it was when the same call is made again. A ``share``
    writes one part, beside others on any machine that sees the same directories; the one with
    ``finalize`` collects them. Raises
    OutputError when the output is in the way or cannot be written, and whatever
    :func:`plan_conversion` raises.
    """
    from ckpt.convert import staging  # noqa: PLC0415 - planning needs no NumPy

    staging.check_output(output, overwrite=options.overwrite)
    with ModelBuilder(options.cache) as builder:
        conversion = plan_conversion(source, options, iteration=iteration)
        builder.expect(conversion.config)  # copies are compared meanwhile
        return carry_out(
            conversion, output, options, progress=progress, builder=builder, share=share
        )


def prove_conversion(
    conversion: Conversion, builder: ModelBuilder, progress: Progress | None = None
) -> Conversion:
    """The conversion with its proof: what it will write is what transformers builds.

    ``progress`` is told where that model has to be waited for. Raises PlanError with a short
    diff where that is not so.
    """
    waiting = (progress or Silent()) if builder.must_build(conversion.config) else Silent()
    found = {target.spec.name: target.spec.shape for target in conversion.plan.targets}
    with unhurried_collector():
        once = " (once for this kind of model)" if builder.keeps else ""
        waiting.start(f"checking against transformers' model{once}", unit="")
        try:
            model = builder.build(conversion.config)
        finally:
            waiting.finish()
        proof = prove(found, conversion.config, model, conversion.architecture)
    return replace(conversion, proof=proof)


def plan_with_proof(
    source: Path,
    options: ConvertOptions,
    *,
    iteration: IterationChoice = "latest",
    output: Path | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """What :func:`convert_checkpoint` would do, proved and not done; raises as it does.

    With its needs where ``output`` is given; a disk that is too small is said, not raised.
    """
    with unhurried_collector(), ModelBuilder(options.cache) as builder:
        conversion = plan_conversion(source, options, iteration=iteration)
        if output is not None:
            conversion = replace(conversion, needs=needs_of(conversion, output, options.workers))
        return prove_conversion(conversion, builder, progress)


def carry_out(
    conversion: Conversion,
    output: Path,
    options: ConvertOptions,
    *,
    progress: Progress | None = None,
    builder: ModelBuilder | None = None,
    share: Share = WHOLE,
) -> ConvertReport | PartReport:
    """Write what :func:`plan_conversion` planned; raises as :func:`convert_checkpoint` does."""
    from ckpt.convert import carry  # noqa: PLC0415 - planning needs no NumPy
    from ckpt.convert.run import Run  # noqa: PLC0415

    with ModelBuilder(options.cache) if builder is None else nullcontext(builder) as own:
        prove = partial(prove_conversion, builder=own, progress=progress)
        run = Run(conversion, output, options, progress or Silent(), share)
        return carry.carry_out(run, prove)


def _check_overrides(
    overrides: Mapping[str, Any], checkpoint: Checkpoint, values: Mapping[str, Any]
) -> None:
    """Raise OptionsError for a --set that nothing reads."""
    new = [name for name in overrides if name not in checkpoint.args]
    unread = unread_arguments(new, values, checkpoint.shapes) if new else ()
    if unread:
        near = difflib.get_close_matches(unread[0], checkpoint.args, n=1)
        raise OptionsError(
            f"--set {unread[0]}: no such training argument is read or stored",
            hint=f"Did you mean {near[0]}?" if near else None,
        )


def _choose_family(
    args: TrainingArgs, family: str | None, reference: Reference | None
) -> Architecture:
    """The family that the user names, that of the reference, or the one that fits."""
    if family is not None or reference is None:
        return choose_architecture(args, family)
    try:
        return choose_architecture(args, reference.model_type)
    except FamilyError as error:
        raise FamilyError(
            f"the reference is of model_type {reference.model_type}: {error.message}",
            file=reference.file,
            hint=error.hint or "Give the reference of this model, or name a --family",
        ) from error


def _find_tokenizer(options: ConvertOptions, reference: Reference | None) -> Tokenizer | None:
    """The tokenizer that the user names, else the reference's."""
    if options.tokenizer is None and reference is not None and reference.has_tokenizer:
        return read_tokenizer(reference.file.parent)
    return read_tokenizer(options.tokenizer) if options.tokenizer else None


def _copied(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, reference: Reference | None
) -> tuple[Copied, ...]:
    """The files that are copied as they are: a tokenizer's, a reference's, recorded logits."""
    files = tokenizer.files if tokenizer else ()
    files += tuple(copied_files(reference, files)) if reference else ()
    recorded = checkpoint.directory / REFERENCE_NAME
    files += ((REFERENCE_FILE, recorded),) if recorded.is_file() else ()
    return tuple(Copied(name, file, stamp(file)) for name, file in files)


def _main_dtype(specs: Sequence[TensorSpec]) -> DType:
    """The type that most bytes have."""
    sizes: dict[DType, int] = {}
    for spec in specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _notes(
    checkpoint: Checkpoint,
    args: TrainingArgs,
    plan: Plan,
    tokenizer: Tokenizer | None,
    vocabulary_note: str | None,
) -> tuple[str, ...]:
    notes = [*checkpoint.notes, *args.notes]
    if vocabulary_note:
        notes.append(vocabulary_note)
    if args.mtp_layers:
        kept = "kept" if args.mtp_kept else f"dropped ({plural(len(plan.dropped), 'tensor')})"
        layers = plural(args.mtp_layers, "layer")
        predict = "that predicts" if args.mtp_layers == 1 else "that predict"
        notes.append(f"{layers} {predict} further tokens: {kept}")
    if plan.summed:
        are = "is" if plan.summed == 1 else "are"
        notes.append(f"{plural(plan.summed, 'tensor')} {are} the sum of what each rank adds")
    if plan.padding_rows:
        notes.append(f"{plural(plan.padding_rows, 'padding row')} of the vocabulary left out")
    if checkpoint.foreign_classes:
        names = ", ".join(checkpoint.foreign_classes)
        notes.append(f"classes read as inert values, no code of theirs was run: {names}")
    if tokenizer is None:
        notes.append(
            "no tokenizer: text requests will fail, and config.json names no begin and end of "
            "text; give one with --tokenizer"
        )
    elif not tokenizer.has_chat_template:
        notes.append("no chat template: chat requests will be refused, completions work")
    return tuple(notes)


def _oversized(specs: Sequence[TensorSpec], limit: int) -> tuple[str, ...]:
    """A note where tensors, which are never cut, make files larger than was asked for."""
    large = [spec for spec in specs if spec.nbytes > limit]
    if not large:
        return ()
    most = max(large, key=lambda spec: spec.nbytes)
    return (
        (
            f"larger than --max-shard-size {format_bytes(limit)}: {plural(len(large), 'tensor')}, "
            f"each in a file of its own; the largest is {most.name}, {format_bytes(most.nbytes)}"
        ),
    )


def _fingerprint(
    identity: Mapping[str, Any],
    options: ConvertOptions,
    config: Mapping[str, Any],
    copied: Sequence[Copied],
) -> str:
    return fingerprint(
        __version__,
        identity,
        options.of_content(),
        config,
        [(copy.name, *copy.stamp) for copy in copied],
    )


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tells one state of a checkpoint from another, without reading its tensors.

    Its files are held to the state that they had before the first of them was read.
    """
    known = checkpoint.stamps
    return {
        "path": str(checkpoint.directory.resolve()),
        "iteration": checkpoint.iteration,
        "format": checkpoint.format,
        "files": {
            str(path.relative_to(checkpoint.directory)): known.get(str(path)) or stamp(path)
            for path in checkpoint.files
        },
        "metadata_sha256": {
            path.name: sha256(path.read_bytes()).hexdigest() for path in checkpoint.metadata_files
        },
    }
