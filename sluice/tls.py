"""Certificates of a process: checked when they are read, and read again when their files change.

A folder holds `tls.crt` (the certificate and what is between it and its authority), `tls.key` and `ca.crt` (authorities
that are accepted), all PEM. gRPC speaks TLS 1.2 or later and asks for HTTP/2 by ALPN by itself.
"""

import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import grpc

from sluice.errors import SettingsError
from sluice.proxies import DIRECT

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Pair:
    """A certificate with its key, PEM."""

    chain: bytes
    key: bytes


def read_pair(folder: Path) -> Pair:
    """Read the certificate of `folder`.

    Raises:
        SettingsError: a file is missing or broken, they do not belong together, or it is not valid now.
    """
    # Imported here: a mesh without encryption does without it.
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain, key = _read(folder / CERTIFICATE), _read(folder / KEY)
    certificate = _certificates(chain, folder / CERTIFICATE)[0]
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{folder / KEY}: is not a PEM key without a password") from error
    if private.public_key() != certificate.public_key():
        raise SettingsError(f"{folder / KEY}: is not the key of {folder / CERTIFICATE}")
    _check_dates(certificate, folder / CERTIFICATE)
    return Pair(chain, key)


def read_authorities(*files: Path) -> bytes:
    """Read the certificates of `files` as one PEM text.

    Raises:
        SettingsError: one is missing, or holds no certificate.
    """
    texts = [_read(file) for file in files]
    for text, file in zip(texts, files, strict=True):
        _certificates(text, file)
    return b"\n".join(texts)


def channel_credentials(folder: Path | None) -> grpc.ChannelCredentials | None:
    """Return credentials for calls to other processes of the mesh; None: no encryption.

    Raises:
        SettingsError: as `read_pair` and `read_authorities`.
    """
    if folder is None:
        return None
    pair = read_pair(folder)
    return grpc.ssl_channel_credentials(
        read_authorities(folder / AUTHORITIES), pair.key, pair.chain
    )


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """Open a channel between processes of a mesh, which uses no HTTP proxy; encrypted with `credentials`."""
    options = (*options, DIRECT)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def server_credentials(folder: Path, client_cas: Sequence[Path] = ()) -> grpc.ServerCredentials:
    """Return credentials of a server. A handshake reads files that have changed; broken ones leave the last good ones.

    Args:
        folder: Folder of the certificate.
        client_cas: Callers must show a certificate of one of these authorities; empty: they are not asked.

    Raises:
        SettingsError: as `read_pair` and `read_authorities`.
    """

    def read() -> grpc.ServerCertificateConfiguration:
        pair = read_pair(folder)
        roots = read_authorities(*client_cas) if client_cas else None
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], roots)

    # gRPC asks at each handshake, on threads of its own. Its types do not know that None is an answer: as they were.
    files = _Files(read, folder / CERTIFICATE, folder / KEY, *client_cas)
    ask: Any = files.changed
    return grpc.dynamic_ssl_server_credentials(files.current, ask, bool(client_cas))


def server_context(folder: Path, client_cas: Sequence[Path], protocol: str) -> ssl.SSLContext:
    """Return the same as `server_credentials` for a server that is not gRPC and speaks `protocol` (ALPN).

    Raises:
        SettingsError: as `read_pair` and `read_authorities`.
    """
    read = partial(_context, folder, client_cas, protocol)
    files = _Files(read, folder / CERTIFICATE, folder / KEY, *client_cas)
    first = files.current

    def at_handshake(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        files.changed()
        connection.context = files.current

    # OpenSSL calls it at every handshake, also of clients that name no server.
    first.sni_callback = at_handshake
    return first


def _context(folder: Path, client_cas: Sequence[Path], protocol: str) -> ssl.SSLContext:
    read_pair(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = (
        0  # two would take a fifth of the time of a handshake, and few clients resume
    )
    context.set_alpn_protocols([protocol])
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    if client_cas:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=read_authorities(*client_cas).decode())
    return context


class ClientContext:
    """The ssl context of a connection that lasts: `refresh` before each new try."""

    def __init__(self, folder: Path) -> None:
        """Read the files; raise SettingsError as `read_pair` and `read_authorities` do."""
        self._folder = folder
        self._files = _Files(self._read, folder / CERTIFICATE, folder / KEY, folder / AUTHORITIES)
        self.context = ssl.create_default_context(cadata=self._files.current)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def refresh(self) -> None:
        """Read changed files; broken ones leave the last good ones in use. Removed authorities stay accepted."""
        authorities = self._files.changed()
        if authorities is not None:
            self.context.load_verify_locations(cadata=authorities)
            self._load()

    def _read(self) -> str:
        """Read the authorities, and check the pair."""
        read_pair(self._folder)
        return read_authorities(self._folder / AUTHORITIES).decode()

    def _load(self) -> None:
        self.context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)


class _Files(Generic[_T]):
    """What is read from files, and again when they are replaced; broken ones leave the last good ones.

    A Secret's files are links that Kubernetes turns to another folder.
    """

    def __init__(self, read: Callable[[], _T], *files: Path) -> None:
        self._read = read
        self._files = files
        self._seen = self._stamps()
        self.current = read()

    def changed(self) -> _T | None:
        """Return the content if it has changed since the last call; None if not, or if it is broken."""
        seen, self._seen = self._seen, self._stamps()
        if seen == self._seen:
            return None
        try:
            self.current = self._read()
        except SettingsError as error:
            logger.error("reading certificates failed, the last ones stay in force: %s", error)
            return None
        logger.info("reloaded certificates of %s", self._files[0].parent)
        return self.current

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for file in self._files:
            with suppress(OSError):
                stat = file.stat()
                stamps.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return stamps


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error


def _certificates(text: bytes, file: Path) -> "list[Certificate]":
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(text)
    except ValueError as error:
        raise SettingsError(f"{file}: holds no PEM certificate") from error


def _check_dates(certificate: "Certificate", file: Path) -> None:
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        raise SettingsError(f"{file}: has expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    if certificate.not_valid_before_utc > now:
        raise SettingsError(
            f"{file}: is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; compare the clocks"
        )
