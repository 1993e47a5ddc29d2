"""OpenAI's client and curl, which know nothing of Sluice, at the suite's mesh."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.interop.tools import Ran, run
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

ROOT: Final = Path(__file__).parents[2]
_COMMAND: Final = re.compile(r"^    (curl -s (?:.*\\\n)*.*)$", re.MULTILINE)


class Ticket(BaseModel):
    topic: Literal["refund", "delivery"]
    urgent: bool


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chats_with_the_client_that_blocks(mesh: RunningMesh) -> None:
    with OpenAI(base_url=f"http://{mesh.http}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="small", messages=asked("Sort ascending: 31, 7, 19"), max_tokens=32
        )
        assert answer.choices[0].message.content == "7, 19, 31"
        turns = [*asked("Sort ascending: 31, 7, 19"), answer.choices[0].message]
        again = client.chat.completions.create(
            model="small", messages=[*turns, *asked("Sort ascending: 5, 2")], max_tokens=32
        )
        assert again.choices[0].message.content
        parsed = client.chat.completions.parse(
            model="small",
            messages=asked("Which label fits this ticket? I never got my lamp."),
            response_format=Ticket,
        )
        assert isinstance(parsed.choices[0].message.parsed, Ticket)


async def test_the_commands_of_the_documents(mesh: RunningMesh, tmp_path: Path) -> None:
    body = {"model": "echo", "messages": asked("a b"), "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    answers, file_id = [], ""
    page = (ROOT / "docs/use/http.md").read_text(encoding="utf-8")
    for command in _COMMAND.findall(page):
        command = command.replace("127.0.0.1:8000", mesh.http)
        command = command.replace("file-upload-...", file_id)
        ran = await bash(command, tmp_path)
        assert ran.code == 0, ran.err
        answers.append(json.loads(ran.out))
        file_id = answers[-1]["id"]
    stored, batch = answers
    assert (stored["object"], batch["object"]) == ("file", "batch")


async def bash(command: str, folder: Path) -> Ran:
    return await run(*shlex.split(command.replace("\\\n", " ")), cwd=folder)
