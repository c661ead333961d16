"""Checkpoints in an object store: a real S3 server on loopback, every format, every fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import builders
import pytest
import torch
from click.testing import CliRunner
from tiny_deepspeed import neox, write_layers, write_universal, write_zero3
from tiny_megatron import Ranks, TinyModel, write_dcp, write_legacy, write_torch_dist, write_zarr

from ckpt.cli import main as ckpt
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.convert.read import Files
from ckpt.errors import EXIT_FAILED, SourceError, StoreError
from ckpt.inspection import inspect_directory
from ckpt.storage import to_location

pytestmark = pytest.mark.store
ROOT = Path(__file__).parent.parent
MODEL = TinyModel("llama")


def legacy(root):
    return write_legacy(root, MODEL, Ranks(tp=2, pp=2))


def before_zip(root):
    """The form of PyTorch before 1.6: pickles, then storages."""
    write_legacy(root, MODEL, Ranks(tp=2))
    for file in root.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        torch.save(content, file, _use_new_zipfile_serialization=False)
    return root


FORMATS = {
    "torch": legacy,
    "torch before 1.6": before_zip,
    "torch_dist": lambda root: write_torch_dist(root, MODEL, Ranks(tp=2)),
    "zarr": lambda root: write_zarr(root, MODEL, Ranks(tp=2)),
    "torch_dcp": lambda root: write_dcp(root, MODEL),
    "fsdp_dtensor": lambda root: write_dcp(root, MODEL, fsdp=True),
    "deepspeed": lambda root: write_layers(root, neox(2)),
    "deepspeed_zero3": lambda root: write_zero3(root, neox(2), dp=3),
    "deepspeed_universal": lambda root: write_universal(root, neox(2)),
}


def outputs(directory):
    """Every file but the manifest, which holds times and the source's name."""
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file() and file.name != "ckpt-manifest.json"
    }


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_in_a_store_converts_to_the_bytes_of_a_local_one(tmp_path, bucket, form):
    """Inspected and converted, with nothing on this machine but the output."""
    source = FORMATS[form](tmp_path / "run")
    remote = to_location(bucket.put_directory(source, f"runs/{form.replace(' ', '-')}"))
    local, told = (inspect_directory(place).as_dict() for place in (source, remote))
    differing = {key for key in local if local[key] != told[key]}
    assert differing <= {"directory", "notes"}
    for place, name in ((source, "local"), (remote, "remote")):
        convert_checkpoint(place, tmp_path / name, ConvertOptions(max_shard_size=20_000))
    assert outputs(tmp_path / "remote") == outputs(tmp_path / "local")
    assert len(outputs(tmp_path / "local")) > 3


def test_the_commands_take_a_url_for_source_tokenizer_and_reference(tmp_path, bucket):
    """As on this machine; the reference's own tokenizer files and token ids come along."""
    source = legacy(tmp_path / "run")
    convert_checkpoint(source, tmp_path / "plain", ConvertOptions())
    reference = tmp_path / "reference"
    reference.mkdir()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    rows = config["vocab_size"]
    vocabulary = {f"t{number}": number for number in range(rows)}
    (reference / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    urls = [bucket.put_directory(place, f"cli/{place.name}") for place in (source, reference)]
    chosen = ["--reference", urls[1], "--tokenizer", urls[1], "--quiet"]
    result = CliRunner().invoke(ckpt, ["convert", urls[0], str(tmp_path / "out"), *chosen])
    assert result.exit_code == 0, result.output
    found = outputs(tmp_path / "out")
    assert found["tokenizer.json"] == (reference / "tokenizer.json").read_bytes()
    assert json.loads(found["config.json"])["eos_token_id"] == 5
    told = CliRunner().invoke(ckpt, ["inspect", urls[0], "--json"])
    assert json.loads(told.stdout)["directory"].startswith(f"{urls[0]}/iter_")


def test_a_model_in_a_store_is_inspected_and_checked(tmp_path, bucket):
    """Headers are read, and not the weights."""
    convert_checkpoint(legacy(tmp_path / "run"), tmp_path / "out", ConvertOptions())
    url = bucket.put_directory(tmp_path / "out", "models/one")
    for more in ([], ["--check"]):
        result = CliRunner().invoke(ckpt, ["inspect", url, *more])
        assert result.exit_code == 0, result.output
    assert "whole" in result.output


def traffic(monkeypatch):
    """Bytes that were fetched, and listings that were made."""
    from ckpt.storage.store import Store

    seen = {"bytes": 0, "lists": []}
    fetch, faults = Store._fetch, Store.faults

    def counted(self, ranges):
        found = fetch(self, ranges)
        seen["bytes"] += sum(map(len, found))
        return found

    def noted(self, key, doing):
        if "list" in doing:
            seen["lists"].append((key, doing))
        return faults(self, key, doing)

    monkeypatch.setattr(Store, "_fetch", counted)
    monkeypatch.setattr(Store, "faults", noted)
    return seen


LARGE = builders.Model(hidden=480, ffn=1440, vocab=4096)


def zarr_with_states(root):
    """The optimizer's states are most of a checkpoint, and nothing of them is read."""
    write_zarr(root, MODEL, Ranks(tp=2), optimizer=True)
    for array in [path.parent for path in root.rglob("optimizer*/.zarray")]:
        for chunk in (path for path in array.iterdir() if path.name != ".zarray"):
            chunk.write_bytes(bytes(2**20))
    return root


@pytest.mark.parametrize(
    "write",
    [
        lambda root: builders.write_legacy(root, LARGE, tp=2),
        lambda root: builders.write_torch_dist(root, LARGE, tp=2),
        zarr_with_states,
    ],
    ids=["torch", "torch_dist", "zarr"],
)
def test_planning_fetches_a_small_part_and_lists_nothing_twice(
    tmp_path, bucket, monkeypatch, write
):
    """Of files of many megabytes only what says where the elements are."""
    source = write(tmp_path / "run")
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    remote = to_location(bucket.put_directory(source, f"large/{tmp_path.name}"))
    seen = traffic(monkeypatch)
    plan = plan_conversion(remote, ConvertOptions())
    assert plan.plan.parameters
    assert size > 4 * 2**20
    assert seen["bytes"] < size / 20
    assert len(seen["lists"]) == len(set(seen["lists"])) <= 4


@pytest.mark.parametrize("form", ["torch", "torch_dist", "deepspeed", "deepspeed_universal"])
def test_files_are_looked_into_side_by_side(tmp_path, bucket, monkeypatch, form):
    """One after the other, a thousand rank files would each wait for several answers."""
    from ckpt.storage.store import Store

    source = FORMATS[form](tmp_path / "run")
    remote = to_location(bucket.put_directory(source, f"beside/{form}"))
    fetch, now, most = Store._fetch, [], [0]

    def slow(self, ranges):
        now.append(1)
        most[0] = max(most[0], len(now))
        time.sleep(0.02)
        try:
            return fetch(self, ranges)
        finally:
            now.pop()

    monkeypatch.setattr(Store, "_fetch", slow)
    assert plan_conversion(remote, ConvertOptions()).plan.parameters
    assert most[0] > 1


def test_a_read_fetches_no_more_than_the_weights(tmp_path, bucket, monkeypatch):
    """Rows that are read one by one come from kept blocks, each fetched once."""
    source = builders.write_legacy(tmp_path / "run", LARGE, tp=2)
    remote = to_location(bucket.put_directory(source, "large/read"))
    conversion = plan_conversion(remote, ConvertOptions())
    seen = traffic(monkeypatch)
    convert_checkpoint(remote, tmp_path / "out", ConvertOptions())
    assert conversion.plan.nbytes <= seen["bytes"] < 1.6 * conversion.plan.nbytes


@pytest.mark.parametrize("fault", ["deleted", "replaced", "cut short"])
def test_a_source_that_changes_after_the_plan_ends_the_run_by_name(
    tmp_path, bucket, monkeypatch, fault
):
    """Retention deletes, a trainer overwrites: no output appears, the object is named."""
    from ckpt import convert

    source = legacy(tmp_path / "run")
    url = bucket.put_directory(source, f"changing/{fault.replace(' ', '-')}")
    file = max(source.rglob("*.pt"))
    key = f"{url[len(bucket.url) + 1 :]}/{file.relative_to(source).as_posix()}"
    planned = convert.plan_conversion

    def change(*args, **values):
        found = planned(*args, **values)
        content = file.read_bytes()
        if fault == "deleted":
            bucket.delete(key)
        elif fault == "replaced":
            bucket.put(key, content[:-1] + bytes([content[-1] ^ 1]))
        else:
            bucket.put(key, content[:1000])
        return found

    monkeypatch.setattr(convert, "plan_conversion", change)
    with pytest.raises(SourceError, match="is gone" if fault == "deleted" else "changed") as error:
        convert_checkpoint(to_location(url), tmp_path / "out", ConvertOptions())
    assert error.value.file == f"{bucket.url}/{key}"
    assert error.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["torch", "torch_dist", "zarr"])
def test_an_object_that_vanishes_after_the_listing_ends_the_plan_by_name(
    tmp_path, bucket, monkeypatch, form
):
    """Between the listing and the first look into it."""
    from ckpt import sources

    source = FORMATS[form](tmp_path / "run")
    url = bucket.put_directory(source, f"vanishing/{form}")
    ends = {
        "torch": "mp_rank_01_001/model_optim_rng.pt",
        "torch_dist": ".distcp",
        "zarr": ".zarray",
    }
    key = max(key for key in bucket.keys(f"vanishing/{form}/") if key.endswith(ends[form]))
    listed = sources.list_whole

    def delete(directory):
        listed(directory)
        bucket.delete(key)

    monkeypatch.setattr(sources, "list_whole", delete)
    with pytest.raises(SourceError, match="no such object") as error:
        inspect_directory(to_location(url)) if form != "torch_dist" else plan_conversion(
            to_location(url), ConvertOptions()
        )
    assert error.value.file == f"{bucket.url}/{key}"


def test_an_object_that_is_replaced_while_it_is_read_is_noticed_at_the_end(tmp_path, bucket):
    """It was looked at before the first byte, and is again after the last."""
    bucket.put("late/file", bytes(3000))
    url = f"{bucket.url}/late/file"
    stamps = {url: to_location(url).stamp()}
    import numpy as np

    with Files(stamps) as files:
        files.read_into(url, 5, np.empty(100, np.uint8))
        bucket.put("late/file", bytes(2999) + b"x")
        with pytest.raises(SourceError, match="changed"):
            files.check_unchanged([url])
        bucket.delete("late/file")
        with pytest.raises(SourceError, match="gone"):
            files.check_unchanged([url])


def run_ckpt(*args, **environment):
    """The command in a process of its own, with these variables set or (None) unset."""
    values = {**os.environ, **{key: value for key, value in environment.items() if value}}
    for key in (key for key, value in environment.items() if value is None):
        values.pop(key, None)
    values["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "ckpt", *args], check=False, capture_output=True, text=True,
        env=values, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["validate", "serve"])
def test_commands_that_need_local_files_say_how_to_copy(bucket, command):
    """In one line, before anything is started."""
    url = f"{bucket.url}/models/one"
    given = [url, url] if command == "validate" else [url]
    result = CliRunner().invoke(ckpt, [command, *given])
    assert result.exit_code == EXIT_FAILED
    assert result.stderr == (
        f"error: {url}: {command} reads files of this machine only, not an object store. "
        f"Copy it first: aws s3 sync {url} one\n"
    )


def test_a_pipeline_with_a_stage_that_needs_local_files_stops_before_it_converts(tmp_path, bucket):
    """Its convert stage alone takes URLs."""
    source = bucket.put_directory(legacy(tmp_path / "run"), "pipelines/run")
    file = tmp_path / "pipeline.yaml"
    text = f"source: {{path: {source}}}\noutput: out\nserve: {{enabled: false}}\n"
    file.write_text(text)
    result = CliRunner().invoke(ckpt, ["run", str(file), "--quiet"])
    assert result.exit_code == EXIT_FAILED
    assert f"{source}: validate reads files of this machine only" in result.stderr
    assert not (tmp_path / "out").exists()
    file.write_text(text + "validate: {enabled: false}\n")
    for state in ("done", "current"):
        result = CliRunner().invoke(ckpt, ["run", str(file), "--quiet", "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["stages"]["convert"]["state"] == state


def test_a_bucket_that_does_not_exist_is_said_to_be_missing(bucket):
    result = run_ckpt("inspect", "s3://no-such-bucket-here/run")
    assert result.returncode == EXIT_FAILED
    assert "error: s3://no-such-bucket-here/run: " in result.stderr
    assert "no such bucket" in result.stderr
    assert "AWS_ENDPOINT_URL" in result.stderr


def test_a_directory_that_does_not_exist_is_said_to_be_missing(bucket):
    result = run_ckpt("inspect", f"{bucket.url}/nothing/here")
    assert result.returncode == EXIT_FAILED
    missing = f"error: {bucket.url}/nothing/here: no such directory. Give the run's directory"
    assert result.stderr.startswith(missing)


def test_without_credentials_the_next_step_is_named(bucket, tmp_path):
    nothing = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"))
    home = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    result = run_ckpt("inspect", f"{bucket.url}/run", **nothing, **home)
    assert result.returncode == EXIT_FAILED
    assert "no credentials were found" in result.stderr
    assert "AWS_PROFILE" in result.stderr


def test_a_store_that_does_not_answer_is_said_so(bucket):
    from object_store import free_port

    down = f"http://127.0.0.1:{free_port()}"
    result = run_ckpt("inspect", f"{bucket.url}/run", AWS_ENDPOINT_URL=down)
    assert result.returncode == EXIT_FAILED
    assert "the store does not answer" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"])
def test_denied_access_is_said_without_any_key(bucket, monkeypatch, tmp_path, code):
    """By the store's own code, whatever its text holds."""
    url = bucket.put_directory(legacy(tmp_path / "run"), f"denied/{code}")
    files = type(bucket.files)
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    async def deny(self, method, *args, **values):
        text = "The key AKIAORIGINALKEY00001 with Signature=abcdef0123 was refused"
        answer = {"Error": {"Code": code, "Message": text}}
        raise translate_boto_error(ClientError(answer, method))

    monkeypatch.setattr(files, "_call_s3", deny)
    with pytest.raises(StoreError, match=code) as error:
        inspect_directory(to_location(url))
    assert "AKIA" not in str(error.value)
    assert "abcdef" not in str(error.value)
    assert error.value.hint


def test_an_unknown_fault_is_shown_without_secrets():
    from ckpt.storage.faults import explain

    text = "odd: AKIAORIGINALKEY00001 X-Amz-Signature=abc123 token: xyz"
    found = str(explain(RuntimeError(text), "s3://b/k", "cannot read it"))
    assert "RuntimeError: odd" in found
    assert not any(word in found for word in ("AKIAO", "abc123", "xyz"))
