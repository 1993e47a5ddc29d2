"""Who pays for a call. Without credentials the caller says so itself, in the metadata of the call."""

import re
from collections.abc import Mapping
from typing import Final

from sluice.defaults import TENANT_METADATA
from sluice.errors import InvalidRequest

DEFAULT: Final = "default"

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tenant_of(metadata: Mapping[str, str]) -> str:
    """The tenant that the metadata names, "default" when it names none.

    Raises:
        InvalidRequest: that is no name.
    """
    name = metadata.get(TENANT_METADATA, DEFAULT)
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest.of(
            f"metadata.{TENANT_METADATA}", "must be 1 to 64 letters, digits, '-' and '_'"
        )
    return name
