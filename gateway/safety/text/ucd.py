"""The Unicode character database, typed and pinned to one version; that of `unicodedata` depends on the Python."""

from collections.abc import Callable
from typing import Final

import unicodedata2

UNICODE_VERSION: Final = "18.0.0"
"""The version of the installed tables, held by a test."""

category: Final[Callable[[str], str]] = unicodedata2.category
combining: Final[Callable[[str], int]] = unicodedata2.combining
decimal: Final[Callable[[str], int]] = unicodedata2.decimal
decomposition: Final[Callable[[str], str]] = unicodedata2.decomposition
name: Final[Callable[[str, str], str]] = unicodedata2.name
normalize: Final[Callable[[str, str], str]] = unicodedata2.normalize
