"""Every table in the registry, against transformers' own model of that class."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from builders import random
from converted import apply_steps, windows

from ckpt.arch import ARCHITECTURES, choose_architecture
from ckpt.arch.table import Architecture, Const
from ckpt.completeness import prove
from ckpt.convert.facts import fact, known_facts
from ckpt.convert.hf_files import build_config
from ckpt.convert.maps import CastReport
from ckpt.convert.plan import build_plan
from ckpt.convert.read import Files
from ckpt.errors import FamilyError
from ckpt.layout import Cut
from ckpt.metamodel import build_meta_model
from ckpt.sources import Checkpoint, Parallelism
from ckpt.tensors import DType, Shard, SourceTensor, View
from ckpt.training import TrainingArgs, parse_training_args

if TYPE_CHECKING:
    from pathlib import Path

EVERY = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
LAYERS, VOCABULARY, PADDING, TP = 3, 19, 5, 2
BASE = parse_training_args(
    {
        "num_layers": LAYERS, "hidden_size": 24, "num_attention_heads": 4, "kv_channels": 6,
        "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 36,
        "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY + PADDING,
        "max_position_embeddings": 32, "layernorm_epsilon": 3e-5, "rotary_base": 5000,
        "position_embedding_type": "rope", "add_bias_linear": False,
        "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0, 1],
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5,
        "linear_value_head_dim": 3, "linear_conv_kernel_dim": 4,
        "kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 7,
        "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 9, "dsa_indexer_topk": 5,
    },
    {},
)  # fmt: skip
DELTA = ("experimental_attention_variant", "linear_attention_freq")
BASE = replace(
    BASE,
    mixers=(),
    linear_attention=None,
    unusual=tuple(item for item in BASE.unusual if item[0] not in DELTA),
)
EXPERTS = {"experts": 6, "expert_ffn": 20, "router_topk": 2, "moe_layers": (False, True, True)}
# What makes a property of TrainingArgs true; a table that expects another one adds a line.
MADE_TRUE: dict[str, dict[str, Any]] = {
    "is_moe": EXPERTS,
    "all_moe": {**EXPERTS, "moe_layers": (True,) * LAYERS},
    "moe_is_suffix": {},
    "has_shared_expert": {"shared_ffn": 40},
    "shared_divides": {"shared_ffn": 40},
    "multi_head": {"groups": 4},
    "plain_head_dim": {},
    "four_times_ffn": {"ffn_hidden_size": 96},
    "heads_divide_hidden": {},
    "query_scalar_is_whole": {},
    "normalises_scores": {},
    "has_q_lora": {"q_lora_rank": 12},
    "is_hybrid": {
        "layers": 5,
        "hybrid_pattern": "M*-EM",
        "mixers": ("mamba", "attention", "", "", "mamba"),
        "feed_forwards": ("", "", "dense", "moe", ""),
        "moe_layers": (False, False, False, True, False),
        "mamba_heads": 6,
        "mamba_head_dim": 4,
        "mamba_groups": 2,
        "mamba_state": 5,
    },
    "has_mamba": {},
    "experts_are_known": {
        "experts": 6,
        "expert_ffn": 20,
        "router_topk": 2,
        "router_score": "sigmoid",
        "router_bias": True,
        "shared_ffn": 40,
    },
    "linear_attention": {"mixers": ("linear_attention", "attention", "linear_attention")},
}
# Answers to what a family may ask the user.
ANSWERS: dict[str, Any] = {
    "scales_embedding": True,
    "query_scalar": 20.0,
    "attention_cap": 40.0,
    "logit_cap": 25.0,
    "local_rotary_base": 700.0,
    "window_layers": (True, False, True),
    "indexer_interleaved": False,
}


def variants(architecture: Architecture) -> list[TrainingArgs]:
    """Models that the family can represent: made from what it expects, then varied."""
    args = BASE
    for name, allowed in architecture.expects.items():
        if name in MADE_TRUE and allowed[0]:
            args = replace(args, **MADE_TRUE[name])
    for name, allowed in architecture.expects.items():
        if name in {item.name for item in fields(TrainingArgs)}:
            args = replace(args, **{name: allowed[0]})
    args = replace(args, **{name: ANSWERS[name] for name in architecture.asks})
    if args.window_layers:
        args = replace(args, sliding_window=9)
    args = replace(args, zero_centered_norm=architecture.norm_adds_one)
    found = []
    for tied, bias, rank, norm in itertools.product(
        [False, True], [False, True], [None, 12], [False, True]
    ):
        one = replace(args, tied=tied, linear_bias=bias, qkv_bias=args.qkv_bias or bias)
        one = replace(one, qk_norm=args.qk_norm or norm)
        one = replace(one, q_lora_rank=rank if args.mla else None)
        one = replace(one, moe_latent=rank if args.is_hybrid else None)
        if not architecture.mismatches(one) and one not in found:
            found.append(one)
    return found


@EVERY
def test_names_that_a_table_uses_exist(architecture):
    """Facts of config.json, conditions, sizes and expectations are fields or properties."""
    facts = {value for value in architecture.config.values() if not isinstance(value, Const)}
    assert facts <= known_facts()
    used = set(architecture.expects)
    for rule in architecture.rules:
        used |= {rule.when.lstrip("!")} if rule.when else set()
        used |= {rule.layout.rows} if rule.layout.rows else set()
        used |= {rule.layout.total} if rule.layout.total else set()
        used |= set(rule.layout.blocks)
    for name in used:
        assert hasattr(BASE, name), name


def test_an_unknown_fact_is_an_error():
    with pytest.raises(AttributeError, match="no_such_fact"):
        fact("no_such_fact", BASE)


@EVERY
def test_patterns_are_distinct_and_well_formed(architecture):
    """No two rows that hold at once take one tensor, and none fill one target twice."""
    for args in variants(architecture):
        for scope in ("dense", "moe"):
            rules = [
                rule
                for rule in architecture.rules
                if rule.applies(args) and rule.layers in {"all", scope}
            ]
            sources = [rule.source for rule in rules]
            targets = [target for rule in rules for target in rule.targets]
            assert len(sources) == len(set(sources))
            assert len(targets) == len(set(targets))
    for rule in architecture.rules:
        for text in (rule.source, *rule.targets, *rule.mtp_copies):
            text.format(layer=0, expert=0, mtp=0)
        assert rule.targets


def test_names_and_aliases_belong_to_one_family():
    names = [name for item in ARCHITECTURES.values() for name in (item.name, *item.aliases)]
    assert len(names) == len(set(names))
    assert all(key == item.name for key, item in ARCHITECTURES.items())


@EVERY
def test_a_family_is_found_by_every_name_and_by_itself(architecture):
    """A model that it expects is given to it, or to one before it that fits as well."""
    for args in variants(architecture):
        for name in (architecture.name, *architecture.aliases):
            assert choose_architecture(args, name) is architecture
        chosen = choose_architecture(args)
        order = list(ARCHITECTURES.values())
        assert order.index(chosen) <= order.index(architecture)
        assert not chosen.mismatches(args)


def test_a_model_that_no_family_fits_is_told_why():
    args = replace(BASE, normalization="L2Norm")
    with pytest.raises(FamilyError, match="normalization is 'L2Norm'"):
        choose_architecture(args)
    with pytest.raises(FamilyError, match=r"Did you mean qwen3\?"):
        choose_architecture(BASE, "qwen33")
    with pytest.raises(FamilyError, match=r"family llama cannot .* 'L2Norm'"):
        choose_architecture(args, "llama")


def expected_rows(architecture, args):
    """(row, training name, target names) of every tensor the model has."""
    for rule in architecture.rules:
        if not rule.applies(args) or "{mtp}" in rule.source:
            continue
        layers = range(args.layers) if "{layer}" in rule.source else [None]
        for layer in layers:
            if layer is not None and not rule.has_layer(args, layer):
                continue
            for expert in range(args.experts) if "{expert}" in rule.source else [None]:
                names = [t.format(layer=layer, expert=expert) for t in rule.targets]
                yield rule, rule.source.format(layer=layer, expert=expert), names, expert


def megatron_tensor(rule, names, expert, truth, args):
    """The whole training tensor that these Hugging Face tensors came from, by plain indexing."""
    parts = []
    for name, pattern in zip(names, rule.targets, strict=True):
        part = truth[name] - (1 if rule.plain and args.zero_centered_norm else 0)
        if expert is not None and "{expert}" not in pattern:
            part = part[expert]
        parts.append(part.mT if rule.layout.transposed else part)
    if rule.layout.cut in JOINED:
        return JOINED[rule.layout.cut](parts, args)
    heads, groups, width = args.heads, args.groups, args.head_dim
    match rule.layout.cut:
        case Cut.WHOLE:
            return parts[0]
        case Cut.VOCABULARY:
            return torch.cat([parts[0], random("padding", PADDING, *parts[0].shape[1:])])
        case Cut.GATE_UP:
            return torch.cat(parts)
        case Cut.INTERLEAVED_GATE_UP:
            return torch.cat([parts[0][0::2], parts[0][1::2]])
        case Cut.FLAT_QKV:
            parts = parts[0].split([heads * width, groups * width, groups * width])
    query, key, value = parts
    rows = []
    for group in range(groups):
        wide = heads // groups * width
        rows.append(query[group * wide : (group + 1) * wide])
        rows += [side[group * width : (group + 1) * width] for side in (key, value)]
    return torch.cat(rows)


def gated_rows(parts, args):
    """Of each group all queries, all gates, the key, the value; a head is [query; gate]."""
    heads, width = args.heads, args.head_dim
    both = parts[0].view(heads, 2, width, -1)
    keys, values = (part.view(args.groups, width, -1) for part in parts[1:])
    rows = []
    for group in range(args.groups):
        inside = range(group * heads // args.groups, (group + 1) * heads // args.groups)
        rows += [both[head, kind] for kind in (0, 1) for head in inside]
        rows += [keys[group], values[group]]
    return torch.cat(rows)


def delta_rows(parts, args):
    """[q; k; v; z; b; a] of all heads from what each key head has of them."""
    keys, per = args.delta_key_heads, args.delta_value_heads // args.delta_key_heads
    key, value = args.delta_key_dim, per * args.delta_value_dim
    big = [head.split([key, key, value, value]) for head in parts[0].chunk(keys)]
    small = [head.split(per) for head in parts[1].chunk(keys)]
    kinds = [list(kind) for kind in zip(*big, strict=True)]
    kinds += [list(kind) for kind in zip(*small, strict=True)]
    return torch.cat([torch.cat(kind) for kind in kinds])


JOINED = {Cut.DELTA: delta_rows, Cut.GATED_QKV: gated_rows}


def ranks_of(rule, whole, args):
    """What each tensor-parallel rank holds."""
    layout = rule.layout
    if layout.blocks:
        blocks = whole.split([getattr(args, name) for name in layout.blocks])
        return [torch.cat([block.chunk(TP)[rank] for block in blocks]) for rank in range(TP)]
    if layout.dim is None or (layout.rows and getattr(args, layout.rows) % TP):
        return [whole] * TP
    blocks = [block.chunk(TP, layout.dim) for block in whole.chunk(layout.parts, layout.dim)]
    return [torch.cat([block[rank] for block in blocks], layout.dim) for rank in range(TP)]


def stored(architecture, args, truth, file):
    """A checkpoint whose tensors lie end to end in one file."""
    tensors, content = [], b""
    for rule, name, names, expert in expected_rows(architecture, args):
        whole = megatron_tensor(rule, names, expert, truth, args)
        shards = []
        for rank, part in enumerate(ranks_of(rule, whole, args)):
            view = View.contiguous(str(file), len(content), DType.F32, tuple(part.shape))
            shards.append(Shard(view, rank=rank))
            content += part.contiguous().numpy().tobytes()
        tensors.append(SourceTensor(name, DType.F32, tuple(shards)))
    file.write_bytes(content)
    return Checkpoint(
        "torch", file.parent, 1, {}, Parallelism(tensor=TP), tuple(tensors), {}, (), (file,), ()
    )


def saved_by_transformers(config, place: Path):
    """Names and random values of a model that transformers builds from our config.json."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    assert type(model).__name__ == config["architectures"][0]
    with torch.no_grad():
        for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
            if value.is_floating_point() and "inv_freq" not in name:
                value.copy_(random(name, *value.shape))
    model.save_pretrained(place)
    return load_file(place / "model.safetensors")


def finished(window, target):
    """The bytes after the target's steps, which undo what was stored as distance from 1."""
    report = CastReport()
    done = apply_steps(window, target.stored, target.steps, name=target.spec.name, report=report)
    return done.tobytes()


@EVERY
def test_a06_the_table_fills_exactly_the_tensors_that_transformers_has(architecture, tmp_path):
    """The same names and shapes, and each element where transformers had it before."""
    models = variants(architecture)
    assert models
    for number, args in enumerate(models):
        config = build_config(architecture, args, vocab_size=VOCABULARY, dtype=DType.F32)
        truth = saved_by_transformers(config, tmp_path / str(number))
        filled = {name for *_, names, _ in expected_rows(architecture, args) for name in names}
        assert filled == set(truth)
        checkpoint = stored(architecture, args, truth, tmp_path / f"{number}.bin")
        plan = build_plan(checkpoint, args, architecture, vocab_size=VOCABULARY, dtype=None)
        assert {t.spec.name: t.spec.shape for t in plan.targets} == {
            name: tuple(value.shape) for name, value in truth.items()
        }
        written = {target.spec.name: target.spec.shape for target in plan.targets}
        proof = prove(written, config, build_meta_model(config), architecture)
        assert proof.parameters == sum(value.numel() for value in truth.values())
        assert plan.padding_rows == PADDING
        with Files() as files:
            for target in plan.targets:
                parts = windows(files, target.copies, target.stored_bytes)
                content = b"".join(finished(part, target) for part in parts)
                assert content == truth[target.spec.name].numpy().tobytes(), target.spec.name
