"""Build the calls of `embed`, `rerank` and `score`, and collect embeddings."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.client.request import M, TextOptions, set_fields, set_options
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb

TEXTS_A_CALL: Final = 256
BYTES_A_CALL: Final = 128 * 1024
"""Most texts and characters of one call; a longer list is sent in several calls, a longer text by itself."""
CALLS: Final = 4
"""Concurrent calls for one list, so that the gateway prepares texts while workers compute others."""
TEXTS_S: Final = 600.0
"""Default timeout for a list of texts, in seconds."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of a list of texts, in the order of the texts.

    Attributes:
        vectors: Embeddings as arrays of float32, which `numpy.array` accepts.
        token_counts: Number of tokens of each text.
        truncated: Whether each text was truncated.
        model: Name of the model.
        request_ids: Ids of the calls that the list was sent in.
    """

    vectors: tuple["array[float]", ...]
    token_counts: tuple[int, ...]
    truncated: tuple[bool, ...]
    model: str
    request_ids: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(self.token_counts)


def embed_requests(
    texts: Sequence[str], options: TextOptions, **fields: Any
) -> list[pb.EmbedRequest]:
    """Return the requests for `texts`, in order; each has the given options and `fields`.

    Raises:
        InvalidRequest: A value does not fit its field.
    """
    if isinstance(texts, str):
        raise InvalidRequest.of("texts", "is a single text; send a list of texts")
    parts = _parts(texts)
    return [text_request(pb.EmbedRequest(), options, texts=part, **fields) for part in parts]


def text_request(request: M, options: TextOptions, **fields: Any) -> M:
    """Set options and `fields` of `request`, and return it; raise as `embed_requests`."""
    set_options(request, options, "")
    return set_fields(request, **fields)


def embeddings_of(responses: Sequence[pb.EmbedResponse]) -> Embeddings:
    """Return the embeddings in the responses to all calls for one list."""
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
