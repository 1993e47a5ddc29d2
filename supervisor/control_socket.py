"""The socket on which a supervisor takes commands: one JSON object to it, one back."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sluice.errors import SettingsError, SetupError

logger = logging.getLogger(__name__)

_NAME: Final = "control.sock"
_MAX_BYTES: Final = 64 * 1024 * 1024
_READ_S: Final = 10.0

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def listen(root: Path, answer: Answer) -> asyncio.Server:
    """Answer each command in `root` until the server is closed, an error with its kind and text.

    A command goes on when its caller has gone.
    """

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_S):
                command = json.loads(await reader.read())
            try:
                answered = await answer(command)
            except (SettingsError, SetupError) as error:
                answered = {"error": str(error), "in_settings": isinstance(error, SettingsError)}
            except Exception as error:  # who asked would wait
                logger.exception("reload failed")
                name = type(error).__name__
                answered = {"error": f"internal error: {name}; see: sluice logs"}
            writer.write(json.dumps(answered).encode())
            await writer.drain()
        except (TimeoutError, ValueError, ConnectionError):
            return  # not a command, or nobody waits for the answer
        finally:
            writer.close()

    bound = socket.socket(socket.AF_UNIX)
    (root / _NAME).unlink(missing_ok=True)
    with _short(root) as path:
        bound.bind(path)
    (root / _NAME).chmod(0o600)
    return await asyncio.start_unix_server(take, sock=bound, limit=_MAX_BYTES)


def ask(root: Path, command: dict[str, Any], bound_s: float) -> dict[str, Any]:
    """Send a command to the supervisor that runs in `root` and return its answer.

    Raises:
        SetupError: there is none, or it did not answer within `bound_s` seconds, or the command failed with one.
        SettingsError: the command failed with one.
    """
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(bound_s)
        try:
            with _short(root) as path:
                connected.connect(path)
            connected.sendall(json.dumps(command).encode())
            connected.shutdown(socket.SHUT_WR)
            parts = iter(lambda: connected.recv(65536), b"")
            answer: dict[str, Any] = json.loads(b"".join(parts))
        except TimeoutError:
            raise SetupError(
                f"the supervisor did not answer in {bound_s:.0f} s; see: sluice logs"
            ) from None
        except (OSError, ValueError) as error:
            raise SetupError(f"the supervisor in {root} does not answer: {error}") from error
    if "error" in answer:
        raise (SettingsError if answer.get("in_settings") else SetupError)(answer["error"])
    return answer


@contextmanager
def _short(root: Path) -> Iterator[str]:
    """Return a path of the socket that is short enough for the system (107 characters), wherever `root` is."""
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{_NAME}"
    finally:
        os.close(folder)
