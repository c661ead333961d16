"""Outputs in an object store: parts that are sent, receipts, kills, and nothing left over."""

from __future__ import annotations

import json
from pathlib import Path

import builders
import pytest
from click.testing import CliRunner
from object_store import run_python
from safetensors.torch import load
from tiny_megatron import Ranks, TinyModel, write_legacy

from ckpt.cli import main as ckpt
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.convert.share import Share
from ckpt.errors import EXIT_FAILED, OptionsError, OutputError
from ckpt.progress import Silent
from ckpt.storage import to_location

pytestmark = pytest.mark.store
MODEL = TinyModel("llama")
SMALL = ConvertOptions(max_shard_size=20_000)
LARGE = builders.Model(hidden=480, ffn=1440, vocab=8192)  # 45 MB
PART_BYTES = 5 * 2**20  # the least that S3 takes


class Notes(Silent):
    """Keeps what is told."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.fixture
def place(bucket, request):
    """A key of this test's own, and nothing open below it before or after."""
    key = "out/" + "".join(c if c.isalnum() else "-" for c in request.node.name)
    yield key
    assert bucket.uploads() == []


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint, and the files of its local conversion without the manifest."""
    root = tmp_path_factory.mktemp("small")
    source = write_legacy(root / "run", MODEL, Ranks(tp=2, pp=2))
    convert_checkpoint(source, root / "out", SMALL)
    return source, files_of(root / "out")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """As ``small``, with a weight file of several parts."""
    root = tmp_path_factory.mktemp("large")
    source = builders.write_legacy(root / "run", LARGE, tp=2)
    convert_checkpoint(source, root / "out", ConvertOptions())
    return source, files_of(root / "out")


def files_of(directory):
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file() and file.name != "ckpt-manifest.json"
    }


def without_manifest(bucket, key):
    found = bucket.contents(key)
    manifest = json.loads(found.pop("ckpt-manifest.json"))
    outputs = {entry["name"]: entry["size"] for entry in manifest["stages"]["convert"]["outputs"]}
    assert outputs == {name: len(content) for name, content in found.items()}
    return found


def output(bucket, key):
    return to_location(f"{bucket.url}/{key}")


def test_an_output_in_a_store_holds_the_bytes_of_a_local_one(bucket, place, small):
    """And nothing else: no receipt, no state."""
    source, expected = small
    report = convert_checkpoint(source, output(bucket, place), SMALL)
    assert without_manifest(bucket, place) == expected
    assert report.as_dict()["output"] == f"{bucket.url}/{place}"


def test_from_store_to_store_the_bytes_are_the_same(bucket, place, small, tmp_path):
    """By the command, with a tokenizer from there as well, and its JSON lines name the place."""
    source, expected = small
    tokenizer = builders.write_tokenizer(tmp_path / "tokenizer", MODEL_ROWS)
    urls = [bucket.put_directory(each, f"{place}-{each.name}") for each in (source, tokenizer)]
    target = f"{bucket.url}/{place}"
    args = ["--max-shard-size", "20000", "--tokenizer", urls[1], "--quiet"]
    result = CliRunner().invoke(ckpt, ["convert", urls[0], target, *args])
    assert result.exit_code == 0, result.output
    found = without_manifest(bucket, place)
    assert found.pop("tokenizer.json") == (tokenizer / "tokenizer.json").read_bytes()
    weights = {name for name in expected if name.endswith(".safetensors")}
    assert {name: found[name] for name in weights} == {name: expected[name] for name in weights}
    told = CliRunner().invoke(ckpt, ["inspect", target])
    assert told.exit_code == 0
    assert "convert" in told.output


MODEL_ROWS = 40


def test_workers_write_the_same_bytes(bucket, place, small):
    """Each process opens the store for itself."""
    source, expected = small
    options = ConvertOptions(max_shard_size=20_000, workers=2)
    convert_checkpoint(source, output(bucket, place), options)
    assert without_manifest(bucket, place) == expected


def test_parts_on_several_machines_are_finalized(bucket, place, small):
    """Without locks: the parts are told so, and the last run collects them."""
    source, expected = small
    notes = Notes()
    for index in range(3):
        share = Share(index, 3)
        convert_checkpoint(source, output(bucket, place), SMALL, share=share, progress=notes)
        assert "config.json" not in bucket.contents(place)
    assert any("no locks in a store" in line for line in notes.lines)
    convert_checkpoint(source, output(bucket, place), SMALL, share=Share(0, 1, finalize=True))
    assert without_manifest(bucket, place) == expected


def test_a_part_that_lacks_is_named_when_the_output_is_to_be_finalized(bucket, place, small):
    """Nothing appears, and the other part can still be written."""
    source, _ = small
    convert_checkpoint(source, output(bucket, place), SMALL, share=Share(0, 2))
    with pytest.raises(OutputError, match="not finished") as error:
        convert_checkpoint(source, output(bucket, place), SMALL, share=Share(0, 1, finalize=True))
    assert "part 2 of 2" in str(error.value)


def counted_parts(monkeypatch):
    """Multipart requests by kind, counted at the client."""
    from s3fs import S3FileSystem

    seen = {}
    call = S3FileSystem.call_s3

    def counted(self, method, *args, **values):
        seen[method] = seen.get(method, 0) + 1
        return call(self, method, *args, **values)

    monkeypatch.setattr(S3FileSystem, "call_s3", counted)
    return seen


def test_a_large_file_is_sent_in_parts(bucket, place, large, monkeypatch):
    """And read back equal; the header of each file is read, not the file."""
    source, expected = large
    monkeypatch.setattr("ckpt.storage.uploads._PART_BYTES", PART_BYTES)
    seen = counted_parts(monkeypatch)
    convert_checkpoint(source, output(bucket, place), ConvertOptions())
    assert seen["create_multipart_upload"] == seen["complete_multipart_upload"] == 1
    assert seen["upload_part"] >= 3
    assert without_manifest(bucket, place) == expected


def test_an_upload_that_fails_is_aborted_on_the_store(bucket, place, large, monkeypatch):
    """No object, no parts that nobody sees, no config.json; the same command then goes on."""
    from s3fs import S3FileSystem

    source, expected = large
    monkeypatch.setattr("ckpt.storage.uploads._PART_BYTES", PART_BYTES)
    call, sent = S3FileSystem.call_s3, []

    def broken(self, method, *args, **values):
        if method == "upload_part":
            sent.append(values["PartNumber"])
            if len(sent) == 2:
                raise PermissionError("Access Denied")
        return call(self, method, *args, **values)

    with monkeypatch.context() as patch:
        patch.setattr(S3FileSystem, "call_s3", broken)
        with pytest.raises(OutputError, match="access denied") as error:
            convert_checkpoint(source, output(bucket, place), ConvertOptions())
    assert error.value.file == f"{bucket.url}/{place}/model.safetensors"
    assert "s3:PutObject" in error.value.hint
    assert bucket.uploads() == []
    left = bucket.contents(place)
    assert all(name.startswith(".ckpt-partial/") for name in left)
    convert_checkpoint(source, output(bucket, place), ConvertOptions())
    assert without_manifest(bucket, place) == expected


KILLED = """
import os, signal, sys
from ckpt.convert import object_stage
from ckpt.storage import uploads
uploads._PART_BYTES = 5 * 2**20
kind, number, written = sys.argv[1], int(sys.argv[2]), []
original = object_stage.ObjectFile.{method}

def counted(self, *values):
    written.append(1)
    if len(written) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *values)

object_stage.ObjectFile.{method} = counted
from ckpt.cli import main
main(sys.argv[3:])
"""


def killed(method, number, *args):
    """The command in a process that kills itself at a chosen call."""
    done = run_python(KILLED.replace("{method}", method), method, str(number), *args)
    assert done.returncode == -9, done.stderr


def test_a_killed_run_keeps_what_has_a_receipt(bucket, place, small):
    """The rerun writes the rest; until then there is no config.json to load."""
    source, expected = small
    target = f"{bucket.url}/{place}"
    killed("commit", 4, "convert", str(source), target, "--max-shard-size", "20000", "--quiet")
    left = bucket.contents(place)
    assert "config.json" not in left
    assert sum(name.endswith(".receipt.json") for name in left) == 3
    notes = Notes()
    convert_checkpoint(source, output(bucket, place), SMALL, progress=notes)
    assert any(line.startswith("note: kept 3 of") for line in notes.lines)
    assert without_manifest(bucket, place) == expected


def test_what_a_killed_upload_left_is_aborted_by_the_next_run(bucket, place, large):
    """Parts of an upload that nobody ends cost money and are seen by nobody."""
    source, expected = large
    killed("write", 3, "convert", str(source), f"{bucket.url}/{place}", "--quiet")
    assert bucket.uploads() == [f"{place}/model.safetensors"]
    convert_checkpoint(source, output(bucket, place), ConvertOptions())
    assert without_manifest(bucket, place) == expected


def test_an_unfinished_output_of_other_options_starts_afresh(bucket, place, small):
    """Saying why; files of both never meet."""
    source, _ = small
    target = f"{bucket.url}/{place}"
    killed("commit", 4, "convert", str(source), target, "--max-shard-size", "20000", "--quiet")
    notes = Notes()
    options = ConvertOptions(max_shard_size=30_000, dtype="bf16")
    convert_checkpoint(source, output(bucket, place), options, progress=notes)
    assert any("starting afresh" in line and "dtype was keep" in line for line in notes.lines)
    found = without_manifest(bucket, place)
    index = json.loads(found["model.safetensors.index.json"])["weight_map"]
    assert {name for name in found if name.endswith(".safetensors")} == set(index.values())
    kinds = {t.dtype for name in set(index.values()) for t in load(found[name]).values()}
    assert [str(kind) for kind in kinds] == ["torch.bfloat16"]


def test_a_finished_file_that_was_written_again_is_not_kept(bucket, place, small):
    """Its receipt is of another state of the object."""
    source, expected = small
    target = f"{bucket.url}/{place}"
    killed("commit", 4, "convert", str(source), target, "--max-shard-size", "20000", "--quiet")
    first = next(name for name in sorted(bucket.contents(place)) if name.startswith("model-"))
    content = bucket.contents(place)[first]
    bucket.put(f"{place}/{first}", content[:-1] + bytes([content[-1] ^ 1]))
    convert_checkpoint(source, output(bucket, place), SMALL)
    assert without_manifest(bucket, place) == expected


def test_an_output_that_exists_is_not_replaced_unless_asked(bucket, place, small):
    """With --overwrite the older one goes away whole, its config.json first."""
    source, expected = small
    convert_checkpoint(source, output(bucket, place), ConvertOptions(max_shard_size=5_000))
    many = set(bucket.contents(place))
    with pytest.raises(OutputError, match="the output exists") as error:
        convert_checkpoint(source, output(bucket, place), SMALL)
    assert "--overwrite" in error.value.hint
    assert set(bucket.contents(place)) == many
    deleted = []
    with pytest.MonkeyPatch.context() as patch:
        from ckpt.storage.store import Store

        delete = Store.delete
        patch.setattr(Store, "delete", lambda s, key: (deleted.append(key), delete(s, key))[1])
        options = ConvertOptions(max_shard_size=20_000, overwrite=True)
        convert_checkpoint(source, output(bucket, place), options)
    assert deleted[0] == f"weights/{place}/config.json"
    assert without_manifest(bucket, place) == expected


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_run_killed_while_it_replaces_an_older_output_goes_on(bucket, place, small, number):
    """Whatever was removed by then; without --overwrite too, since the older one is gone."""
    source, expected = small
    convert_checkpoint(source, output(bucket, place), ConvertOptions(max_shard_size=5_000))
    program = KILLED.replace("object_stage.ObjectFile.{method}", "Store.delete").replace(
        "from ckpt.storage import uploads", "from ckpt.storage import uploads\n"
        "from ckpt.storage.store import Store",
    )  # fmt: skip
    args = ["convert", str(source), f"{bucket.url}/{place}", "--max-shard-size", "20000"]
    done = run_python(program, "delete", str(number), *args, "--overwrite", "--quiet")
    assert done.returncode == -9, done.stderr
    convert_checkpoint(source, output(bucket, place), SMALL)
    assert without_manifest(bucket, place) == expected


def test_what_ckpt_did_not_write_is_left_alone(bucket, place, small):
    """Even with --overwrite, and nothing is written beside it."""
    source, _ = small
    bucket.put(f"{place}/notes.txt", b"mine")
    for options in (SMALL, ConvertOptions(overwrite=True)):
        with pytest.raises(OutputError, match="the output exists"):
            convert_checkpoint(source, output(bucket, place), options)
    assert bucket.contents(place) == {"notes.txt": b"mine"}


def test_a_strange_object_among_the_output_stops_the_end(bucket, place, small, monkeypatch):
    """It would be published with the model."""
    from ckpt.convert import carry

    source, expected = small
    written = carry._write_beside

    def strange(*values):
        bucket.put(f"{place}/evil.py", b"import os")
        return written(*values)

    with monkeypatch.context() as patch:
        patch.setattr(carry, "_write_beside", strange)
        with pytest.raises(OutputError, match="do not belong here"):
            convert_checkpoint(source, output(bucket, place), SMALL)
    assert "ckpt-manifest.json" not in bucket.contents(place)
    bucket.delete(f"{place}/evil.py")
    convert_checkpoint(source, output(bucket, place), SMALL)
    assert without_manifest(bucket, place) == expected


def test_an_output_inside_the_checkpoint_is_refused(bucket, place, small):
    source, _ = small
    url = bucket.put_directory(source, place)
    (iteration,) = (path.name for path in source.glob("iter_*"))
    with pytest.raises(OutputError, match="inside the checkpoint"):
        convert_checkpoint(to_location(url), to_location(f"{url}/{iteration}/out"), SMALL)


def test_parts_do_not_replace_a_finished_output(bucket, place, small):
    """Each would remove what another has just written."""
    source, _ = small
    convert_checkpoint(source, output(bucket, place), SMALL)
    options = ConvertOptions(max_shard_size=30_000, overwrite=True)
    with pytest.raises(OutputError, match="parts cannot replace"):
        convert_checkpoint(source, output(bucket, place), options, share=Share(0, 2))


def test_a_bucket_that_does_not_exist_is_named_before_anything_is_written(bucket, small):
    source, _ = small
    url = "s3://no-such-bucket-here/out"
    result = CliRunner().invoke(ckpt, ["convert", str(source), url, "--quiet"])
    assert result.exit_code == EXIT_FAILED
    assert f"{url}: " in result.stderr
    assert "no such bucket" in result.stderr


def test_another_store_of_fsspec_takes_an_output_too(small):
    """Its own memory: no parts and no requests, the same bytes."""
    source, expected = small
    target = to_location("memory://models/one")
    convert_checkpoint(source, target, SMALL)
    found = {
        name: (target / name).read_bytes() for name in expected
    }  # fmt: skip
    assert found == expected
    again = to_location("memory://models/one")
    assert sorted(entry.name for entry in again.entries()) == sorted(
        [*expected, "ckpt-manifest.json"]
    )


def test_a_missing_library_is_named_with_the_extra_that_brings_it():
    """Without a traceback, and without a look at the network."""
    program = "import sys\nfor name in ('s3fs', 'gcsfs'): sys.modules[name] = None\n"
    program += "from ckpt.cli import main\nmain(sys.argv[1:])"
    for protocol, extra in (("s3", "s3"), ("gs", "gs")):
        done = run_python(program, "inspect", f"{protocol}://bucket/run")
        assert done.returncode == EXIT_FAILED
        assert f"pip install 'megatron-to-vllm[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:secret@bucket/run", "credentials in it"),
        ("nosuch://bucket/run", "no known kind of store"),
        ("s3://", "not the URL of a directory"),
        ("s3://bucket/run?versionId=3", "not the URL of a directory"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url, message):
    with pytest.raises(OptionsError, match=message) as error:
        to_location(url)
    assert "secret" not in str(error.value)


def test_paths_of_this_machine_never_load_a_store(tmp_path):
    """Nor does a colon in a name make one of them."""
    source = write_legacy(tmp_path / "a:b", MODEL, Ranks())
    program = "import sys\nfrom ckpt.config import ConvertOptions\n"
    program += "from ckpt.convert import convert_checkpoint\nfrom pathlib import Path\n"
    program += "convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), ConvertOptions())\n"
    program += "known = ('ckpt.storage.store', 'ckpt.storage.paths', 's3fs')\n"
    program += "print([name for name in known if name in sys.modules])"
    done = run_python(program, str(source), str(tmp_path / "out"))
    assert done.stdout.strip() == "[]", done.stderr
    assert isinstance(to_location(str(source)), Path)
