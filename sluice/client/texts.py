"""What a client asks about texts, and the embeddings that it gets."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from sluice.client.request import PRIORITIES, PriorityName, Prompt, set_field, set_prompt
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import value_of

TEXTS_A_CALL: Final = 256
BYTES_A_CALL: Final = 128 * 1024
"""A longer list of texts is sent in several calls, each up to about so much."""
CALLS: Final = 4
"""How many of them at a time, so that the gateway prepares texts while workers compute others."""
TEXTS_S: Final = 600.0
"""How long such a list may take, seconds."""


class TextOptions(TypedDict, total=False):
    """What can be set about a call.

    Attributes:
        model: its name; without it the only model of its kind answers.
        priority: "interactive" (default), "standard" or "bulk".
        labels: for policies, as of `generate`.
    """

    model: str
    priority: PriorityName
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of texts, in their order.

    Attributes:
        vectors: float32; `numpy.array` takes them as they are.
        token_counts: of each text.
        truncated: whether each text was cut.
        request_ids: of the calls that a long list was sent in.
    """

    vectors: tuple["array[float]", ...]
    token_counts: tuple[int, ...]
    truncated: tuple[bool, ...]
    model: str
    request_ids: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.token_counts)


def embed_requests(
    texts: Sequence[str],
    options: TextOptions,
    *,
    prompt_name: str,
    dimensions: int,
    normalize: bool | None,
    truncate: bool,
) -> list[pb.EmbedRequest]:
    """The calls for ``texts``, in order.

    Raises:
        InvalidRequest: a value does not fit its field.
    """
    if isinstance(texts, str):
        raise InvalidRequest.of("texts", "is one text; put it into a list")
    requests = []
    for part in _parts(texts):
        request = pb.EmbedRequest(truncate=truncate, normalize=normalize)
        set_field(request, "texts", part)
        set_field(request, "prompt_name", prompt_name)
        set_field(request, "dimensions", dimensions)
        _set_options(request, options)
        requests.append(request)
    return requests


def embeddings_of(responses: Sequence[pb.EmbedResponse]) -> Embeddings:
    """What the calls of one list gave."""
    found = [one for response in responses for one in response.embeddings]
    return Embeddings(
        tuple(array("f", one.values) for one in found),
        tuple(one.token_count for one in found),
        tuple(one.truncated for one in found),
        responses[0].model,
        tuple(response.request_id for response in responses),
    )


def rerank_request(
    query: str, documents: Sequence[str], options: TextOptions, *, top_n: int, truncate: bool
) -> pb.RerankRequest:
    """The message; raises as `embed_requests`."""
    request = pb.RerankRequest(truncate=truncate)
    set_field(request, "query", query)
    set_field(request, "documents", documents)
    set_field(request, "top_n", top_n)
    _set_options(request, options)
    return request


def score_request(
    prompt: Prompt | None, answers: Sequence[str], options: TextOptions, *, raw_prompt: bool
) -> pb.ScoreRequest:
    """The message; raises as `embed_requests`."""
    request = pb.ScoreRequest(raw_prompt=raw_prompt)
    if prompt is not None:
        set_prompt(request, prompt)
    set_field(request, "answers", answers)
    _set_options(request, options)
    return request


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for text in texts:
        if part and (len(part) == TEXTS_A_CALL or size + len(text) > BYTES_A_CALL):
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield part


def _set_options(request: Any, options: TextOptions) -> None:
    priority = options.get("priority", "interactive")
    if priority not in PRIORITIES:
        raise InvalidRequest.of("priority", f"{priority!r} is none of {', '.join(PRIORITIES)}")
    request.priority = value_of(pb.Priority, priority)
    set_field(request, "model", options.get("model", ""))
    set_field(request, "labels", options.get("labels", {}))
