"""Converted models mean the same to transformers 4 as to transformers 5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_megatron import TINY_FAMILIES, Ranks, TinyModel, write_legacy

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion

WORKER = Path(__file__).parent / "transformers4_worker.py"
# transformers 4's Qwen2-MoE has no head size of its own, and says so when a model needs one.
# Its DeepSeek-V2 leaves out YaRN's softmax scale: compared without, and warned of (see below).
SIZES: dict[str, dict[str, object]] = {
    "qwen2moe": {"hidden_size": 192},
    "deepseek-v2": {"rope_type": "rope", "rotary_scaling_factor": 1.0},
}
KNOWN_TO_BOTH = {
    "llama", "llama1p", "llama3", "mistral", "qwen2", "qwen3", "gpt", "neox", "bloom", "mixtral",
    "mixtral-gg", "qwen2moe", "qwen3moe", "deepseek", "deepseek-mtp", "deepseek-gg",
}  # fmt: skip


def answers(order, place, **environment):
    """What the transformers on that path answers, by family."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(order), str(place)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(place)


@pytest.fixture(scope="module")
def both(transformers4, tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    order = {}
    for family in TINY_FAMILIES:
        model = TinyModel(family, args=SIZES.get(family, {}))
        source = place / f"{family}-run"
        source.mkdir()
        write_legacy(source, model, Ranks())
        convert_checkpoint(source, place / family, ConvertOptions(family=model.hf_family))
        order[family] = str(place / family)
    (place / "order.json").write_text(json.dumps(order))
    old = answers(place / "order.json", place / "old.safetensors", PYTHONPATH=str(transformers4))
    new = answers(place / "order.json", place / "new.safetensors")
    assert old.pop("version")[0] == 4
    assert new.pop("version")[0] >= 5
    return old, new


def test_both_versions_answer_alike(both):
    """Every model that both know, to rounding; the tiny ones are untrained and so sensitive."""
    old, new = both
    assert old.keys() >= KNOWN_TO_BOTH
    assert new.keys() == set(TINY_FAMILIES)
    for family, logits in old.items():
        assert logits.std() > 0.01, family
        assert (logits - new[family]).abs().max() <= 1e-4, family


def test_what_only_the_older_version_answers_otherwise_is_warned_of(tmp_path):
    """The conversion says it, with and only with the setting that it is about."""
    for args, warned in ({}, True), (SIZES["deepseek-v2"], False):
        source = tmp_path / str(warned)
        source.mkdir()
        write_legacy(source, TinyModel("deepseek-v2", args=args), Ranks())
        notes = plan_conversion(source, ConvertOptions()).notes
        assert any("transformers before 5 leaves out YaRN" in note for note in notes) is warned
