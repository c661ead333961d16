"""Faults that people met with other converters, A01 to A13: each input, and the right answer.

All sizes of a model differ from one another, and each element is a number of its own, so that a
swap is seen and not only a loss.
"""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_megatron
import torch
from safetensors.torch import load_file
from tiny_megatron import (
    Ranks,
    TinyModel,
    expected_hf,
    write_legacy,
    write_torch_dist,
)
from traced import Traced, assert_traced

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import CkptError, FamilyError, PlanError, SourceError
from ckpt.manifest import read_stage

BOTH = pytest.mark.parametrize("write", [write_legacy, write_torch_dist])
DENSE = dict(
    num_layers=2, hidden_size=56, num_attention_heads=12, num_query_groups=3, kv_channels=10,
    ffn_hidden_size=36, vocab_size=131, make_vocab_size_divisible_by=16,
)  # fmt: skip
# 12 heads in 3 groups of 4, 10 wide; hidden 24; 5 layers; 6 experts 20 wide.
EXPERTS = dict(
    num_layers=5, hidden_size=24, num_attention_heads=12, num_query_groups=3, kv_channels=10,
    ffn_hidden_size=36, num_experts=6, moe_ffn_hidden_size=20, vocab_size=131,
    make_vocab_size_divisible_by=16,
)  # fmt: skip


@pytest.fixture
def traced(monkeypatch):
    values = Traced()
    monkeypatch.setattr(tiny_megatron, "random", values)
    return values


def convert(source, place, **options):
    convert_checkpoint(source, place, ConvertOptions(**options))
    return place


@BOTH
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("groups", [3, 1, 12])
@pytest.mark.parametrize("family", ["llama", "qwen2"], ids=["no-bias", "bias"])
def test_a01_queries_keys_and_values_come_from_their_own_rows(
    tmp_path, traced, write, tp, groups, family
):
    """12 heads in 3 groups, in one, and each its own: rows are those of its query group.

    With one group and three ranks no rank holds a whole group.
    """
    sizes = {**DENSE, "num_query_groups": groups, "hidden_size": 57, "ffn_hidden_size": 36}
    model = TinyModel(family, args={**sizes, "kv_channels": 12 if groups == 1 else 10})
    source = write(tmp_path / "run", model, Ranks(tp=tp))
    # hidden does not divide by heads: transformers' Llama refuses it, its Mistral does not
    assert_traced(convert(source, tmp_path / "out"), model, traced)


@BOTH
@pytest.mark.parametrize("tp", [2, 3])
def test_a02_gate_and_up_are_merged_half_by_half(tmp_path, traced, write, tp):
    """A rank holds [gate part | up part]; dense, routed and shared experts alike."""
    sizes = {"ffn_hidden_size": 30, "moe_ffn_hidden_size": 18, "num_layers": 2,
             "moe_shared_expert_intermediate_size": 54, "moe_layer_freq": [0, 1],
             "hidden_size": 66, "q_lora_rank": 42, "kv_lora_rank": 34, "qk_pos_emb_head_dim": 8,
             "v_head_dim": 22, "qk_head_dim": 20}  # fmt: skip
    model = TinyModel("deepseek", args=sizes)
    source = write(tmp_path / "run", model, Ranks(tp=tp), te=True)
    assert_traced(convert(source, tmp_path / "out"), model, traced)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(4, 1, 2), (3, 2, 3), (2, 3, 1)])
def test_a02_experts_cut_over_their_own_ranks(tmp_path, traced, tp, ep, etp):
    """Expert tensor parallelism has its own size; halves are still merged one by one."""
    sizes = {**EXPERTS, "num_layers": 2, "moe_ffn_hidden_size": 18, "vocab_size": 130}
    model = TinyModel("mixtral", args=sizes)
    if (tp, ep, etp) == (4, 1, 2):  # two of four ranks hold the same half of each expert
        with pytest.raises(SourceError, match=r"mp_rank_03"):
            convert(write_broken(tmp_path / "bad", model), tmp_path / "none")
    source = write_legacy(tmp_path / "run", model, Ranks(tp=tp, ep=ep, etp=etp))
    assert_traced(convert(source, tmp_path / "out"), model, traced)


def write_broken(place, model):
    """A run of four ranks of which one folder got lost."""
    source = write_legacy(place, model, Ranks(tp=4, etp=2))
    shutil.rmtree(source / "iter_0000007" / "mp_rank_03")
    return source


@BOTH
@pytest.mark.parametrize(("ep", "experts"), [(3, 6), (2, 6), (4, 8)])
@pytest.mark.parametrize("grouped", [False, True])
def test_a05_every_expert_keeps_its_number(tmp_path, traced, write, ep, experts, grouped):
    """Ranks number their experts from 0; expert e of the output is expert e of the model."""
    model = TinyModel("mixtral", args={**EXPERTS, "num_experts": experts})
    source = write(tmp_path / "run", model, Ranks(ep=ep), te=True, grouped=grouped)
    assert_traced(convert(source, tmp_path / "out"), model, traced)


def test_a05_a_lost_expert_rank_is_named_and_no_smaller_model_is_made(tmp_path, traced):
    """Never a model with fewer experts."""
    model = TinyModel("mixtral", args=EXPERTS)
    source = write_legacy(tmp_path / "run", model, Ranks(ep=3))
    shutil.rmtree(source / "iter_0000007" / "mp_rank_00_001")
    with pytest.raises(SourceError, match="mp_rank_00_001"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a07_three_forms_of_experts_give_equal_bytes(tmp_path, traced):
    """Sequential, TransformerEngine's weightN and GroupedMLP's weight1/weight2; 4 a rank."""
    model = TinyModel("mixtral", args={**EXPERTS, "num_experts": 8, "hidden_size": 24})
    forms = {
        "sequential": dict(),
        "te": dict(te=True, grouped=True),
        "legacy": dict(grouped=True),
    }
    made = {}
    for name, form in forms.items():
        source = write_legacy(tmp_path / name, model, Ranks(tp=2, ep=2), **form)
        out = convert(source, tmp_path / f"{name}-out")
        assert_traced(out, model, traced)
        made[name] = (out / "model.safetensors").read_bytes()
    assert made["sequential"] == made["te"] == made["legacy"]


def test_a08_ranks_that_were_never_saved_are_listed(tmp_path, traced):
    """TP 2, EP 4, ETP 1 is whole with four folders; TP 4, EP 2, ETP 1 lacks what it lacks."""
    model = TinyModel("mixtral", args={**EXPERTS, "num_experts": 8})
    source = write_legacy(tmp_path / "whole", model, Ranks(tp=2, ep=4, etp=1))
    names = sorted(path.name for path in (source / "iter_0000007").iterdir())
    assert names == ["mp_rank_00_000", "mp_rank_00_002", "mp_rank_01_001", "mp_rank_01_003"]
    assert_traced(convert(source, tmp_path / "out"), model, traced)
    source = write_legacy(tmp_path / "holes", model, Ranks(tp=4, ep=2, etp=1))
    for name in ("mp_rank_02_000", "mp_rank_03_001"):
        shutil.rmtree(source / "iter_0000007" / name)
    with pytest.raises(SourceError) as caught:
        convert(source, tmp_path / "none")
    message = str(caught.value)
    assert "files of 2 ranks are missing: mp_rank_02_000, mp_rank_03_001" in message
    assert "cannot be rebuilt" in message


@pytest.mark.parametrize("ranks", [Ranks(tp=2, ep=2), Ranks(tp=2, pp=2)], ids=["ep", "pp"])
def test_a08_a_folder_name_of_two_numbers_is_read_by_the_arguments(tmp_path, traced, ranks):
    """mp_rank_01_001 is an expert rank in one run and a pipeline stage in another."""
    model = TinyModel("mixtral", args=EXPERTS)
    source = write_legacy(tmp_path / "run", model, ranks)
    assert (source / "iter_0000007" / "mp_rank_01_001").is_dir()
    assert_traced(convert(source, tmp_path / "out"), model, traced)


@BOTH
@pytest.mark.parametrize("rank", [None, 12])
@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
def test_a09_latent_attention_with_and_without_query_lora(tmp_path, traced, write, rank, te):
    """Another set of modules, norms fused or not: every one has its place."""
    model = TinyModel("deepseek", args={"q_lora_rank": rank})
    source = write(tmp_path / "run", model, Ranks(tp=2), te=te)
    out = convert(source, tmp_path / "out")
    assert_traced(out, model, traced)
    config = json.loads((out / "config.json").read_text())
    assert config["q_lora_rank"] == rank
    assert "q_lora_rank" in config


def test_a09_a_trained_norm_without_a_place_stops_the_run(tmp_path, traced):
    """It never vanishes."""
    model = TinyModel("deepseek", args={"q_lora_rank": None})
    source = write_legacy(tmp_path / "run", model, Ranks())
    name = "decoder.layers.1.self_attention.q_layernorm.weight"
    edit(source, lambda state: state["model"].update({name: torch.full((28,), 1.5)}))
    with pytest.raises(PlanError, match=r"decoder\.layers\.1\.self_attention\.q_layernorm\.weight"):
        convert(source, tmp_path / "out")


def test_a09_latent_attention_without_norms_is_refused(tmp_path, traced):
    """Hugging Face's class always applies them."""
    model = TinyModel("deepseek", args={"qk_layernorm": False})
    source = write_legacy(tmp_path / "run", model, Ranks())
    with pytest.raises(FamilyError, match="qk_norm is False"):
        convert(source, tmp_path / "out")


def edit(source, change):
    """Change every rank's state on disk."""
    for file in source.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)


@BOTH
@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3moe", "deepseek-mtp"])
def test_a10_every_norm_lands_in_its_own_slot(tmp_path, traced, write, te, family):
    """Fused and separate names, per-head norms, layers with and without experts, the last norm."""
    model = TinyModel(family)
    norms = [name for name in expected_hf(model) if "norm" in name]
    assert len(norms) > 2 * model.values.num_layers
    source = write(tmp_path / "run", model, Ranks(tp=2), te=te)
    assert_traced(convert(source, tmp_path / "out"), model, traced)


@BOTH
def test_a11_the_expert_bias_stays_fp32_bit_for_bit(tmp_path, monkeypatch, write):
    """1 + k/4096 needs more bits than bf16 has; the chosen experts stay the same."""
    original = tiny_megatron.random

    def biased(name, *shape, dtype=torch.float32):
        if name.endswith("e_score_correction_bias"):
            assert dtype is torch.float32
            return 1 + torch.arange(shape[0]).flip(0) / 4096
        return original(name, *shape, dtype=dtype)

    monkeypatch.setattr(tiny_megatron, "random", biased)
    model = TinyModel("deepseek", dtype=torch.bfloat16)
    source = write(tmp_path / "run", model, Ranks(tp=2, ep=2), te=True)
    out = convert(source, tmp_path / "out", dtype="bf16")
    found = load_file(out / "model.safetensors")
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, expected_hf(model)["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert not torch.equal(bias, bias.bfloat16().float())
    router = found["model.layers.1.mlp.gate.weight"].float()
    assert torch.equal(router, expected_hf(model)["model.layers.1.mlp.gate.weight"].float())
    tokens = torch.randn(1000, router.shape[1], generator=torch.Generator().manual_seed(1))
    scores = (tokens @ router.T).sigmoid()
    exact = (scores + bias).topk(4).indices.sort().values
    rounded = (scores + bias.bfloat16().float()).topk(4).indices.sort().values
    assert not torch.equal(exact, rounded)  # a cast would route tokens elsewhere
    true_bias = expected_hf(model)["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(exact, (scores + true_bias).topk(4).indices.sort().values)


@BOTH
@pytest.mark.parametrize("depth", [1, 2])
def test_a12_layers_that_predict_further_tokens_are_kept_or_dropped(tmp_path, traced, write, depth):
    """Kept under the numbers behind the last layer; dropped by one flag; nothing else changes."""
    model = TinyModel(
        "deepseek-mtp",
        args={"num_layers": 5, "moe_layer_freq": [0, 1, 1, 1, 1], "mtp_num_layers": depth},
    )
    source = write(tmp_path / "run", model, Ranks(tp=2), te=True)
    kept = convert(source, tmp_path / "kept")
    assert_traced(kept, model, traced)
    names = load_file(kept / "model.safetensors").keys()
    for layer in range(5, 5 + depth):
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            assert f"model.layers.{layer}.{part}.weight" in names
    assert not any(name.startswith(f"model.layers.{5 + depth}.") for name in names)
    config = json.loads((kept / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (5, depth)
    dropped = convert(source, tmp_path / "dropped", mtp="drop")
    behind = tuple(f"model.layers.{layer}." for layer in range(5, 5 + depth))
    further = {name for name in names if name.startswith(behind)}
    assert load_file(dropped / "model.safetensors").keys() == names - further
    config = json.loads((dropped / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (5, 0)
    for place, word in ((kept, "kept"), (dropped, "dropped")):
        notes = read_stage(place, "convert")["notes"]
        assert any(f"further tokens: {word}" in n and n.startswith(f"{depth} layer") for n in notes)


@pytest.mark.parametrize(
    ("layers", "ranks"),
    [
        (7, Ranks(pp=3, split=(1, 4, 2))),
        (8, Ranks(pp=2, vpp=2)),
        (6, Ranks(pp=4, split=(1, 2, 2, 1))),  # embedding and loss count as a layer each
        (7, Ranks(tp=2, pp=2, vpp=3, split=(2, 1, 1, 1, 1, 1))),  # a layout string
        (5, Ranks(pp=3, split=(2, 2, 1))),  # only the last stage's number is set
        (4, Ranks(pp=3, split=(2, 2, 0))),  # the last stage holds the head alone
    ],
)
def test_a13_every_layer_is_there_once_whatever_the_split(tmp_path, traced, layers, ranks):
    """Layer numbers are counted in the files, so that no rule of some version is needed."""
    model = TinyModel("qwen3", args={"num_layers": layers})
    source = write_legacy(tmp_path / "run", model, ranks)
    out = convert(source, tmp_path / "out")
    assert_traced(out, model, traced)
    numbers = {
        int(name.split(".")[2])
        for name in load_file(out / "model.safetensors")
        if name.startswith("model.layers.")
    }
    assert numbers == set(range(layers))


def test_a13_a_stage_too_few_stops_the_run(tmp_path, traced):
    """The layers are counted against the arguments too."""
    model = TinyModel("llama", args={"num_layers": 7})
    source = write_legacy(tmp_path / "run", model, Ranks(pp=3, split=(1, 4, 2)))
    edit(source, lambda state: setattr(state["args"], "num_layers", 8))
    with pytest.raises(CkptError, match="8 layers"):
        convert(source, tmp_path / "out")


@BOTH
def test_a25_sizes_and_constants_are_those_of_training(tmp_path, traced, write):
    """Not those of a famous model: head size, positions, eps, rotary base."""
    model = TinyModel(
        "qwen3",
        args={
            "hidden_size": 96, "num_attention_heads": 12, "num_query_groups": 3,
            "kv_channels": 10, "seq_length": 128, "max_position_embeddings": 4096,
            "layernorm_epsilon": 3e-5, "rotary_base": 500000,
        },
    )  # fmt: skip
    out = convert(write(tmp_path / "run", model, Ranks(tp=3)), tmp_path / "out")
    assert_traced(out, model, traced)
    config = json.loads((out / "config.json").read_text())
    assert config["head_dim"] == 10 != 96 // 12
    assert config["max_position_embeddings"] == 4096
    assert config["rms_norm_eps"] == 3e-5
    assert config["rope_theta"] == 500000
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (12, 3)


def test_a27_every_tensor_keeps_its_own_type(tmp_path):
    """A router trained in fp32 beside bf16 weights stays so; config.json names the main type."""
    model = TinyModel("mixtral", dtype=torch.bfloat16)
    source = write_legacy(tmp_path / "run", model, Ranks(tp=2, ep=2))

    def wide(state):
        for name, value in state["model"].items():
            if name.endswith("router.weight"):
                state["model"][name] = value.float() + 1 / 4096

    edit(source, wide)
    for dtype in ("keep", "bf16"):
        out = convert(source, tmp_path / dtype, dtype=dtype)
        found = load_file(out / "model.safetensors")
        kinds = {name for name, value in found.items() if value.dtype is torch.float32}
        assert kinds == {f"model.layers.{n}.block_sparse_moe.gate.weight" for n in range(3)}
        for name in kinds:
            assert torch.equal(found[name], expected_hf(model)[name].float() + 1 / 4096)
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == "bfloat16"
