"""The manifest: sections of finished stages, written whole, read only if it is ours."""

from __future__ import annotations

import json
import os

import pytest

from ckpt import manifest
from ckpt.errors import OutputError


def test_stages_are_added_and_replaced_and_the_others_stay(tmp_path):
    assert manifest.read_manifest(tmp_path) is None
    assert manifest.read_stage(tmp_path, "convert") is None
    manifest.write_stage(tmp_path, "convert", {"value": 1})
    manifest.write_stage(tmp_path, "validate", {"verdict": "passed"})
    manifest.write_stage(tmp_path, "convert", {"value": 2})
    content = json.loads((tmp_path / manifest.MANIFEST_NAME).read_text())
    assert content["schema"] == 1
    assert content["stages"]["validate"]["verdict"] == "passed"
    section = manifest.read_stage(tmp_path, "convert")
    assert section["value"] == 2
    assert section["finished"].endswith("+00:00")
    assert content["tool"].keys() >= {"ckpt", "python", "torch", "transformers"}
    assert [path.name for path in tmp_path.iterdir()] == [manifest.MANIFEST_NAME]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"),
        ('{"schema": 1, "stages"', "cannot read"),
        ("[]", "not a manifest"),
        ('{"schema": 1}', "not a manifest"),
        ('{"schema": 1, "stages": []}', "not a manifest"),
        ('{"schema": 2, "stages": {}}', "another version.*expected 1, found 2"),
    ],
)
def test_a_damaged_manifest_is_an_error_with_its_name(tmp_path, text, message):
    (tmp_path / manifest.MANIFEST_NAME).write_text(text)
    with pytest.raises(OutputError, match=message) as caught:
        manifest.read_manifest(tmp_path)
    assert manifest.MANIFEST_NAME in str(caught.value)


def test_a23_a_reader_sees_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    """Killed between writing and renaming, the old content is still whole."""
    file = tmp_path / "f.json"
    manifest.write_json(file, {"old": 1})

    def killed(_fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.write_json(file, {"new": 1})
    assert json.loads(file.read_text()) == {"old": 1}


def test_fingerprints_are_equal_exactly_when_the_values_are():
    values = [{"a": 1, "b": [1, 2]}, {"a": 1, "b": [2, 1]}, {"a": "1", "b": [1, 2]}, {"a": 1}, None]
    prints = [manifest.fingerprint(value) for value in values]
    assert len(set(prints)) == len(values)
    assert all(len(found) == 32 for found in prints)
    assert manifest.fingerprint({"b": [1, 2], "a": 1}) == prints[0]
    assert manifest.fingerprint("a", "b") != manifest.fingerprint("ab")
