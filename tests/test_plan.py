"""Plans: decided from names and shapes alone, complete or refused, and printed."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from builders import Model, megatron_tensors, rank_part, training_args

from ckpt.arch import ARCHITECTURES
from ckpt.convert.describe import describe_plan
from ckpt.convert.plan import build_plan
from ckpt.convert.steps import Cast
from ckpt.errors import PlanError
from ckpt.shards import assign, file_names
from ckpt.sources import Checkpoint, Parallelism
from ckpt.tensors import DType, Shard, SourceTensor, View
from ckpt.training import parse_training_args

GOLDEN = Path(__file__).parent / "golden"
MODEL = Model(layers=1, hidden=20, heads=4, groups=2, head_dim=6, ffn=14, vocab=19, divisible=4)
TP = 2


def checkpoint_of(model, tp=TP, **changes):
    """A checkpoint that exists on paper: ranks' tensors end to end in one file for each rank."""
    ends = [0] * tp
    tensors = []
    for name, whole in megatron_tensors(model, tp).items():
        shards = []
        for rank in range(tp):
            shape = tuple(rank_part(name, whole, tp, rank).shape)
            file = f"run/mp_rank_{rank:02d}/model_optim_rng.pt"
            view = View.contiguous(file, ends[rank], DType.F32, shape)
            ends[rank] += view.nbytes
            shards.append(Shard(view, rank=rank))
        tensors.append(SourceTensor(name, DType.F32, tuple(shards)))
    checkpoint = Checkpoint(
        format="torch",
        directory=Path("run"),
        iteration=10,
        args=vars(training_args(model, tp=tp, pp=1)),
        parallelism=Parallelism(tensor=tp),
        tensors=tuple(tensors),
        shapes={tensor.name: None for tensor in tensors},
        skipped=(),
        files=(),
        metadata_files=(),
    )
    return replace(checkpoint, **changes)


def plan_of(checkpoint, family="llama", dtype=None, vocab=MODEL.vocab):
    args = parse_training_args(checkpoint.args, checkpoint.shapes)
    return build_plan(checkpoint, args, ARCHITECTURES[family], vocab_size=vocab, dtype=dtype)


def printed(plan, limit=10**9):
    groups = assign([target.spec for target in plan.targets], limit)
    return describe_plan(plan, list(zip(file_names(len(groups)), groups, strict=True))) + "\n"


@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("llama-tp2", MODEL, {}),
        ("qwen2-tied-bf16", replace(MODEL, family="qwen2", tied=True), {"dtype": DType.BF16}),
        ("llama-zero-centred", replace(MODEL, zero_centred=True), {}),
    ],
)
def test_a_plan_is_this_text(name, model, options):
    """Every file, tensor, step and rectangle; the offsets were checked by hand once."""
    family = model.family if model.family in ARCHITECTURES else "llama"
    found = printed(plan_of(checkpoint_of(model), family=family, **options), limit=6000)
    assert found == (GOLDEN / f"{name}.plan").read_text(encoding="utf-8")


def test_a_plan_moves_every_element_once_and_drops_the_padding():
    plan = plan_of(checkpoint_of(MODEL))
    stored = sum(tensor.numel() for tensor in megatron_tensors(MODEL, TP).values())
    assert plan.source_parameters == stored
    assert plan.padding_rows == MODEL.padded(TP) - MODEL.vocab == 5
    assert plan.parameters == stored - 2 * 5 * MODEL.hidden
    assert plan.nbytes == 4 * plan.parameters
    for target in plan.targets:
        assert sum(copy.nbytes for copy in target.copies) == target.spec.nbytes


def test_replicated_tensors_are_checked_against_the_first_rank():
    checks = plan_of(checkpoint_of(MODEL)).checks
    assert sorted(check.name for check in checks) == [
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
    ]
    assert all("mp_rank_00" in check.first.file for check in checks)
    assert all("mp_rank_01" in check.other.file for check in checks)


def test_a_cast_is_planned_only_where_it_changes_the_type():
    plan = plan_of(checkpoint_of(MODEL), dtype=DType.F32)
    assert not any(target.steps for target in plan.targets)
    plan = plan_of(checkpoint_of(MODEL), dtype=DType.F16)
    assert all(target.steps == (Cast(DType.F16),) for target in plan.targets)
    assert {target.spec.dtype for target in plan.targets} == {DType.F16}


def without(checkpoint, *ends):
    kept = tuple(t for t in checkpoint.tensors if not t.name.endswith(ends))
    return replace(checkpoint, tensors=kept)


def test_a20_every_unknown_and_every_missing_tensor_is_listed():
    """Not the first one only; the nearest missing name stands beside an unknown one."""
    checkpoint = checkpoint_of(MODEL)
    renamed = tuple(
        replace(t, name=t.name.replace("linear_fc", "linear_fcc")) for t in checkpoint.tensors
    )
    with pytest.raises(PlanError) as caught:
        plan_of(replace(checkpoint, tensors=renamed))
    text = str(caught.value)
    assert "2 tensors have no place in family llama" in text
    assert "nearest: decoder.layers.0.mlp.linear_fc1.weight" in text
    assert "2 tensors are missing" in text
    assert "mp_rank_00/model_optim_rng.pt" in text


def test_a_long_list_is_cut_and_counted():
    checkpoint = checkpoint_of(replace(MODEL, layers=12))
    with pytest.raises(PlanError, match=r"12 tensors are missing: .* and 4 more"):
        plan_of(without(checkpoint, "linear_fc1.weight"))


def test_a04_an_untied_model_without_a_head_is_refused():
    with pytest.raises(PlanError, match=r"missing: output_layer\.weight"):
        plan_of(without(checkpoint_of(MODEL), "output_layer.weight"))


def test_a04_a_tied_model_with_a_head_of_its_own_is_refused():
    """Folding a copy away is the source's work, and only for what is equal."""
    checkpoint = checkpoint_of(MODEL)
    args = {**checkpoint.args, "untie_embeddings_and_output_weights": False}
    with pytest.raises(PlanError, match=r"no place in family llama: output_layer\.weight"):
        plan_of(replace(checkpoint, args=args))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_query_groups", 4, "linear_qkv.weight: the number of rows does not fit"),
        ("kv_channels", 5, "linear_qkv.weight: the number of rows does not fit"),
        ("vocab_size", 25, "at least 25 rows"),
    ],
)
def test_sizes_that_the_tensors_contradict_stop_with_the_name(field, value, message):
    checkpoint = checkpoint_of(MODEL)
    checkpoint = replace(checkpoint, args={**checkpoint.args, field: value})
    with pytest.raises(PlanError, match=message):
        plan_of(checkpoint, vocab=checkpoint.args["vocab_size"])


def test_a_shard_of_another_width_stops_with_its_file():
    checkpoint = checkpoint_of(MODEL)

    def narrow(tensor):
        first, second = tensor.shards
        view = replace(second.view, shape=(second.view.shape[0], 3))
        return replace(tensor, shards=(first, replace(second, view=view)))

    changed = tuple(
        narrow(t) if t.name.endswith("linear_fc1.weight") else t for t in checkpoint.tensors
    )
    with pytest.raises(PlanError, match=r"mp_rank_01.*linear_fc1.*do not fit together"):
        plan_of(replace(checkpoint, tensors=changed))


def test_targets_come_in_the_order_of_the_model():
    names = [t.spec.name for t in plan_of(checkpoint_of(replace(MODEL, layers=11))).targets]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert prod(layers.count(n) for n in range(11)) == 9**11
