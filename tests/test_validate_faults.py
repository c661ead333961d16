"""The validator is tested by mutation: right models pass, every seeded fault fails."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ckpt.config import ValidateOptions
from ckpt.progress import Silent
from ckpt.validate import validate_checkpoint
from ckpt.validate.hf_run import run_hf
from ckpt.validate.recorded import Reference, write_reference

VOCAB, LAYERS, HEAD, LENGTH = 96, 3, 8, 64
SHARED: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=HEAD,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        **SHARED,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**SHARED, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(
        **{key: value for key, value in SHARED.items() if key != "head_dim"}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHARED),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHARED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHARED, **EXPERTS, norm_topk_prob=True),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """For each family a model's directory and, in an iteration's directory, its answers."""
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    made = {}
    for family, config in CONFIGS.items():
        root = tmp_path_factory.mktemp(family)
        model = transformers.AutoModelForCausalLM.from_config(config())
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "norm" in name:
                    value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
                else:
                    value.copy_(0.2 * torch.randn(value.shape, generator=generator))
        model.save_pretrained(root / "model")
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
        answer = run_hf(root / "model", ids, Silent())
        padding = 50 * torch.randn(*ids.shape, 32, generator=generator)
        logits = torch.cat([answer.logits, padding], dim=-1)
        iteration = root / "run" / "iter_0000010"
        write_reference(iteration, Reference(ids, logits, answer.hidden, dtype="float32"))
        (iteration / ".metadata").touch()
        made[family] = root
    yield made
    torch.set_num_threads(threads)


def judge(root, model, **options):
    return validate_checkpoint(root / "run" / "iter_0000010", model, ValidateOptions(**options))


def at(layer):
    return f"model.layers.{layer}."


def swap(tensors, first, second):
    tensors[first], tensors[second] = tensors[second], tensors[first]


def swapped_rows(name, rows):
    def change(tensors, _config):
        value = tensors[name]
        order = list(range(0, len(value), rows))
        parts = list(value.split(rows))
        parts[0], parts[1] = parts[1], parts[0]
        assert len(parts) == len(order)
        tensors[name] = torch.cat(parts).contiguous()

    return change


def swapped(first, second):
    def change(tensors, _config):
        swap(tensors, first, second)

    return change


def scaled(name, factor):
    def change(tensors, _config):
        tensors[name] = tensors[name] * factor

    return change


def zeroed(name):
    def change(tensors, _config):
        tensors[name] = torch.zeros_like(tensors[name])

    return change


def shifted_rows(name):
    """A padding row slipped in: every later row belongs to the token before."""

    def change(tensors, _config):
        tensors[name] = tensors[name].roll(1, 0).contiguous()

    return change


def one_row(name, row):
    def change(tensors, _config):
        tensors[name] = tensors[name].clone()
        tensors[name][row] = tensors[name][row - 1]

    return change


def set_rope(**values):
    def change(_tensors, config):
        config["rope_parameters"] = {**config["rope_parameters"], **values}

    return change


def dropped_scaling(_tensors, config):
    theta = config["rope_parameters"]["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}


def set_config(**values):
    def change(_tensors, config):
        assert config.keys() >= values.keys()
        config.update(values)

    return change


def wrong_halves(tensors, _config):
    """Gate and up cut as if two tensor-parallel ranks had been laid end to end."""
    gate, up = f"{at(1)}mlp.gate_proj.weight", f"{at(1)}mlp.up_proj.weight"
    (a, b), (c, d) = tensors[gate].chunk(2), tensors[up].chunk(2)
    tensors[gate], tensors[up] = torch.cat([a, c]), torch.cat([b, d])


def interleaved_rope(tensors, _config):
    """Rows of queries and keys in the order that interleaved rotation wants."""
    for part in "qk":
        name = f"{at(0)}self_attn.{part}_proj.weight"
        rows = tensors[name].reshape(-1, 2, HEAD // 2, tensors[name].shape[1])
        tensors[name] = rows.transpose(1, 2).reshape(tensors[name].shape).contiguous()


LAST = LAYERS - 1
ATTENTION, LAST_ATTENTION = f"{at(1)}self_attn.", f"{at(LAST)}self_attn."
EARLIER_AGREE, ANY = "the first position", ""
# Family, fault, the first layer that differs (None: behind the last), what the report guesses.
FAULTS: dict[str, Any] = {
    "two query heads of the last layer": (
        "llama", swapped_rows(f"{LAST_ATTENTION}q_proj.weight", HEAD), LAYERS, EARLIER_AGREE,
    ),
    "two key heads": (
        "qwen3", swapped_rows(f"{ATTENTION}k_proj.weight", HEAD), 2, EARLIER_AGREE,
    ),
    "two value heads": ("mistral", swapped_rows(f"{ATTENTION}v_proj.weight", HEAD), 2, ANY),
    "keys and values": (
        "llama", swapped(f"{ATTENTION}k_proj.weight", f"{ATTENTION}v_proj.weight"), 2, ANY,
    ),
    "interleaved rotation": ("llama", interleaved_rope, 1, EARLIER_AGREE),
    "gate and up": (
        "llama", swapped(f"{at(LAST)}mlp.gate_proj.weight", f"{at(LAST)}mlp.up_proj.weight"),
        LAYERS, "gate and up",
    ),
    "gate and up of two ranks end to end": ("mistral", wrong_halves, 2, ANY),
    "two layers": (
        "llama", swapped(f"{at(0)}mlp.down_proj.weight", f"{at(1)}mlp.down_proj.weight"), 1, ANY,
    ),
    "rope base": ("mistral", set_rope(rope_theta=500000.0), 1, EARLIER_AGREE),
    "rope scaling lost": ("llama", dropped_scaling, 1, EARLIER_AGREE),
    "rope factor": ("llama", set_rope(factor=4.0), 1, EARLIER_AGREE),
    "attention norm off by 2 %": ("llama", scaled(f"{at(1)}input_layernorm.weight", 1.02), 2, ANY),
    "final norm off by 2 %": ("llama", scaled("model.norm.weight", 1.02), None, "final norm"),
    "query norm off by 2 %": ("qwen3", scaled(f"{ATTENTION}q_norm.weight", 1.02), 2, EARLIER_AGREE),
    "query and key norms": (
        "qwen3", swapped(f"{ATTENTION}q_norm.weight", f"{ATTENTION}k_norm.weight"), 2, ANY,
    ),
    "norm of another layer": (
        "llama", swapped(f"{at(0)}input_layernorm.weight", f"{at(1)}input_layernorm.weight"),
        1, ANY,
    ),
    "query bias missing": ("qwen2", zeroed(f"{ATTENTION}q_proj.bias"), 2, EARLIER_AGREE),
    "value bias missing": ("qwen2", zeroed(f"{ATTENTION}v_proj.bias"), 2, ANY),
    "embedding shifted by a padding row": (
        "llama", shifted_rows("model.embed_tokens.weight"), 0, "vocabulary",
    ),
    "embedding scaled": ("llama", scaled("model.embed_tokens.weight", 1.02), 0, "embedding"),
    "head shifted by a padding row": ("llama", shifted_rows("lm_head.weight"), None, "output head"),
    "last row of the head": ("llama", one_row("lm_head.weight", VOCAB - 1), None, "output head"),
    "tied that is not": ("qwen3", set_config(tie_word_embeddings=True), None, "output head"),
    "norm's epsilon": ("llama", set_config(rms_norm_eps=1e-2), 1, ANY),
    "two experts of the last layer": (
        "mixtral",
        lambda tensors, _config: [
            swap(tensors, *(f"{at(LAST)}block_sparse_moe.experts.{e}.{w}.weight" for e in (1, 2)))
            for w in ("w1", "w2", "w3")
        ],
        LAYERS, "experts",
    ),
    "router rows": (
        "qwen3_moe", swapped_rows(f"{at(1)}mlp.gate.weight", 1), 2, "experts",
    ),
    "one expert's gate and up": (
        "qwen3_moe",
        swapped(
            f"{at(1)}mlp.experts.3.gate_proj.weight", f"{at(1)}mlp.experts.3.up_proj.weight"
        ),
        2, ANY,
    ),
    "normalised router weights": ("qwen3_moe", set_config(norm_topk_prob=False), 1, ANY),
    "experts a token": ("qwen3_moe", set_config(num_experts_per_tok=1), 1, ANY),
}  # fmt: skip


def mutated(root, tmp_path, change):
    out = tmp_path / "model"
    shutil.copytree(root / "model", out)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    change(tensors, config)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("family", CONFIGS)
def test_a_right_model_passes(originals, family):
    report = judge(originals[family], originals[family] / "model")
    assert report.passed
    assert report.agreement.max_abs_diff < 1e-5
    assert report.agreement.spread > 0.1
    assert report.padding_columns == 32
    assert report.first_bad_layer is None
    assert f"all {LAYERS + 1} residual streams agree" in report.as_text()


@pytest.mark.parametrize("name", FAULTS)
def test_every_seeded_fault_fails_and_its_layer_is_named(originals, tmp_path, name):
    """Default limits; a model that differs in one place only."""
    family, change, layer, guess = FAULTS[name]
    report = judge(originals[family], mutated(originals[family], tmp_path, change))
    assert not report.passed
    assert report.first_bad_layer == layer
    assert guess in report.likely_fault()
    assert "likely fault" in report.as_text()
    assert report.as_dict()["verdict"] == "failed"


def test_a_missing_tensor_is_not_made_up(originals, tmp_path):
    """transformers would fill it with random numbers and a warning."""
    from ckpt.errors import ModelError

    out = mutated(originals["qwen2"], tmp_path, lambda t, _: t.pop(f"{at(0)}self_attn.q_proj.bias"))
    with pytest.raises(ModelError, match="missing keys"):
        judge(originals["qwen2"], out)


def test_a_tensor_too_many_is_not_ignored(originals, tmp_path):
    from ckpt.errors import ModelError

    def change(tensors, _config):
        tensors[f"{at(0)}self_attn.q_proj.bias"] = torch.ones(32)

    with pytest.raises(ModelError, match="unexpected keys"):
        judge(originals["llama"], mutated(originals["llama"], tmp_path, change))


def test_a_tensor_of_another_shape_is_refused(originals, tmp_path):
    from ckpt.errors import ModelError

    def change(tensors, _config):
        tensors["lm_head.weight"] = torch.ones(VOCAB + 1, 40)

    with pytest.raises(ModelError):
        judge(originals["llama"], mutated(originals["llama"], tmp_path, change))
