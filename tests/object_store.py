"""Servers of object stores on loopback, and what lies in them by their libraries' own words."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAORIGINALKEY00001",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anyone",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
DEADLINE_SECONDS = 60


def free_port() -> int:
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _server(program: str, port: int, path: str, log: Path) -> Iterator[str]:
    """The address of a server that runs in a process of its own and is ended afterwards."""
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-c", ENDS_WITH_PARENT + program, str(port)],
            stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(server, f"{address}{path}", log)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code < 500:
                return
        time.sleep(0.1)
    raise RuntimeError(f"no server: {log.read_text(errors='replace')[-2000:]}")


def moto_server(log: Path) -> contextlib.AbstractContextManager[str]:
    """An S3 server."""
    return _server(MOTO, free_port(), "/moto-api/", log)


# A test run that is killed cannot end its servers: they see its pipe close.
ENDS_WITH_PARENT = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
"""
MOTO = """
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""
EMULATOR = """
import time
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="weights").start()
time.sleep(3600)
"""


@contextlib.contextmanager
def emulator(log: Path) -> Iterator[dict[str, str]]:
    """An emulator of Google's store, with a bucket; the environment that leads there."""
    with _server(EMULATOR, free_port(), "/storage/v1/b", log) as address:
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks by gRPC, which is not emulated
        }


def gs_files(url: str) -> dict[str, bytes]:
    """All objects below a URL, by the library itself."""
    import gcsfs

    files = gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
    start = url.partition("://")[2] + "/"
    return {name[len(start) :]: files.cat_file(name) for name in files.find(start)}


def run_python(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A program of Python in a process of its own, with this package and this environment."""
    root = str(Path(__file__).parent.parent)
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        check=False, capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


@dataclass
class Bucket:
    """One bucket, by the library's own client and not by the code under test."""

    files: Any
    name: str
    address: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put_directory(self, directory: Path, key: str) -> str:
        """Copy all files below a directory; the URL of the copy."""
        for file in sorted(directory.rglob("*")):
            if file.is_file():
                self.put(f"{key}/{file.relative_to(directory).as_posix()}", file.read_bytes())
        return f"{self.url}/{key}"

    def put(self, key: str, content: bytes) -> None:
        self.client("put_object", Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client("delete_object", Key=key)

    def contents(self, key: str = "") -> dict[str, bytes]:
        """All objects below a key, by what follows it."""
        start = f"{key}/" if key else ""
        return {
            name[len(start) :]: self.client("get_object", Key=name, read=True)
            for name in self.keys(start)
        }

    def keys(self, start: str = "") -> list[str]:
        found: list[str] = []
        token: dict[str, Any] = {}
        while True:
            page = self.client("list_objects_v2", Prefix=start, **token)
            found += [item["Key"] for item in page.get("Contents", [])]
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that were neither finished nor aborted."""
        found = self.client("list_multipart_uploads").get("Uploads") or []
        return [item["Key"] for item in found]

    def client(self, method: str, *, read: bool = False, **values):
        answer = self.files.call_s3(method, Bucket=self.name, **values)
        if not read:
            return answer
        import fsspec.asyn

        async def body():
            return await answer["Body"].read()

        return fsspec.asyn.sync(self.files.loop, body)
