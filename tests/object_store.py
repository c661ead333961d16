"""A real S3 server on loopback (moto), and directories copied into it and out of it."""

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
from typing import Any

import httpx

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
def moto_server(log: Path):
    """The server's address; it runs in a process of its own and is ended afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(server, address, log)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{address}/moto-api/", timeout=5).status_code < 500:
                return
        time.sleep(0.1)
    raise RuntimeError(f"moto did not start: {log.read_text(errors='replace')[-2000:]}")


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
