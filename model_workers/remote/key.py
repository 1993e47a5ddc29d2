"""The API key of a server."""

import os
from pathlib import Path

from model_workers.remote.faults import Retry, ServerFault
from sluice.errors import ModelUnavailable, SettingsError
from sluice.settings.remote import ServerSettings


def read_key(settings: ServerSettings) -> str:
    """Return the key of the server; empty: it needs none, or its variable is not set.

    Raises:
        ServerFault: Its file cannot be read now.
    """
    if settings.api_key_env:
        return os.environ.get(settings.api_key_env, "")
    if not settings.api_key_file:
        return ""
    try:
        return Path(settings.api_key_file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ServerFault(
            f"api_key_file: {error.strerror}", ModelUnavailable, Retry.NEVER
        ) from error


def check_key(model: str, settings: ServerSettings) -> None:
    """Check that a configured key exists; raise SettingsError if it does not."""
    try:
        key = read_key(settings)
    except ServerFault as fault:
        raise SettingsError(f"models: {model}: server.{fault.message}") from fault
    if not key and (settings.api_key_env or settings.api_key_file):
        source = settings.api_key_env or settings.api_key_file
        raise SettingsError(
            f"models: {model}: server: {source} holds no key; set it, or leave it out"
        )
