"""Directories that must not be served are refused before anything starts."""

from __future__ import annotations

import json
import socket

import fake_engine
import pytest

from ckpt.config import ServeOptions
from ckpt.errors import ModelError, ServeError
from ckpt.manifest import write_stage
from ckpt.serve.preflight import check_model, free_port

DEFAULT = ServeOptions()
FOREIGN = ServeOptions(foreign=True)


def test_a_converted_directory_is_accepted_with_what_matters(tmp_path):
    model = check_model(fake_engine.write_model(tmp_path / "m", trained_tensor_parallel=4), DEFAULT)
    assert (model.trained_tensor_parallel, model.dtype, model.longest) == (4, "float32", 64)
    assert model.has_tokenizer
    assert model.has_chat_template
    assert model.reference is not None
    assert model.notes == ("not validated: run ckpt validate before you rely on it",)


def test_a_directory_without_manifest_is_refused_unless_foreign(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", manifest=False)
    with pytest.raises(ModelError, match="not a finished output of ckpt"):
        check_model(place, DEFAULT)
    assert check_model(place, FOREIGN).trained_tensor_parallel is None


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no such directory"):
        check_model(tmp_path / "none", DEFAULT)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_is_not_as_written_is_refused(tmp_path, name):
    place = fake_engine.write_model(tmp_path / "m")
    (place / name).write_bytes((place / name).read_bytes()[:-1])
    with pytest.raises(ModelError, match="a file is not what the conversion wrote"):
        check_model(place, DEFAULT)


def test_a_lost_file_is_refused(tmp_path):
    place = fake_engine.write_model(tmp_path / "m")
    (place / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="found no file"):
        check_model(place, DEFAULT)


def test_a_foreign_truncated_file_is_refused(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", manifest=False)
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cut short"):
        check_model(place, FOREIGN)


def write_index(place, weight_map):
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_file_that_the_index_names_must_be_there(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", manifest=False)
    write_index(place, {"w": "model.safetensors", "v": "model-2.safetensors"})
    with pytest.raises(ModelError, match=r"model-2\.safetensors: the file is missing"):
        check_model(place, FOREIGN)


def test_a_tensor_that_the_index_names_must_be_there(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", manifest=False)
    write_index(place, {"w": "model.safetensors", "v": "model.safetensors"})
    with pytest.raises(ModelError, match="v: 1 tensors are not where the index says"):
        check_model(place, FOREIGN)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path, text):
    place = fake_engine.write_model(tmp_path / "m", manifest=False)
    (place / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="cannot read the index"):
        check_model(place, FOREIGN)


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_broken_configuration_is_refused(tmp_path, text):
    place = fake_engine.write_model(tmp_path / "m", manifest=False)
    (place / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model(place, FOREIGN)


def test_a_model_whose_validation_failed_is_refused(tmp_path):
    place = fake_engine.write_model(tmp_path / "m")
    write_stage(place, "validate", {"verdict": "failed"})
    with pytest.raises(ModelError, match="its last validation failed"):
        check_model(place, DEFAULT)


def test_a_validated_model_has_nothing_to_note(tmp_path):
    place = fake_engine.write_model(tmp_path / "m")
    write_stage(place, "validate", {"verdict": "passed"})
    assert check_model(place, DEFAULT).notes == ()


def test_what_requests_will_fail_is_said(tmp_path):
    bare = check_model(fake_engine.write_model(tmp_path / "a", tokenizer=False), DEFAULT)
    plain = check_model(fake_engine.write_model(tmp_path / "b", template=False), DEFAULT)
    assert "no tokenizer: text requests will fail, token ids work" in bare.notes
    assert "no chat template: chat requests will be refused, completions work" in plain.notes


def test_a_template_in_the_older_place_is_found(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", template=False, manifest=False)
    (place / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert check_model(place, FOREIGN).has_chat_template


def test_a_given_template_must_exist_and_counts(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", template=False)
    file = tmp_path / "chat.jinja"
    with pytest.raises(ServeError, match="no such chat template"):
        check_model(place, ServeOptions(chat_template=file))
    file.write_text("x")
    assert check_model(place, ServeOptions(chat_template=file)).has_chat_template


def test_the_type_comes_from_the_tensors_where_the_configuration_is_silent(tmp_path):
    place = fake_engine.write_model(tmp_path / "m", config={"dtype": None})
    assert check_model(place, DEFAULT).dtype == "float32"


def test_a_context_beyond_the_model_is_refused(tmp_path):
    place = fake_engine.write_model(tmp_path / "m")
    with pytest.raises(ServeError, match="expected at most 64, found 65"):
        check_model(place, ServeOptions(max_model_len=65))
    assert check_model(place, ServeOptions(max_model_len=64))


def test_stretched_positions_leave_the_context_to_the_engine(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    place = fake_engine.write_model(tmp_path / "m", config={"rope_scaling": scaling})
    assert check_model(place, ServeOptions(max_model_len=200))


def test_a_taken_port_is_refused_and_zero_finds_a_free_one():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1 port {taken}"):
            free_port("127.0.0.1", taken)
    assert free_port("127.0.0.1", 0) > 0


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ServeError, match="cannot listen on"):
        free_port("192.0.2.1", 0)
