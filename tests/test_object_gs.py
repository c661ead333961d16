"""gs:// by gcsfs, against an emulator of Google's store."""

from __future__ import annotations

import builders
import pytest
from object_store import emulator, gs_files
from tiny_megatron import Ranks, TinyModel, write_torch_dist

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import OutputError
from ckpt.inspection import inspect_directory
from ckpt.storage import to_location

pytestmark = [
    pytest.mark.store,
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # gcsfs by aiohttp
]
SMALL = ConvertOptions(max_shard_size=20_000)


@pytest.fixture(scope="module")
def gs(tmp_path_factory):
    """The bucket's URL; the environment points to the emulator."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("gcp_storage_emulator")
    log = tmp_path_factory.mktemp("gs") / "log"
    with emulator(log) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        pytest.importorskip("gcsfs")  # reads the environment when it is imported
        for name in ("gs", "gcs"):
            patch.setitem(fsspec.config.conf, name, {"token": "anon"})
        yield "gs://weights"


def test_from_store_to_store_the_bytes_are_those_of_a_local_conversion(gs, tmp_path):
    """Inspected, converted, and converted again, which is refused."""
    source = write_torch_dist(tmp_path / "run", TinyModel("llama"), Ranks(tp=2))
    convert_checkpoint(source, tmp_path / "out", SMALL)
    run = to_location(f"{gs}/run")
    for file in (file for file in source.rglob("*") if file.is_file()):
        (run / str(file.relative_to(source))).write_bytes(file.read_bytes())
    run = to_location(f"{gs}/run")
    assert inspect_directory(run).as_dict()["format"] == "torch_dist"
    convert_checkpoint(run, to_location(f"{gs}/out"), SMALL)
    expected = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    found = gs_files(f"{gs}/out")
    for each in (expected, found):
        assert each.pop("ckpt-manifest.json")
    assert found == expected
    with pytest.raises(OutputError, match="the output exists"):
        convert_checkpoint(run, to_location(f"{gs}/out"), SMALL)


def test_a_large_file_is_sent_in_parts_and_a_broken_one_leaves_no_object(gs, tmp_path, monkeypatch):
    """An upload that goes on from request to request, and one that is given up.

    The emulator cannot cancel; Google's store forgets what was not finished after a week.
    """
    from gcsfs.core import GCSFile

    model = builders.Model(hidden=480, ffn=1440, vocab=8192)
    source = builders.write_legacy(tmp_path / "run", model, tp=2)
    monkeypatch.setattr("ckpt.storage.uploads._PART_BYTES", 5 * 2**20)
    upload, sent = GCSFile._upload_chunk, []

    def broken(self, final=False):  # noqa: FBT002 - the library's signature
        sent.append(self.path)
        if len(sent) == 3:
            raise PermissionError("denied")
        return upload(self, final=final)

    with monkeypatch.context() as patch:
        patch.setattr(GCSFile, "_upload_chunk", broken)
        with pytest.raises(OutputError, match="access denied"):
            convert_checkpoint(source, to_location(f"{gs}/large"), ConvertOptions())
    assert not [name for name in gs_files(f"{gs}/large") if name.startswith("model")]
    convert_checkpoint(source, to_location(f"{gs}/large"), ConvertOptions())
    convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    content = gs_files(f"{gs}/large")["model.safetensors"]
    assert content == (tmp_path / "out" / "model.safetensors").read_bytes()
