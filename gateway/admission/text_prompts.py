"""Makes prompts of texts: those of Embed, Rerank and Score, and the texts of tokens that a caller sends."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from gateway.admission.prompts import encode_now, prompt_too_long, too_long
from gateway.admission.request_context import PreparedPrompt
from gateway.admission.turns import LOOP_COST, TextThreads
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import ControlToken
from gateway.validation.conversation import Conversation
from gateway.validation.requests import in_vocabulary
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.internal.v1.task_pb2 import Sampling, Values
from sluice.v1.inference_pb2 import EmbedRequest, RerankRequest, ScoreRequest

SCORED_VALUES_MAX: Final = 131_072
"""Numbers that a run may answer with: four bytes each, in one message."""
UNDRAWN: Final = Sampling(max_tokens=1, top_p=1.0, repetition_penalty=1.0)
"""The parameters of tasks that draw no token: every task has some."""


async def decode(
    conversation: Conversation, model: ServedModel, threads: TextThreads, tenant: str
) -> Conversation:
    """Return the conversation with the texts of the tokens that the caller sent; raise as `decode_now`."""
    if conversation.sent_tokens > LOOP_COST:
        return await threads.run(tenant, partial(decode_now, conversation, model))
    return decode_now(conversation, model)


def decode_now(conversation: Conversation, model: ServedModel) -> Conversation:
    """Return the conversation with the texts of the tokens in it, which are those of `model`.

    Raises:
        InvalidRequest: They are no tokens of text, or the model takes text alone.
        PromptTooLong: They are more than the context has room for.
    """
    turns, answers = conversation.turns, conversation.answers
    if token_ids := conversation.token_ids:
        if len(token_ids) >= model.context_tokens:
            raise prompt_too_long(model, f"{len(token_ids)}", len(token_ids))
        turns = (replace(turns[0], content=_text_of(model, token_ids, "tokens.token_ids")),)
    if sent := conversation.answer_token_ids:
        for place, ids in enumerate(sent):
            _cut(model, f"token_answers[{place}].token_ids", len(ids), model.context_tokens)
        answers = tuple(
            _text_of(model, ids, f"token_answers[{place}].token_ids")
            for place, ids in enumerate(sent)
        )
    return replace(conversation, turns=turns, answers=answers)


def _text_of(model: ServedModel, token_ids: Sequence[int], field: str) -> str:
    tokenizer = model.tokenizer
    if model.settings.takes_messages or tokenizer.pieces is not None:
        raise InvalidRequest.of(field, f"{model.name} takes text alone; send the text")
    if not in_vocabulary(token_ids, tokenizer.tokenizer.get_vocab_size()):
        size = tokenizer.tokenizer.get_vocab_size()
        raise InvalidRequest.of(field, f"must be below {size}, the vocabulary of {model.name}")
    try:
        return tokenizer.decode(token_ids)
    except ControlToken as error:
        text, token_id = error.args
        raise InvalidRequest.of(
            field, f"has the special token {token_id} ({text}); send tokens of text alone"
        ) from None


def embed_prompts(
    request: EmbedRequest, conversation: Conversation, model: ServedModel
) -> list[PreparedPrompt]:
    """Return a prompt for each text.

    Raises:
        PromptTooLong: A text does not fit, and must not be cut.
    """
    sentence, tokenizer = model.sentence, model.tokenizer
    assert sentence is not None, "it is an embedding model"
    prompt = sentence.prompts.get(request.prompt_name or sentence.default_prompt, "")
    values = Values(
        dimensions=request.dimensions,
        normalize=request.normalize if request.HasField("normalize") else None,
    )
    room = model.context_tokens - tokenizer.added(1)
    prompts = []
    for place, text in enumerate(conversation.documents):
        token_ids = _tokens(model, prompt + text)
        cut = _cut(model, f"texts[{place}]", len(token_ids), room, request.truncate)
        framed, _ = tokenizer.framed(token_ids[:room])
        prompts.append(PreparedPrompt(model, framed, UNDRAWN, None, values, cut))
    return prompts


def rerank_prompts(
    request: RerankRequest, conversation: Conversation, model: ServedModel
) -> list[PreparedPrompt]:
    """Return a prompt for each document, with the query before it; raise as `embed_prompts`."""
    tokenizer = model.tokenizer
    query_ids = _tokens(model, conversation.query)
    room = model.context_tokens - tokenizer.added(2) - len(query_ids)
    if room < 1:
        raise _text_too_long(model, "query", len(query_ids), room + len(query_ids), "shorten it")
    prompts = []
    for place, document in enumerate(conversation.documents):
        token_ids = _tokens(model, document)
        cut = _cut(model, f"documents[{place}]", len(token_ids), room, request.truncate)
        framed, second = tokenizer.framed(query_ids, token_ids[:room])
        prompts.append(
            PreparedPrompt(model, framed, UNDRAWN, None, Values(second_text=second), cut)
        )
    return prompts


def score_prompts(
    request: ScoreRequest, conversation: Conversation, model: ServedModel
) -> list[PreparedPrompt]:
    """Return a prompt for each answer, with the prompt before it; raise as `embed_prompts`, and InvalidRequest."""
    if model.settings.engine != "transformers":
        raise InvalidRequest.of("model", f"{model.name} gives no log-probabilities; name another")
    own = conversation.vocabulary == model.name and conversation.answer_token_ids
    prompt = encode_now(conversation, model) if conversation.turns else None
    prompts = []
    for place, answer in enumerate(conversation.answers):
        sent = own[place] if own else ()
        # A caller that sends tokens decides what they begin with.
        before = prompt if prompt is not None else [] if sent else model.tokenizer.lead
        token_ids = sent or model.tokenizer.bare(answer)
        prompts.append(_score_prompt(model, before, token_ids, place, request.alternatives))
    return prompts


def _score_prompt(
    model: ServedModel, prompt: Sequence[int], answer: Sequence[int], place: int, alternatives: int
) -> PreparedPrompt:
    token_ids = [*prompt, *answer]
    # The first token has no probability without one before it.
    scored = token_ids[max(1, len(prompt)) :]
    if not scored:
        raise InvalidRequest.of(f"answers[{place}]", "is one token, and there is none before it")
    _cut(model, f"answers[{place}]", len(answer), model.context_tokens - len(prompt))
    if len(scored) * (1 + 2 * alternatives) > SCORED_VALUES_MAX:
        raise InvalidRequest.of(
            "alternatives",
            f"are too many for {len(scored)} tokens; ask for fewer, or send shorter texts",
        )
    values = Values(scored_token_ids=scored, scored_alternatives=alternatives)
    return PreparedPrompt(
        model, token_ids[:-1], UNDRAWN, None, values, answer_token_ids=tuple(answer)
    )


def _tokens(model: ServedModel, text: str) -> list[int]:
    lower = model.sentence is not None and model.sentence.lower_case
    return model.tokenizer.bare(text.lower() if lower else text)


def _cut(
    model: ServedModel, field: str, tokens: int, room: int, truncate: bool | None = None
) -> bool:
    """Return whether a text must be cut to fit; raise PromptTooLong if that is not allowed.

    `truncate` is the caller's choice; None where the method has none.
    """
    if tokens > room and not truncate:
        remedy = "shorten it" if truncate is None else "shorten it, or set truncate"
        raise _text_too_long(model, field, tokens, room, remedy)
    return tokens > room


def _text_too_long(
    model: ServedModel, field: str, tokens: int, room: int, remedy: str
) -> PromptTooLong:
    """Return the error for one text of several that does not fit."""
    context = model.context_tokens
    problem = (
        f"has {tokens} tokens, {model.name} has room for {max(room, 0)} beside {context - room} others in its "
        f"context of {context}; {remedy}"
    )
    return too_long(model, tokens, field, problem)
