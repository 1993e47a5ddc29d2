"""What a line of a job's input becomes: an item, or a bad line."""

from dataclasses import dataclass, field

from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest

Request = GenerateRequest | EmbedRequest


@dataclass(slots=True)
class Item:
    """An item of a job, from its line in the input until its outcome is written.

    Attributes:
        custom_id: its name in the job.
        line: its line in the input, or row of a table, from 1.
        request: what is asked of the mesh; the job adds class, labels and idempotency key.
        url: the API in OpenAI's batch format, such as "/v1/chat/completions"; empty in other formats.
        index: its index in the stage.
        position: its position among the items of the attempt, from 0; the index itself in the first
            attempt, later only dead letters are counted.
        input_hash: hash of what is computed; empty if no other item counts as identical.
        document: index of the document that it is a part of, in jobs with stages.
        part: its number among the parts of the document, from 0.
        parts: how many parts the document has.
        earlier_reason: why it was a dead letter before.
        earlier_bytes: length of the line of that dead letter in the output.
        size: bytes of the request.
        tries: how often it was sent and counted.
        refusals: how often in a row the mesh had no capacity for it.
        reserved_tokens: tokens set aside for it while it is in flight.
        followers: later items with the same hash.
    """

    custom_id: str
    line: int
    request: Request
    url: str = ""
    index: int = 0
    position: int = 0
    input_hash: bytes = b""
    document: int = 0
    part: int = 0
    parts: int = 0
    earlier_reason: str = ""
    earlier_bytes: int = 0
    size: int = 0
    tries: int = 0
    refusals: int = 0
    reserved_tokens: float = 0.0
    followers: list["Item"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no item.

    Attributes:
        line: its line in the input, or row of a table, from 1.
        custom_id: its name, if it could be read.
        reason: what is wrong with the line, in one sentence.
        code: the reason of its dead letter, for programs: "BAD_LINE" or "DUPLICATE_ID".
    """

    line: int
    custom_id: str | None
    reason: str
    code: str = "BAD_LINE"
