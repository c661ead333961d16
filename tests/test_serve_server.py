"""Ready means it answered: servers that are slow, dead, sick, deaf or wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fake_engine
import httpx
import pytest
from fake_engine import known

from ckpt.config import ServeOptions
from ckpt.errors import EngineError, OptionsError, ServeError
from ckpt.progress import Silent
from ckpt.serve import RunningServer, running_server, serve_model

pytestmark = pytest.mark.usefixtures("scratch")


class Notes(Silent):
    """Keeps what was noted."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.fixture
def python(tmp_path):
    return fake_engine.write_engine(tmp_path / "engine")


@pytest.fixture
def model(tmp_path):
    return fake_engine.write_model(tmp_path / "model")


def options(python, behaviour="", *, extra=(), **values):
    arguments = ("--fake", behaviour, *extra) if behaviour else tuple(extra)
    return ServeOptions(python=python, port=0, extra_args=arguments, **values)


def refuse(model, chosen, tmp_path, error=ServeError):
    """Start a server that must not come up; returns the error and the seconds it took."""
    begin = time.monotonic()
    with (
        pytest.raises(error) as caught,
        running_server(model, chosen, engines_root=tmp_path / "none"),
    ):
        pytest.fail("a server that must not be ready")
    return caught.value, time.monotonic() - begin


def test_a_good_server_is_ready_compared_and_gone_afterwards(model, python, tmp_path, scratch):
    with running_server(model, options(python, "worker"), engines_root=tmp_path) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        assert fake_engine.shared_memory(server.process.pid)
        assert len(fake_engine.living_in_session(server.process.pid)) == 2
        assert known(server.agreement).min_cosine > 0.9999999
        assert known(server.agreement).positions == 16
        facts = json.loads(json.dumps(server.as_dict()))
    assert facts["model"] == "model"
    assert facts["tensor_parallel"] == 1
    assert facts["engine"] == "vLLM 9.9 (named with --python)"
    assert facts["comparison"].startswith("agrees with the original: logits at 16 positions")
    assert fake_engine.living_in_session(facts["pid"]) == []
    assert fake_engine.shared_memory(facts["pid"]) == []
    assert [path.name for path in scratch.glob("ckpt-serve-*/*")] == ["server.log"]


def test_the_text_says_where_what_and_why(model, python, tmp_path):
    with running_server(model, options(python), engines_root=tmp_path) as server:
        text = server.as_text()
    for part in (
        f"ready: {server.url}/v1  model model",
        "vLLM 9.9 (named with --python), float32",
        "tensor-parallel size 1, as in training",
        "served in float32, as stored; vLLM by itself would round to bfloat16",
        "agrees with the original",
        f"log: {server.process.log}",
    ):
        assert part in text


def test_the_command_is_shown_but_the_key_is_not(model, python, tmp_path):
    notes = Notes()
    chosen = options(python, api_key="geheim")
    with running_server(model, chosen, engines_root=tmp_path, progress=notes) as server:
        models = f"{server.url}/v1/models"
        assert httpx.get(models, trust_env=False).status_code == 401
        assert "geheim" not in server.process.log.read_text()
    (shown,) = [line for line in notes.lines if line.startswith("running: ")]
    assert "--tensor-parallel-size 1" in shown
    assert "geheim" not in "".join(notes.lines) + repr(server) + repr(chosen)


def test_without_a_recording_the_text_says_so(python, tmp_path):
    place = fake_engine.write_model(tmp_path / "m", reference=False)
    with running_server(place, options(python), engines_root=tmp_path) as server:
        assert server.agreement is None
        assert "not compared with the original: no recorded reference" in server.as_text()


def test_a_large_vocabulary_is_compared_by_log_probabilities(python, tmp_path):
    place = fake_engine.write_model(tmp_path / "m", config={"vocab_size": 5000})
    with running_server(place, options(python), engines_root=tmp_path) as server:
        assert known(server.agreement).values == "log-probabilities of the top 20 tokens"
        assert known(server.agreement).passed
        assert "raw_logits" not in server.process.log.read_text()


def test_a_wrong_server_is_stopped(model, python, tmp_path, scratch):
    error, _ = refuse(model, options(python, "wrong"), tmp_path)
    assert "the served model DOES NOT AGREE with the original: logits at 16 pos" in str(error)
    assert "ckpt validate" in error.hint


def test_a_server_that_is_near_enough_passes(model, python, tmp_path):
    with running_server(model, options(python, "near"), engines_root=tmp_path) as server:
        assert 1e-4 < known(server.agreement).mean_abs_diff < 1e-3


def test_a_slow_server_is_waited_for(model, python, tmp_path):
    with running_server(model, options(python, "slow"), engines_root=tmp_path) as server:
        assert server.startup_seconds > 1


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("crash", "ended by itself with exit status 1: ValueError: the weights are odd"),
        ("exit0", "ended by itself with exit status 0"),
        ("sick", "healthy but cannot answer: /v1/completions failed with HTTP 500: "),
        ("sick", "; NotImplementedError: head_dim=16 is not supported"),
        ("abort", "expected finish_reason stop or length, found abort"),
        ("other", "another server answers here (expected model, found somebody-else)"),
    ],
)
def test_a_server_that_cannot_answer_is_never_ready(model, python, tmp_path, behaviour, message):
    error, seconds = refuse(model, options(python, behaviour), tmp_path)
    assert message in str(error)
    assert "server.log" in error.hint
    assert seconds < 15


@pytest.mark.slow
def test_a_server_that_never_gets_healthy_is_given_up_and_killed(model, python, tmp_path):
    chosen = options(python, "slow-deaf", startup_timeout_seconds=1.0)
    error, _ = refuse(model, chosen, tmp_path)
    assert "not healthy after 1 s" in str(error)
    assert not any("slow-deaf" in line for line in every_command_line(str(model)))


def test_a_server_that_hangs_at_the_first_question_is_given_up(model, python, tmp_path):
    chosen = options(python, "hang", startup_timeout_seconds=2.0)
    error, seconds = refuse(model, chosen, tmp_path)
    assert "healthy but cannot answer: no answer from /v1/completions: ReadTimeout" in str(error)
    assert seconds < 30


def every_command_line(text):
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_text().replace("\0", " "))
    return [line for line in lines if text in line]


def test_a_server_that_dies_later_is_an_error_even_with_status_0(model, python, tmp_path):
    seen: list[RunningServer] = []
    with pytest.raises(ServeError, match="ended by itself with exit status 0"):
        serve_model(
            fake_engine.write_model(tmp_path / "plain", reference=False),
            options(python, "dies"),
            engines_root=tmp_path,
            announce=seen.append,
        )
    assert fake_engine.living_in_session(seen[0].process.pid) == []


def test_a_chat_answer_streams_and_is_timed(model, python, tmp_path):
    with running_server(model, options(python), engines_root=tmp_path) as server:
        answer = known(server.demonstrate(Silent()))
    assert (answer.text, answer.pieces) == ("Hello you", 2)
    assert 0 < answer.first_piece_seconds <= answer.seconds
    assert "user: What is a checkpoint?\nassistant: Hello you\n(2 pieces, first" in answer.as_text()


def test_without_a_template_there_is_no_chat_answer(python, tmp_path):
    notes, place = Notes(), fake_engine.write_model(tmp_path / "m", template=False)
    chosen = options(python)
    with running_server(place, chosen, engines_root=tmp_path, progress=notes) as server:
        assert server.demonstrate(notes) is None
    assert "no chat answer: the model has no chat template" in notes.lines
    assert "note: no chat template: chat requests will be refused, completions work" in notes.lines


def test_a_chat_answer_that_breaks_off_is_an_error(model, python, tmp_path):
    chosen = options(python, "broken-stream")
    with (
        running_server(model, chosen, engines_root=tmp_path) as server,
        pytest.raises(ServeError, match="broke off"),
    ):
        server.chat("Hi")


def test_a_given_template_is_passed_on_and_tried(model, python, tmp_path):
    file = tmp_path / "my chat.jinja"
    file.write_text("x")
    chosen = options(python, chat_template=file)
    with running_server(model, chosen, engines_root=tmp_path) as server:
        assert str(file) in server.process.log.read_text()
    error, _ = refuse(model, options(python, "bad-template", chat_template=file), tmp_path)
    assert "chat failed with HTTP 400" in str(error)


def test_a_taken_port_is_refused_before_anything_starts(model, python, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        chosen = ServeOptions(python=python, port=listener.getsockname()[1])
        error, seconds = refuse(model, chosen, tmp_path)
    assert "Choose another --port" in str(error)
    assert seconds < 5


@pytest.mark.parametrize("flag", ["--port", "--tensor-parallel-size=4", "--api-key"])
def test_flags_that_have_an_option_of_their_own_are_refused(model, python, tmp_path, flag):
    error, _ = refuse(model, options(python, extra=(flag, "1")), tmp_path, OptionsError)
    assert "cannot be passed on" in str(error)


def test_without_any_engine_both_ways_to_get_one_are_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt.serve.find_vllm", lambda *_: None)
    monkeypatch.setattr("ckpt.serve.embedded_is_there", lambda: False)
    error, _ = refuse(model, ServeOptions(port=0), tmp_path, EngineError)
    assert "ckpt engine install vllm" in str(error)
    assert "pip install 'megatron-to-vllm[serving]'" in str(error)
    error, _ = refuse(model, ServeOptions(port=0, engine="vllm"), tmp_path, EngineError)
    assert "no vLLM is installed. Install it with ckpt engine install vllm" in str(error)


# The command itself, as a process that gets signals.


@contextlib.contextmanager
def command(model, python, behaviour, scratch):
    """``ckpt serve`` in the foreground; its output so far is in ``.lines``."""
    argv = [sys.executable, "-m", "ckpt", "serve", str(model), "--python", str(python)]
    argv += ["--port", "0", "--json", "--", "--fake", behaviour]
    environment = {**fake_engine.environment(), "TMPDIR": str(scratch)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_command_leaves_no_process(model, python, scratch, number):
    with command(model, python, "worker", scratch) as process:
        pid = json.loads(process.stdout.readline())["pid"]
        assert fake_engine.living_in_session(pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    assert fake_engine.living_in_session(pid) == []
    assert fake_engine.shared_memory(pid) == []


def test_a_second_signal_ends_a_deaf_server_at_once(model, python, scratch):
    with command(model, python, "deaf", scratch) as process:
        pid = json.loads(process.stdout.readline())["pid"]
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert fake_engine.living_in_session(pid) == []


@pytest.mark.slow
def test_a_signal_during_the_start_leaves_no_process(model, python, scratch):
    with command(model, python, "slow-deaf", scratch) as process:
        for line in process.stderr:
            if line.startswith("starting the server"):
                break
        time.sleep(1)
        assert every_command_line(str(model))[1:]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert every_command_line(str(model)) == []


def test_the_death_of_the_engine_ends_the_command_with_1(model, python, scratch):
    with command(model, python, "ok", scratch) as process:
        pid = json.loads(process.stdout.readline())["pid"]
        os.kill(pid, signal.SIGKILL)
        out, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "error: the server ended by itself with exit status -9" in errors
    assert json.loads(out)["error"] == "ServeError"


def test_a_wrong_model_ends_the_command_with_1(model, python, scratch):
    with command(model, python, "wrong", scratch) as process:
        out, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "DOES NOT AGREE" in errors
    assert json.loads(out)["error"] == "ServeError"
