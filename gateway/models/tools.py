"""Tools and tool calls: the texts inside their JSON, the formats of model families, and grammars for answers.

A block of tool calls is `opening`, then JSON objects with name and arguments, then `closing`. Between the objects
are blanks and `separators`.
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
"""Keywords of JSON Schema, which need no inspection: almost half of a schema's strings."""


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may ask the caller to run.

    Attributes:
        name: Name of the function.
        description: What it does, for the model.
        parameters: JSON Schema of its arguments.
        strict: Whether arguments must match the schema in every answer.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an earlier turn of a conversation.

    Attributes:
        id: Id that the result of the call refers to.
        name: Name of the tool.
        arguments: JSON object, or the text in its place: the conversation may have a truncated call.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        tools: Tools of the request.
        only: Name of the tool that it must call exactly once; empty for any.
        required: Whether it must call a tool.
        parallel: Whether it may have several calls.
        schema: JSON Schema of an answer without calls; empty if it is free text.
    """

    tools: tuple[FunctionTool, ...]
    only: str = ""
    required: bool = False
    parallel: bool = True
    schema: str = ""

    @property
    def callable(self) -> tuple[FunctionTool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.only in ("", tool.name))

    @property
    def forced(self) -> bool:
        """Whether the answer must call a tool."""
        return self.required or bool(self.only)

    @property
    def constrained(self) -> bool:
        """Whether the text of the answer is constrained by a grammar."""
        return self.forced or bool(self.schema) or any(tool.strict for tool in self.callable)

    @property
    def single(self) -> bool:
        """Whether the answer has at most one call."""
        return bool(self.only) or not self.parallel


_NUMBER_MIN: Final = 1000
"""Smallest integer to inspect: no rule matches three digits."""


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON `value` with `change` applied to each string, key and long integer, except schema keywords.

    An integer becomes a string only if `change` returns another text than its digits.
    """
    if isinstance(value, str):
        return value if _KEYWORD.fullmatch(value) else change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [map_texts(entry, change) for entry in value]
    digits = _digits_of(value)
    if not digits:
        return value
    changed = change(digits)
    return value if changed == digits else changed


def _digits_of(value: Any) -> str:
    """Return the digits of a long integer, also if JSON has it as `4.1e15`; empty for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    # 4.1e15 is a card number as well; fractions are not inspected.
    if isinstance(value, float) and not value.is_integer():
        return ""
    return str(int(value)) if abs(value) >= _NUMBER_MIN else ""


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes tool calls.

    Attributes:
        opening: Text that begins a block.
        start: Text between the opening and the first object.
        closing: Text that ends a block.
        separators: Characters between objects.
        arguments: Key of the arguments in constrained answers; "arguments" and "parameters" are both read.
        bare: Whether an answer may begin with an object, without the opening.
        many: Whether a block may have several calls; otherwise each call is a block.
        id_prefix: Prefix of the ids of calls.
        id_chars: Length of the rest of an id.
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
        """Return an id for a tool call that depends on `seed` alone."""
        return self.id_prefix + hashlib.sha256(seed.encode()).hexdigest()[: self.id_chars]


HERMES: Final = ToolFormat("<tool_call>", "", "</tool_call>", "", arguments="arguments", many=False)
"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call."""
LLAMA3: Final = ToolFormat("<|python_tag|>", "", "", ";", arguments="parameters", bare=True)
"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`."""
MISTRAL: Final = ToolFormat(
    "[TOOL_CALLS]", "[", "]", ",", arguments="arguments", id_prefix="", id_chars=9
)
"""Mistral and Mixtral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. Their templates require ids of 9
letters and digits."""

FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}


def guess(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks the model for; None if unknown or if it takes no tools."""
    if "tools" not in template:
        return None
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    return LLAMA3 if LLAMA3.opening in template or "ipython" in template else None


# The grammar of an answer: tool calls alone, or tool calls or JSON by a schema, or free text with tool calls.

CALLS_MAX: Final = 16
"""Most tool calls in a block, and in an answer of calls alone: a weak model would begin another one again and again."""
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY: Final = r"(.|\n)*"
_NO_OBJECT: Final = r"[ \t\r\n]*([^{ \t\r\n](.|\n)*)?"
"""Text that a format without an opening does not take for tool calls."""


def grammar_of(form: ToolFormat, use: ToolUse, opening_id: int | None = None) -> str:
    """Return the grammar of an answer, for llguidance.

    Args:
        form: The model's format.
        use: Tools that the answer may call.
        opening_id: Token of the format's opening, if it is one of the model's special tokens.
    """
    opening = _literal(form.opening) if opening_id is None else f"<[{opening_id}]>"
    if use.forced:
        rules = [f"start: {_calls(form, use, opening)}", _block(form, use)]
    elif use.schema:
        # A bare call could not be told from JSON by the schema before its end.
        calls = _calls(replace(form, bare=False), use, opening)
        answer = json_in_lark(json.loads(use.schema))
        rules = [f"start: {calls} | answer", f"answer: {answer}", _block(form, use)]
    else:
        rules = _free(form, use, opening, opening_id)
    tools = use.callable
    rules.append("tool: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = f'{{"name": "{tool.name}", "{form.arguments}": '
        by_schema = use.forced or tool.strict
        arguments = arguments_of(tool) if by_schema else {"type": "object"}
        rules.append(f'tool_{i}: {_literal(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {json_in_lark(arguments)}")
    return "\n".join(rules) + "\n"


def arguments_of(tool: FunctionTool) -> dict[str, object]:
    """Return the JSON Schema of a tool's arguments, which are always an object."""
    return {"type": "object", **tool.parameters} if tool.parameters else dict(_NO_ARGUMENTS)


def _calls(form: ToolFormat, use: ToolUse, opening: str) -> str:
    """Return the rule for tool calls and nothing else."""
    call = "block" if form.bare else f"{opening} block"
    return call if form.many else _repeated(call, "\n", use)


def _free(form: ToolFormat, use: ToolUse, opening: str, opening_id: int | None) -> list[str]:
    """Return the rules for text in which every opening begins a block."""
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
    """Return the rule for what follows an opening."""
    if not form.many:
        return f'block: "\\n" tool "\\n" {_literal(form.closing)}'
    calls = _repeated("tool", f"{form.separators} ", use)
    ends = [_literal(text) if text else "" for text in (form.start, form.closing)]
    return f"block: {ends[0]} {calls} {ends[1]}"


def _repeated(rule: str, separator: str, use: ToolUse) -> str:
    return rule if use.single else f"{rule} ({_literal(separator)} {rule}){{0,{CALLS_MAX - 1}}}"


def _literal(text: str) -> str:
    """Return `text` as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
