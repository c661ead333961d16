"""An object that is written in parts and appears when it is whole, and what broken ones leave."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.storage.store import Store

_PART_BYTES = 16 * 2**20
_MOST_PARTS = 9000  # Amazon's limit is 10,000
_S3 = {"s3", "s3a"}


class Upload:
    """A multipart upload of about ``nbytes`` bytes, or one request for few."""

    def __init__(self, store: Store, key: str, nbytes: int) -> None:
        """Nothing is sent yet."""
        self._store, self._key = store, key
        size = max(_PART_BYTES, -(-nbytes // _MOST_PARTS))
        with store.faults(key, "cannot write it", OutputError):
            self._stream: Any = store.files.open(store.name(key), "wb", block_size=size)

    def write(self, content: bytes) -> None:
        """Send what follows; a part goes out when there is enough for one."""
        with self._store.faults(self._key, "cannot write it", OutputError):
            self._stream.write(content)

    def commit(self) -> None:
        """Send the rest; the object is there when this returns."""
        with self._store.faults(self._key, "cannot write it", OutputError):
            self._stream.close()
        self._store.forget_changed(self._key)

    def abort(self) -> None:
        """Leave no object and no parts of one."""
        from fsspec.spec import AbstractBufferedFile  # noqa: PLC0415 - an extra

        stream = self._stream
        if stream.closed:
            return
        buffered = isinstance(stream, AbstractBufferedFile)
        try:
            # What went wrong before is what counts; the next run looks for what is left.
            with suppress(OSError, OutputError), self._store.faults(
                self._key, "cannot give it up", OutputError
            ):  # fmt: skip
                stream.discard()
        finally:
            if buffered:
                stream.closed = True  # else it would be sent when it is collected
            else:  # a store in memory, where an object is there from its first byte on
                stream.close()
                self._store.delete(self._key)


def abort_uploads(store: Store, start: str) -> None:
    """End the multipart uploads, of keys that begin so, that a killed process has left.

    Parts of such cost money and are seen by nobody. Without the right to list them, nothing is
    done: that is what a bucket's own rule for incomplete uploads is for.
    """
    if store.protocol not in _S3:
        return
    bucket, _, prefix = start.partition("/")
    with suppress(OutputError), store.faults(start, "cannot list uploads", OutputError):
        for key, number in list(_uploads(store, bucket, prefix)):
            with suppress(FileNotFoundError):
                store.files.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=number
                )


def _uploads(store: Store, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    more: dict[str, str] = {}
    while True:
        page = store.files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
        for upload in page.get("Uploads") or ():
            yield upload["Key"], upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
