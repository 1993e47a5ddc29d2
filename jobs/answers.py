"""Answers by the hash of their input, so that identical inputs are computed once.

They are in a file on disk: memory does not grow with the job. SQLite deletes its name at once, so a
killed process leaves nothing behind. The file caches what JetStream has: whoever takes over the job
fills a new one from the results.
"""

import hashlib
import sqlite3
from typing import Final, Self

from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2 import JobAnswer

_CACHE_KIB: Final = 2048


def temporary_table(columns: str) -> sqlite3.Connection:
    """Open a database with one table, `kept`, whose file is deleted with the connection.

    Threads may use it in turn.
    """
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for pragma in ("temp_store=FILE", "journal_mode=OFF", f"cache_size=-{_CACHE_KIB}"):
        database.execute(f"PRAGMA {pragma}")
    database.execute(f"CREATE TABLE kept ({columns}) WITHOUT ROWID")
    return database


class DedupeCache:
    """Cache of answers by input hash; a context manager that deletes its file."""

    def __init__(self) -> None:
        self._database = temporary_table("hash BLOB PRIMARY KEY, answer BLOB")

    def get(self, input_hash: bytes) -> JobAnswer | None:
        """Return the answer for an input, or None."""
        row = self._database.execute(
            "SELECT answer FROM kept WHERE hash = ?", (input_hash,)
        ).fetchone()
        return None if row is None else JobAnswer.FromString(row[0])

    def put(self, input_hash: bytes, answer: JobAnswer) -> None:
        """Store an answer, unless the input has one."""
        self._database.execute(
            "INSERT OR IGNORE INTO kept VALUES (?, ?)", (input_hash, answer.SerializeToString())
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


def input_hash(request: GenerateRequest | EmbedRequest) -> bytes:
    """Return 16 bytes that identify what is computed, of a request without an idempotency key.

    Empty if the temperature is above 0 and there is no seed: then answers to equal inputs may differ.
    """
    if isinstance(request, GenerateRequest):
        sampling = request.sampling
        if sampling.temperature > 0 and not sampling.HasField("seed"):
            return b""
    # Logs of jobs have the hashes, so they stay the same from release to release.
    kind = b"embed" if isinstance(request, EmbedRequest) else b""
    named = kind + request.SerializeToString(deterministic=True)
    return hashlib.blake2b(named, digest_size=16).digest()
