"""DeepSpeed's directories, from stored names and ranks to a checkpoint; common to all forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.parts import Held
from ckpt.sources import names, neox
from ckpt.sources.checkpoint import Checkpoint, Parallelism, count_in, parallelism_of
from ckpt.sources.flatten import flatten, namespace
from ckpt.sources.ranked import fold_tied, one_dtype
from ckpt.sources.roles import plain_names
from ckpt.sources.rows import reorder_qkv
from ckpt.sources.unpickle import Stub, TensorRef
from ckpt.tensors import Combine, Shard, SourceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ckpt.sources.locate import Located
    from ckpt.sources.torch_archive import TorchArchive
    from ckpt.sources.unpickle import Reader

# What each rank holds of a tensor, by rank; by stored or by canonical name.
ByRank = dict[int, Held]

_EXPERTS = "deepspeed_moe."
_ROW_BIASES = (".self_attention.linear_proj.bias", ".mlp.linear_fc2.bias")
# bigscience-workshop/Megatron-DeepSpeed, megatron/enums.py
_POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
# Arguments of Megatron-DeepSpeed that change the model in a way that no family has.
_REFUSED = {
    "glu_activation": "its gated MLP has the gate second and no family of this block",
    "num_experts_switch": "switch layers",
}
_MOE_REASON = (
    "experts of DeepSpeed's MoE: its gates drop tokens beyond a capacity and draw the second "
    "expert at random, which no Hugging Face class computes"
)


@dataclass(frozen=True)
class Run:
    """The training run as one state file describes it.

    ``library`` is ``megatron``, ``bigscience`` (its fork) or ``neox``.
    """

    located: Located
    library: str
    args: dict[str, Any]
    reader: Reader
    notes: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """The iteration's directory."""
        return self.located.directory


def read_run(located: Located, archive: TorchArchive, reader: Reader) -> Run:
    """The run's arguments under Megatron's names; SourceError for what no family can be."""
    root = archive.root
    if not isinstance(root, dict):
        raise SourceError("holds no model state", file=archive.file)
    experts = sorted(path.name for path in located.directory.glob("*expert_*_model_states.pt"))
    if experts:
        raise SourceError(_MOE_REASON, file=located.directory / experts[0])
    stored = namespace(root.get("args"))
    if not stored:
        raise SourceError(
            "holds no training arguments", file=archive.file, hint="Supply them with --set"
        )
    if neox.is_neox(root.get("args")):
        args, notes = neox.training_args(stored, located.directory)
        return Run(located, "neox", args, reader, notes)
    args = _megatron_args(stored, root, archive.file)
    library = "bigscience" if "glu_activation" in stored else "megatron"
    return Run(located, library, args, reader)


def _megatron_args(stored: dict[str, Any], root: Mapping[str, Any], file: Path) -> dict[str, Any]:
    for name, reason in _REFUSED.items():
        if stored.get(name):
            raise SourceError(f"training argument {name}: {reason}", file=file)
    values = dict(stored)
    values["checkpoint_version"] = root.get("checkpoint_version", 0)
    experts = values.get("num_experts")
    if isinstance(experts, list | tuple):  # one number for each layer or for all; 1 is a plain MLP
        if any(count != 1 for count in experts):
            raise SourceError(_MOE_REASON, file=file)
        values["num_experts"] = None
    if "rope_theta" in values:
        values["rotary_base"] = values["rope_theta"]
    positions = values.get("position_embedding_type")
    if isinstance(positions, Stub):
        number = next(iter(positions.args), None)
        known = _POSITIONS.get(number) if isinstance(number, int) else None
        if known is None:
            raise SourceError(f"unknown kind of positions {positions!r}", file=file)
        values["position_embedding_type"] = known
    info = root.get("universal_checkpoint_info")
    if isinstance(info, dict) and values.get("vocab_size") is None:
        values["vocab_size"] = info.get("original_vocab_size")
    return values


def views_of(archive: TorchArchive, state: Mapping[str, Any]) -> Iterator[tuple[str, Held]]:
    """Weights of a state dict by stored name; SourceError for an entry that is no tensor."""
    for name, value in flatten(state):
        if names.skip_reason(name) or value is None:
            continue
        if not isinstance(value, TensorRef):
            raise SourceError("an entry that is no tensor", file=archive.file, tensor=name)
        yield name, Held.whole(archive.view(value, name=name))


def check_ranks(run: Run, stored: Mapping[str, ByRank], tp: int) -> None:
    """Raise SourceError unless all ``tp`` ranks hold every tensor, and the run has so many."""
    for name, by_rank in stored.items():
        if set(by_rank) != set(range(tp)):
            raise SourceError(
                "only some ranks hold this tensor",
                file=run.directory,
                tensor=name,
                expected=f"{tp} tensor-parallel ranks",
                found=f"ranks {sorted(by_rank)}",
            )
    expected = parallelism_of(run.args).tensor
    if expected != tp:
        raise SourceError(
            "the files are not of as many tensor-parallel ranks as the training arguments say",
            file=run.directory,
            expected=f"{expected} ranks",
            found=f"{tp}",
        )


def assemble(
    run: Run,
    stored: Mapping[str, ByRank],
    *,
    files: Sequence[Path],
    parallelism: Parallelism,
    skipped: Sequence[tuple[str, str]] = (),
    notes: tuple[str, ...] = (),
) -> Checkpoint:
    """The checkpoint of tensors given by stored name and rank; raises as the parts do."""
    tensors = _tensors(run, stored)
    return Checkpoint(
        format=run.located.format,
        directory=run.directory,
        iteration=run.located.iteration,
        args=run.args,
        parallelism=parallelism,
        tensors=tuple(tensors),
        shapes={tensor.name: tensor.shape for tensor in tensors},
        skipped=names.count_skipped(list(skipped)),
        files=tuple(dict.fromkeys(files)),
        metadata_files=(),
        foreign_classes=run.reader.foreign_classes,
        notes=(*run.located.notes, *run.notes, *notes),
    )


def _tensors(run: Run, stored: Mapping[str, ByRank]) -> list[SourceTensor]:
    experts = [name for name in stored if _EXPERTS in name]
    if experts:
        raise SourceError(_MOE_REASON, file=run.directory, tensor=experts[0])
    plain = plain_names(stored, run.directory)
    named = {plain[key]: by_rank for key, by_rank in stored.items()}
    if run.library == "neox":
        named = neox.rearrange(named, run.args)
    layers = {names.layer_of(name) for name in named} - {None}
    expected = count_in(run.args, "num_layers", "encoder_num_layers")
    if expected and len(layers) != expected:
        raise SourceError(
            "the files do not hold all layers",
            file=run.directory,
            expected=f"{expected} layers",
            found=f"{len(layers)}",
        )
    tensors = [_tensor(run, name, by_rank) for name, by_rank in named.items()]
    return fold_tied([reorder_qkv(tensor, run.args) for tensor in tensors], run.args)


def _tensor(run: Run, name: str, by_rank: ByRank) -> SourceTensor:
    held = [by_rank[rank] for rank in sorted(by_rank)]
    dtype = one_dtype(name, [part.view for one in held for part in one.parts])
    alone = len(held) == 1
    shards = [
        Shard(
            part.view,
            start=part.start if alone or len(one.parts) > 1 else None,
            rank=None if alone else rank,
        )
        for rank, one in enumerate(held)
        for part in one.parts
    ]
    shape = held[0].shape if alone else None
    return SourceTensor(name, dtype, tuple(shards), shape, combine=_combine(run, name))


def _combine(run: Run, name: str) -> Combine:
    """How ranks' copies become one, where every rank holds the whole.

    GPT-NeoX adds the biases of row-parallel linears on each rank before the sum over ranks
    if the residual is parallel (megatron/model/transformer.py); otherwise behind it, as the
    forks of Megatron-LM do. It and BigScience's fork let copies drift apart, and their own
    converters take the mean; deepspeedai's demands that they are equal.
    """
    if run.library == "megatron":
        return Combine.EQUAL
    if run.library == "neox" and name.endswith(_ROW_BIASES) and run.args["gpt_j_residual"]:
        return Combine.SUM
    return Combine.MEAN
