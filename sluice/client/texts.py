"""What a client asks about texts, and the embeddings that it gets."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.client.request import M, TextOptions, set_fields, set_options
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb

TEXTS_A_CALL: Final = 256
BYTES_A_CALL: Final = 128 * 1024
"""A longer list of texts is sent in several calls, each up to about so much."""
CALLS: Final = 4
"""How many of them at a time, so that the gateway prepares texts while workers compute others."""
TEXTS_S: Final = 600.0
"""How long such a list may take, seconds."""


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
    texts: Sequence[str], options: TextOptions, **fields: Any
) -> list[pb.EmbedRequest]:
    """Return the calls for `texts`, in order, with these `fields`.

    Raises:
        InvalidRequest: a value does not fit its field.
    """
    if isinstance(texts, str):
        raise InvalidRequest.of("texts", "is one text; put it into a list")
    parts = _parts(texts)
    return [text_request(pb.EmbedRequest(), options, texts=part, **fields) for part in parts]


def text_request(request: M, options: TextOptions, **fields: Any) -> M:
    """Return `request` with these `fields`; raise as `embed_requests` does."""
    set_options(request, options, "")
    return set_fields(request, **fields)


def embeddings_of(responses: Sequence[pb.EmbedResponse]) -> Embeddings:
    """Return the embeddings of all calls for one list."""
    embeddings = [embedding for response in responses for embedding in response.embeddings]
    return Embeddings(
        tuple(array("f", embedding.values) for embedding in embeddings),
        tuple(embedding.token_count for embedding in embeddings),
        tuple(embedding.truncated for embedding in embeddings),
        responses[0].model,
        tuple(response.request_id for response in responses),
    )


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
