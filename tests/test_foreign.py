"""Models that are known and not supported are refused by their own name."""
# ruff: noqa: E501 - messages are written out whole

from __future__ import annotations

import pytest
import torch
from builders import Model, write_legacy

from ckpt.arch import ARCHITECTURES, choose_architecture
from ckpt.arch.foreign import FOREIGN, foreign_family
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import FamilyError, SourceError
from ckpt.inspection import inspect_directory

LAYER = "decoder.layers.0."
# A stored tensor or arguments, and the whole message.
CASES: dict[str, tuple[str | dict[str, object], str]] = {
    "lora": (
        LAYER + "self_attention.linear_qkv.adapter.linear_in.weight",
        (
            "this is a model with LoRA adapters that were not merged "
            "(decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight): adapters beside "
            "the weights are not supported. Merge the adapter into the weights first, and convert the "
            "merged checkpoint"
        ),
    ),
    "lora-wrapped": (
        LAYER + "mlp.linear_fc1.to_wrap.weight",
        (
            "this is a model with LoRA adapters that were not merged "
            "(decoder.layers.0.mlp.linear_fc1.to_wrap.weight): adapters beside the weights are not "
            "supported. Merge the adapter into the weights first, and convert the merged checkpoint"
        ),
    ),
    "absorbed": (
        LAYER + "self_attention.linear_k_up_proj.weight",
        (
            "this is multi-latent attention in its absorbed form, for inference "
            "(decoder.layers.0.self_attention.linear_k_up_proj.weight): the projection that it was "
            "made from is not stored. Convert the training checkpoint that it was made from"
        ),
    ),
    "mxfp4": (
        LAYER + "mlp.experts.linear_fc1_blocks",
        (
            "this is a model in MXFP4 (decoder.layers.0.mlp.experts.linear_fc1_blocks): weights of "
            "4 bits with scales are not supported. Convert a checkpoint in bf16, as training keeps it"
        ),
    ),
    "puzzle": (
        {"heterogeneous_block_specs": True},
        (
            "this is a heterogeneous model (puzzle) (heterogeneous_block_specs=True): a size of its "
            "own for each layer is not supported. Supported relatives: llama"
        ),
    ),
    "reward": (
        "rm_head.weight",
        (
            "this is a model with a value, reward or classification head (rm_head.weight): only heads "
            "that predict tokens are supported. Nothing was written"
        ),
    ),
    "vision": (
        "vision_model.decoder.layers.0.self_attention.linear_proj.weight",
        (
            "this is a model for images, video or sound "
            "(vision_model.decoder.layers.0.self_attention.linear_proj.weight): only language models "
            "are supported; its language part alone is not written either. Nothing was written"
        ),
    ),
    "bert": (
        "binary_head.weight",
        (
            "this is BERT (binary_head.weight): an encoder that fills in masked tokens is not "
            "supported. Nothing was written"
        ),
    ),
    "retro": (
        {"retro_add_retriever": True},
        (
            "this is Retro (retro_add_retriever=True): a retriever in the model is not supported. "
            "Supported relatives: gpt2"
        ),
    ),
    "t5": (
        LAYER + "cross_attention.linear_q.weight",
        (
            "this is T5 (decoder.layers.0.cross_attention.linear_q.weight): an encoder beside the "
            "decoder is not supported. Nothing was written"
        ),
    ),
    "deepseek-v4": (
        LAYER + "self_attention.linear_kv_proj.weight",
        (
            "this is DeepSeek-V4 (decoder.layers.0.self_attention.linear_kv_proj.weight): its "
            "attention, hyper-connections and hashed routing are not supported. Supported relatives: "
            "deepseek_v3, deepseek_v32"
        ),
    ),
    "kimi-k3": (
        LAYER + "self_attention_res_proj.weight",
        (
            "this is Kimi K3 (decoder.layers.0.self_attention_res_proj.weight): its mixed residual "
            "streams and norms of experts are not supported. Supported relatives: deepseek_v3"
        ),
    ),
    "kimi-linear": (
        LAYER + "self_attention.f_a_proj.weight",
        (
            "this is Kimi Linear (decoder.layers.0.self_attention.f_a_proj.weight): Kimi delta "
            "attention is not supported. Supported relatives: deepseek_v3"
        ),
    ),
    "falcon-h1": (
        LAYER + "mamba_mixer.in_proj.weight",
        (
            "this is Falcon-H1 (decoder.layers.0.mamba_mixer.in_proj.weight): attention and Mamba "
            "side by side in a layer are not supported. Nothing was written"
        ),
    ),
    "gemma-3n": (
        LAYER + "altup.router.weight",
        (
            "this is Gemma 3n (decoder.layers.0.altup.router.weight): alternating updates and learned "
            "augmented residuals are not supported. Supported relatives: gemma3_text"
        ),
    ),
    "gemma-4": (
        LAYER + "per_layer_projection.weight",
        (
            "this is Gemma 4 (decoder.layers.0.per_layer_projection.weight): embeddings for each layer "
            "and scaled layers are not supported. Supported relatives: gemma3_text"
        ),
    ),
    "ernie-vl": (
        LAYER + "mlp.vision_moe_layer.router.weight",
        (
            "this is ERNIE 4.5 VL (decoder.layers.0.mlp.vision_moe_layer.router.weight): experts for "
            "text beside experts for images are not supported. Nothing was written"
        ),
    ),
    "llama-4": (
        {"qk_l2_norm": True, "moe_apply_probs_on_input": True},
        (
            "this is Llama 4 (qk_l2_norm=True, moe_apply_probs_on_input=True): chunked attention, and "
            "router weights on the experts' input, are not supported. Supported relatives: llama, "
            "mixtral"
        ),
    ),
}


def checkpoint(place, given):
    """A Llama with one tensor more, or with other training arguments."""
    if isinstance(given, dict):
        return write_legacy(place, Model(args=given))
    source = write_legacy(place, Model())
    add_entry(source, given, torch.ones(2, 3))
    return source


def add_entry(source, name, value):
    (file,) = source.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    state["model"][name] = value
    torch.save(state, file)


@pytest.mark.parametrize("case", CASES)
def test_a_known_model_is_refused_by_its_name(tmp_path, case):
    """The message names the model, what gave it away and why; nothing is written."""
    given, message = CASES[case]
    source = checkpoint(tmp_path / "run", given)
    with pytest.raises(FamilyError) as caught:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert str(caught.value) == message
    assert not (tmp_path / "out").exists()
    found = inspect_directory(source).facts
    assert (found["convertible"], found["reason"]) == (False, message)


def test_every_row_that_tensors_or_arguments_give_away_has_a_case():
    """And each case is caught by the row that it is written for."""
    told = {row.name for row in FOREIGN if row.tensors or row.arguments}
    named = {
        name for name in told for _, message in CASES.values() if f"this is {name} (" in message
    }
    assert named == told


def test_rows_name_relatives_that_exist_and_aliases_that_are_free():
    """An alias belongs to one model, supported or not."""
    aliases = [alias for row in FOREIGN for alias in row.aliases]
    taken = {name for item in ARCHITECTURES.values() for name in (item.name, *item.aliases)}
    assert len(aliases) == len(set(aliases))
    assert not taken & set(aliases)
    assert {name for row in FOREIGN for name in row.relatives} <= ARCHITECTURES.keys()
    assert all(row.tensors or row.arguments or row.aliases for row in FOREIGN)


def test_no_supported_family_looks_like_a_foreign_one():
    """No row of any table is caught."""
    for architecture in ARCHITECTURES.values():
        names = [rule.source for rule in architecture.rules]
        assert [row.name for row in FOREIGN if row.evidence(names, {})] == []


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("deepseek_v4", "this is DeepSeek-V4 (--family deepseek_v4): "),
        ("minimax_m1", "this is MiniMax-M1 (--family minimax_m1): lightning attention"),
        ("Hunyuan", "this is Hunyuan (--family Hunyuan): there is no table of its tensors yet"),
        ("gema2", "unknown family 'gema2'. Did you mean gemma2? Known families: "),
        ("minimax-m2", "unknown family 'minimax-m2'. Did you mean minimax_m2?"),
        ("xyzzy", "unknown family 'xyzzy'. Known families: "),
    ],
)
def test_a_family_that_is_asked_for_is_explained_or_the_nearest_is_named(family, message):
    """By any name that a user may give."""
    from test_architecture_tables import BASE

    with pytest.raises(FamilyError) as caught:
        choose_architecture(BASE, family)
    assert str(caught.value).startswith(message)
    assert foreign_family("llama") is None


class Float8Tensor:
    """Stands for TransformerEngine's class of that name."""


def test_weights_in_eight_bits_are_refused_with_a_way_out(tmp_path):
    """Rank files keep TransformerEngine's own objects; they are never run."""
    source = write_legacy(tmp_path / "run", Model())
    name = LAYER + "mlp.linear_fc1.weight"
    add_entry(source, name, Float8Tensor())
    with pytest.raises(SourceError, match="keeps in few bits") as caught:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert caught.value.tensor == name
    assert "torch_dist" in str(caught.value.hint)


def test_an_encoder_beside_a_decoder_is_told_from_two_copies(tmp_path):
    """Both of T5's stacks have layers with the same names."""
    source = write_legacy(tmp_path / "run", Model())
    add_entry(source, "encoder.layers.0.self_attention.linear_proj.weight", torch.ones(2, 3))
    with pytest.raises(SourceError, match="T5"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
