"""The rows of requests about texts: an embedding a text, a score a pair, the log-probabilities of an answer."""

from functools import partial
from typing import Final

from gateway.admission.prompts import PreparedPrompt, encode_now, too_long
from gateway.models.catalog import ServedModel
from gateway.validation.conversation import Conversation
from sluice.errors import InvalidRequest
from sluice.internal.v1.task_pb2 import Sampling, Values
from sluice.v1.inference_pb2 import EmbedRequest, RerankRequest, ScoreRequest

UNDRAWN: Final = Sampling(max_tokens=1, top_p=1.0, repetition_penalty=1.0)
"""Nothing is drawn, but every task has one."""


def embed_rows(
    request: EmbedRequest, conversation: Conversation, model: ServedModel
) -> list[PreparedPrompt]:
    """A row for each text.

    Raises:
        PromptTooLong: one does not fit, and must not be cut.
    """
    sentence, tokenizer = model.sentence, model.tokenizer
    assert sentence is not None, "it is an embedding model"
    prompt = sentence.prompts.get(request.prompt_name or sentence.default_prompt, "")
    values = Values(
        dimensions=request.dimensions,
        normalize=request.normalize if request.HasField("normalize") else None,
    )
    room = model.context_tokens - tokenizer.added(1)
    rows = []
    for place, turn in enumerate(conversation.turns):
        token_ids = _tokens(model, prompt + turn.content)
        cut = _cut(model, f"texts[{place}]", len(token_ids), room, request.truncate)
        framed, _ = tokenizer.framed(token_ids[:room])
        rows.append(PreparedPrompt(model, framed, UNDRAWN, None, values, cut))
    return rows


def rerank_rows(
    request: RerankRequest, conversation: Conversation, model: ServedModel
) -> list[PreparedPrompt]:
    """A row for each document, with the query before it; raises as `embed_rows`."""
    tokenizer = model.tokenizer
    query, *documents = (turn.content for turn in conversation.turns)
    asked = _tokens(model, query)
    room = model.context_tokens - tokenizer.added(2) - len(asked)
    if room < 1:
        raise too_long(model.name, "query", len(asked), model.context_tokens)
    rows = []
    for place, document in enumerate(documents):
        token_ids = _tokens(model, document)
        cut = _cut(model, f"documents[{place}]", len(token_ids), room, request.truncate)
        framed, second = tokenizer.framed(asked, token_ids[:room])
        rows.append(PreparedPrompt(model, framed, UNDRAWN, None, Values(second_text=second), cut))
    return rows


def score_rows(
    request: ScoreRequest, conversation: Conversation, model: ServedModel
) -> list[PreparedPrompt]:
    """A row for each answer, with the prompt before it; raises as `embed_rows`, and InvalidRequest."""
    if model.settings.engine != "transformers":
        raise InvalidRequest.of("model", f"{model.name} gives no log-probabilities; name another")
    turns = conversation.turns
    first = len(turns) - len(request.answers)
    asked = Conversation(turns[:first], conversation.raw)
    prompt = encode_now(asked, model) if first else model.tokenizer.lead
    score = partial(_score_row, model, prompt)
    return [score(place, turn.content) for place, turn in enumerate(turns[first:])]


def _score_row(model: ServedModel, prompt: list[int], place: int, answer: str) -> PreparedPrompt:
    token_ids = [*prompt, *model.tokenizer.bare(answer)]
    # Without a token before it the first one has no probability.
    scored = token_ids[max(1, len(prompt)) :]
    if not scored:
        raise InvalidRequest.of(f"answers[{place}]", "is one token, and there is none before it")
    _cut(model, f"answers[{place}]", len(token_ids), model.context_tokens, False)
    return PreparedPrompt(model, token_ids[:-1], UNDRAWN, None, Values(scored_token_ids=scored))


def _tokens(model: ServedModel, text: str) -> list[int]:
    lower = model.sentence is not None and model.sentence.lower_case
    return model.tokenizer.bare(text.lower() if lower else text)


def _cut(model: ServedModel, field: str, tokens: int, room: int, truncate: bool) -> bool:
    """Whether a text must be cut to fit."""
    if tokens > room and not truncate:
        raise too_long(model.name, field, tokens, room)
    return tokens > room
