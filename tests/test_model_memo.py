"""Models that transformers built before are taken from disk, and only where nothing changed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import pytest
from builders import Model, hf_config, write_legacy
from click.testing import CliRunner

from ckpt import metamodel, model_memo
from ckpt.cli import _cache_root, main
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion, plan_with_proof
from ckpt.manifest import read_stage
from ckpt.metamodel import ModelBuilder, build_meta_model
from ckpt.model_memo import ModelMemo

MODEL = Model()
CONFIG = {**hf_config(MODEL), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", MODEL, tp=2)


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Packages that have the names and files of the libraries, and can be changed."""
    packages = {}
    for library, files in {
        "torch": ("__init__.py", "version.py"),
        "transformers": (
            "__init__.py", "modeling_utils.py", "integrations/deep/moe.py",
            "models/auto/configuration_auto.py", "models/llama/modeling_llama.py",
            "models/llama/configuration_llama.py", "models/gemma3/modeling_gemma3.py",
            "models/clip/modeling_clip.py", "models/other/modeling_other.py",
        ),
    }.items():  # fmt: skip
        packages[library] = tmp_path / "libraries" / library
        for name in files:
            file = packages[library] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x = 1\n")
    llama = packages["transformers"] / "models" / "llama" / "modeling_llama.py"
    llama.write_text("from ..clip.modeling_clip import x\n")
    monkeypatch.setattr(model_memo, "_package", packages.__getitem__)
    versions = {"torch": "2.9.0", "transformers": "5.1.0"}
    monkeypatch.setattr(model_memo, "version", versions.__getitem__)
    packages["versions"] = versions
    return packages


def kept(root, config=CONFIG):
    """Whether a model of this config.json is found by a process of its own."""
    return ModelMemo(root).load(config) is not None


def keep(root, config=CONFIG):
    ModelMemo(root).save(config, asdict(build_meta_model(CONFIG)))


def memo_of(root):
    (file,) = (root / "models").glob("*.json")
    return file


def test_the_second_conversion_takes_the_model_of_the_first(tmp_path, source, monkeypatch):
    """The same proof is made, nothing is built, and the report says which it was."""
    options = ConvertOptions(cache=tmp_path / "cache")
    convert_checkpoint(source, tmp_path / "first", options)
    monkeypatch.setattr(metamodel, "build_meta_model", lambda _: pytest.fail("it was built"))
    convert_checkpoint(source, tmp_path / "second", options)
    proofs = [read_stage(tmp_path / name, "convert")["proof"] for name in ("first", "second")]
    assert [proof.pop("built") for proof in proofs] == ["now", "memo"]
    assert proofs[0] == proofs[1]
    assert proofs[0]["proved"]


def test_a_model_comes_back_as_it_was_built(tmp_path):
    with ModelBuilder(tmp_path) as builder:
        built = builder.build(CONFIG)
    with ModelBuilder(tmp_path) as builder:
        found = builder.build(CONFIG)
    assert asdict(found) == {**asdict(built), "built": "memo"}
    assert built == build_meta_model(CONFIG)


def test_no_process_is_started_where_the_memo_answers(tmp_path, monkeypatch):
    """Where nothing of these libraries is kept it starts at once, else on the first miss."""
    monkeypatch.setattr(metamodel, "_LOADED", "no.such.module")
    with ModelBuilder(tmp_path) as builder:
        assert builder._child is not None
    keep(tmp_path)
    with ModelBuilder(tmp_path) as builder:
        assert builder.build(CONFIG).built == "memo"
        assert builder._child is None
    monkeypatch.setattr(metamodel, "_PROGRAM", "import sys; sys.exit('it was asked')")
    with ModelBuilder(tmp_path) as builder:
        assert builder._child is None
        assert builder.build({**CONFIG, "hidden_size": 72}).lacks.endswith("it was asked")
        assert builder._child is not None


def test_what_is_not_kept_is_loaded_beside_other_work(tmp_path, monkeypatch):
    """As soon as the content of config.json is known, not when the model is asked for."""
    keep(tmp_path)
    monkeypatch.setattr(metamodel, "_LOADED", "no.such.module")
    with ModelBuilder(tmp_path) as builder:
        builder.expect(CONFIG)
        assert builder._child is None
    with ModelBuilder(tmp_path) as builder:
        builder.expect({**CONFIG, "hidden_size": 72})
        assert builder._child is not None


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("transformers/models/llama/modeling_llama.py", True),
        ("transformers/models/llama/configuration_llama.py", True),
        ("transformers/models/clip/modeling_clip.py", True),
        ("transformers/modeling_utils.py", True),
        ("transformers/integrations/deep/moe.py", True),
        ("transformers/models/auto/configuration_auto.py", True),
        ("torch/version.py", True),
        ("transformers/models/other/modeling_other.py", False),
        ("transformers/models/gemma3/modeling_gemma3.py", False),
    ],
)
def test_a_changed_source_file_of_the_model_is_a_miss(tmp_path, libraries, name, counts):
    """Size or time, of what the model or all models are built from; not of other models."""
    library, _, rest = name.partition("/")
    file = libraries[library] / rest
    for change in ("time", "size"):
        keep(tmp_path / change)
        assert kept(tmp_path / change)
        if change == "time":
            state = file.stat()
            os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        else:
            with file.open("a") as stream:
                stream.write("y = 2\n")
        assert kept(tmp_path / change) is not counts


def test_a_model_whose_sources_lie_elsewhere_depends_on_all(tmp_path, libraries):
    """gemma3_text is a kind of model in the directory gemma3."""
    config = {**CONFIG, "model_type": "gemma3_text"}
    keep(tmp_path, config)
    assert kept(tmp_path, config)
    (libraries["transformers"] / "models/gemma3/modeling_gemma3.py").write_text("x = 12\n")
    assert not kept(tmp_path, config)


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_version_of_a_library_is_a_miss(tmp_path, libraries, library):
    keep(tmp_path)
    assert ModelMemo(tmp_path).knows_libraries()
    libraries["versions"][library] += "1"
    assert not kept(tmp_path)
    assert not ModelMemo(tmp_path).knows_libraries()


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 61}, {"tie_word_embeddings": True}, {"model_type": "mistral"}, {"new": None}],
    ids=str,
)
def test_another_config_is_a_miss(tmp_path, changes):
    keep(tmp_path)
    assert kept(tmp_path, {"dtype": "float16", **dict(reversed(CONFIG.items()))})
    assert not kept(tmp_path, {**CONFIG, **changes})


def test_code_of_ckpt_that_changed_is_a_miss(tmp_path, monkeypatch):
    keep(tmp_path)
    copy = tmp_path / "code" / "model_memo.py"
    copy.parent.mkdir()
    for file in (Path(model_memo.__file__), Path(metamodel.__file__)):
        (copy.parent / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(model_memo, "__file__", str(copy))
    assert kept(tmp_path)
    with (copy.parent / "metamodel.py").open("a") as stream:
        stream.write("# changed\n")
    assert not kept(tmp_path)


def signed(model):
    text = json.dumps(model).encode()
    return sha256(text).hexdigest().encode() + b"\n" + text


BUILT = json.loads(json.dumps(asdict(build_meta_model(CONFIG))))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        signed(BUILT)[:-9],
        signed(BUILT).replace(b"60", b"61"),
        signed([]),
        signed({**BUILT, "stored": {}}),
        signed({**BUILT, "stored": ["a"]}),
        signed({**BUILT, "stored": {"a": [3, -5]}}),
        signed({**BUILT, "stored": {"a": [3, "5"]}}),
        signed({**BUILT, "loaded": {"a": 3}}),
        signed({**BUILT, "tied": [3]}),
        signed({**BUILT, "prefix": None}),
        signed({key: value for key, value in BUILT.items() if key != "ignored"}),
        sha256(b"[" * 99999).hexdigest().encode() + b"\n" + b"[" * 99999,
    ],
    ids=range(14),
)
def test_a_damaged_memo_is_built_anew(tmp_path, content):
    """Cut short, changed, or well signed and not a model: it is replaced, never believed."""
    keep(tmp_path)
    memo_of(tmp_path).write_bytes(content)
    with ModelBuilder(tmp_path) as builder:
        assert builder.build(CONFIG) == build_meta_model(CONFIG)
    assert kept(tmp_path)


def test_keys_that_no_model_has_are_passed_over(tmp_path):
    keep(tmp_path)
    memo_of(tmp_path).write_bytes(signed({**BUILT, "lacks": "all", "built": "now", "other": 3}))
    with ModelBuilder(tmp_path) as builder:
        assert asdict(builder.build(CONFIG)) == {
            **asdict(build_meta_model(CONFIG)),
            "built": "memo",
        }


def test_a_memo_that_others_can_write_is_not_believed(tmp_path):
    """Nor a link, a directory, or a pipe that never ends."""
    keep(tmp_path)
    file = memo_of(tmp_path)
    file.chmod(0o620)
    assert not kept(tmp_path)
    file.chmod(0o600)
    assert kept(tmp_path)
    file.rename(tmp_path / "other")
    file.symlink_to(tmp_path / "other")
    assert not kept(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert not kept(tmp_path)
    file.unlink()
    file.mkdir()
    assert not kept(tmp_path)


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, source):
    """A file where the directory should be stands for a disk that is full or read-only."""
    (tmp_path / "cache").write_text("in the way")
    planned = plan_with_proof(source, ConvertOptions(cache=tmp_path / "cache"))
    assert planned.proof.built == "now"
    assert not planned.proof.lacks


def test_a_read_only_cache_is_read_and_not_written(tmp_path, monkeypatch):
    keep(tmp_path)

    def refuse(*_args, **_options):
        raise PermissionError(30, "Read-only file system")

    for name in ("utime", "replace"):
        monkeypatch.setattr(model_memo.os, name, refuse)
    monkeypatch.setattr(model_memo.tempfile, "mkstemp", refuse)
    assert kept(tmp_path)
    keep(tmp_path, {**CONFIG, "hidden_size": 61})
    assert not kept(tmp_path, {**CONFIG, "hidden_size": 61})


def test_a_class_that_transformers_lacks_is_asked_for_every_time(tmp_path):
    """The next version may have it, and the answer costs nothing to find again."""
    unknown = {**CONFIG, "model_type": "llama9"}
    with ModelBuilder(tmp_path) as builder:
        assert builder.build(unknown).lacks
    assert not kept(tmp_path, unknown)


def test_without_the_libraries_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(model_memo, "find_spec", lambda _: None)
    keep(tmp_path)
    assert not (tmp_path / "models").exists()
    assert not ModelMemo(tmp_path).knows_libraries()


def test_the_oldest_memos_make_room(tmp_path, monkeypatch):
    """Those that were used last stay; files and bytes are bounded."""
    monkeypatch.setattr(model_memo, "KEPT_FILES", 3)
    directory, used = tmp_path / "models", iter(range(1, 99))
    configs = [{**CONFIG, "vocab_size": 100 + number} for number in range(5)]
    for number, config in enumerate(configs):
        known = set(directory.glob("*"))
        keep(tmp_path, config)
        (new,) = set(directory.iterdir()) - known
        os.utime(new, ns=(0, next(used)))
        if number == 0:
            first = new
        if number == 2:
            os.utime(first, ns=(0, next(used)))
    assert [kept(tmp_path, config) for config in configs] == [True, False, False, True, True]
    size = first.stat().st_size
    monkeypatch.setattr(model_memo, "KEPT_BYTES", 2 * size + 9)
    keep(tmp_path, {**CONFIG, "vocab_size": 99})
    assert kept(tmp_path, {**CONFIG, "vocab_size": 99})
    assert len(list(directory.iterdir())) == 2


def test_where_the_cache_is_decides_nothing_of_the_output(tmp_path, source):
    """Neither whether an interrupted run goes on, nor what the manifest holds."""
    plans = [plan_conversion(source, ConvertOptions(cache=at)) for at in (None, tmp_path / "c")]
    assert plans[0].fingerprint == plans[1].fingerprint
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(cache=tmp_path / "c"))
    assert "cache" not in read_stage(tmp_path / "out", "convert")["options"]


def test_the_cache_is_the_users_and_can_be_turned_off(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache_root() == tmp_path / "ckpt"
    monkeypatch.setenv("CKPT_CACHE", "off")
    assert _cache_root() is None
    monkeypatch.delenv("CKPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _cache_root() == tmp_path / "home" / ".cache" / "ckpt"


def test_without_a_home_directory_nothing_is_kept(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert _cache_root() is None


def test_the_command_line_uses_the_cache(tmp_path, source, monkeypatch):
    """--plan, inspect --check and convert share what was built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runner, out = CliRunner(), str(tmp_path / "out")
    command = ["convert", str(source), out]
    first = runner.invoke(main, [*command, "--plan", "--json"])
    assert json.loads(first.stdout)["proof"]["built"] == "now"
    assert kept(tmp_path / "cache" / "ckpt", json.loads(first.stdout)["config"])
    monkeypatch.setattr(metamodel, "build_meta_model", lambda _: pytest.fail("it was built"))
    second = runner.invoke(main, [*command, "--json", "--quiet"])
    assert json.loads(second.stdout.splitlines()[-1])["proof"]["built"] == "memo"
    assert runner.invoke(main, ["inspect", out, "--check"]).exit_code == 0


def test_a_conversion_with_a_memo_loads_no_tensor_library(tmp_path, source):
    """Neither the command itself nor a process of it."""
    import subprocess

    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["convert", str(source), str(tmp_path / "out"), "--quiet"]
    first = CliRunner().invoke(main, [*command, "--plan"], env=environment)
    assert first.exit_code == 0
    program = (
        "import subprocess, sys\nsubprocess.Popen = None\nfrom ckpt.cli import main\n"
        f"sys.argv = ['ckpt', *{command!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
