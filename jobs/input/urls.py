"""Inputs that the service opens itself: what fsspec opens, below prefixes that the operator lists."""

from collections.abc import Generator, Sequence
from typing import Final
from urllib.parse import unquote, urlsplit

from jobs.download import PIECE_BYTES
from jobs.outbound import Outbound
from sluice.errors import InvalidRequest, SluiceError, TransportUnavailable

FIELD: Final = "spec.input.url"


def check_url(url: str, prefixes: Sequence[str]) -> None:
    """Check that the operator lets a URL be read (`jobs.input_prefixes`).

    A prefix ends at a "/", whether it is written or not: "s3://prompts" does not cover
    "s3://prompts-private".

    Raises:
        InvalidRequest: it may not be read.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequest.of(FIELD, "not a URL; send SCHEME://HOST/PATH") from error
    steps = unquote(parts.path).split("/")
    if not parts.scheme or "::" in url or ".." in steps or "\\" in url or parts.username:
        raise InvalidRequest.of(
            FIELD, "not a plain URL; remove chained file systems, '..' and user names"
        )
    if not any(url.startswith(prefix.rstrip("/") + "/") for prefix in prefixes):
        listed = ", ".join(prefixes) or "none"
        raise InvalidRequest.of(
            FIELD,
            f"not below any prefix that the operator allows (jobs.input_prefixes): {listed};"
            " upload the file instead",
        )


def read_url(url: str, prefixes: Sequence[str], outbound: Outbound) -> Generator[bytes]:
    """Yield the bytes behind a URL in pieces. Blocks.

    http and https go through `Outbound`; other schemes through fsspec, with the credentials and
    endpoints of this process's environment.

    Raises:
        InvalidRequest: it may not be read, is missing, or this process has no access; the message says what to do.
        TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
    """
    check_url(url, prefixes)
    if urlsplit(url).scheme in ("http", "https"):
        yield from outbound.read(url, FIELD)
        return
    try:
        import fsspec

        options = _OPTIONS.get(urlsplit(url).scheme, {})
        files, path = fsspec.url_to_fs(url, **options)
        size, position = files.info(path).get("size"), 0
        with files.open(path, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                position += len(piece)
                yield piece
        if size is not None and position != size:
            message = f"{url}: {position} of {size} bytes came"
            raise TransportUnavailable(message, retry_after_s=1.0)
    except SluiceError:
        raise
    except Exception as error:  # fsspec's drivers raise what their libraries raise
        problem = f"{url}: {type(error).__name__}: {error}"
        if {kind.__name__ for kind in type(error).__mro__} & _PASSING:
            raise TransportUnavailable(problem, retry_after_s=1.0) from error
        hint = (
            "make it readable for the jobs process: the object, its credentials (AWS_ACCESS_KEY_ID, "
            "or a role), and the driver (`pip install 's3fs>=2025.3'` for S3)"
        )
        raise InvalidRequest.of(FIELD, f"{problem}; {hint}") from error


_PASSING: Final = frozenset(
    {
        "ConnectionError",
        "TimeoutError",
        "HTTPClientError",
        "ClientConnectionError",
        "ClientPayloadError",
    }
)
"""Names of errors of Python, botocore and aiohttp for connections that fail or break."""
_OPTIONS: Final[dict[str, dict[str, int]]] = {"s3": {"default_block_size": 8 << 20}}
