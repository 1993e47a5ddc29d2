"""What a line of a job's input becomes: an item, or a bad line."""

from dataclasses import dataclass

from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest

Request = GenerateRequest | EmbedRequest


@dataclass(frozen=True, slots=True)
class Item:
    """A line that can be answered.

    Attributes:
        custom_id: its name in the job.
        line: its line in the input, or row of a table, from 1.
        request: what the mesh is asked; model, class, labels and key are added where the job sends it.
        url: of OpenAI's batch format: the API, for example "/v1/chat/completions"; empty in other formats.
    """

    custom_id: str
    line: int
    request: Request
    url: str = ""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no item, and why, in one sentence for people.

    Attributes:
        line: its line in the input, or row of a table, from 1.
        custom_id: its name, when it could be read.
        reason: one sentence that says what is wrong with the line.
        code: the reason of its dead letter, for programs: "BAD_LINE" or "DUPLICATE_ID".
    """

    line: int
    custom_id: str | None
    reason: str
    code: str = "BAD_LINE"
