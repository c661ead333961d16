"""The real vLLM serves what was converted, at either tensor-parallel size, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import builders
import fake_engine
import httpx
import pytest
from fake_engine import known

from ckpt.config import ConvertOptions, ServeOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import ServeError
from ckpt.progress import Silent
from ckpt.serve import running_server
from ckpt.serve.devices import has_amx

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
MODEL = builders.Model(hidden=128, heads=4, groups=2, head_dim=32, ffn=192, vocab=260)
WIDE = builders.variant(MODEL, layers=1, hidden=1024, heads=8, head_dim=64)
VOCABULARY = 260
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token for each byte, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {"<s>": 0, "</s>": 1, **{letter: number + 2 for number, letter in enumerate(letters)}}
    plain = Tokenizer(models.BPE(vocab=ids, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    full = PreTrainedTokenizerFast(tokenizer_object=plain, **MARKS)
    full.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    place = tmp_path_factory.mktemp("tokenizer")
    full.save_pretrained(place)
    return place


def record(config, tensors, place):
    """The truth's logits, by transformers, as a training job would have recorded them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(tensors, strict=True)
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"input_ids": ids, "logits": logits}, place / "ckpt-reference.safetensors")


def llama(place, tokenizer, shape=MODEL, **options):
    """A Megatron checkpoint of tensor-parallel size 2 with a recording, converted."""
    from transformers import LlamaConfig

    run = builders.write_legacy(place / "run", shape, tp=2)
    config = LlamaConfig(**builders.hf_config(shape))
    record(config, builders.hf_tensors(shape), run / "iter_0000010")
    convert_checkpoint(run, place / "model", ConvertOptions(tokenizer=tokenizer, **options))
    return place / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return llama(tmp_path_factory.mktemp("llama"), tokenizer)


@contextlib.contextmanager
def command(model, python, scratch, *words):
    """``ckpt serve`` as a process, with what it reports when it is ready."""
    argv = [sys.executable, "-m", "ckpt", "serve", str(model), "--python", str(python)]
    argv += ["--port", "0", "--json", *words]
    environment = {**fake_engine.environment(), "TMPDIR": str(scratch)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def shared_memory(runs):
    return [path for name in runs for path in Path("/dev/shm").glob(f"*{name}*")]


def leftovers(scratch):
    return [path.name for path in scratch.glob("ckpt-serve-*/*") if path.name != "server.log"]


@pytest.mark.parametrize(
    ("words", "size", "number"),
    [(("--tensor-parallel", "1"), 1, signal.SIGTERM), ((), 2, signal.SIGINT)],
    ids=["tp1-sigterm", "tp2-sigint"],
)
def test_a_conversion_is_served_like_the_original(model, vllm_python, scratch, words, size, number):
    with command(model, vllm_python, scratch, *words) as process:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        facts = json.loads(line)
        assert facts["tensor_parallel"] == size
        assert facts["agreement"]["passed"]
        assert facts["agreement"]["max_abs_diff"] < 1e-4
        assert facts["agreement"]["positions"] == 78
        asked = {"model": facts["model"], "messages": [{"role": "user", "content": "Hi"}]}
        answer = httpx.post(
            f"{facts['url']}/chat/completions",
            json={**asked, "max_tokens": 4},
            trust_env=False,
            timeout=60,
        )
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
        runs = [path.name for path in scratch.glob("ckpt-serve-*/tmp/vllm_dist_*")]
        assert bool(shared_memory(runs)) is (size > 1)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert fake_engine.living_in_session(facts["pid"]) == []
    assert shared_memory(runs) == []
    assert leftovers(scratch) == []


def test_a_signal_while_it_starts_leaves_no_process(model, vllm_python, scratch):
    with command(model, vllm_python, scratch) as process:
        for line in process.stderr:
            if line.startswith("starting the server: 10 s"):
                break
        (pid,) = [session for session in sessions(str(model)) if session != process.pid]
        process.terminate()
        begin = time.monotonic()
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begin < 20
    assert fake_engine.living_in_session(pid) == []
    assert leftovers(scratch) == []


def sessions(text):
    """Sessions of processes whose command line holds a text."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (directory / "cmdline").read_text():
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                found.add(int(fields[3]))
    return found - {own_session()}


def own_session():
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[3])


def test_half_precision_without_a_tokenizer_is_served_by_token_ids(tmp_path, vllm_python, scratch):
    place = llama(tmp_path, None, WIDE, dtype="bf16")
    chosen = ServeOptions(python=vllm_python, port=0, tensor_parallel=1)
    with running_server(place, chosen, engines_root=tmp_path) as server:
        assert server.command.dtype == "bfloat16"
        assert known(server.agreement).passed
        assert known(server.agreement).max_abs_diff > 1e-4
        assert "no tokenizer: text requests will fail, token ids work" in server.reasons
        assert server.demonstrate(Silent()) is None


def test_half_precision_of_a_tiny_model_is_served_on_any_cpu(
    tmp_path, tokenizer, vllm_python, scratch
):
    place = llama(tmp_path, tokenizer, dtype="bf16")
    chosen = ServeOptions(python=vllm_python, port=0, tensor_parallel=1)
    with running_server(place, chosen, engines_root=tmp_path) as server:
        assert server.command.dtype == ("float32" if has_amx() else "bfloat16")
        assert known(server.agreement).precision == "half"


def test_a_wrong_conversion_is_never_offered(tmp_path, tokenizer, vllm_python, scratch):
    place = llama(tmp_path, tokenizer, overrides=("rotary_base=1000",))
    chosen = ServeOptions(python=vllm_python, port=0, tensor_parallel=1)
    with (
        pytest.raises(ServeError, match="DOES NOT AGREE"),
        running_server(place, chosen, engines_root=tmp_path),
    ):
        pytest.fail("a wrong model must not be ready")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_latent_attention_is_right_on_the_cpu(tmp_path, vllm_python, scratch, dtype):
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    extra = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **extra}))
    (tmp_path / "m" / "original").mkdir()
    record(config, model.state_dict(), tmp_path / "m" / "original")
    chosen = ServeOptions(python=vllm_python, port=0, foreign=True, dtype=dtype)
    with running_server(tmp_path / "m", chosen, engines_root=tmp_path) as server:
        assert server.tensor_parallel == 1
        limit = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        assert known(server.agreement).max_abs_diff < limit
