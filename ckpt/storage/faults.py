"""What goes wrong with an object store, in words that help; by the libraries' own names.

No text of a library is passed on that may hold a key, a signature or a token.
"""

from __future__ import annotations

import re
from errno import ENOENT
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

_RIGHTS = (
    "These credentials need s3:ListBucket and s3:GetObject here (and s3:PutObject, "
    "s3:AbortMultipartUpload and s3:DeleteObject for an output)"
)
_KEYS = (
    "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for gs:// "
    "GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login. "
    "For a public bucket set FSSPEC_S3_ANON=true"
)
_NETWORK = "Check the network and AWS_ENDPOINT_URL; the same command goes on from where it was"
_BUCKET = "Check its name, and AWS_ENDPOINT_URL for a store that is not Amazon's"
# What is wrong and the next step, by the store's error code or the name of the exception.
_KINDS: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("no such bucket", _BUCKET, frozenset({"NoSuchBucket", "InvalidBucketName"})),
    (
        "the store does not accept the credentials",
        _KEYS,
        frozenset({
            "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
            "TokenRefreshRequired", "RefreshError", "UnauthorizedSSOTokenError",
            "AuthorizationHeaderMalformed", "401",
        }),
    ),
    (
        "no credentials were found",
        _KEYS,
        frozenset({
            "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
            "DefaultCredentialsError", "ProfileNotFound", "TokenRetrievalError",
        }),
    ),
    (
        "access denied",
        _RIGHTS,
        frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "PermissionError",
                   "Forbidden"}),
    ),
    (
        "the store does not answer",
        _NETWORK,
        frozenset({
            "EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError",
            "ReadTimeoutError", "ProxyConnectionError", "SSLError", "HTTPClientError",
            "ClientConnectorError", "ClientConnectorDNSError", "ServerDisconnectedError",
            "ServerTimeoutError", "FSTimeoutError", "TimeoutError", "ConnectionError",
            "ConnectionRefusedError", "ConnectionResetError", "ClientPayloadError",
            "ResponseStreamingError", "IncompleteReadError", "gaierror", "RequestTimeout",
            "InternalError", "ServiceUnavailable", "SlowDown", "500", "503",
        }),
    ),
)  # fmt: skip
_SECRETS = re.compile(
    r"(AKIA|ASIA)\w+|(?i:(signature|credential|token|secret|key|password))\w*[=:]\s*\S+"
)
_SHOWN = 160


def is_missing(error: BaseException) -> bool:
    """Whether it says that an object or a directory is not there, and its bucket is."""
    if "NoSuchBucket" in set(_names(error)):
        return False
    return isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == ENOENT


def explain(
    error: BaseException, url: str, doing: str, kind: type[CkptError] = StoreError
) -> CkptError:
    """The error of ours for one of a library; ``doing`` says what could not be done."""
    names = list(_names(error))
    for message, hint, known in _KINDS:
        code = next((name for name in names if name in known), None)
        if code is not None:
            return kind(f"{doing}: {message} ({code})", file=url, hint=hint)
    text = _SECRETS.sub("...", " ".join(str(error).split()))[:_SHOWN]
    return kind(f"{doing}: {type(error).__name__}: {text}", file=url, hint=_NETWORK)


def _names(error: BaseException | None) -> Iterator[str]:
    """The store's codes, then the exceptions' names, from the outermost to what caused it."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for each in chain:
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            yield str(response.get("Error", {}).get("Code"))
        yield str(getattr(each, "code", ""))
    for each in chain:
        yield from (kind.__name__ for kind in type(each).__mro__)
