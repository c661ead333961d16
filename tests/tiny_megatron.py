"""Tiny Megatron checkpoints of any family, experts and latent attention included, without Megatron.

    model = TinyModel("deepseek-mtp")
    write_legacy(root, model, Ranks(tp=2, pp=2, ep=2), te=True)
    write_torch_dist(root, model, Ranks(tp=2), te=True)
    write_zarr(root, model, Ranks(tp=2), te=True)
    expected_hf(model)

``builders.py`` writes Llama-like models and their faults. Here the sizes and arguments are those
of ``megatron_families``, made shallower. A model is a list of tensors under Megatron-Core's names
with the Hugging Face tensors that make each; slow and plain code joins, cuts and renames them.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
import signal
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tiny_families_a
import tiny_families_b
import torch
from builders import TRACKER, Item, random, save_dist
from megatron_families import BASE, FAMILIES
from tiny_gpt import BLOOM, GPT2, NEOX, joined, rows
from tiny_hybrid import AROUND, nemotron4, one_block, shortened
from tiny_linear import DELTA, delta_net, is_linear, whole_delta, whole_gated
from tiny_tensors import Tensor
from tiny_tensors import plain as _plain
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXTRA_STATES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bytesio": lambda: io.BytesIO(b"state"),
    "uint8": lambda: torch.empty(0, dtype=torch.uint8),
    "bytes": lambda: torch.arange(7, dtype=torch.uint8),
}
# Families with biases and names of their own.
GPT = {"gpt": GPT2, "neox": NEOX, "bloom": BLOOM}
TINY_FAMILIES = {
    **FAMILIES,
    "bloom": {
        **FAMILIES["gpt"],
        "position_embedding_type": "alibi",
        "bias_gelu_fusion": True,
    },
    # transformers' Llama wants hidden to divide by heads, else it is written as a Mistral
    "llama-even": {**FAMILIES["llama"], "hidden_size": 96},
    "glm4_moe_lite": FAMILIES["deepseek"],
}
OTHER_LAYERS = {**tiny_families_a.LAYERS, **tiny_families_b.LAYERS}
# Families that are another one's network under another name.
SAME_NETWORK = {"mistral", "glm4_moe_lite", "olmoe"}
SHALLOW = {"num_layers": 3, "moe_layer_freq": 1}
SHALLOW_DEEPSEEK = {"num_layers": 3, "moe_layer_freq": [0, 1, 1]}
AS_THEY_ARE = ("qwen3next", "nemotron")  # layers of several kinds


@dataclass(frozen=True)
class TinyModel:
    """A family of ``megatron_families`` with three layers; ``args`` overrides its arguments."""

    family: str
    dtype: torch.dtype = torch.float32
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> argparse.Namespace:
        """The training arguments that do not depend on the ranks."""
        given = {**BASE, **TINY_FAMILIES[self.family]}
        prefix = isinstance(given["moe_layer_freq"], list)
        shallow = SHALLOW_DEEPSEEK if prefix else SHALLOW
        shallow = {} if self.family.startswith(AS_THEY_ARE) else shallow
        known = {**given, **shallow, **self.args}
        layers = known["num_layers"]
        if known["linear_attention_freq"] and layers % known["linear_attention_freq"]:
            # a layer for a further token is built like the last one, which must have attention
            known["linear_attention_freq"] = [(layers - layer + 1) % 2 for layer in range(layers)]
        if known["hybrid_override_pattern"]:
            pattern = shortened(known["hybrid_override_pattern"], known["num_layers"])
            known["hybrid_override_pattern"] = pattern
        return argparse.Namespace(**known)

    @property
    def hf_family(self) -> str | None:
        """The family that must be asked for, where another one is the same network."""
        return self.family if self.family in SAME_NETWORK else None

    @property
    def only_te(self) -> bool:
        """Whether Megatron builds it with TransformerEngine's modules alone."""
        a = self.values
        return bool(a.experimental_attention_variant == DELTA or a.hybrid_override_pattern)

    @property
    def next_mtp(self) -> bool:
        """Whether the layer for a further token has Qwen3-Next's names."""
        return self.family.startswith("qwen3next")

    def adds_one(self, name: str) -> bool:
        """Whether a gain of the Hugging Face model is 1 more than the one that was trained."""
        centred = self.values.layernorm_zero_centered_gamma and "norm" in name
        stored_so = (
            "gemma" in self.family
            or self.family == "nemotron"
            or (self.next_mtp and ".linear_attn." not in name)
        )
        return bool(centred and not stored_so)

    def is_moe(self, layer: int) -> bool:
        a = self.values
        if not a.num_experts:
            return False
        frequency = a.moe_layer_freq
        if isinstance(frequency, list):
            return bool(frequency[min(layer, a.num_layers - 1)])
        return bool(layer % frequency == 0)


@dataclass(frozen=True)
class Ranks:
    """Parallel sizes; ``split`` gives the layers of each virtual stage in order."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    split: tuple[int, ...] | None = None

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def world(self) -> int:
        """Ranks of one pipeline stage."""
        return max(self.tp, self.expert_tp * self.ep)


def tensors(model: TinyModel) -> list[Tensor]:
    """Every tensor of the model, layers and experts numbered globally, in the local spec."""
    a = model.values
    if model.family in GPT:
        return [Tensor(*row) for row in rows(a, GPT[model.family])]
    table = (a.vocab_size, a.hidden_size)
    further = range(a.num_layers, a.num_layers + (a.mtp_num_layers or 0))
    repeated = () if model.next_mtp else further
    copies = {
        what: tuple(f"model.layers.{number}.{what}.weight" for number in repeated)
        for what in ("embed_tokens", "shared_head.head")
    }
    found = [
        Tensor(
            "embedding.word_embeddings.weight",
            "vocab",
            (("model.embed_tokens.weight", table),),
            copies["embed_tokens"],
        )
    ]
    for layer in range(a.num_layers):
        found += _layer(model, f"decoder.layers.{layer}.", layer)
    found.append(_plain("decoder.final_layernorm.weight", "model.norm.weight", (a.hidden_size,)))
    if model.family == "nemotron":
        found.append(_plain("decoder.final_layernorm.bias", "model.norm.bias", (a.hidden_size,)))
    for index, layer in enumerate(further):
        found += _mtp(model, f"mtp.layers.{index}.", layer)
    if a.untie_embeddings_and_output_weights:
        head = (("lm_head.weight", table),)
        found.append(Tensor("output_layer.weight", "vocab", head, copies["shared_head.head"]))
    return [_renamed(item, AROUND) for item in found] if a.hybrid_override_pattern else found


def _renamed(item: Tensor, names: dict[str, str]) -> Tensor:
    return replace(item, parts=tuple((names.get(hf, hf), shape) for hf, shape in item.parts))


def _layer(model: TinyModel, core: str, layer: int, hf: str = "") -> list[Tensor]:
    if model.family in OTHER_LAYERS:
        return OTHER_LAYERS[model.family](model, core, layer)
    a, hf = model.values, hf or f"model.layers.{layer}."
    if model.family == "nemotron":
        return nemotron4(a, core, hf, _attention)
    if a.hybrid_override_pattern:
        hf = f"backbone.layers.{layer}."
        return one_block(a, core, hf, a.hybrid_override_pattern[layer], _attention)
    attention = _latent_attention if a.multi_latent_attention else _attention
    attention = delta_net if is_linear(a, layer) else attention
    size = (a.hidden_size,)
    norm = "post_attention_layernorm.weight"
    return [
        _plain(core + "input_layernorm.weight", hf + "input_layernorm.weight", size),
        *attention(a, core + "self_attention.", hf + "self_attn."),
        _plain(core + "pre_mlp_layernorm.weight", hf + norm, size),
        *(
            _experts(model, core + "mlp.", hf)
            if model.is_moe(layer)
            else _mlp(a, core + "mlp.", hf + "mlp.", a.ffn_hidden_size)
        ),
    ]


def _attention(a: argparse.Namespace, core: str, hf: str) -> list[Tensor]:
    groups = a.num_query_groups if a.group_query_attention else a.num_attention_heads
    rows = [a.num_attention_heads * a.kv_channels, *[groups * a.kv_channels] * 2]

    def parts(kind: str, *width: int):
        names = [f"{hf}{part}_proj.{kind}" for part in "qkv"]
        return tuple((name, (count, *width)) for name, count in zip(names, rows, strict=True))

    kind = "gated" if a.attention_output_gate else "qkv"
    shape = (a.hidden_size, rows[0])
    rows[0] *= 2 if a.attention_output_gate else 1
    found = [Tensor(core + "linear_qkv.weight", kind, parts("weight", a.hidden_size))]
    if a.add_qkv_bias:
        found.append(Tensor(core + "linear_qkv.bias", "qkv", parts("bias")))
    if a.qk_layernorm:
        for part in "qk":
            name = f"{core}{part}_layernorm.weight"
            found.append(_plain(name, f"{hf}{part}_norm.weight", (a.kv_channels,)))
    found.append(_plain(core + "linear_proj.weight", hf + "o_proj.weight", shape, "row"))
    return found


def _latent_attention(a: argparse.Namespace, core: str, hf: str) -> list[Tensor]:
    heads, query = a.num_attention_heads, a.qk_head_dim + a.qk_pos_emb_head_dim
    latent, hidden = a.kv_lora_rank, a.hidden_size
    rows = [
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent + a.qk_pos_emb_head_dim, hidden),
         "down"),
        ("kv_layernorm", "kv_a_layernorm", (latent,), "copy"),
        ("linear_kv_up_proj", "kv_b_proj", (heads * (a.qk_head_dim + a.v_head_dim), latent),
         "column"),
        ("linear_proj", "o_proj", (hidden, heads * a.v_head_dim), "row"),
    ]  # fmt: skip
    if getattr(a, "dsa_indexer_n_heads", None):
        rows += tiny_families_b.indexer_rows(a)
    if getattr(a, "mla_down_proj_fusion", False):
        down = rows.pop(0)
        both = (
            (f"{hf}q_a_proj.weight", (a.q_lora_rank, hidden)),
            (f"{hf}{down[1]}.weight", down[2]),
        )
        fused = [Tensor(core + "linear_qkv_down_proj.weight", "two_down", both)]
    else:
        fused = []
    if a.q_lora_rank:
        rows += [
            ("linear_q_down_proj", "q_a_proj", (a.q_lora_rank, hidden), "down"),
            ("q_layernorm", "q_a_layernorm", (a.q_lora_rank,), "copy"),
            ("linear_q_up_proj", "q_b_proj", (heads * query, a.q_lora_rank), "column"),
        ]
    else:
        rows.append(("linear_q_proj", "q_proj", (heads * query, hidden), "column"))
    if fused:
        rows = [row for row in rows if row[0] != "linear_q_down_proj"]
    biased = [row for row in rows if row[0].endswith("k_norm")]
    return [
        *fused,
        *(_plain(f"{core}{o}.weight", f"{hf}{t}.weight", s, k) for o, t, s, k in rows),
        *(_plain(f"{core}{o}.bias", f"{hf}{t}.bias", s, k) for o, t, s, k in biased),
    ]


def _mlp(
    a: argparse.Namespace,
    core: str,
    hf: str,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Tensor]:
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    both = ((gate, (ffn, a.hidden_size)), (up, (ffn, a.hidden_size)))
    return [
        Tensor(core + "linear_fc1.weight", "gate_up", both),
        _plain(core + "linear_fc2.weight", down, (a.hidden_size, ffn), "row"),
    ]


def _experts(model: TinyModel, core: str, hf: str) -> list[Tensor]:
    a = model.values
    mixtral = model.family.startswith(("mixtral", "minimax"))
    hf += "block_sparse_moe." if mixtral else "mlp."
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = [
        _plain(core + "router.weight", hf + "gate.weight", (a.num_experts, a.hidden_size)),
    ]
    if a.moe_router_enable_expert_bias:
        bias = ((hf + "gate.e_score_correction_bias", (a.num_experts,)),)
        found.append(Tensor(core + "router.expert_bias", "copy", bias, fp32=True))
    for expert in range(a.num_experts):
        at = f"{core}experts.local_experts.{expert}."
        found += _mlp(a, at, f"{hf}experts.{expert}.", a.moe_ffn_hidden_size, names)
    shared = a.moe_shared_expert_intermediate_size
    if shared:
        name = "shared_expert" if a.moe_shared_expert_gate else "shared_experts"
        found += _mlp(a, core + "shared_experts.", f"{hf}{name}.", shared)
    if a.moe_shared_expert_gate:
        gate = hf + "shared_expert_gate.weight"
        found.append(_plain(core + "shared_experts.gate_weight", gate, (1, a.hidden_size)))
    return found


def _mtp(model: TinyModel, core: str, layer: int) -> list[Tensor]:
    hidden, hf = model.values.hidden_size, f"model.layers.{layer}."
    if model.next_mtp:
        return [
            _plain(core + "enorm.weight", "mtp.pre_fc_norm_embedding.weight", (hidden,)),
            _plain(core + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight", (hidden,)),
            _plain(core + "final_layernorm.weight", "mtp.norm.weight", (hidden,)),
            _plain(core + "eh_proj.weight", "mtp.fc.weight", (hidden, 2 * hidden), "column"),
            *_layer(model, core + "transformer_layer.", layer, "mtp.layers.0."),
        ]
    norms = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    return [
        *(_plain(f"{core}{o}.weight", f"{hf}{t}.weight", (hidden,)) for o, t in norms.items()),
        _plain(core + "eh_proj.weight", hf + "eh_proj.weight", (hidden, 2 * hidden), "column"),
        *_layer(model, core + "transformer_layer.", layer),
    ]


def _value(model: TinyModel, tensor: Tensor, part: int) -> torch.Tensor:
    name, shape = tensor.parts[part]
    dtype = torch.float32 if tensor.fp32 else model.dtype
    value = random(name, *shape, dtype=dtype)
    if "norm" in name and model.values.layernorm_zero_centered_gamma:
        value -= 1  # whether the Hugging Face class adds the 1 or not
    return value


def expected_hf(model: TinyModel) -> dict[str, torch.Tensor]:
    """The truth: every tensor of the Hugging Face model, by name.

    Gains stored as a distance from 1 become fp32, since 1 + x need not fit the stored type.
    """
    found = {}
    for tensor in tensors(model):
        for index, (name, _) in enumerate(tensor.parts):
            value = _value(model, tensor, index)
            found[name] = value.float() + 1 if model.adds_one(name) else value
            found.update(dict.fromkeys(tensor.also, found[name]))
    return joined(found) if model.family in GPT else tiny_families_a.stacked(found)


def whole(model: TinyModel, tensor: Tensor, tp: int) -> torch.Tensor:
    """The training tensor, as one rank alone would hold it; padding rows are not zero."""
    parts = [_value(model, tensor, index) for index in range(len(tensor.parts))]
    if tensor.kind == "vocab":
        rows = padded_vocab(model, tp) - parts[0].shape[0]
        parts.append(random("padding", rows, parts[0].shape[1], dtype=model.dtype))
    if tensor.kind in {"delta", "gated"}:
        join = whole_delta if tensor.kind == "delta" else whole_gated
        return join(model.values, parts)
    if tensor.kind != "qkv":
        return torch.cat(parts)
    size = model.values.kv_channels
    query, key, value = (part.split(size) for part in parts)
    per_group = len(query) // len(key)
    heads: list[torch.Tensor] = []
    for group in range(len(key)):
        heads += [*query[group * per_group :][:per_group], key[group], value[group]]
    return torch.cat(heads)


def padded_vocab(model: TinyModel, tp: int) -> int:
    a = model.values
    unit: int = a.make_vocab_size_divisible_by * tp
    vocab: int = a.vocab_size
    return -(-vocab // unit) * unit


def pieces(
    tensor: Tensor, value: torch.Tensor, ranks: Ranks, *, te: bool
) -> list[list[tuple[tuple[int, ...], torch.Tensor]]]:
    """For each (expert) tensor-parallel rank, the blocks it holds and where each begins."""
    size = ranks.expert_tp if ".local_experts." in tensor.name else ranks.tp
    axis = {"copy": None, "down": None, "row": 1}.get(tensor.kind, 0)
    if tensor.kind == "down":
        axis = None if te else 0
    if axis is None:
        return [[((0,) * value.dim(), value)] for _ in range(size)]
    halves = value.chunk(2) if tensor.kind == "gate_up" else (value,)
    if tensor.kind == "two_down":
        halves = value.split([shape[0] for _, shape in tensor.parts])
    halves = value.split(tensor.blocks) if tensor.blocks else halves
    found: list[list[tuple[tuple[int, ...], torch.Tensor]]] = [[] for _ in range(size)]
    at = 0
    for half in halves:
        for rank, block in enumerate(half.chunk(size, axis)):
            start = [0] * value.dim()
            start[axis] = at
            found[rank].append((tuple(start), block))
            at += block.shape[axis]
    return found


def spelled(name: str, *, te: bool, latent: bool) -> str:
    """A tensor's name under TransformerEngine's spec, which fuses norms into linears."""
    if not te:
        return name
    if not latent:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    else:
        name = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", name)
    return name


def _names(model: TinyModel, *, te: bool) -> dict[str, str]:
    """Stored name of every tensor; a dense layer's MLP norm is fused, one before experts is not."""
    every = tensors(model)
    experts = {item.name.split(".mlp.")[0] for item in every if ".mlp.router." in item.name}
    linear = {item.name.split("in_proj.")[0] for item in every if ".in_proj." in item.name}
    found = {}
    for item in every:
        name = spelled(item.name, te=te, latent=model.values.multi_latent_attention)
        if getattr(model.values, "dsa_indexer_n_heads", None):
            name = item.name  # the indexer needs queries that are normed already
        block = item.name.split(".pre_mlp_layernorm.")[0]
        if te and block not in experts:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        if te and getattr(model.values, "mla_down_proj_fusion", False):
            fused = ".self_attention.linear_qkv_down_proj.layer_norm_"
            name = name.replace(".input_layernorm.", fused)
        if te and model.family.startswith("gemma"):
            for plain, fused in tiny_families_b.POST_NORMS.items():
                name = name.replace(plain, fused)
        if name.split("linear_qkv.")[0] in linear:
            name = name.replace(".linear_qkv.", ".in_proj.")
        if re.fullmatch(r"decoder\.layers\.\d+\.norm\.weight", name):
            name = name.replace(".norm.weight", ".mixer.in_proj.layer_norm_weight")
        if model.values.hybrid_override_pattern:
            name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")
        found[item.name] = name
    return found


def training_args(model: TinyModel, ranks: Ranks, *, te: bool, format_: str) -> argparse.Namespace:
    """The arguments that Megatron-LM would store."""
    return argparse.Namespace(
        **vars(model.values),
        padded_vocab_size=padded_vocab(model, ranks.tp),
        params_dtype=model.dtype,
        transformer_impl="transformer_engine" if te else "local",
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        virtual_pipeline_model_parallel_size=ranks.vpp if ranks.vpp > 1 else None,
        expert_model_parallel_size=ranks.ep,
        expert_tensor_parallel_size=ranks.expert_tp,
        ckpt_format=format_,
        exit_signal=signal.SIGTERM,
    )


# --- the torch format -------------------------------------------------------------------------


def write_legacy(
    root: Path,
    model: TinyModel,
    ranks: Ranks,
    *,
    te: bool = False,
    grouped: bool = False,
    extra: str = "none",
    iteration: int = 7,
) -> Path:
    """A run's directory in the ``torch`` format.

    ``grouped`` keeps a rank's experts together: ``weight0`` .. ``weightN`` under ``te``, else
    GroupedMLP's ``weight1`` and ``weight2``. ``extra`` is the form of ``_extra_state``.
    """
    directory, te = root / f"iter_{iteration:07d}", te or model.only_te
    args = training_args(model, ranks, te=te, format_="torch")
    stages = _stages(model, ranks)
    seen = set()
    for stage in range(ranks.pp):
        for number in range(ranks.world):
            tp, ep = number % ranks.tp, number // ranks.expert_tp % ranks.ep
            name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if ranks.pp > 1 else "")
            name += f"_{ep:03d}" if ranks.ep > 1 else ""
            if name in seen:
                continue
            seen.add(name)
            at = (tp, ep, number % ranks.expert_tp)
            chunks = [
                _chunk(model, stages, part * ranks.pp + stage, ranks, at, te=te, grouped=grouped)
                for part in range(ranks.vpp)
            ]
            for chunk in chunks:
                _add_extra_states(chunk, EXTRA_STATES[extra])
            keys = ["model"] if ranks.vpp == 1 else [f"model{n}" for n in range(ranks.vpp)]
            state = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": iteration,
                **dict(zip(keys, chunks, strict=True)),
            }
            (directory / name).mkdir(parents=True)
            torch.save(state, directory / name / "model_optim_rng.pt")
    (root / TRACKER).write_text(str(iteration))
    return root


def _stages(model: TinyModel, ranks: Ranks) -> list[list[int]]:
    """The layers of each virtual stage."""
    layers, count = model.values.num_layers, ranks.pp * ranks.vpp
    split = ranks.split or [layers // count + (n < layers % count) for n in range(count)]
    numbers = iter(range(layers))
    return [[next(numbers) for _ in range(size)] for size in split]


def _chunk(model, stages, stage, ranks, at, *, te, grouped) -> dict[str, Any]:
    tp, ep, etp = at
    last = stage == len(stages) - 1
    names = _names(model, te=te)
    found = {}
    for item in tensors(model):
        name = _local_name(names[item.name], stages[stage], first=stage == 0, last=last)
        tied_head = not model.values.untie_embeddings_and_output_weights and last and stage
        if item.name == "embedding.word_embeddings.weight" and tied_head:
            name = "output_layer.weight"
        elif item.name.startswith("embedding.") and model.values.mtp_num_layers and last:
            name = item.name
        if name is None:
            continue
        expert = re.search(r"\.local_experts\.(\d+)\.", name)
        local = model.values.num_experts // ranks.ep if expert else 0
        if expert and int(expert[1]) // local != ep:
            continue
        if expert:
            name = name.replace(expert[0], f".local_experts.{int(expert[1]) % local}.")
        held = pieces(item, whole(model, item, ranks.tp), ranks, te=te)[etp if expert else tp]
        axis = 1 if item.kind == "row" else 0
        found[name] = torch.cat([block for _, block in held], axis)
    has_bias = model.values.add_bias_linear  # GroupedMLP, the local spec's, has none
    return _together(found, te=te) if grouped and (te or not has_bias) else found


def _local_name(name: str, layers: list[int], *, first: bool, last: bool) -> str | None:
    """The name within a stage whose layers count from 0; None where the stage has it not."""
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        if int(parts[2]) not in layers:
            return None
        return ".".join([*parts[:2], str(layers.index(int(parts[2]))), *parts[3:]])
    return name if (first if name.startswith("embedding.") else last) else None


def _together(found: dict[str, Any], *, te: bool) -> dict[str, Any]:
    """The experts of a rank as grouped parameters hold them."""
    result: dict[str, Any] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, value in found.items():
        expert = re.fullmatch(
            r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.linear_fc(\d)\.(weight|bias)", name
        )
        if expert is None:
            result[name] = value
        elif te:
            result[f"{expert[1]}.linear_fc{expert[3]}.{expert[4]}{expert[2]}"] = value
        else:
            stacks.setdefault(f"{expert[1]}.weight{expert[3]}", []).append(value.t())
    for name, values in stacks.items():
        inner = torch.stack(values)  # [experts, in, out] in memory
        shape = (inner.shape[1], -1) if name.endswith("1") else (-1, inner.shape[2])
        result[name] = inner.reshape(shape) if name.endswith("2") else inner.view(shape)
    return result


def _add_extra_states(chunk: dict[str, Any], make: Callable[[], Any]) -> None:
    for name in list(chunk):
        if re.search(r"(linear_\w+|output_layer)\.weight\d*$", name):
            chunk[re.sub(r"weight(\d*)$", r"_extra_state\1", name)] = make()


# --- the torch_dist format --------------------------------------------------------------------


def write_torch_dist(
    root: Path,
    model: TinyModel,
    ranks: Ranks,
    *,
    te: bool = False,
    grouped: bool = False,
    single: bool = False,
    prefix: str = "",
    common: str = "common.pt",
    optimizer: bool = False,
    iteration: int = 7,
) -> Path:
    """A run's directory in the ``torch_dist`` format.

    Layers and experts are stacked where Megatron stacks them: layers if all are alike. Under
    ``grouped`` a chunk holds all experts of an expert rank, else one. ``single`` is the key form
    ``singleton_local_shards``, ``common`` where the arguments are: ``common.pt`` or among the
    objects of the ``.distcp`` files as ``common_state``.
    """
    te = te or model.only_te
    items = _items(model, ranks, prefix, te=te, grouped=grouped, single=single)
    if optimizer:
        for key, entry in list(items.items()):
            zeros = {at: torch.zeros(block.shape) for at, block in entry.parts.items()}
            moment = Item(entry.shape, torch.float32, zeros)
            items[f"optimizer.state.exp_avg.{key}"] = moment
    state = {
        "args": training_args(model, ranks, te=te, format_="torch_dist"),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": {"singleton_local_shards": single},
    }
    objects: dict[str, Any] = {"rng_state/shard_0_1": [[{"seed": 1}]]}
    for key in _linears(items):
        objects[re.sub("weight$", "_extra_state/shard_0_1", key)] = [None]
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    if common == "common.pt":
        torch.save(state, directory / "common.pt")
    else:
        objects["common_state/shard_0_1"] = [state]
    save_dist(directory, items, objects)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (root / TRACKER).write_text(str(iteration))
    return root


def _items(model, ranks, prefix, *, te, grouped, single) -> dict[str, Item]:
    """The model's weights as the global tensors of Megatron-Core's sharded state dict."""
    items: dict[str, Item] = {}
    names = _names(model, te=te)
    for item in tensors(model):
        _add_item(items, prefix, model, item, names[item.name], ranks, te=te, single=single)
    if grouped:
        for key, entry in items.items():
            if ".experts." in key and "shared" not in key:
                local = model.values.num_experts // ranks.ep
                _merge_expert_chunks(entry, local, 1 if key.endswith("bias") else 2)
    return items


def _linears(items) -> list[str]:
    return [key for key in items if re.search(r"linear_\w+\.weight$", key)]


def _add_item(items, prefix, model, item, name, ranks, *, te, single) -> None:
    """One tensor's chunks, put at its place in what is stacked."""
    a = model.values
    several = isinstance(a.moe_layer_freq, list) or model.only_te
    alike = not several and not single
    lead: list[tuple[int, int]] = []  # (place, length) of each axis that is put before
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer and alike:
        name = name.replace(layer[0], "decoder.layers.", 1)
        lead.append((int(layer[1]), a.num_layers))
    if not te:  # Megatron stores the local spec's fused norms under TransformerEngine's names
        name = _dist_name(name, latent=a.multi_latent_attention)
    expert = re.search(r"\.local_experts\.(\d+)\.", name)
    if expert:
        name = name.replace(expert[0], f".experts.{expert[1]}." if single else ".experts.")
        lead += [] if single else [(int(expert[1]), a.num_experts)]
    value = whole(model, item, ranks.tp)
    stored_apart = dict(zip(item.block_names, value.split(item.blocks or len(value)), strict=False))
    stored_apart = {f".{part}": block for part, block in stored_apart.items()}
    if single and item.kind == "gate_up":
        stored_apart = dict(zip(("_w", "_v"), value.chunk(2), strict=True))
    if stored_apart:
        for suffix, half in stored_apart.items():
            alone = Tensor(item.name, "column", item.parts)
            _put(items, prefix + name + suffix, half, pieces(alone, half, ranks, te=te), lead)
    else:
        _put(items, prefix + name, value, pieces(item, value, ranks, te=te), lead)


def _dist_name(name: str, *, latent: bool) -> str:
    if not latent:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return name


def _put(items, key, value, by_rank, lead) -> None:
    shape = (*(length for _, length in lead), *value.shape)
    entry = items.setdefault(key, Item(shape, value.dtype, {}))
    for start, block in [held for rank in by_rank for held in rank]:
        place = (*(at for at, _ in lead), *start)
        entry.parts[place] = block.reshape((1,) * len(lead) + block.shape)


def _merge_expert_chunks(entry: Item, count: int, values: int) -> None:
    axis = len(entry.shape) - values - 1
    merged: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for at, block in sorted(entry.parts.items()):
        first = (*at[:axis], at[axis] // count * count, *at[axis + 1 :])
        merged.setdefault(first, []).append(block)
    entry.parts = {at: torch.cat(blocks, axis) for at, blocks in merged.items()}


# --- the zarr format --------------------------------------------------------------------------

ZARR_DTYPES = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "bfloat16"}


def write_zarr(
    root: Path,
    model: TinyModel,
    ranks: Ranks,
    *,
    te: bool = False,
    grouped: bool = False,
    single: bool = False,
    prefix: str = "",
    optimizer: bool = False,
    separator: str = ".",
    cut_short: bool = False,
    iteration: int = 7,
) -> Path:
    """A run's directory in the ``zarr`` format: one array (zarr v2) for each global tensor.

    ``cut_short`` makes chunks that do not divide the array: those at its edges are stored in full
    and filled up with numbers that are no weights.
    """
    directory = root / f"iter_{iteration:07d}"
    te = te or model.only_te
    items = _items(model, ranks, prefix, te=te, grouped=grouped, single=single)
    if optimizer:
        for key, entry in list(items.items()):
            zeros = {at: torch.zeros(block.shape) for at, block in entry.parts.items()}
            items[f"optimizer.state.exp_avg.{key}"] = Item(entry.shape, torch.float32, zeros)
    for key, entry in items.items():
        _write_array(directory / key, entry, separator, cut_short=cut_short)
    for key in [key.replace("weight", "_extra_state") for key in _linears(items)]:
        (directory / key).mkdir()
        torch.save([None], directory / key / "shard_0_1.pt")
    state = {
        "args": training_args(model, ranks, te=te, format_="zarr"),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    torch.save(state, directory / "common.pt")
    config = {"sharded_backend": "zarr", "sharded_backend_version": 1, "common_backend": "torch"}
    (directory / "metadata.json").write_text(json.dumps(config))
    (root / TRACKER).write_text(str(iteration))
    return root


def _write_array(path: Path, entry: Item, separator: str, *, cut_short: bool) -> None:
    """``.zarray`` and one raw file for each chunk, all of one size."""
    value = torch.full(entry.shape, float("nan"), dtype=entry.dtype)
    for start, block in entry.parts.items():
        value[tuple(slice(at, at + n) for at, n in zip(start, block.shape, strict=True))] = block
    sizes = {tuple(block.shape) for block in entry.parts.values()}
    assert len(sizes) == 1, "zarr has chunks of one size"
    (chunks,) = sizes
    if cut_short:
        chunks = tuple(-(-2 * size // 3) for size in entry.shape)
    path.mkdir(parents=True)
    header = {
        "chunks": chunks,
        "compressor": None,
        "dtype": ZARR_DTYPES[entry.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": entry.shape,
        "zarr_format": 2,
    }
    if separator != ".":
        header["dimension_separator"] = separator
    (path / ".zarray").write_text(json.dumps(header, indent=4))
    counts = [range(-(-whole // part)) for whole, part in zip(entry.shape, chunks, strict=True)]
    for index in itertools.product(*counts):
        full = torch.full(chunks, -777.0, dtype=entry.dtype)
        box = [slice(at * size, (at + 1) * size) for at, size in zip(index, chunks, strict=True)]
        inside = value[tuple(box)]
        full[tuple(slice(0, size) for size in inside.shape)] = inside
        file = path / separator.join(str(at) for at in index)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(full.view(torch.uint8).numpy().tobytes())


# --- the state dict saved by PyTorch's own DCP ------------------------------------------------


def write_dcp(
    root: Path,
    model: TinyModel,
    *,
    te: bool = False,
    fsdp: bool = False,
    world: int = 1,
    iteration: int = 7,
    edit: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A run's directory in the ``torch_dcp`` format, or under ``fsdp`` in ``fsdp_dtensor``.

    With ``world`` ranks, each a process, weights are DTensors cut along their first dimension,
    also where that does not divide. ``edit(state)`` may change what is saved.
    """
    te = te or model.only_te
    args = training_args(model, Ranks(), te=te, format_="fsdp_dtensor" if fsdp else "torch_dcp")
    names = _names(model, te=te)
    weights = {}
    for item in tensors(model):
        value = whole(model, item, 1)
        split = fsdp and model.values.swiglu and item.kind == "gate_up"
        apart = {"_w": value.chunk(2)[0], "_v": value.chunk(2)[1]} if split else {"": value}
        if fsdp and "query" in item.block_names:  # a delta net's parts, and not those of Mamba
            blocks = zip(item.block_names, value.split(item.blocks), strict=True)
            apart = {f".{part}": block for part, block in blocks}
        for suffix, half in apart.items():
            weights[f"module.{_grouped_name(names[item.name], te=te)}{suffix}"] = half.clone()
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": weights,
        "optimizer": {"state": {name: torch.zeros(7) for name in weights}},
        "opt_param_scheduler": {"max_lr": 1e-4},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.zeros(9, dtype=torch.uint8)}]},
        "num_floating_point_operations_so_far": 1.5,
    }
    if edit:
        edit(state)
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    if world == 1:
        save_alone(state, directory)
    else:
        store = root / "store"
        spawn(_save_rank, (world, store, state, directory), nprocs=world)
        store.unlink(missing_ok=True)
    (root / TRACKER).write_text(str(iteration))
    return root


def save_alone(state: dict[str, Any], directory: Path) -> None:
    """Save a state dict from this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=directory, no_dist=True)


def _grouped_name(name: str, *, te: bool) -> str:
    return re.sub(r"\.local_experts\.(\d+)\.(\w+)\.weight$", r".\2.weight\1", name) if te else name


def _save_rank(rank: int, world: int, store: Path, state: dict[str, Any], directory: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    address = f"file://{store}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model = {name: distribute_tensor(value, mesh, [Shard(0)])
             for name, value in state["model"].items()}  # fmt: skip
    save({**state, "model": model}, checkpoint_id=directory)
    torch.distributed.destroy_process_group()


def _write_torch_dcp(root, model, _ranks, *, te: bool, grouped: bool = False) -> Path:
    return write_dcp(root, model, te=te or grouped)


def _write_fsdp_dtensor(root, model, _ranks, *, te: bool, grouped: bool = False) -> Path:
    return write_dcp(root, model, te=te or grouped, fsdp=True)


@dataclass(frozen=True)
class Writer:
    """A format's writer, which models such a program trains, and whether it keeps them in fp32."""

    write: Callable[..., Path]
    holds: Callable[[TinyModel], bool] = lambda model: True
    fp32: bool = False


# A new format adds itself here.
WRITERS: dict[str, Writer] = {
    "torch": Writer(write_legacy),
    "torch_dist": Writer(write_torch_dist),
    "zarr": Writer(write_zarr),
    "torch_dcp": Writer(_write_torch_dcp),
    "fsdp_dtensor": Writer(_write_fsdp_dtensor),
}
