"""OpenAI's API from the side of a client: the body of a request, and the content of its stream's events."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_workers.engine.protocol import Sampling, SequenceEnd, SequenceSpec, TokenLogprobs
from model_workers.model_folder import CONFIG, TOKENIZER
from model_workers.remote.faults import Retry, ServerFault, fault_in_stream
from sluice.errors import InvalidRequest, SafetyBlocked
from sluice.internal.v1.task_pb2 import ServerOptions
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import PrefixCache, context_tokens_of
from sluice.settings.remote import ServerSettings
from sluice.wire.text_tokens import TextTokens, load_text_tokens

SEED_MAX: Final = 2**31
"""Upper bound of seeds: some servers store them in 32 bits."""
CONTEXT_MAX: Final = 1 << 24
"""Context length if nothing names one; gateways refuse such a model."""
TOKEN_CHARS_MAX: Final = 256
"""Maximum length of a token's text in log-probabilities, because it travels with each."""
ALTERNATIVES_MAX: Final = 20

_ENDS: Final[Mapping[str, SequenceEnd]] = {
    "length": SequenceEnd.LENGTH,
    "max_tokens": SequenceEnd.LENGTH,
}
_PLAIN: Final = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_NEUTRAL: Final = Sampling(max_tokens=1)


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """Tokens as the server counts and bills them."""

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ServerToken:
    """A token of a chat: its text as bytes, its log-probability, and the most probable ones by text."""

    data: bytes
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Content of an event: text, pieces of tool calls or token ids, by the server's API; the end, or both."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    server_tokens: tuple[ServerToken, ...] = ()
    end: SequenceEnd | None = None
    usage: ServerUsage | None = None


@dataclass(frozen=True)
class ServerApi:
    """The API of one model's server.

    Attributes:
        tokens: Tokens of text; None: the server exchanges token ids.
        context_tokens: Maximum length of prompt and answer together.
        prefix_cache: Which requests may share the server's cache, if it has a `cache_salt`.
    """

    settings: ServerSettings
    tokens: TextTokens | None
    context_tokens: int
    prefix_cache: PrefixCache = "tenant"

    @property
    def path(self) -> str:
        """Path of requests, relative to `url`."""
        return "/chat/completions" if self.settings.api == "chat" else "/completions"

    def known_text(self, spec: SequenceSpec) -> str:
        """Return the text that the server will repeat of a sequence that was begun before."""
        if self.settings.api != "chat":
            return ""
        assert self.tokens is not None, "text needs them"
        return self.tokens.decode(spec.produced)

    def is_whole(self, spec: SequenceSpec) -> bool:
        """Return whether a sequence lacks only its end, as far as the server's tokens are counted."""
        return self.settings.api != "chat" and len(spec.produced) >= spec.sampling.max_tokens

    def body(self, spec: SequenceSpec) -> dict[str, Any]:
        """Return the body of the request for a sequence.

        Raises:
            ServerFault: The server cannot take its prompt.
        """
        body: dict[str, Any] = {"model": self.settings.model, "stream": True}
        if self.settings.api == "chat":
            assert self.tokens is not None, "text needs them"
            body |= _conversation_of(spec.prompt, self.tokens)
        else:
            body["prompt"] = [*spec.prompt, *spec.produced]
        if self.settings.api == "tokens":
            body["return_token_ids"] = True
        options = spec.sampling.server
        if options is not None and options.one_call:
            body["parallel_tool_calls"] = False
        return {**self.settings.extra_body, **body, **self._sampling(spec)}

    def chunk(self, data: str) -> Chunk:
        """Return the content of an event.

        Raises:
            ServerFault: The server has failed, or violates its API.
        """
        try:
            event = json.loads(data)
            if event.get("error"):
                raise fault_in_stream(event["error"])
            usage = _usage(event.get("usage"))
            if not event.get("choices"):
                return Chunk(usage=usage)
            choice = event["choices"][0]
            return self._content(choice, _end(choice.get("finish_reason")), usage)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise ServerFault(
                f"the server sent an event that is none of its API ({type(error).__name__})"
            ) from error

    def _sampling(self, spec: SequenceSpec) -> dict[str, Any]:
        """Return the sampling parameters that differ from defaults, by the server's names."""
        sampling, names = spec.sampling, self.settings.names
        is_chat = self.settings.api == "chat"
        produced = 0 if is_chat else len(spec.produced)  # a chat begins anew
        values: dict[str, Any] = {
            "max_tokens": self._max_tokens(spec, produced),
            "temperature": sampling.temperature,
            "seed": sampling.seed % SEED_MAX if sampling.temperature else None,
            "stream_options": {"include_usage": True},
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
            # In a chat a flag, because the number of alternatives has its own field.
            "logprobs": (is_chat or sampling.top_logprobs) if sampling.logprobs else None,
            "min_tokens": max(0, sampling.min_tokens - produced) or None,
            "stop_token_ids": sorted(sampling.stop_token_ids) or None,
            "json_schema": _response_format(sampling),
            "regex": sampling.regex and {"regex": sampling.regex},
            "grammar": sampling.grammar and {"grammar": sampling.grammar},
            "priority": spec.rank,
            "cache_salt": self._cache_salt(spec) if "cache_salt" in names else None,
            **_options(sampling),
        }
        fields = {key: value for key, value in values.items() if value is not None}
        plain = {name: getattr(sampling, name) for name in _PLAIN}
        fields |= {name: x for name, x in plain.items() if x != getattr(_NEUTRAL, name)}
        body = {name: fields[key] for key, name in names.items() if key in fields}
        if names.get("logprobs") in body:
            of_api = {"top_logprobs": sampling.top_logprobs}
            body |= of_api if is_chat else {"return_tokens_as_token_ids": True}
        return body

    def _cache_salt(self, spec: SequenceSpec) -> str | None:
        """Return the salt of a server's prefix cache: equal where blocks may be shared."""
        shared = {"mesh": None, "tenant": f"tenant {spec.tenant}", "off": spec.request_id}
        sharing = shared[self.prefix_cache]
        return None if sharing is None else hashlib.sha256(sharing.encode()).hexdigest()

    def _max_tokens(self, spec: SequenceSpec, produced: int) -> int | None:
        """Return the limit; None: the rest of the context, which a server with other tokens counts better."""
        limit = spec.sampling.max_tokens
        is_whole = len(spec.prompt) + limit >= self.context_tokens
        return None if is_whole and self.tokens is not None else limit - produced

    def _content(
        self, choice: Mapping[str, Any], end: SequenceEnd | None, usage: ServerUsage | None
    ) -> Chunk:
        if self.settings.api == "tokens":
            if choice.get("token_ids") is None and choice.get("text"):
                raise ServerFault(
                    "the server gives no token ids: set api of the model to completions or chat",
                    retry=Retry.NEVER,
                )
            token_ids = tuple(map(int, choice.get("token_ids") or ()))
            logprobs = _logprobs(choice.get("logprobs"))
            return Chunk(token_ids=token_ids, logprobs=logprobs, end=end, usage=usage)
        if self.settings.api == "completions":
            return Chunk(text=_text(choice.get("text")), end=end, usage=usage)
        delta = choice.get("delta") or {}
        text = _text(delta.get("content")) + _text(delta.get("refusal"))
        # DeepSeek's name, SGLang's and the older one of vLLM; vLLM's present one.
        reasoning = _text(delta.get("reasoning_content") or delta.get("reasoning"))
        tokens = _server_tokens(choice.get("logprobs"))
        calls = delta.get("tool_calls") or ()
        return Chunk(reasoning, text, calls, server_tokens=tokens, end=end, usage=usage)


def _conversation_of(prompt: Sequence[int], tokens: TextTokens) -> dict[str, Any]:
    """Return messages and tools of a conversation; any other prompt is a message of the user.

    Raises:
        ServerFault: It was cut, or not made by the gateway.
    """
    text = tokens.decode(prompt)
    if prompt[0] != tokens.conversation:
        return {"messages": [{"role": "user", "content": text}]}
    try:
        messages, *tools = json.loads(text)
        conversation = {"messages": [_message_for(message) for message in messages]}
        return conversation | ({"tools": tools[0]} if tools else {})
    except (ValueError, LookupError, TypeError) as error:
        raise ServerFault("the prompt is no conversation", InvalidRequest, Retry.NEVER) from error


def _message_for(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the API has it: arguments are JSON, a tool's answer has no name."""
    result = dict(message)
    if result["role"] == "tool":
        result.pop("name", None)
    if "tool_calls" in result:
        result["tool_calls"] = [_call_for(call) for call in result["tool_calls"]]
    return result


def _call_for(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):  # a text stands for one that is no JSON object
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _response_format(sampling: Sampling) -> dict[str, Any] | None:
    """Return the caller's own response_format, else one for the schema."""
    if sampling.server is not None and sampling.server.response_format:
        shape: dict[str, Any] = json.loads(sampling.server.response_format)
        return shape
    if sampling.json_schema is None:
        return None
    schema = {"name": "answer", "schema": json.loads(sampling.json_schema), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _options(sampling: Sampling) -> dict[str, Any]:
    """Return the options that only servers have, by our names."""
    options = sampling.server or ServerOptions()
    choice: Any = "required" if options.call_required else None
    if options.function:
        choice = {"type": "function", "function": {"name": options.function}}
    variables = options.chat_template_kwargs
    return {
        "tool_choice": choice,
        "reasoning_effort": options.reasoning_effort or None,
        "chat_template_kwargs": json.loads(variables) if variables else None,
    }


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError
    return value or ""


def _end(reason: str | None) -> SequenceEnd | None:
    if reason == "content_filter":
        raise ServerFault(
            "the server's content filter ended the answer", SafetyBlocked, Retry.NEVER
        )
    if reason in ("abort", "error"):
        raise fault_in_stream({"code": reason})
    return None if reason is None else _ENDS.get(reason, SequenceEnd.STOP)


def _usage(usage: Mapping[str, Any] | None) -> ServerUsage | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ServerUsage(
        int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0), int(cached)
    )


def _server_tokens(logprobs: Mapping[str, Any] | None) -> tuple[ServerToken, ...]:
    """Return tokens of a chat as the server counts them; a refusal has none."""
    return tuple(
        ServerToken(
            _bytes_of(entry),
            float(entry["logprob"]),
            tuple(
                (str(top["token"])[:TOKEN_CHARS_MAX], float(top["logprob"]))
                for top in (entry.get("top_logprobs") or ())[:ALTERNATIVES_MAX]
            ),
        )
        for entry in (logprobs or {}).get("content") or ()
    )


def _bytes_of(token: Mapping[str, Any]) -> bytes:
    """Return a token's bytes: its text if the server does not send them."""
    raw = token.get("bytes")
    return str(token["token"]).encode() if raw is None else bytes(raw)


def _logprobs(logprobs: Mapping[str, Any] | None) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities as vLLM sends them with return_tokens_as_token_ids: tokens are "token_id:N"."""
    if not logprobs:
        return ()
    alternatives = logprobs.get("top_logprobs") or [{}] * len(logprobs["token_logprobs"])
    return tuple(
        TokenLogprobs(
            logprob,
            tuple((int(name.removeprefix("token_id:")), p) for name, p in (top or {}).items()),
        )
        for logprob, top in zip(logprobs["token_logprobs"], alternatives, strict=True)
    )


def find_text_tokens(model: ModelSettings) -> TextTokens | None:
    """Return the tokens of text; None for a server that exchanges token ids.

    Raises:
        SettingsError: There is no tokenizer, or it is not lossless.
    """
    assert model.server is not None
    if model.server.api == "tokens":
        return None
    return load_text_tokens(_tokenizer_file(model, TOKENIZER))


def find_context(model: ModelSettings) -> int:
    """Return the maximum length of prompt and answer together, in tokens."""
    if model.context_tokens is not None:
        return model.context_tokens
    try:
        config = json.loads(_tokenizer_file(model, CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, SettingsError):
        return CONTEXT_MAX
    return context_tokens_of(config) or CONTEXT_MAX


def _tokenizer_file(model: ModelSettings, name: str) -> Path:
    path = resolve_model_path(model.path)
    if Path(path).is_dir():
        return Path(path, name)
    # Imported here: a folder needs no hub.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name))
    except Exception as error:  # the library raises many kinds: network, name, access
        kind = type(error).__name__
        raise SettingsError(f"models: {model.name}: {path}: no {name} ({kind})") from error
