"""Without vLLM the embedded engine serves, and says what that costs."""

from __future__ import annotations

import fake_engine
import pytest
from fake_engine import known

from ckpt.config import ServeOptions
from ckpt.errors import ServeError
from ckpt.progress import Silent
from ckpt.serve import running_server
from ckpt.serve.command import embedded_command
from ckpt.serve.preflight import check_model


def losses(model, **values):
    options = ServeOptions(**values)
    return "\n".join(embedded_command(check_model(model, options), options, port=1).reasons)


def test_what_is_lost_is_said(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", trained_tensor_parallel=4)
    text = losses(place, served_model_name="demo", max_model_len=32)
    for part in (
        "transformers serve answers, since no vLLM was found: no log-probabilities",
        "nothing is compared with the original",
        "vLLM is installed with: ckpt engine install vllm",
        "no tensor parallelism: training's size 4 is not used",
        "the model's name in requests is its directory, not 'demo'",
        "max_model_len 32 is not enforced",
    ):
        assert part in text


def test_what_was_asked_for_is_no_surprise(tmp_path):
    text = losses(fake_engine.write_model(tmp_path / "m"), engine="embedded")
    assert "transformers serve answers, as asked for" in text
    assert "ckpt engine install" not in text
    assert "tensor parallelism" not in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel": 2}, "has no tensor parallelism"),
        ({"api_key": "k"}, "has no api key"),
        ({"chat_template": "config.json"}, "has no chat template"),
    ],
)
def test_what_it_would_ignore_is_refused(tmp_path, values, message):
    place = fake_engine.write_model(tmp_path / "m")
    if "chat_template" in values:
        values = {"chat_template": place / "config.json"}
    with pytest.raises(ServeError, match=message):
        losses(place, **values)


def test_a_model_without_a_tokenizer_is_refused_early(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", tokenizer=False)
    with pytest.raises(ServeError, match="takes text only, and the model has no tokenizer"):
        losses(place)


@pytest.mark.slow
def test_a_converted_model_is_served(tmp_path, scratch):
    """Needs the extra ``[serving]``."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    place = tiny_llama(tmp_path / "m")
    chosen = ServeOptions(engine="embedded", port=0, foreign=True)
    with running_server(place, chosen, engines_root=tmp_path) as server:
        answer = known(server.demonstrate(Silent()))
        text = server.as_text()
    assert answer.seconds > 0
    assert f"model {place}" in text
    assert "not compared with the original: this engine gives no log-probabilities" in text
    assert fake_engine.living_in_session(server.process.pid) == []


def tiny_llama(place):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    ids = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=ids, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    full = PreTrainedTokenizerFast(tokenizer_object=plain)
    full.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    full.save_pretrained(place)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    return place
