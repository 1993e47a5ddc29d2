"""Inputs that the service opens itself; S3 by a real server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from jobs.outbound import Outbound, check_url, read_url
from sluice.errors import InvalidRequest, TransportUnavailable
from tests.jobs.conftest import Receiver

LINE = b'{"id": "a", "prompt": "hello"}\n'


@pytest.mark.parametrize(
    "url",
    [
        "s3://other/a",
        "s3://prompts-private/a",
        "s3://prompts",
        "s3://prompts/../other/a",
        "s3://prompts/%2e%2e/other/a",
        "simplecache::s3://prompts/a",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
    ],
)
def test_only_what_the_operator_lists_is_read(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"spec\.input\.url"):
        check_url(url, ["s3://prompts"])
    with pytest.raises(InvalidRequest, match=r"jobs\.input_prefixes|plain URL"):
        check_url(url, [])


def test_below_a_prefix_is_read(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINE)
    check_url("s3://prompts/day/a", ["s3://prompts/"])
    found = read_url(f"file://{tmp_path}/in.jsonl", [f"file://{tmp_path}"], Outbound())
    assert b"".join(found) == LINE
    with pytest.raises(InvalidRequest, match=r"FileNotFoundError.*credentials"):
        list(read_url(f"file://{tmp_path}/none", [f"file://{tmp_path}"], Outbound()))


def test_http_reaches_no_private_address(receiver: Receiver) -> None:
    base = f"http://127.0.0.1:{receiver.port}"
    assert b"".join(read_url(f"{base}/a", [base], Outbound(["127.0.0.1"]))) == b"hello"
    with pytest.raises(InvalidRequest, match="private"):
        list(read_url(f"{base}/a", [base], Outbound()))


class _Broken(MemoryFile):
    def read(self, size: int | None = -1, /) -> bytes:
        raise ConnectionResetError("reset")


@pytest.mark.parametrize(("kind", "said"), [(MemoryFile, "39 of 40 bytes"), (_Broken, "reset")])
def test_object_that_comes_short_is_unavailable(kind: type[MemoryFile], said: str) -> None:
    class Files(MemoryFileSystem):  # type: ignore[misc]
        protocol = "shortmem"
        store: ClassVar[dict[str, Any]] = {
            "shortmem://a/in.jsonl": MemoryFile(None, None, b"x" * 40)
        }

        def _open(self, path: str, *_: Any, **__: Any) -> MemoryFile:
            return kind(self, path, b"x" * 39)

    fsspec.register_implementation("shortmem", Files, clobber=True)
    with pytest.raises(TransportUnavailable, match=said):
        list(read_url("shortmem://a/in.jsonl", ["shortmem://a"], Outbound()))


def test_a_driver_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"nosuch.*driver"):
        list(read_url("nosuch://a/b", ["nosuch://a"], Outbound()))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of a server with the bucket "prompts"; drivers use it."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if "Running on http" in line)
        endpoint = line.split("Running on ")[1].strip()
        for key, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(key, value)
        yield endpoint
    finally:
        server.kill()
        server.communicate()


@pytest.mark.long
@pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="needs s3fs and moto")
def test_an_object_of_s3_is_an_input(s3: str) -> None:
    code = """
import boto3, warnings
from jobs.input import read_items
from jobs.outbound import read_url
s3 = boto3.client("s3")
s3.create_bucket(Bucket="prompts")
lines = b"".join(b'{"id": %d, "prompt": "hello"}\\n' % n for n in range(200_000))
s3.put_object(Bucket="prompts", Key="day/in.jsonl", Body=lines)
items = read_items(read_url("s3://prompts/day/in.jsonl", ["s3://prompts"], Outbound()))
print(sum(1 for _ in items))
try:
    list(read_url("s3://prompts/none", ["s3://prompts"], Outbound()))
except Exception as error:
    print(error)
"""
    run = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.splitlines()[0] == "200000"
    assert "FileNotFoundError" in ran.stdout
    without = {key: value for key, value in os.environ.items() if "AWS_" not in key}
    without |= {"AWS_ENDPOINT_URL": s3, "AWS_EC2_METADATA_DISABLED": "true"}
    code = """
from jobs.outbound import read_url
try:
    list(read_url("s3://prompts/day/in.jsonl", ["s3://prompts"], Outbound()))
except Exception as error:
    print(error)
"""
    run = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=100, check=True, env=without)
    assert "its credentials (AWS_ACCESS_KEY_ID" in ran.stdout
