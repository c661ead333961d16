"""Options and fixtures of all tests."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import transformers.modeling_utils  # noqa: F401 - else each conversion starts a process for it


def pytest_addoption(parser):
    parser.addoption(
        "--vllm-python",
        type=Path,
        default=None,
        metavar="PYTHON",
        help="Python that has vLLM; by default the one that `ckpt engine install vllm` made.",
    )
    parser.addoption(
        "--megatron-cache",
        type=Path,
        default=None,
        metavar="DIR",
        help="Keep the checkpoints that megatron-core makes here, and use those that are there.",
    )
    parser.addoption(
        "--corpus",
        type=Path,
        default=None,
        metavar="DIR",
        help="Also convert every recorded case in DIR and compare its logits.",
    )
    parser.addoption(
        "--transformers4",
        type=Path,
        default=None,
        metavar="DIR",
        help="Also compare with the transformers 4 that pip installed with --target DIR.",
    )


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    """No test finds what an earlier run kept, or leaves anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("CKPT_CACHE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def transformers_loaded():
    """Conversions in this process prove themselves here, and start no process for it."""
    import transformers

    assert transformers.PreTrainedModel


def pytest_generate_tests(metafunc):
    if "corpus_case" in metafunc.fixturenames:
        root = metafunc.config.getoption("--corpus")
        cases = sorted(path for path in root.iterdir() if path.is_dir()) if root else []
        metafunc.parametrize("corpus_case", cases, ids=[path.name for path in cases])


def pytest_collection_modifyitems(config, items):
    for option, fixture in (("--corpus", "corpus_case"), ("--transformers4", "transformers4")):
        if config.getoption(option) is None:
            chosen = [item for item in items if fixture not in item.fixturenames]
            config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
            items[:] = chosen


@pytest.fixture(scope="session")
def transformers4(pytestconfig):
    """The directory of the older transformers."""
    return pytestconfig.getoption("--transformers4").resolve()


@pytest.fixture(scope="session")
def megatron_checkpoints(request, tmp_path_factory):
    """``megatron_checkpoints([Layout(...), ...])``: checkpoints that megatron-core wrote.

    Those of the same layout are made once a session. Needs the marker ``megatron``.
    """
    from megatron_checkpoints import write_checkpoints

    root = request.config.getoption("--megatron-cache") or tmp_path_factory.mktemp("megatron")
    return lambda layouts: write_checkpoints(root, list(layouts))


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs of the command line that are cheap to start, and to kill."""
    from faults import Forks

    with Forks(tmp_path_factory.mktemp("forks")) as running:
        yield running


@pytest.fixture(scope="session")
def whole(forks, tmp_path_factory):
    """A checkpoint of some MB and its conversion that nothing disturbed."""
    from faults import convert_undisturbed

    return convert_undisturbed(forks, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where tests' temporary files go; its path is short, as those of sockets must be."""
    place = Path(tempfile.mkdtemp(prefix="ckpt-test-"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def vllm_python(pytestconfig):
    """A Python with a real vLLM; a test that was chosen and lacks one fails."""
    from ckpt.cli import _engines_root
    from ckpt.engines import managed_python

    python = pytestconfig.getoption("--vllm-python") or managed_python(_engines_root(), "vllm")
    if python is None:
        pytest.fail("no vLLM here: give --vllm-python, or run ckpt engine install vllm")
    return python


@pytest.fixture(scope="session")
def store_address(tmp_path_factory):
    """A real S3 server; `make test-store` installs it, and skips nothing."""
    for package in ("moto.server", "s3fs"):
        pytest.importorskip(package)
    from object_store import moto_server

    with moto_server(tmp_path_factory.mktemp("moto") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def store_bucket(store_address):
    """One bucket on it; the environment points there for the rest of the session."""
    from object_store import KEYS, Bucket

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": store_address}.items():
            patch.setenv(name, value)
        import s3fs

        files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        files.call_s3("create_bucket", Bucket="weights")
        yield Bucket(files, "weights", store_address)


@pytest.fixture
def bucket(store_bucket):
    """The bucket; each test writes below a name of its own."""
    return store_bucket
