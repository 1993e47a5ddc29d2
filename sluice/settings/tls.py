"""Settings of encryption."""

from pathlib import Path

from sluice.settings.base import Section


class TlsSettings(Section):
    """Encryption; docs/operate/security.md. A folder has the form of cert-manager's Secrets: `tls.crt`, `tls.key`,
    `ca.crt`."""

    embedded: bool = False
    """`sluice up` makes an authority in its state directory, and certificates for all that it starts."""
    mesh: Path | None = None
    """Folder of this process for calls between processes: it shows its certificate there, and accepts those of ca.crt.
    Unset: they are not encrypted."""
    callers: Path | None = None
    """Folder of the gateway's ports for callers; unset: ``mesh``."""
    client_ca: Path | None = None
    """PEM file: callers must show a certificate of one of these authorities. Unset: they need none."""

    @property
    def serving(self) -> Path | None:
        """Folder of the gateway's ports."""
        return self.callers or self.mesh
