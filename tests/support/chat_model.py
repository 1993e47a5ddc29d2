"""The general model as it was downloaded on this machine, for tests that are long; the rest of the suite has none."""

import os
from pathlib import Path
from typing import Final

import pytest

from sluice.settings.model_cache import CHAT_FILE

NAMED: Final = "SLUICE_TEST_MODEL_CACHE"
"""Where `SLUICE_MODEL_CACHE` pointed before tests/conftest.py changed it."""
CACHE: Final = Path(os.environ.get(NAMED) or "~/.cache/sluice/models").expanduser()
needs_chat_model: Final = pytest.mark.skipif(
    not (CACHE / CHAT_FILE).exists(), reason=f"no {CHAT_FILE} in {CACHE}; run scripts/chat_model"
)
