"""Makes the prompts of a request for a model: tokens, and sampling parameters that fit the model.

A request for an answer has one prompt. A request about texts has one for each text, pair or answer.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from gateway.admission.text_work import TextThreads
from gateway.models.catalog import ServedModel
from gateway.models.speech import chunks_of
from gateway.models.tokenizer import ControlToken, TemplateRefused
from gateway.models.tools import ToolUse, grammar_of
from gateway.safety.output.filter import OutputFilter
from gateway.validation.conversation import Conversation, ValidAudio, function_of, messages_of
from gateway.validation.options import NO_EFFORT
from gateway.validation.requests import ValidRequest, in_vocabulary
from sluice.errors import FieldViolation, InvalidRequest, PromptTooLong
from sluice.internal.v1.task_pb2 import Audio, Sampling, ServerOptions, Values
from sluice.settings.remote import ServerSettings
from sluice.v1.inference_pb2 import EmbedRequest, RerankRequest, ScoreRequest

SERVED_HERE: Final = frozenset({"stop", "max_tokens", "n", "response_format"})
"""Sampling parameters that the gateway itself applies."""
TOP_P_MIN: Final = 1e-6
"""Replaces a top_p of 0, which servers refuse: the most probable token is drawn."""
NEUTRAL: Final[Mapping[str, float]] = {"top_p": 1.0, "repetition_penalty": 1.0}
"""Values of parameters that change nothing, where that is not 0."""
ASKING: Final = frozenset({"seed", "logprobs"})
"""Parameters that change something whatever their value."""

SCORED_VALUES_MAX: Final = 131_072
"""Numbers that a run may answer with: four bytes each, in one message."""
UNDRAWN: Final = Sampling(max_tokens=1, top_p=1.0, repetition_penalty=1.0)
"""The parameters of tasks that draw no token: every task has some."""


@dataclass
class PreparedPrompt:
    """A prompt for one model.

    Attributes:
        model: The model.
        prompt_token_ids: Tokens of the prompt; with audio, what its decoder begins with.
        sampling: Sampling parameters.
        inspect: Returns a filter for an answer; None if answers are not filtered.
        values: The numbers that are wanted instead of an answer.
        truncated: Whether the text was cut to fit the context.
        audio: What the model hears.
        answer_token_ids: Tokens of an answer that is scored.
        chunks: The prompts whose answers together are the answer; the tokens are those of all. Empty for one prompt.
    """

    model: ServedModel
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    inspect: Callable[[], OutputFilter | None] | None
    values: Values | None = None
    truncated: bool = False
    audio: Audio | None = None
    answer_token_ids: Sequence[int] = ()
    chunks: tuple["PreparedPrompt", ...] = ()


def check_length(texts: Sequence[str], models: Sequence[ServedModel]) -> None:
    """Raise PromptTooLong if the characters alone are too many for each of `models`: a quick check before any work."""
    chars = sum(map(len, texts))
    for model in models:
        if math.ceil(chars / model.tokenizer.token_chars_max) < model.context_tokens:
            return
    model = max(models, key=lambda model: model.context_tokens * model.tokenizer.token_chars_max)
    tokens_min = math.ceil(chars / model.tokenizer.token_chars_max)
    raise prompt_too_long(model, f"{chars} characters, at least {tokens_min}", tokens_min)


async def prepare(
    request: ValidRequest,
    conversation: Conversation,
    model: ServedModel,
    inspect: Callable[[], OutputFilter | None] | None,
    threads: TextThreads,
) -> PreparedPrompt:
    """Return the prompt of a conversation for `model`; raise as `encode`, `fit` and `hear`."""
    if request.audio is not None:
        return hear(request, request.audio, conversation.turns[0].content, model, inspect)
    if model.speech is not None:
        raise InvalidRequest.of("model", f"{model.name} takes audio, and no prompts; set audio")
    token_ids = await encode(conversation, model, threads, request.tenant)
    return PreparedPrompt(model, token_ids, fit(request, model, len(token_ids)), inspect)


def hear(
    request: ValidRequest,
    audio: ValidAudio,
    before: str,
    model: ServedModel,
    inspect: Callable[[], OutputFilter | None] | None,
) -> PreparedPrompt:
    """Return the prompt of `audio` for `model`, behind the text `before`; raise as `fit`.

    Raises:
        InvalidRequest: The model takes no audio, or log-probabilities are wanted of chunks.
    """
    speech = model.speech
    if speech is None:
        raise InvalidRequest.of("audio", f"{model.name} takes no audio")
    before_ids = model.tokenizer.bare(f" {before.strip()}") if before.strip() else []
    prompt, opening = speech.begin(audio.language, translate=audio.translate, before=before_ids)
    sampling = fit(request, model, len(prompt))
    # The tokens that say the language are beside those that the caller counts.
    language_tokens = 1 + len(opening) if opening else 0
    room = model.context_tokens - len(prompt)
    sampling.max_tokens = min(sampling.max_tokens + language_tokens, room)
    chunks = [
        PreparedPrompt(
            model, prompt, sampling, None, audio=Audio(pcm=pcm, opening_token_ids=opening)
        )
        for pcm in chunks_of(audio.pcm, speech.chunk_s)
    ]
    if len(chunks) == 1:
        return replace(chunks[0], inspect=inspect)
    if sampling.logprobs:
        raise InvalidRequest.of(
            "sampling.logprobs", f"are there for up to {speech.chunk_s:g} s of audio; cut it"
        )
    whole = Sampling()
    whole.CopyFrom(sampling)
    if not request.sampling.max_tokens:
        whole.max_tokens = len(chunks) * sampling.max_tokens
    return PreparedPrompt(model, prompt * len(chunks), whole, inspect, chunks=tuple(chunks))


async def encode(
    conversation: Conversation, model: ServedModel, threads: TextThreads, tenant: str
) -> list[int]:
    """Return the prompt's tokens, computed in the event loop or in one of `threads`.

    Raises:
        InvalidRequest: The model's chat template does not take the conversation, or there is none.
    """
    work = partial(encode_now, conversation, model)
    return await threads.work_on(conversation.texts, tenant, work)


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
            _cut(model, f"token_answers[{place}].token_ids", len(ids), model.context_tokens, False)
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


def encode_now(conversation: Conversation, model: ServedModel) -> list[int]:
    """Return as `encode` does, in this thread."""
    if conversation.token_ids and conversation.vocabulary == model.name:
        return list(conversation.token_ids)
    tokenizer, alone = model.tokenizer, len(conversation.turns) == 1 and not conversation.tools
    if conversation.raw or (tokenizer.template is None and alone):
        return tokenizer.encode_text(conversation.turns[0].content)
    if tokenizer.template is None:
        raise InvalidRequest.of("chat", f"{model.name} has no chat template; send one prompt")
    form = tokenizer.tool_format
    if conversation.tools and form is None:
        raise InvalidRequest.of(
            "tools", f"the chat template of {model.name} takes no tools that we know"
        )
    says_strict = model.settings.takes_messages
    tools = [function_of(tool, says_strict=says_strict) for tool in conversation.tools]
    try:
        return _encode_chat(conversation, model, tools)
    except TemplateRefused as refused:
        raise InvalidRequest.of(
            "chat.messages", f"the chat template of {model.name} refuses them: {refused}"
        ) from refused


def _encode_chat(
    conversation: Conversation, model: ServedModel, tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the tokens of a conversation in the chat template of `model`; raise as `ModelTokenizer.encode_chat`."""
    tokenizer, turns, variables = model.tokenizer, conversation.turns, conversation.variables
    try:
        return tokenizer.encode_chat(messages_of(turns, tokenizer.tool_format), variables, tools)
    except TemplateRefused:
        arguments = [call.arguments for turn in turns for call in turn.calls]
        if not any(isinstance(argument, str) for argument in arguments):
            raise
    # Some templates name each argument, so they fail on a text.
    wrapped = messages_of(turns, tokenizer.tool_format, wrapped=True)
    return tokenizer.encode_chat(wrapped, variables, tools)


def fit(request: ValidRequest, model: ServedModel, prompt_tokens: int) -> Sampling:
    """Return the complete sampling parameters of `request` for `model`.

    `max_tokens` is cut to what the context has room for: an answer that reaches it ends with FINISH_REASON_LENGTH.

    Raises:
        PromptTooLong: The context has no room for a single token of an answer.
        InvalidRequest: Tokens of the request are not of this model's vocabulary, or the model has no token that ends an
            answer, which a constraint needs.
    """
    context = model.context_tokens
    if prompt_tokens >= context:
        raise prompt_too_long(model, f"{prompt_tokens}", prompt_tokens)
    _check_model(request, model)
    sampling, constraint = request.sampling, request.sampling.WhichOneof("constraint")
    limit = min(model.max_answer_tokens, context - prompt_tokens)
    max_tokens = min(sampling.max_tokens or limit, limit)
    # A request that is repeated at another gateway gets the same answer, whatever became of the first one.
    seed = sampling.seed if sampling.HasField("seed") else request.seed_of_key
    fitted = Sampling(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or TOP_P_MIN,
        top_k=sampling.top_k,
        seed=secrets.randbits(63) if seed is None else seed,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.HasField("logprobs"),
        top_logprobs=sampling.logprobs,
        stop_token_ids=sorted(model.tokenizer.stop_token_ids.union(sampling.stop_token_ids)),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=min(sampling.min_tokens, max_tokens),
        logit_bias=sampling.logit_bias,
    )
    if constraint is not None:
        setattr(fitted, constraint, getattr(sampling, constraint))
    form, tools = model.tokenizer.tool_format, request.tools
    if model.settings.takes_messages:
        fitted.server.CopyFrom(_server_options(request))
    elif form is not None and tools is not None and tools.constrained:
        fitted.grammar = grammar_of(form, tools, model.tokenizer.special_id(form.opening))
    return fitted


def _server_options(request: ValidRequest) -> ServerOptions:
    """Return what the server of a model gets in addition to prompt and sampling parameters."""
    sampling, tools = request.sampling, request.tools
    options = ServerOptions(
        response_format=sampling.response_format,
        reasoning_effort=sampling.reasoning_effort,
        chat_template_kwargs=sampling.chat_template_kwargs,
    )
    if tools is not None:
        options.function, options.call_required = tools.only, tools.required
        options.one_call = not tools.parallel
    return options


def prompt_too_long(model: ServedModel, size: str, tokens: int) -> PromptTooLong:
    """Return the error for a prompt of `tokens` tokens, named `size`, that `model` has no room for."""
    message = (
        f"the prompt has {size} tokens, the context of {model.name} has {model.context_tokens}, answer included; "
        "shorten it"
    )
    return _too_long(model, tokens, message, FieldViolation("input", message))


def _text_too_long(model: ServedModel, field: str, tokens: int, room: int) -> PromptTooLong:
    """Return the error for one text of several that does not fit."""
    context = model.context_tokens
    problem = (
        f"has {tokens} tokens, {model.name} has room for {max(room, 0)} beside {context - room} others in its "
        f"context of {context}; shorten it, or set truncate"
    )
    return _too_long(model, tokens, f"{field}: {problem}", FieldViolation(field, problem))


def _too_long(
    model: ServedModel, tokens: int, message: str, violation: FieldViolation
) -> PromptTooLong:
    limits = {"prompt_tokens": str(tokens), "context_tokens": str(model.context_tokens)}
    return PromptTooLong(message, metadata=limits, violations=[violation])


def _check_model(request: ValidRequest, model: ServedModel) -> None:
    """Raise InvalidRequest for what `validate` cannot check before the model is known."""
    size, sampling = model.tokenizer.vocab_size, request.sampling
    fields = {
        "resume.token_ids": request.resume,
        "sampling.stop_token_ids": sampling.stop_token_ids,
        "sampling.logit_bias": sampling.logit_bias,
    }
    for field, token_ids in fields.items():
        if token_ids and not in_vocabulary(token_ids, size):
            raise InvalidRequest.of(field, f"must be below {size}, the vocabulary of {model.name}")
    if sampling.logit_bias and request.model != model.name:
        raise InvalidRequest.of(
            "sampling.logit_bias",
            f"has token ids of one model: name it in model; {model.name} would answer now",
        )
    if model.settings.server is not None:
        _check_server(request, model.name, model.settings.server)
    elif sampling.reasoning_effort not in ("", NO_EFFORT):
        problem = f'{model.name} takes "{NO_EFFORT}" alone; leave it out'
        raise InvalidRequest.of("sampling.reasoning_effort", problem)
    constraint = sampling.WhichOneof("constraint")
    field = f"sampling.{constraint}" if constraint else ""
    if request.tools is not None and request.tools.constrained:
        field = "tools"
    if field and not model.tokenizer.stop_token_ids:
        raise InvalidRequest.of(field, f"{model.name} has no token that ends an answer")


def _check_server(request: ValidRequest, name: str, server: ServerSettings) -> None:
    """Raise InvalidRequest if the server of a model of `engine: openai` does not take all parameters."""
    served = SERVED_HERE if server.api == "chat" else SERVED_HERE | {"chat_template_kwargs"}
    for field, value in request.sampling.ListFields():
        asks = field.name in ASKING or value != NEUTRAL.get(field.name, 0)
        if asks and field.name not in served and field.name not in server.names:
            raise _not_taken(f"sampling.{field.name}", name, "leave it out")
    if request.tools is not None:
        _check_server_tools(request.tools, name, server)


def _check_server_tools(tools: ToolUse, name: str, server: ServerSettings) -> None:
    """Raise InvalidRequest if the server does not take tools as the request has them."""
    chats, names = server.api == "chat", server.names
    if tools.forced and ("tool_choice" if chats else "grammar") not in names:
        raise _not_taken("tool_choice", name, "let the model choose")
    strict = next((at for at, tool in enumerate(tools.tools) if tool.strict), None)
    if strict is not None and ("strict" if chats else "grammar") not in names:
        raise _not_taken(f"tools[{strict}].strict", name, "leave it out")
    if not chats and tools.schema and "grammar" not in names:
        raise _not_taken("sampling.json_schema", name, "leave it or the tools out")


def _not_taken(field: str, name: str, remedy: str) -> InvalidRequest:
    return InvalidRequest.of(field, f"the server of {name} does not take it; {remedy}")


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
        raise _text_too_long(model, "query", len(query_ids), room + len(query_ids))
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
    model: ServedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    place: int,
    alternatives: int,
) -> PreparedPrompt:
    token_ids = [*prompt, *answer]
    # The first token has no probability without one before it.
    scored = token_ids[max(1, len(prompt)) :]
    if not scored:
        raise InvalidRequest.of(f"answers[{place}]", "is one token, and there is none before it")
    _cut(model, f"answers[{place}]", len(token_ids), model.context_tokens, False)
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


def _cut(model: ServedModel, field: str, tokens: int, room: int, truncate: bool) -> bool:
    """Return whether a text must be cut to fit; raise PromptTooLong if that is not allowed."""
    if tokens > room and not truncate:
        raise _text_too_long(model, field, tokens, room)
    return tokens > room
