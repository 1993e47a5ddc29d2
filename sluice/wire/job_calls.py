"""What a gateway shows a process of `jobs`: whose jobs a call may see, signed with the key of the mesh.

Keys of lists are here too.

The key itself is not sent: who listens in place of `jobs` while it is down would learn it, and could then call
gateways for every tenant. A signature is good for one tenant's jobs alone.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from sluice.defaults import ALL_TENANTS_METADATA, KEY_METADATA, TENANT_METADATA

SIGNATURE: Final = "sluice-jobs-signature"


def page_key(create_unix_ms: int, name: str) -> str:
    """Return the key of a job or an upload in lists, newest first: also the token of the page that begins behind it."""
    return f"{(1 << 48) - create_unix_ms:015d}-{name}"


def signed(metadata: Mapping[str, str], mesh_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return `metadata`, which names a tenant, with its signature; unchanged without a key."""
    entries = tuple(metadata.items())
    return entries if mesh_key is None else (*entries, (SIGNATURE, _signature(metadata, mesh_key)))


def is_signed(metadata: Mapping[str, str | bytes], mesh_key: str) -> bool:
    """Return whether `metadata` has the signature that belongs to it."""
    signature = str(metadata.get(SIGNATURE, "")).encode()
    return hmac.compare_digest(signature, _signature(metadata, mesh_key).encode())


def _signature(metadata: Mapping[str, str] | Mapping[str, str | bytes], mesh_key: str) -> str:
    named = [str(metadata.get(name, "")) for name in (TENANT_METADATA, ALL_TENANTS_METADATA)]
    if key_id := metadata.get(KEY_METADATA):
        named.append(str(key_id))
    signed = "\n".join(("sluice jobs", *named))
    return hmac.new(mesh_key.encode(), signed.encode(), hashlib.sha256).hexdigest()
