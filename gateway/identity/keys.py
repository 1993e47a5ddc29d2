"""API keys as the bucket has them, and whose call a key makes."""

from collections.abc import Mapping
from hmac import compare_digest

from gateway.identity.caller import Caller
from sluice.errors import Unauthenticated
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings.limits import RateLimits
from sluice.wire.api_keys import digest_of, id_of

_HELP = "; `sluice keys list` shows those of this mesh, `sluice keys create` makes one"


def caller_of_key(text: str, records: Mapping[str, ApiKeyRecord], unix_s: float) -> Caller:
    """Whose call the key ``text`` makes.

    The id finds the record; of the secret only a hash is compared, in a time that does not depend on it. Whether a key
    has been revoked is told to its owner alone.

    Args:
        records: by id.
        unix_s: now, since the Unix epoch.

    Raises:
        Unauthenticated: it is no key of the mesh, or none any more.
    """
    key_id = id_of(text)
    if key_id is None:
        raise Unauthenticated.of(
            "KEY_INVALID", "the API key is not whole: copy all of it, slc_ and what follows"
        )
    record = records.get(key_id)
    if record is None or not compare_digest(record.digest, digest_of(text)):
        raise Unauthenticated.of(
            "KEY_INVALID", f"there is no API key {key_id} with this secret{_HELP}"
        )
    if record.revoke_unix_ms:
        raise Unauthenticated.of("KEY_REVOKED", f"the API key {key_id} was revoked: use another")
    if record.expire_unix_ms and unix_s * 1000 >= record.expire_unix_ms:
        raise Unauthenticated.of("KEY_EXPIRED", f"the API key {key_id} has expired: use another")
    limits = RateLimits(
        requests_per_minute=record.requests_per_minute or None,
        tokens_per_minute=record.tokens_per_minute or None,
    )
    return Caller(record.tenant, frozenset(record.roles), key_id, limits)
