"""The written config.json turns positions just as training did: frequencies as vectors."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from builders import Model, write_legacy
from tiny_megatron import Ranks, TinyModel
from tiny_megatron import write_legacy as write_experts

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion

HEAD_DIM, BASE, POSITIONS = 10, 500000, 700
LINEAR = {"rotary_seq_len_interpolation_factor": 3.0}
LLAMA3 = {"use_rope_scaling": True, "rope_scaling_factor": 6.0}
YARN = {
    "rope_type": "yarn", "rotary_base": 20000, "rotary_scaling_factor": 5.0,
    "original_max_position_embeddings": 300, "max_position_embeddings": 300,
    "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.9, "mscale_all_dim": 0.7,
}  # fmt: skip
YARNS = {
    "both": YARN,
    "equal": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "wide": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "rotary_scaling_factor": 40.0},
    "long": {**YARN, "original_max_position_embeddings": 4096, "rotary_base": 10000},
}


def llama_config(place, settings):
    source = write_legacy(place / "run", Model(args=settings), tp=2)
    return plan_conversion(source, ConvertOptions()).config


def yarn_config(place, settings):
    source = write_experts(place / "run", TinyModel("deepseek", args=settings), Ranks())
    return plan_conversion(source, ConvertOptions()).config


def rotary(config):
    """transformers' module of the class that config.json names: frequencies and factor."""
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = getattr(transformers, config["architectures"][0])
    settings = kind.config_class.from_dict(dict(config))
    modules = {"llama": LlamaRotaryEmbedding, "deepseek_v3": DeepseekV3RotaryEmbedding}
    module = modules[config["model_type"]](settings)
    return module.inv_freq.double().numpy(), module.attention_scaling


def plain(width, base):
    return np.array([base ** (-2 * i / width) for i in range(width // 2)])


def llama3(frequencies, factor, *, low=1.0, high=4.0, original=8192):
    """Long waves are stretched, short ones kept, those between mixed (Llama 3.1's own code)."""
    found = []
    for frequency in frequencies:
        turns = original * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(share * frequency + (1 - share) * frequency / factor)
    return np.array(found)


def yarn(width, args):
    """YaRN's ramp between the dimensions that turn beta_fast and beta_slow times (its paper)."""
    base, original = args["rotary_base"], args["original_max_position_embeddings"]

    def dimension(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(args["beta_fast"])), 0)
    high = min(math.ceil(dimension(args["beta_slow"])), width - 1)
    found = []
    for number, frequency in enumerate(plain(width, base)):
        ramp = min(1.0, max(0.0, (number - low) / max(high - low, 0.001)))
        stretched = frequency / args["rotary_scaling_factor"]
        found.append(stretched * ramp + frequency * (1 - ramp))
    return np.array(found)


def mscale(factor, share):
    return 0.1 * share * math.log(factor) + 1


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found / expected - 1).max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, plain(HEAD_DIM, BASE)),
        (LINEAR, plain(HEAD_DIM, BASE) / 3),
        (LLAMA3, llama3(plain(HEAD_DIM, BASE), 6.0)),
        ({**LLAMA3, "rotary_base": 10000}, llama3(plain(HEAD_DIM, 10000), 6.0)),
    ],
    ids=["plain", "linear", "llama3", "llama3-base"],
)
def test_a26_scaled_frequencies_are_those_of_the_formula(tmp_path, settings, expected):
    """The scaled ones differ from the plain ones, so a lost scaling is seen."""
    found, factor = rotary(llama_config(tmp_path, settings))
    assert factor == 1.0
    assert_close(found, expected)
    base = settings.get("rotary_base", BASE)
    assert (np.abs(found / plain(HEAD_DIM, base) - 1).max() > 0.5) == (len(settings) > 0)


@pytest.mark.parametrize("settings", YARNS.values(), ids=YARNS)
def test_a26_yarn_frequencies_and_factor_are_those_of_the_formula(tmp_path, settings):
    """Latent attention: all six settings reach config.json, and the longest position too."""
    config = yarn_config(tmp_path, settings)
    found, factor = rotary(config)
    width = config["qk_rope_head_dim"]
    assert_close(found, yarn(width, settings))
    assert np.abs(found / plain(width, settings["rotary_base"]) - 1).max() > 0.5
    scale = settings["rotary_scaling_factor"]
    shares = [mscale(scale, settings[name]) for name in ("mscale", "mscale_all_dim")]
    assert factor == pytest.approx(shares[0] / shares[1], rel=1e-6)
    longest = settings["original_max_position_embeddings"] * scale
    assert config["max_position_embeddings"] == longest


def angles(found):
    return torch.outer(torch.arange(POSITIONS).double(), torch.from_numpy(found))


@pytest.fixture
def without_gpu(monkeypatch):
    """Megatron asks for the current GPU wherever it makes a tensor; its imports warn."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.megatron
@pytest.mark.parametrize("settings", [{}, LINEAR, LLAMA3], ids=["plain", "linear", "llama3"])
def test_a26_angles_are_those_of_megatron_core(tmp_path, without_gpu, settings):
    """At every position up to 700: what training turned by, the written model turns by."""
    from megatron.core.models.common.embeddings import RotaryEmbedding

    found, _ = rotary(llama_config(tmp_path, settings))
    theirs = RotaryEmbedding(
        kv_channels=HEAD_DIM, rotary_percent=1.0, rotary_base=BASE, use_cpu_initialization=True,
        seq_len_interpolation_factor=settings.get("rotary_seq_len_interpolation_factor"),
        rope_scaling=settings.get("use_rope_scaling", False),
        rope_scaling_factor=settings.get("rope_scaling_factor", 8.0),
    )  # fmt: skip
    expected = theirs.get_freqs_non_repeated(POSITIONS).double()
    assert (angles(found) - expected).abs().max() < 2e-4
    if settings:
        assert (angles(plain(HEAD_DIM, BASE)) - expected).abs().max() > 0.1


@pytest.mark.megatron
@pytest.mark.parametrize("settings", YARNS.values(), ids=YARNS)
def test_a26_yarn_angles_are_those_of_megatron_core(tmp_path, without_gpu, settings):
    """The angles at every position up to 700, and the factor on cosine and sine."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    config = yarn_config(tmp_path, settings)
    found, factor = rotary(config)
    theirs = YarnRotaryEmbedding(
        config["qk_rope_head_dim"], rotary_base=settings["rotary_base"],
        scaling_factor=settings["rotary_scaling_factor"],
        original_max_position_embeddings=settings["original_max_position_embeddings"],
        beta_fast=settings["beta_fast"], beta_slow=settings["beta_slow"],
        mscale=settings["mscale"], mscale_all_dim=settings["mscale_all_dim"],
        use_cpu_initialization=True,
    )  # fmt: skip
    expected, scale = theirs.get_emb(POSITIONS)
    half = expected.shape[-1] // 2
    assert (angles(found) - expected[:, 0, 0, :half].double()).abs().max() < 2e-4
    assert factor == pytest.approx(float(scale), rel=1e-6)
