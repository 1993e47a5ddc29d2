"""Tools that a request offers, calls of them, the texts inside their JSON; and how families of models write calls,
with the grammar that holds an answer to it.

A block of calls: ``opening``, then JSON objects with name and arguments, then ``closing``. Between the
objects stand blanks and ``separators``.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sluice.constraints import json_in_lark

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
    """A call in an earlier turn of a conversation.

    Attributes:
        arguments: The JSON object, or the text that stands in its place where it is none: a call that was cut off
            stays in its conversation.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | str


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


_NUMBER_MIN: Final = 1000
"""Integers below it are not inspected: no rule finds anything in three digits."""


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change each string, key and long integer of the JSON ``value``, except the keywords of schemas.

    An integer becomes a string only where ``change`` gives another text than its digits.
    """
    if isinstance(value, str):
        return value if _KEYWORD.fullmatch(value) else change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [map_texts(one, change) for one in value]
    digits = _digits_of(value)
    if not digits:
        return value
    changed = change(digits)
    return value if changed == digits else changed


def _digits_of(value: Any) -> str:
    """Return the digits of an integer, however JSON wrote it (``4.1e15``); empty for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not value.is_integer():
        return ""
    return str(int(value)) if abs(value) >= _NUMBER_MIN else ""


def texts_in(value: Any) -> list[str]:
    """Return the texts that `map_texts` changes, in its order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    map_texts(value, note)
    return found


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


HERMES: Final = ToolFormat("<tool_call>", "", "</tool_call>", "", arguments="arguments", many=False)
"""Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for each call."""
LLAMA3: Final = ToolFormat("<|python_tag|>", "", "", ";", arguments="parameters", bare=True)
"""Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, alone or behind ``<|python_tag|>``."""
MISTRAL: Final = ToolFormat(
    "[TOOL_CALLS]", "[", "]", ",", arguments="arguments", id_prefix="", id_chars=9
)
"""Mistral and Mixtral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``. Their templates take ids of 9 letters
and digits alone."""

FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}


def guess(template: str) -> ToolFormat | None:
    """The format that a chat template asks the model for; None: none of ours, or it takes no tools."""
    if "tools" not in template:
        return None
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    return LLAMA3 if LLAMA3.opening in template or "ipython" in template else None


# The grammar of an answer with calls. It must be calls, or calls or a text of a JSON schema, or it is free; what it
# calls is held to the schemas of strict tools.

CALLS_MAX: Final = 16
"""Most calls in one answer: a weak model would begin another one again and again."""
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY: Final = r"(.|\n)*"
_NO_OBJECT: Final = r"[ \t\r\n]*([^{ \t\r\n](.|\n)*)?"
"""A text that a format without an opening does not take for calls."""


def grammar_of(form: ToolFormat, use: ToolUse, opening_id: int | None = None) -> str:
    """``opening_id``: the token of the format's opening, where it is one of the model's special tokens."""
    opening = _literal(form.opening) if opening_id is None else f"<[{opening_id}]>"
    if use.forced:
        rules = [f"start: {_calls(form, use, opening)}", _block(form, use)]
    elif use.schema:
        # A call without an opening could not be told from such a text before its end.
        calls = _calls(replace(form, bare=False), use, opening)
        answer = json_in_lark(json.loads(use.schema))
        rules = [f"start: {calls} | answer", f"answer: {answer}", _block(form, use)]
    else:
        rules = _free(form, use, opening, opening_id)
    tools = use.callable
    rules.append("tool: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = f'{{"name": "{tool.name}", "{form.arguments}": '
        held = use.forced or tool.strict
        arguments = arguments_of(tool) if held else {"type": "object"}
        rules.append(f'tool_{i}: {_literal(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {json_in_lark(arguments)}")
    return "\n".join(rules) + "\n"


def arguments_of(tool: Tool) -> dict[str, object]:
    """The schema of a tool's arguments, which are an object whatever else it says."""
    return {"type": "object", **tool.parameters} if tool.parameters else dict(_NO_ARGUMENTS)


def _calls(form: ToolFormat, use: ToolUse, opening: str) -> str:
    """Calls and nothing else."""
    call = "block" if form.bare else f"{opening} block"
    return call if form.many else _repeated(call, "\n", use)


def _free(form: ToolFormat, use: ToolUse, opening: str, opening_id: int | None) -> list[str]:
    """Text, in which every opening begins a block."""
    text = _NO_OBJECT if form.bare else _ANY
    if opening_id is not None:
        before = [f"before: TEXT {opening}", f"TEXT: /{text}/"]
    else:
        mark = re.escape(form.opening).replace("/", r"\/")
        without = f"/{text}/ & ~/{_ANY}{mark}{_ANY}/"
        before = [f"before[lazy]: /{text}{mark}/", f"TEXT: {without}"]
    if form.bare:
        return ["start: TEXT | before block | block", *before, _block(form, use)]
    start = "TEXT | before block" if form.many or use.single else "(before block)* TEXT"
    return [f"start: {start}", *before, _block(form, use)]


def _block(form: ToolFormat, use: ToolUse) -> str:
    """What follows an opening."""
    if not form.many:
        return f'block: "\\n" tool "\\n" {_literal(form.closing)}'
    calls = _repeated("tool", f"{form.separators} ", use)
    ends = [_literal(one) if one else "" for one in (form.start, form.closing)]
    return f"block: {ends[0]} {calls} {ends[1]}"


def _repeated(rule: str, separator: str, use: ToolUse) -> str:
    return rule if use.single else f"{rule} ({_literal(separator)} {rule}){{0,{CALLS_MAX - 1}}}"


def _literal(text: str) -> str:
    """``text`` in quotes, as Lark takes it."""
    return json.dumps(text, ensure_ascii=False)
