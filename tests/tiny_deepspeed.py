"""Tiny checkpoints of Megatron-DeepSpeed, BigScience's fork and GPT-NeoX, without any of them.

    model = gpt(tp=2)                       # or llama, bloom, neox, neox_llama
    write_layers(root, model)               # pipeline layers, one file each
    write_ranks(root, model)                # no pipeline: one file a rank
    write_zero3(root, model, dp=3)          # the optimizer's partitions
    write_universal(root, model)            # fp32.pt for each parameter
    model.hf                                # the truth, by Hugging Face name
    DEEPSPEED_WRITERS                       # the same of any dense model of tiny_megatron

A model is a list of tensors as the ranks hold them; slow and plain code cuts the truth for
them. All sizes differ, and values depend on the Hugging Face name alone.
"""

from __future__ import annotations

import argparse
import enum
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from builders import foreign_module, random
from tiny_megatron import Ranks, TinyModel, Writer, pieces, tensors, training_args, whole

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HIDDEN, HEADS, SIZE, FFN, VOCAB, PADDED, POSITIONS = 3, 72, 12, 6, 44, 131, 160, 34
STEP = "global_step7"
_UNTIED = "untie_embeddings_and_output_weights"


@dataclass
class Stored:
    """One tensor: its number in the layer list, its name there, and what each rank holds.

    ``kind``: copy, column, row, vocab or gated (two halves on each rank), as DeepSpeed's
    universal script tells them apart.
    """

    number: int
    name: str
    ranks: list[torch.Tensor]
    kind: str = "copy"


@dataclass
class DeepSpeedModel:
    """A model as stored, its arguments, and the truth."""

    tp: int
    args: Any
    state: dict[str, Any] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)
    hf: dict[str, torch.Tensor] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    layers: int = LAYERS
    vocab: int = VOCAB

    def value(self, name: str, *shape: int) -> torch.Tensor:
        self.hf[name] = random(name, *shape, dtype=self.dtype)
        return self.hf[name]

    def put(self, number: int, name: str, value: torch.Tensor, kind: str = "copy") -> None:
        """A tensor cut for the ranks along the dimension that its kind says."""
        dim = {"copy": None, "row": 1}.get(kind, 0)
        ranks = [value] * self.tp if dim is None else list(value.chunk(self.tp, dim))
        self.stored.append(Stored(number, name, [part.clone() for part in ranks], kind))

    def put_vocab(self, number: int, name: str, value: torch.Tensor) -> None:
        padding = random("padding", PADDED - VOCAB, HIDDEN, dtype=self.dtype)
        self.put(number, name, torch.cat([value, padding]), "vocab")

    def put_gated(self, number: int, name: str, first: torch.Tensor, second: torch.Tensor) -> None:
        """[first; second] on each rank."""
        pairs = zip(first.chunk(self.tp), second.chunk(self.tp), strict=True)
        self.stored.append(Stored(number, name, [torch.cat(pair) for pair in pairs], "gated"))

    def find(self, end: str) -> Stored:
        return next(item for item in self.stored if item.name.endswith(end))


def by_head(*parts: torch.Tensor, groups: int = HEADS) -> torch.Tensor:
    """Rows of query, key and value in groups: a group's queries, its key, its value."""
    rows = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(rows, 1).flatten(0, 1)


# --- Megatron-DeepSpeed -----------------------------------------------------------------------


def _arguments(tp: int, **more: Any) -> argparse.Namespace:
    """What every model of the fork stores; a plain MLP is one expert there."""
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        kv_channels=SIZE,
        max_position_embeddings=POSITIONS,
        seq_length=POSITIONS,
        padded_vocab_size=PADDED,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        layernorm_epsilon=1e-5,
        num_experts=[1],
        **more,
    )


def _info(model: DeepSpeedModel) -> None:
    model.state |= {
        "checkpoint_version": 3.0,
        "universal_checkpoint_info": {
            "universal_checkpoint_version": 0.2,
            "original_vocab_size": VOCAB,
            "padded_vocab_size": PADDED,
        },
    }


def llama(tp: int = 1, *, groups: int = 6, first: int = 2, tied: bool = False) -> DeepSpeedModel:
    """Llama; ``first`` is the number of the first layer in the list."""
    args = _arguments(
        tp,
        ffn_hidden_size=FFN,
        num_key_value_heads=groups,
        normalization="rmsnorm",
        swiglu=True,
        add_bias_linear=False,
        use_rotary_position_embeddings=True,
        rope_theta=500000,
        rotary_percent=1.0,
        untie_embeddings_and_output_weights=not tied,
        bias_gelu_fusion=False,
    )
    m = DeepSpeedModel(tp, args)
    _info(m)
    m.put_vocab(1, "word_embeddings.weight", m.value("model.embed_tokens.weight", VOCAB, HIDDEN))
    for layer in range(LAYERS):
        at, hf = first + layer, f"model.layers.{layer}."
        m.put(at, "input_layernorm.weight", m.value(hf + "input_layernorm.weight", HIDDEN))
        rows = {"q": HEADS * SIZE, "k": groups * SIZE, "v": groups * SIZE}
        qkv = [m.value(f"{hf}self_attn.{k}_proj.weight", n, HIDDEN) for k, n in rows.items()]
        m.put(at, "self_attention.query_key_value.weight", by_head(*qkv, groups=groups), "column")
        out = m.value(hf + "self_attn.o_proj.weight", HIDDEN, HEADS * SIZE)
        m.put(at, "self_attention.dense.weight", out, "row")
        norm = m.value(hf + "post_attention_layernorm.weight", HIDDEN)
        m.put(at, "post_attention_layernorm.weight", norm)
        gate, up = (m.value(f"{hf}mlp.{k}_proj.weight", FFN, HIDDEN) for k in ("gate", "up"))
        m.put_gated(at, "mlp.dense_h_to_4h.weight", gate, up)
        down = m.value(hf + "mlp.down_proj.weight", HIDDEN, FFN)
        m.put(at, "mlp.dense_4h_to_h.weight", down, "row")
    m.put(first + LAYERS, "weight", m.value("model.norm.weight", HIDDEN))
    if not tied:
        m.put_vocab(first + LAYERS + 1, "lm_head.weight", m.value("lm_head.weight", VOCAB, HIDDEN))
    return m


# Stored name -> (Hugging Face name in GPT-2, in BLOOM and GPT-NeoX, kind, shape).
BLOCK = [
    ("input_layernorm.weight", "ln_1.weight", "input_layernorm.weight", "copy", (HIDDEN,)),
    ("input_layernorm.bias", "ln_1.bias", "input_layernorm.bias", "copy", (HIDDEN,)),
    ("self_attention.query_key_value.weight", "attn.c_attn.weight",
     "self_attention.query_key_value.weight", "qkv", (HIDDEN, HIDDEN)),
    ("self_attention.query_key_value.bias", "attn.c_attn.bias",
     "self_attention.query_key_value.bias", "qkv", (HIDDEN,)),
    ("self_attention.dense.weight", "attn.c_proj.weight", "self_attention.dense.weight", "row",
     (HIDDEN, HIDDEN)),
    ("self_attention.dense.bias", "attn.c_proj.bias", "self_attention.dense.bias", "copy",
     (HIDDEN,)),
    ("post_attention_layernorm.weight", "ln_2.weight", "post_attention_layernorm.weight", "copy",
     (HIDDEN,)),
    ("post_attention_layernorm.bias", "ln_2.bias", "post_attention_layernorm.bias", "copy",
     (HIDDEN,)),
    ("mlp.dense_h_to_4h.weight", "mlp.c_fc.weight", "mlp.dense_h_to_4h.weight", "column",
     (4 * HIDDEN, HIDDEN)),
    ("mlp.dense_h_to_4h.bias", "mlp.c_fc.bias", "mlp.dense_h_to_4h.bias", "column",
     (4 * HIDDEN,)),
    ("mlp.dense_4h_to_h.weight", "mlp.c_proj.weight", "mlp.dense_4h_to_h.weight", "row",
     (HIDDEN, 4 * HIDDEN)),
    ("mlp.dense_4h_to_h.bias", "mlp.c_proj.bias", "mlp.dense_4h_to_h.bias", "copy", (HIDDEN,)),
]  # fmt: skip


def _gpt_block(m: DeepSpeedModel, number: int, layer: int) -> None:
    """GPT-2 keeps [in, out] and all queries, keys, values; the fork the rows of each head."""
    hf = f"transformer.h.{layer}."
    for stored, name, _, kind, shape in BLOCK:
        if kind == "qkv":
            parts = [random(f"{hf}{name}{part}", *shape) for part in "qkv"]
            m.hf[hf + name] = torch.cat(parts).t() if len(shape) > 1 else torch.cat(parts)
            m.put(number, stored, by_head(*parts), "column")
            continue
        value = random(hf + name, *shape)
        m.hf[hf + name] = value.t() if len(shape) > 1 else value
        m.put(number, stored, value, kind)


def gpt(tp: int = 1, *, first: int = 2) -> DeepSpeedModel:
    """GPT with learned positions, biases and tied embeddings: GPT-2."""
    more = {"ffn_hidden_size": 4 * HIDDEN, _UNTIED: False}
    m = DeepSpeedModel(tp, _arguments(tp, bias_gelu_fusion=True, **more))
    _info(m)
    m.put_vocab(1, "word_embeddings.weight", m.value("transformer.wte.weight", VOCAB, HIDDEN))
    m.put(1, "position_embeddings.weight", m.value("transformer.wpe.weight", POSITIONS, HIDDEN))
    for layer in range(LAYERS):
        _gpt_block(m, first + layer, layer)
    for part in ("weight", "bias"):
        m.put(first + LAYERS, part, m.value(f"transformer.ln_f.{part}", HIDDEN))
    return m


class PositionEmbeddingType(enum.Enum):
    """As BigScience's fork has it, in megatron/enums.py."""

    rotary = 1
    absolute = 2
    alibi = 3


def _head_block(m: DeepSpeedModel, number: int, hf: str, attention: str = "self_attention") -> None:
    """The block of BLOOM and GPT-NeoX: Hugging Face keeps the training rows."""
    for stored, _, name, kind, shape in BLOCK:
        rows = (3 * HIDDEN, *shape[1:]) if kind == "qkv" else shape
        value = m.value(hf + name.replace("self_attention", attention), *rows)
        where = stored.replace("self_attention", attention)
        m.put(number, where, value, "column" if kind == "qkv" else kind)


def bloom(tp: int = 1) -> DeepSpeedModel:
    """BigScience's fork: alibi, a norm behind the embedding, layers from number 3 on."""
    args = _arguments(
        tp,
        ffn_hidden_size=4 * HIDDEN,
        position_embedding_type=PositionEmbeddingType.alibi,
        embed_layernorm=True,
        glu_activation=None,
        bias_gelu_fusion=True,
        vocab_size=VOCAB,
        untie_embeddings_and_output_weights=False,
    )
    m = DeepSpeedModel(tp, args, {"checkpoint_version": 3.0})
    at = "transformer."
    m.put_vocab(1, "word_embeddings.weight", m.value(f"{at}word_embeddings.weight", VOCAB, HIDDEN))
    for part in ("weight", "bias"):
        value = m.value(f"{at}word_embeddings_layernorm.{part}", HIDDEN)
        m.put(1, f"word_embeddings.norm.{part}", value)
    for layer in range(LAYERS):
        _head_block(m, 3 + layer, f"{at}h.{layer}.")
    for part in ("weight", "bias"):
        m.put(LAYERS + 4, part, m.value(f"{at}ln_f.{part}", HIDDEN))
    return m


# --- GPT-NeoX ---------------------------------------------------------------------------------


def _neox(tp: int, config: dict[str, Any], **more: Any) -> DeepSpeedModel:
    stored = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "make_vocab_size_divisible_by": 16,
        "padded_vocab_size": PADDED,
        "tokenizer_type": "HFTokenizer",
        "model_parallel_size": tp,
    }
    run = {"model-parallel-size": tp, "pipe-parallel-size": 1, "lr": 1e-5}
    text = json.dumps({"pos_emb": "rotary", "no-weight-tying": True, **config})
    configs = {"model.yml": text.replace("}", ', # the last one\n  "seq_length": 34,\n}')}
    return DeepSpeedModel(tp, stored, {}, configs={**configs, "run.yml": json.dumps(run)}, **more)


def neox(tp: int = 1, *, parallel: bool = True, **more: Any) -> DeepSpeedModel:
    """The 20B model's form; with ``parallel`` the row biases are each rank's own summand."""
    config = {"gpt_j_residual": parallel, "rotary_pct": 0.4, "rotary-emb-base": 20000}
    m = _neox(tp, config, **more)
    m.put(0, "word_embeddings.weight", _padded(m, "gpt_neox.embed_in.weight"), "vocab")
    for layer in range(LAYERS):
        _head_block(m, 2 + layer, f"gpt_neox.layers.{layer}.", "attention")
    for part in ("weight", "bias"):
        m.put(LAYERS + 3, f"norm.{part}", m.value(f"gpt_neox.final_layer_norm.{part}", HIDDEN))
    m.put(LAYERS + 4, "final_linear.weight", _padded(m, "embed_out.weight"), "vocab")
    if parallel:
        for item in m.stored:
            if item.name.endswith(("dense.bias", "dense_4h_to_h.bias")):
                _share_out(m, item)
    return m


def _padded(m: DeepSpeedModel, name: str) -> torch.Tensor:
    """GPT-NeoX stores no true vocabulary size: padding rows stay."""
    return m.value(name, PADDED, HIDDEN)


def _share_out(m: DeepSpeedModel, item: Stored) -> None:
    """Each rank's own part of a bias; the truth becomes the sum, rounded once."""
    name = next(key for key, value in m.hf.items() if torch.equal(value, item.ranks[0]))
    item.ranks = [random(f"{name} {rank}", HIDDEN, dtype=m.dtype) for rank in range(m.tp)]
    m.hf[name] = torch.stack(item.ranks).double().sum(0).to(m.dtype)


def neox_llama(tp: int = 1, *, groups: int = HEADS, naming: str = "new") -> DeepSpeedModel:
    """Llama as GPT-NeoX trains it; ``naming`` old has w1, w2, w3, new [up; gate]."""
    config: dict[str, Any] = {"norm": "rmsnorm", "rms_norm_epsilon": "1e-6", "activation": "swiglu"}
    config |= {"attention_config": [[["flash"], LAYERS]], "intermediate_size": 3 * FFN}
    config |= {"use_bias_in_mlp": False, "use_bias_in_attn_linear": False}
    m = _neox(tp, config | ({"num_kv_heads": groups} if groups != HEADS else {}))
    m.put(0, "word_embeddings.weight", _padded(m, "model.embed_tokens.weight"), "vocab")
    for layer in range(LAYERS):
        _neox_llama_block(m, 2 + layer, f"model.layers.{layer}.", groups, naming)
    m.put(LAYERS + 3, "norm.scale", m.value("model.norm.weight", HIDDEN))
    m.put(LAYERS + 4, "final_linear.weight", _padded(m, "lm_head.weight"), "vocab")
    return m


def _neox_llama_block(m: DeepSpeedModel, at: int, hf: str, groups: int, naming: str) -> None:
    rows = {"q": HIDDEN, "k": groups * SIZE, "v": groups * SIZE}
    qkv = [m.value(f"{hf}self_attn.{k}_proj.weight", n, HIDDEN) for k, n in rows.items()]
    name = "attention.query_key_value.weight"
    if groups == HEADS:
        m.put(at, name, by_head(*qkv), "column")
    else:  # all queries, all keys, all values of a rank
        chunks = [part.chunk(m.tp) for part in qkv]
        ranks = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
        m.stored.append(Stored(at, name, ranks, "column"))
    m.put(
        at, "attention.dense.weight", m.value(hf + "self_attn.o_proj.weight", HIDDEN, HIDDEN), "row"
    )
    for norm in ("input_layernorm", "post_attention_layernorm"):
        m.put(at, f"{norm}.scale", m.value(f"{hf}{norm}.weight", HIDDEN))
    gate, up = (m.value(f"{hf}mlp.{k}_proj.weight", FFN, HIDDEN) for k in ("gate", "up"))
    down = m.value(hf + "mlp.down_proj.weight", HIDDEN, FFN)
    if naming == "new":
        m.put_gated(at, "mlp.linear1.weight", up, gate)
        m.put(at, "mlp.linear2.weight", down, "row")
        return
    m.put(at, "mlp.w1.weight", gate, "column")
    m.put(at, "mlp.w3.weight", up, "column")
    m.put(at, "mlp.w2.weight", down, "row")


# --- any dense family -------------------------------------------------------------------------

OLD_NAMES = (
    ("pre_mlp_layernorm.", "post_attention_layernorm."),
    ("self_attention.linear_qkv.", "self_attention.query_key_value."),
    ("self_attention.linear_proj.", "self_attention.dense."),
    ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
    ("embedding.", ""),
    ("decoder.final_layernorm.", ""),
    ("output_layer.", "lm_head."),
)
KINDS = {"qkv": "column", "gate_up": "gated"}


def is_dense(model: TinyModel) -> bool:
    """Whether Megatron-DeepSpeed could have trained it: its blocks are those of Megatron-LM 3."""
    a = model.values
    plain = not (a.num_experts or a.multi_latent_attention or a.mtp_num_layers)
    plain = plain and not model.only_te
    return plain and all("post_" not in item.name for item in tensors(model))


def from_tiny(model: TinyModel, ranks: Ranks) -> DeepSpeedModel:
    """A model of ``tiny_megatron`` as DeepSpeed's ranks hold it."""
    args = training_args(model, ranks, te=False, format_="deepspeed")
    layers = model.values.num_layers
    m = DeepSpeedModel(ranks.tp, args, {"checkpoint_version": 3.0}, layers=layers)
    m.vocab = model.values.vocab_size
    ends = {"embedding": 1, "decoder": 2 + layers, "output_layer": 3 + layers}
    for item in tensors(model):
        parts = item.name.split(".")
        is_layer = item.name.startswith("decoder.layers.")
        number = 2 + int(parts[2]) if is_layer else ends[parts[0]]
        name = ".".join(parts[3:]) if is_layer else item.name
        for new, old in OLD_NAMES:
            name = name.replace(new, old)
        held = pieces(item, whole(model, item, ranks.tp), ranks, te=False)
        axis = 1 if item.kind == "row" else 0
        blocks = [torch.cat([block for _, block in own], axis) for own in held]
        m.stored.append(Stored(number, name, blocks, KINDS.get(item.kind, item.kind)))
    return m


def _write_whole(root: Path, model: TinyModel, ranks: Ranks, *, te: bool, **_: Any) -> Path:
    """Layer files, or rank files of a run without a pipeline."""
    stored = from_tiny(model, ranks)
    return write_layers(root, stored, pp=ranks.pp) if te else write_ranks(root, stored)


def _write_parts(root: Path, model: TinyModel, ranks: Ranks, *, te: bool, **_: Any) -> Path:
    """Partitions of ZeRO 3 over an odd or an even number of ranks."""
    return write_zero3(root, from_tiny(model, ranks), dp=3 if te else 2)


def _write_joined(root: Path, model: TinyModel, ranks: Ranks, *, te: bool, **_: Any) -> Path:
    """A universal checkpoint made with or without the patterns of the training code."""
    return write_universal(root, from_tiny(model, ranks), patterns=te)


DEEPSPEED_WRITERS = {
    "deepspeed": Writer(_write_whole, is_dense),
    "deepspeed_zero3": Writer(_write_parts, is_dense, fp32=True),
    "deepspeed_universal": Writer(_write_joined, is_dense, fp32=True),
}


# --- directories ------------------------------------------------------------------------------


def _begin(root: Path, model: DeepSpeedModel, name: str = STEP) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (root / "latest").write_text(name)
    for file, text in model.configs.items():
        (directory / "configs").mkdir(exist_ok=True)
        (directory / "configs" / file).write_text(text)
    return directory


def _save(state: Any, file: Path) -> None:
    enums = {"PositionEmbeddingType": PositionEmbeddingType}
    with foreign_module("megatron.enums", **enums):
        PositionEmbeddingType.__module__ = "megatron.enums"
        torch.save(state, file)


def _state(model: DeepSpeedModel, stage: int, **more: Any) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage}}
    return {"args": model.args, "ds_config": config, "iteration": 7, **model.state, **more}


def write_layers(root: Path, model: DeepSpeedModel, *, stage: int = 1, pp: int = 1) -> Path:
    """Pipeline layers in a file each, and optimizer files that nobody can read."""
    directory = _begin(root, model)
    for rank in range(model.tp):
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for item in model.stored:
            layers.setdefault(item.number, {})[item.name] = item.ranks[rank]
        for number, layer in layers.items():
            torch.save(layer, directory / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    for rank in range(model.tp * pp):
        _save(_state(model, stage, module=None), directory / f"mp_rank_{rank:02d}_model_states.pt")
        optimizer = directory / f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
        optimizer.write_bytes(b"unread")
    return root


def module_names(model: DeepSpeedModel) -> dict[int, str]:
    """What stands before the names of each entry where there is no pipeline."""
    if model.configs:
        return {item.number: f"sequential.{item.number}." for item in model.stored}
    first = next(item.number for item in model.stored if item.name.startswith("input_layernorm"))
    names = {1: "language_model.embedding."}
    for layer in range(model.layers):
        names[first + layer] = f"language_model.encoder.layers.{layer}."
    last = max(names)
    return {
        **names,
        last + 1: "language_model.encoder.final_layernorm.",
        last + 2: "language_model.encoder.final_layernorm.",
    }


def _module_name(model: DeepSpeedModel, item: Stored) -> str:
    if item.name == "lm_head.weight":
        return "language_model.output_layer.weight"
    return module_names(model)[item.number] + item.name


def write_ranks(root: Path, model: DeepSpeedModel, *, stage: int = 1) -> Path:
    """No pipeline: the whole model of a rank in one file."""
    directory = _begin(root, model)
    for rank in range(model.tp):
        module = {_module_name(model, item): item.ranks[rank] for item in model.stored}
        state = _state(model, stage, module=module)
        _save(state, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return root


def write_zero3(
    root: Path, model: DeepSpeedModel, *, dp: int, groups: int = 2, frozen: str | None = None
) -> Path:
    """Partitions: each parameter padded and cut into ``dp`` pieces, these laid end to end.

    ``groups`` is how many flat tensors hold them; parameters that end in ``frozen`` are not
    in them but in the model files.
    """
    directory = _begin(root, model)
    for rank in range(model.tp):
        names = {_module_name(model, item): item.ranks[rank] for item in model.stored}
        still = {n: v for n, v in names.items() if frozen and n.endswith(frozen)}
        moving = [name for name in names if name not in still]
        parts = [moving[n::groups] for n in range(groups)]
        for data in range(dp):
            flat = [torch.cat([piece(names[n].float(), dp, data) for n in part]) for part in parts]
            state = _state(
                model,
                3,
                module={name: torch.empty(0) for name in names},
                buffer_names=[],
                shared_params={},
                param_shapes=[{name: names[name].shape for name in part} for part in parts],
                frozen_param_shapes={name: value.shape for name, value in still.items()},
                frozen_param_fragments={n: piece(v, dp, data) for n, v in still.items()},
            )
            at = f"zero_pp_rank_{data}_mp_rank_{rank:02d}"
            _save(state, directory / f"{at}_model_states.pt")
            for number, group in enumerate(flat):
                # DeepSpeed's mark; torch saves a tensor that has one otherwise
                vars(group)["ds_id"] = f"0_{number}"
            optimizer = {"zero_stage": 3, "partition_count": dp, "fp32_flat_groups": flat}
            file = directory / f"bf16_{at}_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, file)
    return root


def piece(value: torch.Tensor, dp: int, data: int) -> torch.Tensor:
    """One of ``dp`` pieces of a flattened tensor; padding has a value that would be noticed."""
    size = -(-value.numel() // dp)
    padded = torch.full((size * dp,), 7.25, dtype=value.dtype)
    padded[: value.numel()] = value.flatten()
    return padded[data * size :][:size].clone()


def write_universal(
    root: Path, model: DeepSpeedModel, *, patterns: bool = True, pipeline: bool = True
) -> Path:
    """What ds_to_universal.py makes; without ``patterns`` it joins everything along rows."""
    directory = _begin(root, model, f"{STEP}_universal")
    for item in model.stored:
        name = f"{item.number}.{item.name}" if pipeline else _module_name(model, item)
        if pipeline and item.number == 1 and not getattr(model.args, _UNTIED, True):
            name = f"tied_modules.embed.{item.name}"
        (directory / "zero" / name).mkdir(parents=True)
        torch.save(_joined(model, item, patterns=patterns), directory / "zero" / name / "fp32.pt")
    torch.save({}, directory / "zero" / "optimizer_state.pt")
    for rank in range(model.tp):
        state = _state(model, 1, module=None)
        _save(state, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return root


def _joined(model: DeepSpeedModel, item: Stored, *, patterns: bool) -> dict[str, Any]:
    parts = [part.float() for part in item.ranks]
    if not patterns:
        return {"param": torch.cat(parts), "cat_dim": 0}
    if item.kind == "copy" and model.tp > 1:
        return {"param": parts[0]}
    if item.kind == "gated":
        halves = [part.chunk(2) for part in parts]
        whole = torch.cat([half[side] for side in (0, 1) for half in halves])
        return {"param": whole, "cat_dim": 0, "param_n_sub_params": 2}
    dim = 1 if item.kind == "row" and model.tp > 1 else 0
    entry: dict[str, Any] = {"param": torch.cat(parts, dim), "cat_dim": dim}
    if item.kind == "vocab":
        entry |= {"param": entry["param"][: model.vocab].clone(), "vocab_tensor": True}
    return entry
