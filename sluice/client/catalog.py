"""What a client can learn about the models without asking one."""

from dataclasses import dataclass

from sluice.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked.

    Attributes:
        context_tokens: tokens that prompt and answer together may have.
        ready: whether a worker that serves it is alive now.
        slots: rows that its workers compute at once.
        running: rows in its workers now.
        queued: tasks that wait for a worker now.
    """

    name: str
    tier: str
    context_tokens: int
    ready: bool
    slots: int
    running: int
    queued: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of a prompt (template included), of the whole context, and the model whose tokenizer counted."""

    token_count: int
    context_tokens: int
    model: str


def models_of(response: pb.ListModelsResponse) -> list[Model]:
    """The models, in the order of the configuration."""
    return [
        Model(m.name, m.tier, m.context_tokens, m.ready, m.slots, m.running, m.queued)
        for m in response.models
    ]


def count_of(response: pb.CountTokensResponse) -> TokenCount:
    """The count."""
    return TokenCount(response.token_count, response.context_tokens, response.model)
