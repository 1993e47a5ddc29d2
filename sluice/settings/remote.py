"""Settings of a model that somebody else's server computes (`engine: openai`); shared by gateway and worker."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from sluice.settings.base import Section

Url = Annotated[str, Field(pattern=r"^https?://[^\s?#]+$")]
Parameter = Literal[
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "json_schema",
    "regex",
    "grammar",
    "stream_options",
    "tool_choice",
    "strict",
    "reasoning_effort",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
]

_OF_OPENAI: Final[tuple[Parameter, ...]] = (
    *("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
    *("json_schema", "stream_options"),
)
_OF_CHATS: Final[tuple[Parameter, ...]] = (
    *("tool_choice", "strict", "reasoning_effort", "chat_template_kwargs"),
)
_ASKED_FOR: Final[frozenset[Parameter]] = frozenset({"priority"})
"""What servers refuse unless they were started for it."""
_DEFAULTS: Final[Mapping[str, tuple[Parameter, ...]]] = {
    "tokens": tuple(one for one in get_args(Parameter) if one not in {*_OF_CHATS, *_ASKED_FOR}),
    "completions": _OF_OPENAI,
    "chat": (*_OF_OPENAI, "logprobs", *_OF_CHATS),
}
"""What servers of each api take, unless the settings say otherwise."""
_ELSEWHERE: Final[Mapping[Parameter, str]] = {
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
}
"""What servers call it where that is another name."""
_OWN_FIELDS: Final = frozenset(
    {"model", "messages", "prompt", "tools", "parallel_tool_calls", "stream", "n", "stop"}
    | {"return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)
"""Fields of a request that are not sampling parameters."""


class ServerSettings(Section):
    """A server that speaks OpenAI's API; see docs/use/remote-models.md."""

    url: Url | tuple[Url, ...]
    """Where the API begins, such as http://10.0.0.7:8000/v1. Several: each has workers of its own."""
    model: str = Field(min_length=1)
    """What the server calls the model."""
    api: Literal["tokens", "completions", "chat"] = "chat"
    """"tokens": token ids both ways (vLLM). "completions": ids to the server, text back (SGLang, llama-server). "chat":
    messages to the server, text back (all others)."""
    api_key_env: str | None = None
    """The variable of the worker's environment with the key."""
    api_key_file: str | None = None
    """The file with the key, read with every request; so a key can be replaced while the worker runs."""
    stall_s: ClassVar[float] = 60.0
    """Silence after which a server has failed, in seconds: longer than any prefill."""
    parameters: Mapping[Parameter, str | None] = Field(default_factory=dict)
    """What the server calls sampling parameters; null: it does not take it. Others keep the names of the API."""
    extra_body: Mapping[str, Any] = Field(default_factory=dict)
    """Fields of every request to the server beside those that the worker sets."""

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses."""
        return (self.url,) if isinstance(self.url, str) else self.url

    @cached_property
    def names(self) -> Mapping[Parameter, str]:
        """The server's names of the sampling parameters that it takes."""
        usual = {one: _ELSEWHERE.get(one, one) for one in _DEFAULTS[self.api]}
        named = {**usual, **self.parameters}
        return {parameter: name for parameter, name in named.items() if name is not None}

    @field_validator("url")
    @classmethod
    def _has_addresses(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if value == ():
            raise ValueError("name an address")
        return value

    @model_validator(mode="after")
    def _check_fields_of_api(self) -> Self:
        """Refuse keys that exclude each other, parameters that the api lacks, and fields that requests set."""
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_file: leave it out, or api_key_env")
        if self.api == "completions" and self.parameters.get("logprobs"):
            raise ValueError("parameters.logprobs: only the api tokens and chat have them")
        named = {name for name, value in self.parameters.items() if value is not None}
        if self.api != "chat" and (chats := named & {*_OF_CHATS}):
            raise ValueError(f"parameters.{min(chats)}: only the api chat has it")
        if conflicts := self.extra_body.keys() & {*_OWN_FIELDS, *self.names.values()}:
            raise ValueError(f"extra_body.{min(conflicts)}: requests set it; leave it out")
        for parameter in ("stop_token_ids", "logit_bias", "grammar"):
            if self.api == "chat" and self.parameters.get(parameter):
                raise ValueError(f"parameters.{parameter}: not in the api chat; leave it out")
        return self
