"""A local authority, and the certificates that it gives to the processes of one mesh.

| file | what |
|---|---|
| `ca.crt`, `ca.key` | the authority |
| `PROCESS/tls.crt`, `tls.key`, `ca.crt` | of one process, in the form of cert-manager's Secrets |

Every file is replaced in one step and can be read by its user alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sluice.errors import SetupError
from sluice.tls import AUTHORITIES, CERTIFICATE, KEY
from sluice.wire.permissions import identity
from supervisor.state import write_atomically

CA_DAYS: Final = 3650
DAYS: Final = 365
RENEW_DAYS: Final = 30
"""`sluice up` renews what is valid for less than this."""
LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_CA_KEY: Final = "ca.key"
_CA_NAME: Final = "Sluice local authority"


@dataclass(frozen=True)
class Issued:
    """A certificate.

    Attributes:
        process: whose it is; "ca": the authority's own.
        names: host names and addresses that it is valid for.
        days_left: until it expires; negative: since.
    """

    process: str
    file: Path
    names: tuple[str, ...]
    expires: datetime
    days_left: int


class Authority:
    """The authority in `folder`; its certificates are valid for `days`."""

    def __init__(self, folder: Path, days: int = DAYS) -> None:
        self.folder, self._days = folder, days

    @property
    def ca(self) -> Path:
        """Its certificate."""
        return self.folder / AUTHORITIES

    def of(self, process: str) -> Path:
        """Return the folder of one process."""
        return self.folder / process

    def ensure(self, processes: Iterable[str], hosts: Sequence[str] = ()) -> list[Path]:
        """Make what is missing, broken, about to expire, or not valid for one of `hosts`; return the new certificates.

        Raises:
            SetupError: a file cannot be written, or the authority's key is gone.
        """
        if not self.ca.exists():
            is_ca = x509.BasicConstraints(ca=True, path_length=0)
            _make(_CA_NAME, self.folder / _CA_KEY, self.ca, CA_DAYS, {is_ca: True})
        names = list(dict.fromkeys((*LOCAL_NAMES, *hosts)))
        stale = [process for process in processes if not self._is_good(process, names)]
        return [self.issue(process, names) for process in stale]

    def issue(self, process: str, names: Sequence[str] = LOCAL_NAMES) -> Path:
        """Issue a new certificate of `process` for `names` and return its file.

        Raises:
            SetupError: a file cannot be written, or the authority's key is gone.
        """
        alternatives: list[x509.GeneralName] = [_general_name(name) for name in names]
        alternatives.append(x509.UniformResourceIdentifier(identity(process)))
        folder = self.of(process)
        extensions = {
            x509.SubjectAlternativeName(alternatives): False,
            x509.BasicConstraints(ca=False, path_length=None): True,
        }
        issuer = _certificate(self.ca).subject, self._load_ca_key()
        _make(process, folder / KEY, folder / CERTIFICATE, self._days, extensions, issuer)
        _write(folder / AUTHORITIES, self.ca.read_bytes())
        return folder / CERTIFICATE

    def issued(self) -> list[Issued]:
        """Return all certificates, the authority's first.

        Raises:
            SetupError: there are none, or one cannot be read.
        """
        if not self.ca.exists():
            raise SetupError(f"{self.folder}: there is no authority; run: sluice certs create")
        files = sorted(self.folder.glob(f"*/{CERTIFICATE}"))
        return [_issued("ca", self.ca), *(_issued(file.parent.name, file) for file in files)]

    def renew(self, processes: Iterable[str]) -> list[Path]:
        """Issue new certificates of `processes`, of all if it is empty, for the same names; return their files.

        Raises:
            SetupError: a process has no certificate, or as `issue` and `issued`.
        """
        by_process = {one.process: one for one in self.issued() if one.file != self.ca}
        process_ids = list(processes) or list(by_process)
        unknown = [process for process in process_ids if process not in by_process]
        if unknown:
            raise SetupError(
                f"there is no certificate of {unknown[0]!r}; known: {', '.join(by_process) or 'none'}"
            )
        return [self.issue(process, by_process[process].names) for process in process_ids]

    def _is_good(self, process: str, names: Sequence[str]) -> bool:
        folder = self.of(process)
        if not all((folder / name).is_file() for name in (CERTIFICATE, KEY, AUTHORITIES)):
            return False
        try:
            issued = _issued(process, folder / CERTIFICATE)
        except SetupError:
            return False
        same = (folder / AUTHORITIES).read_bytes() == self.ca.read_bytes()
        return same and issued.days_left >= RENEW_DAYS and set(names) <= set(issued.names)

    def _load_ca_key(self) -> ec.EllipticCurvePrivateKey:
        file = self.folder / _CA_KEY
        try:
            key = serialization.load_pem_private_key(file.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise SetupError(
                f"{file}: the key of the authority cannot be read; restore it, or remove {self.folder} to begin anew"
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey), "made here"
        return key


def _make(
    name: str,
    key_file: Path,
    file: Path,
    days: int,
    extensions: Mapping[x509.ExtensionType, bool],
    issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None = None,
) -> None:
    """Write a new key, and a certificate of it with `extensions`, by whether they are critical.

    `issuer` has the name and the key that sign; None: its own.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer_name, signing_key = issuer or (subject, key)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer_name, subject, key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    # Clocks may differ a little.
    builder = builder.not_valid_before(now - timedelta(minutes=5))
    builder = builder.not_valid_after(now + timedelta(days=days))
    for extension, is_critical in extensions.items():
        builder = builder.add_extension(extension, is_critical)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(key_file, key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    _write(file, builder.sign(signing_key, SHA256()).public_bytes(pem))


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SetupError(f"{file}: is no PEM certificate") from error


def _issued(process: str, file: Path) -> Issued:
    certificate = _certificate(file)
    names: tuple[str, ...] = ()
    with suppress(x509.ExtensionNotFound):
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        hosts = extension.value.get_values_for_type(x509.DNSName)
        addresses = extension.value.get_values_for_type(x509.IPAddress)
        names = (*hosts, *map(str, addresses))
    expires = certificate.not_valid_after_utc
    return Issued(process, file, names, expires, (expires - datetime.now(UTC)).days)


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, content.decode())
    except OSError as error:
        raise SetupError(f"{file}: cannot be written: {error.strerror}") from error
