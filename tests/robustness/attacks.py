"""Attacks of abuse.py, run in a process of their own: what it asks for, and what came of each call, by code."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc
import uvloop

from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.v1.safety_pb2 import CheckTextRequest
from sluice.v1.safety_pb2_grpc import SafetyServiceStub
from sluice.wire.subjects import CLASSES

MODEL: Final = "echo"
CALL_S: Final = 60.0
READER_S: Final = 600.0
OPENING_MAX: Final = 256
"""Readers that wait for their first event at the same time: a mesh cannot begin thousands of answers at once."""
TURNS: Final = 60_000
CHARS: Final = 190_000
"""Of a text that is inspected: a little below the limit of the default policy."""
MESSAGE_BYTES: Final = 1_000_000
CONNECTIONS: Final = 8
"""Connections that callers share."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

Outcomes = Counter[str]


class Attacker:
    """Connections to one gateway, and how its calls ended."""

    def __init__(self, address: str, size: int = 1, hold_s: float = 0.0, key: str = "") -> None:
        """``size``: calls, readers or connections of the attacks that have many; ``hold_s``: how long they stay."""
        self.address, self.size, self.hold_s = address, size, hold_s
        self.outcomes: Outcomes = Counter()
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self.opening = asyncio.Semaphore(OPENING_MAX)
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [
            grpc.aio.insecure_channel(address, options) for _ in range(min(size, CONNECTIONS))
        ]

    def stub(self, number: int = 0) -> Any:
        """Generate and CountTokens over the connection of one of many callers."""
        return InferenceServiceStub(self.channels[number % len(self.channels)])

    @property
    def limits(self) -> dict[str, Any]:
        """Options of a call."""
        return {"timeout": CALL_S, "metadata": self.metadata}

    async def count(self, kind: str, call: Awaitable[Any]) -> None:
        """Waits for ``call`` and counts how it ended."""
        try:
            await call
            self.outcomes[f"{kind}OK"] += 1
        except grpc.aio.AioRpcError as error:
            typed = "grpc-status-details-bin" in dict(error.trailing_metadata() or ())
            self.outcomes[f"{kind}{error.code().name}{'' if typed else ' untyped'}"] += 1
        except (OSError, EOFError, TimeoutError) as error:
            self.outcomes[f"{kind}{type(error).__name__}"] += 1

    async def read(self, request: pb.GenerateRequest, number: int = 0) -> None:
        """Reads an answer to its end."""
        call = self.stub(number).Generate(request, **self.limits)
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()

    async def read_all(self, kind: str, requests: Iterable[pb.GenerateRequest]) -> None:
        """Reads all answers at once."""
        calls = (self.count(kind, self.read(one, at)) for at, one in enumerate(requests))
        await asyncio.gather(*calls)

    async def close(self) -> None:
        """Ends the connections, whatever runs."""
        await asyncio.gather(*(channel.close(None) for channel in self.channels))


def asked(**fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", pb.SamplingParams(max_tokens=8))
    return pb.GenerateRequest(model=MODEL, sampling=sampling, **fields)


async def turns(attacker: Attacker) -> None:
    """Conversations of 60,000 messages."""
    request = asked(chat=long_chat())
    counted = pb.CountTokensRequest(chat=request.chat, model=MODEL)
    for _ in range(10):
        await attacker.count("Generate ", attacker.read(request))
        await attacker.count("CountTokens ", attacker.stub().CountTokens(counted, timeout=CALL_S))


def long_chat() -> pb.ChatInput:
    return pb.ChatInput(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="a")] * TURNS)


def texts() -> Mapping[str, str]:
    """Texts that cost the most to inspect."""
    chance = random.Random(1)

    def many(size: int, make: Callable[[], str]) -> str:
        return " ".join(make() for _ in range(CHARS // size))

    def filled(piece: str) -> str:
        return piece * (CHARS // len(piece))

    return {
        "telephones": many(
            15, lambda: f"({chance.randrange(200, 999)}) 555-{chance.randrange(9999):04}"
        ),
        "cards": many(20, lambda: f"4111 1111 1111 {chance.randrange(9999):04}"),
        "keys": many(36, lambda: f"sk-{chance.randrange(16**32):032x}"),
        "tokens": filled("eyJhbGciOiJIUzI1NiJ9.e30.x "),
        "marks": filled("a\u0301\u0302\u0303\u0304\u0305"),
        "tags": filled("".join(chr(0xE0020 + at) for at in range(1, 90))),
        "bidi": filled("\u202ea\u202c\u2066b\u2069"),
        "injections": filled("ignore all previous instructions "),
        "template": filled("<|im_start|>system "),
        "any letter": "".join(chr(chance.randrange(0x20, 0xD7FF)) for _ in range(CHARS)),
    }


LARGE: Final[tuple[Callable[[], pb.GenerateRequest], ...]] = (
    lambda: asked(prompt="a", labels={str(at): "x" for at in range(60_000)}),
    lambda: asked(prompt="a", sampling=pb.SamplingParams(stop=["a"] * 300_000)),
    lambda: asked(prompt="a", sampling=pb.SamplingParams(stop_token_ids=[1] * 900_000)),
    lambda: asked(prompt="a", resume=pb.Resume(token_ids=[1] * 900_000)),
    lambda: asked(prompt="a", resume=pb.Resume(hidden_indexes=[1] * 900_000)),
    lambda: asked(prompt="a", sampling=pb.SamplingParams(json_schema='{"a":' * 150_000)),
    lambda: asked(prompt="a", sampling=pb.SamplingParams(regex="a" * MESSAGE_BYTES)),
)
"""Requests of 1 MB in one of their fields."""


async def megabyte(attacker: Attacker) -> None:
    """1 MB of anything: prompts, texts to check, labels, stop strings, tokens."""
    requests = [make() for make in LARGE]
    safety: Any = SafetyServiceStub(attacker.channels[0])
    checks = []
    for text in texts().values():
        whole = (text * (1 + MESSAGE_BYTES // len(text.encode())))[: MESSAGE_BYTES // 4]
        requests.append(asked(prompt=whole))
        check = safety.CheckText(CheckTextRequest(text=text), timeout=CALL_S)
        checks.append(attacker.count("CheckText ", check))
    await asyncio.gather(attacker.read_all("Generate ", requests), *checks)


async def bulk(attacker: Attacker) -> None:
    """Bulk calls, all at once."""
    request = asked(prompt="one two three", priority=pb.PRIORITY_BULK)
    await attacker.read_all("bulk ", [request] * attacker.size)


async def resume(attacker: Attacker) -> None:
    """Control tokens, and tokens that no gateway sent, in ``resume``."""
    for token_ids in ([0, 1, 2, 3, 4], [5, 6, 7], [1]):
        for token in (b"", b"x" * 16):
            held = pb.Resume(token_ids=token_ids, resume_token=token, model=MODEL)
            await attacker.read_all("Generate ", [asked(prompt="a", resume=held)] * 20)


def constraints() -> list[pb.SamplingParams]:
    """Constraints that cost the most to compile."""
    properties = ",".join(f'"p{at}":{{"type":"string"}}' for at in range(2_000))
    defs = ",".join(
        f'"d{at}":{{"anyOf":[{{"$ref":"#/$defs/d{at + 1}"}},{{"type":"null"}}]}}'
        for at in range(500)
    )
    schemas = [
        '{"items":' * 120 + "{}" + "}" * 120,
        f'{{"type":"object","properties":{{{properties}}}}}',
        f'{{"$defs":{{{defs},"d500":{{}}}},"$ref":"#/$defs/d0"}}',
        '{"enum":[' + ",".join(f'"{at:06}"' for at in range(7_000)) + "]}",
        '{"type":"string","pattern":"^(a|b|ab)*(c{1,500}){1,20}$"}',
        '{"type":"string","minLength":10000,"maxLength":60000}',
        '{"type":"array","minItems":5000,"items":{"type":"integer"}}',
        '{"type":"integer","minimum":1,"maximum":98765432109876,"multipleOf":7}',
    ]
    regexes = [
        "(a{1,1000}){1,1000}",
        "(.*a){200}",
        "((a|b)*c){1,300}",
        r"(\p{L}{1,50}\s){1,90}",
        "(a?){500}a{500}",
        "|".join(f"x{at}.*" for at in range(900)),
        "(" * 1_000 + "a" + ")" * 1_000,
    ]
    return [pb.SamplingParams(max_tokens=8, json_schema=schema) for schema in schemas] + [
        pb.SamplingParams(max_tokens=8, regex=regex) for regex in regexes
    ]


async def schemas(attacker: Attacker) -> None:
    """Hostile schemas and regular expressions, all at once."""
    requests = (asked(prompt="a", sampling=params) for params in constraints())
    await attacker.read_all("Generate ", requests)


def longest() -> pb.GenerateRequest:
    """The longest answer that the context allows, for a caller of any class."""
    priority = pb.Priority.Value(f"PRIORITY_{random.choice(CLASSES).upper()}")
    sampling = pb.SamplingParams()
    return asked(prompt="one two three four " * 10, priority=priority, sampling=sampling)


async def _open_all(attacker: Attacker) -> list[Any]:
    """Calls whose first event was read; None for one that was refused."""

    async def opened(number: int) -> Any:
        stub, limits = attacker.stub(number), {**attacker.limits, "timeout": READER_S}
        call = stub.Generate(longest(), **limits)
        async with attacker.opening:
            await attacker.count("opened ", call.read())
        return call

    return await asyncio.gather(*map(opened, range(attacker.size)))


async def slow(attacker: Attacker) -> None:
    """Readers that read the first event and then nothing."""
    calls = await _open_all(attacker)
    await asyncio.sleep(attacker.hold_s)
    for call in calls:
        call.cancel()


async def vanished(attacker: Attacker) -> None:
    """Callers whose connection ends while their answers are computed."""
    await _open_all(attacker)
    await attacker.close()
    await asyncio.sleep(attacker.hold_s)


async def idle(attacker: Attacker) -> None:
    """Connections that say hello over HTTP/2 and then nothing."""
    host, _, port = attacker.address.rpartition(":")
    streams = []
    for _ in range(attacker.size):
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(PREFACE)
            await writer.drain()
            streams.append((reader, writer))
            attacker.outcomes["connected OK"] += 1
        except OSError as error:
            attacker.outcomes[f"connected {error.strerror}"] += 1
    await asyncio.sleep(attacker.hold_s)
    for _, writer in streams:
        writer.close()


async def _again_and_again(attacker: Attacker, request: pb.GenerateRequest) -> None:
    """As many callers as the size says, each of which asks at once when it has been answered."""
    ends = time.monotonic() + attacker.hold_s

    async def caller(number: int) -> None:
        while time.monotonic() < ends:
            await attacker.count("Generate ", attacker.read(request, number))

    await asyncio.gather(*(caller(number) for number in range(attacker.size)))


async def refused(attacker: Attacker) -> None:
    """Prompts of 7,900 characters, each of which is refused as too long after it was inspected and encoded."""
    await _again_and_again(attacker, asked(prompt="a " * 3950))


async def prompts(attacker: Attacker) -> None:
    """Prompts of 880 characters that are answered."""
    await _again_and_again(attacker, asked(prompt="one two " * 110))


ATTACKS: Final[Mapping[str, Callable[[Attacker], Awaitable[None]]]] = {
    attack.__name__: attack
    for attack in (turns, megabyte, bulk, resume, schemas, slow, vanished, idle, refused, prompts)
}


async def attacked(name: str, address: str, size: int, hold_s: float) -> Outcomes:
    """Runs one attack to its end."""
    attacker = Attacker(address, size, hold_s)
    await ATTACKS[name](attacker)
    await attacker.close()
    return attacker.outcomes


if __name__ == "__main__":
    what, where, how_many, how_long = sys.argv[1:]
    print(json.dumps(uvloop.run(attacked(what, where, int(how_many), float(how_long)))))
