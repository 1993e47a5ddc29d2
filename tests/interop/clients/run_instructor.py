# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor: objects by tools, by JSON, by schema; a retry with the history that it makes itself; partial objects."""

import sys
from collections.abc import Iterable
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator

seen: list[str] = []


class Ticket(BaseModel, extra="forbid"):
    topic: Literal["refund", "delivery"]
    urgent: bool


class Picky(BaseModel, extra="forbid"):
    topic: Literal["refund", "delivery"]

    @field_validator("topic")
    @classmethod
    def twice(cls, value: str) -> str:
        """Takes the second one."""
        seen.append(value)
        if len(seen) % 2:
            raise ValueError("say it again")
        return value


ASKED: list[Any] = [
    {"role": "system", "content": "Label tickets."},
    {"role": "user", "content": "I never got my lamp."},
]
plain = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
for mode, model in (
    (instructor.Mode.TOOLS, "tools"),
    (instructor.Mode.TOOLS_STRICT, "tools"),
    (instructor.Mode.JSON_SCHEMA, "small"),
    (instructor.Mode.RESPONSES_TOOLS, "tools"),
    (instructor.Mode.TOOLS, "agent"),
    (instructor.Mode.TOOLS_STRICT, "agent"),
    (instructor.Mode.JSON, "agent"),
    (instructor.Mode.JSON_SCHEMA, "agent"),
    (instructor.Mode.RESPONSES_TOOLS, "agent"),
):
    client = instructor.from_openai(plain, mode=mode)
    one = client.create(model=model, messages=ASKED, response_model=Ticket)
    assert isinstance(one, Ticket)
    if mode is instructor.Mode.JSON:
        continue  # Nothing holds the server to a schema.
    # The model's answer goes back, with what was wrong with it.
    picky = client.create(model=model, messages=ASKED, response_model=Picky, max_retries=3)
    assert isinstance(picky, Picky)
    if mode is instructor.Mode.TOOLS:
        parts = client.create_partial(model=model, messages=ASKED, response_model=Ticket)
        assert list(parts)[-1].topic
client = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
many = client.create(model="agent", messages=ASKED[1:], response_model=Iterable[Ticket])
assert all(isinstance(one, Ticket) for one in many)
named = instructor.from_provider("openai/agent", base_url=sys.argv[1], api_key="none")
assert isinstance(named.create(messages=ASKED, response_model=Ticket), Ticket)
