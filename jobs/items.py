"""What a line of a job's input becomes."""

from dataclasses import dataclass, field
from typing import Final

from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2 import JobItemError, JobResult

REASON_CHARS_MAX: Final = 1000
"""Longest reason of a bad line, which may quote a field that is as long as the line."""

Request = GenerateRequest | EmbedRequest


@dataclass(slots=True)
class Item:
    """An item of a job, from its line in the input until its outcome is written.

    Attributes:
        custom_id: its name in the job; empty if a bad line has none.
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
        outcome: is set if nothing has to be computed: of a bad line, or of a document that an earlier stage
            has finished.
        carried: whether an earlier stage has counted what it took.
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
    outcome: JobResult | None = None
    carried: bool = False

    def fail(self, reason: str, message: str, code: int = 3) -> None:
        """Make it a dead letter, with a reason for programs and one sentence for people."""
        error = JobItemError(code=code, reason=reason, message=message[:REASON_CHARS_MAX])
        self.outcome = JobResult(error=error)


def bad_line(line: int, custom_id: str, message: str, reason: str = "BAD_LINE") -> Item:
    """Return a line that is no item."""
    item = Item(custom_id, line, GenerateRequest())
    item.fail(reason, message)
    return item
