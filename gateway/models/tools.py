"""Tools that a request offers, calls of them, the texts inside their JSON; and how families of models write calls.

A block of calls: ``opening``, then JSON objects with name and arguments, then ``closing``. Between the
objects stand blanks and ``separators``.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

_KEYWORD: Final = re.compile(
    r"\$defs|\$ref|additionalProperties|allOf|anyOf|array|boolean|const|default|definitions|description|enum|format"
    r"|integer|items|maxItems|maxLength|maximum|minItems|minLength|minimum|null|number|object|oneOf|pattern|properties"
    r"|required|string|title|type"
)
"""Strings of a schema that say nothing; almost half of all."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask the caller to run; ``parameters`` is a JSON Schema of its arguments.

    ``strict``: arguments are held to the schema in every answer.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call in an earlier turn of a conversation."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        only: the one that it must call, exactly once; empty: any.
        required: it must have a call.
        parallel: it may have several calls.
        schema: JSON Schema of an answer that calls none; empty: it is free.
    """

    tools: tuple[Tool, ...]
    only: str = ""
    required: bool = False
    parallel: bool = True
    schema: str = ""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(tool for tool in self.tools if self.only in ("", tool.name))

    @property
    def forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.required or bool(self.only)

    @property
    def constrained(self) -> bool:
        """Whether the answer is constrained, to calls or in its calls."""
        return self.forced or bool(self.schema) or any(tool.strict for tool in self.callable)

    @property
    def single(self) -> bool:
        """Whether the answer has one call at most."""
        return bool(self.only) or not self.parallel


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON ``value`` with each string and each key changed, but for the keywords of schemas."""
    if isinstance(value, str):
        return value if _KEYWORD.fullmatch(value) else change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [map_texts(one, change) for one in value]
    return value


def texts_in(value: Any) -> list[str]:
    """The strings that `map_texts` changes, in its order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    map_texts(value, note)
    return found


FormatName = Literal["hermes", "llama3", "mistral"]


@dataclass(frozen=True)
class ToolFormat:
    """One format.

    Attributes:
        start: stands between ``opening`` and the first object.
        bare: an answer may begin with an object, without ``opening``.
        many: whether a block has several calls; else each call has a block.
        arguments: the key of the arguments in what a model is made to write. In what it writes freely either of
            "arguments" and "parameters" is taken.
        id_prefix, id_chars: of the ids that calls get.
    """

    name: FormatName
    opening: str
    start: str
    closing: str
    separators: str
    arguments: str
    bare: bool = False
    many: bool = True
    id_prefix: str = "call_"
    id_chars: int = 24

    def call_id(self, seed: str) -> str:
        """An id that depends on ``seed`` alone."""
        return self.id_prefix + hashlib.sha256(seed.encode()).hexdigest()[: self.id_chars]


HERMES: Final = ToolFormat(
    "hermes", "<tool_call>", "", "</tool_call>", "", arguments="arguments", many=False
)
"""Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for each call."""
LLAMA3: Final = ToolFormat(
    "llama3", "<|python_tag|>", "", "", ";", arguments="parameters", bare=True
)
"""Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, alone or behind ``<|python_tag|>``."""
MISTRAL: Final = ToolFormat(
    "mistral", "[TOOL_CALLS]", "[", "]", ",", arguments="arguments", id_prefix="", id_chars=9
)
"""Mistral and Mixtral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``. Their templates take ids of 9 letters
and digits alone."""

FORMATS: Final[Mapping[str, ToolFormat]] = {one.name: one for one in (HERMES, LLAMA3, MISTRAL)}


def guess(template: str) -> ToolFormat | None:
    """The format that a chat template asks the model for; None: none of ours, or it takes no tools."""
    if "tools" not in template:
        return None
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    return LLAMA3 if LLAMA3.opening in template or "ipython" in template else None
