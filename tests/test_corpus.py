"""Recorded checkpoints of other programs, when a directory of them is given with --corpus."""

from __future__ import annotations

import json

import torch
import transformers
from mtp_reference import mtp_logits
from safetensors.torch import load_file

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.validate.hf_run import load_model


def normalising_twin(directory):
    """The same weights in another class of transformers.

    Its DeepSeek V2 reads no norm_topk_prob and never normalises the chosen experts' weights;
    Mistral 4 is the same network, does, and has a query scale that can be switched off.
    """
    file = directory / "config.json"
    config = json.loads(file.read_text())
    assert config["norm_topk_prob"]
    width = config["qk_rope_head_dim"] + config["qk_nope_head_dim"]
    config |= {
        "model_type": "mistral4",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.pop("rope_theta"),
            "partial_rotary_factor": config["qk_rope_head_dim"] / width,
            "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        },
    }
    assert config.pop("rope_scaling") is None
    settings = transformers.Mistral4Config(**config, attn_implementation="eager")
    settings.head_dim = config["qk_rope_head_dim"]  # what its rotary embedding turns
    model = transformers.Mistral4ForCausalLM(settings).float().eval()
    state = load_file(directory / "model.safetensors")
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: torch.stack(
                [
                    state.pop(f"{at}{e}.{kind}_proj.weight")
                    for e in range(config["n_routed_experts"])
                ]
            )
            for kind in ("gate", "up", "down")
        }
        state[f"{at}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        state[f"{at}down_proj"] = parts["down"]
    model.load_state_dict(state)
    return model


def test_the_converted_model_answers_as_the_original(corpus_case, tmp_path):
    """fp32 logits to 1e-4; where only bf16 ones were recorded, cosine 0.999 at each position."""
    config = convert_checkpoint(corpus_case / "checkpoint", tmp_path / "out", ConvertOptions())
    if config.section["model"]["family"] == "deepseek_v2":
        model = normalising_twin(tmp_path / "out")
    else:
        model = load_model(tmp_path / "out")
    recorded = load_file(corpus_case / "logits.safetensors")
    ids = load_file(corpus_case / "inputs.safetensors")["input_ids"]
    with torch.no_grad():
        found = model(ids).logits
    exact = recorded.get("logits_fp32")
    if exact is None and "BF16" in config.section["model"]["dtypes"]:
        original = recorded["logits"][..., : found.shape[-1]].float()
        cosine = torch.nn.functional.cosine_similarity(original, found, dim=-1)
        assert cosine.min() >= 0.999
        return
    original = (recorded["logits"] if exact is None else exact)[..., : found.shape[-1]]
    assert (found - original).abs().max() <= 1e-4
    if "mtp_logits" in recorded:
        (further,) = mtp_logits(tmp_path / "out", ids)
        original = recorded["mtp_logits"][..., : found.shape[-1]]
        assert (further - original).abs().max() <= 1e-4
