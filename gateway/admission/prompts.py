"""Makes the prompts of a request: tokens and sampling parameters for the model that it is routed to.

Prompt and answer together must fit into a model's context. How many tokens a prompt has is known only once a model's
tokenizer has encoded it. Until then its characters give a lower bound (`ContextFit`), so a model that may fit is tried,
and the request is routed again if it does not. `gateway.admission.text_prompts` makes the prompts of Embed, Rerank and
Score.
"""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from gateway.admission.overload import OverloadControl
from gateway.admission.request_context import OpenFilter, PreparedPrompt, RequestContext
from gateway.admission.turns import TextThreads
from gateway.models.catalog import ServedModel
from gateway.models.speech import chunks_of
from gateway.models.tokenizer import TemplateRefused
from gateway.models.tools import grammar_of
from gateway.routing.router import Plan
from gateway.validation.conversation import Conversation, messages_of
from gateway.validation.options import NO_EFFORT, check_server, function_of
from gateway.validation.requests import ValidRequest, in_vocabulary
from gateway.validation.speech import ValidAudio
from sluice.errors import FieldViolation, InvalidRequest, PromptTooLong
from sluice.internal.v1.task_pb2 import Audio, Sampling, ServerOptions
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY

MIN_ANSWER_TOKENS: Final = 16
"""Room for an answer whose length the caller does not limit, in tokens: fewer are rarely an answer."""
TOP_P_MIN: Final = 1e-6
"""Replaces a top_p of 0, which servers refuse: the most probable token is drawn."""


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
    context: RequestContext, request: ValidRequest, model: ServedModel, threads: TextThreads
) -> PreparedPrompt:
    """Return the prompt of `request`, that of `context` or one like it, for `model`.

    Raises as `encode`, `fit` and `prepare_audio`.
    """
    conversation, inspect = context.conversation, context.open_filter
    if request.audio is not None:
        return prepare_audio(request, request.audio, conversation.turns[0].content, model, inspect)
    if model.tokenizer.speech is not None:
        raise InvalidRequest.of("model", f"{model.name} takes audio, and no prompts; set audio")
    work = partial(encode_now, conversation, model)
    token_ids = await threads.work_on(conversation.texts, request.tenant, work)
    return PreparedPrompt(model, token_ids, fit(request, model, len(token_ids)), inspect)


def prepare_audio(
    request: ValidRequest,
    audio: ValidAudio,
    before: str,
    model: ServedModel,
    inspect: OpenFilter,
) -> PreparedPrompt:
    """Return the prompt of `audio` for `model`, behind the text `before`; raise as `fit`.

    Raises:
        InvalidRequest: The model takes no audio, or log-probabilities are wanted of chunks.
    """
    speech = model.tokenizer.speech
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


def encode_now(conversation: Conversation, model: ServedModel) -> list[int]:
    """Return as `encode` does, in this thread."""
    if conversation.token_ids and conversation.vocabulary == model.name:
        return list(conversation.token_ids)
    tokenizer, turns, tools = model.tokenizer, conversation.turns, conversation.tools
    alone = len(turns) == 1 and not tools
    if conversation.raw or (tokenizer.template is None and alone):
        return tokenizer.encode_text(turns[0].content)
    if tokenizer.template is None:
        raise InvalidRequest.of("chat", f"{model.name} has no chat template; send one prompt")
    form = tokenizer.tool_format
    if tools and form is None:
        raise InvalidRequest.of(
            "tools", f"the chat template of {model.name} takes no tools that we know"
        )
    functions = [function_of(tool, with_strict=model.settings.takes_messages) for tool in tools]
    arguments = [call.arguments for turn in turns for call in turn.calls]
    wrapped = False
    while True:
        messages = messages_of(turns, form, wrapped=wrapped)
        try:
            return tokenizer.encode_chat(messages, conversation.variables, functions)
        except TemplateRefused as refused:
            # Some templates name each argument, so they fail on a text: try once more with texts in an object.
            if wrapped or not any(isinstance(argument, str) for argument in arguments):
                raise InvalidRequest.of(
                    "chat.messages", f"the chat template of {model.name} refuses them: {refused}"
                ) from refused
            wrapped = True


def fit(request: ValidRequest, model: ServedModel, prompt_tokens: int) -> Sampling:
    """Return the complete sampling parameters of `request` for `model`.

    `max_tokens` is cut to what the model and its context allow: an answer that reaches it ends with
    FINISH_REASON_LENGTH.

    Raises:
        PromptTooLong: The context has no room for a single token of an answer.
        InvalidRequest: This model cannot take a field of the request, such as a token id, a constraint or an option.
    """
    context = model.context_tokens
    if prompt_tokens >= context:
        raise prompt_too_long(model, f"{prompt_tokens}", prompt_tokens)
    _check_model(request, model)
    sampling, constraint = request.sampling, request.sampling.WhichOneof("constraint")
    limit = min(model.max_answer_tokens, context - prompt_tokens)
    max_tokens = min(sampling.max_tokens or limit, limit)
    if sampling.HasField("seed"):
        seed = sampling.seed
    elif request.key:
        # A request that is repeated at another gateway gets the same answer, whatever became of the first one.
        seed = request.seed_of_key
    else:
        seed = secrets.randbits(63)
    fitted = Sampling(
        max_tokens=max_tokens,
        top_p=sampling.top_p or TOP_P_MIN,
        seed=seed,
        logprobs=sampling.HasField("logprobs"),
        top_logprobs=sampling.logprobs,
        stop_token_ids=sorted(model.tokenizer.stop_token_ids.union(sampling.stop_token_ids)),
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
    )
    if constraint is not None:
        setattr(fitted, constraint, getattr(sampling, constraint))
    form, tools = model.tokenizer.tool_format, request.tools
    if model.settings.server is not None and model.settings.takes_messages:
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
    problem = (
        f"the prompt has {size} tokens, the context of {model.name} has {model.context_tokens}, answer included; "
        "shorten it"
    )
    return too_long(model, tokens, "input", problem)


def too_long(model: ServedModel, tokens: int, field: str, problem: str) -> PromptTooLong:
    """Return the error for `tokens` in a field that `model` has no room for."""
    limits = {"prompt_tokens": str(tokens), "context_tokens": str(model.context_tokens)}
    message = problem if field == "input" else f"{field}: {problem}"
    return PromptTooLong(message, metadata=limits, violations=[FieldViolation(field, problem)])


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
        check_server(sampling, request.tools, model.name, model.settings.server)
    elif sampling.reasoning_effort not in ("", NO_EFFORT):
        problem = f'{model.name} takes "{NO_EFFORT}" alone; leave it out'
        raise InvalidRequest.of("sampling.reasoning_effort", problem)
    constraint = sampling.WhichOneof("constraint")
    field = f"sampling.{constraint}" if constraint else ""
    if request.tools is not None and request.tools.constrained:
        field = "tools"
    if field and not model.tokenizer.stop_token_ids:
        raise InvalidRequest.of(field, f"{model.name} has no token that ends an answer")


class ContextFit:
    """What is known of the room that each model has for one request.

    Attributes:
        tokens: Length of the prompt in tokens, by the models that have encoded it.
    """

    def __init__(self, context: RequestContext) -> None:
        """Know nothing but the size of the texts. Guard models never fit, unless routing names them."""
        routing = context.policies.settings.routing
        guards = {guard.settings.model for guard in context.safety.guards}
        guards -= {name for _, name in routing.all_models()} if guards else set()
        self._catalog, self._excluded = context.policies.catalog, guards
        self._chars = sum(map(len, context.conversation.texts))
        self._max_tokens = context.max_tokens
        self.tokens: dict[str, int] = {}
        self._roomiest = ""
        """The model that answers although it has less room than wanted, because no other has more."""

    def fits(self, model: str) -> bool:
        """Return whether `model` may have room for the prompt and the answer that is wanted."""
        if model not in self._catalog.reading or model in self._excluded:
            return False
        tokens = min(self._max_tokens or MIN_ANSWER_TOKENS, self._catalog[model].max_answer_tokens)
        return self._room(model) >= (1 if model == self._roomiest else tokens)

    def relax(self) -> None:
        """Accept a shorter answer, of the model with the most room, when no model has room for the one wanted.

        Raises:
            PromptTooLong: No model has room for a single token of an answer; names the largest context.
        """
        candidates = [name for name in self._catalog.reading if name not in self._excluded]
        self._roomiest = max(candidates, key=self._room)
        if self._room(self._roomiest) < 1:
            name = max(candidates, key=lambda name: self._catalog[name].context_tokens)
            tokens = self._catalog[name].context_tokens - self._room(name)
            size = f"{tokens}" if name in self.tokens else f"at least {tokens}"
            raise prompt_too_long(self._catalog[name], size, tokens)

    def _room(self, name: str) -> int:
        """Return the most tokens that an answer of a model may have."""
        model, tokens = self._catalog[name], self.tokens.get(name)
        if tokens is None:
            tokens = math.ceil(self._chars / model.tokenizer.token_chars_max)
        return model.context_tokens - tokens


class Preparation:
    """Prepares prompts.

    Attributes:
        threads: Threads in which long texts become tokens.
    """

    def __init__(self, overload: OverloadControl, threads: TextThreads) -> None:
        """Ask `overload` whether the version of a model is served."""
        self._overload = overload
        self.threads = threads

    async def prepare_all(self, context: RequestContext, contexts: ContextFit | None) -> bool:
        """Set the prompts of a routed request; that of a cascade's second model too, so that no escalation waits.

        Args:
            context: The request.
            contexts: What is known of the room in the contexts of models; None for texts and audio.

        Returns:
            False if the model that the gateway has chosen, or the second of its cascade, has no room for the request.

        Raises as `prepare_for`.
        """
        plan = context.plan
        if context.to_prompts is not None:
            model, texts = context.policies.catalog[plan.model], context.conversation.texts
            work = partial(context.to_prompts, context.conversation, model)
            context.prompts = await self.threads.work_on(texts, context.tenant, work)
            return True
        first = await self.prepare_for(
            context, plan.model, contexts if is_replaceable(plan) else None
        )
        if first is None:
            return False
        context.prompts, context.seed = (first,), first.sampling.seed
        if plan.cascade is not None and contexts is not None:
            second = await self.prepare_for(context, plan.cascade.second, contexts)
            if second is None:
                return False
            second.sampling.seed, context.prompts = context.seed, (first, second)
            # The first answer is judged by its log-probabilities, whether the caller wants them or not.
            first.sampling.logprobs = True
        return True

    async def prepare_for(
        self, context: RequestContext, model: str, contexts: ContextFit | None = None
    ) -> PreparedPrompt | None:
        """Return the prompt for `model`, of the version that the caller's tokens came from if it resumes.

        Returns None, and notes the length in `contexts`, if prompt and answer have no room there.

        Raises:
            InvalidRequest: That version is gone, or as `prepare`.
            PromptTooLong: There is no room; only without `contexts`.
        """
        request, policies = context.request, context.policies
        latest = policies.catalog[model]
        version = policies.catalog.versions.get((model, request.resume_version), latest)
        if (
            version is not latest
            and not self._overload.loads.load(version.task_name, time.monotonic()).ready
        ):
            raise InvalidRequest.of(
                "resume.resume_token",
                "is of a version of the model that was replaced: ask again without resume",
            )
        context.task_names[model] = version.task_name
        try:
            prepared = await prepare(context, request, version, self.threads)
        except PromptTooLong as error:
            if contexts is None:
                raise
            contexts.tokens[model] = int(error.metadata["prompt_tokens"])
            return None
        if contexts is not None:
            contexts.tokens[model] = len(prepared.prompt_token_ids)
            if not contexts.fits(model):
                return None
        return prepared


def is_replaceable(plan: Plan) -> bool:
    """Return whether the gateway chose the model: not the caller, the tokens it resumes with, or the safety policy."""
    named = plan.strategy in (ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY)
    return plan.degraded or not named
