"""The grammar of an answer that must be calls of tools, in the format of a model."""

from typing import Final

from gateway.tools.formats import ToolFormat
from gateway.tools.tool import Tool, ToolUse
from sluice.constraints import json_in_lark

CALLS_MAX: Final = 16
"""Most calls in one answer: a weak model would begin another one again and again."""
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(form: ToolFormat, use: ToolUse, opening_id: int | None = None) -> str:
    """One call of the tools that may be called, or several; ``opening_id``: the token of the format's opening, where it
    is one of the model's special tokens."""
    tools = use.callable
    rules = [_start(form, use.single, opening_id), _call(form, opening_id)]
    rules.append("tool: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = f'{{"name": "{tool.name}", "{form.arguments}": '
        rules.append(f'tool_{i}: {_literal(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {json_in_lark(arguments_of(tool))}")
    return "\n".join(rules) + "\n"


def arguments_of(tool: Tool) -> dict[str, object]:
    """The schema of a tool's arguments, which are an object whatever else it says."""
    return {"type": "object", **tool.parameters} if tool.parameters else dict(_NO_ARGUMENTS)


def _start(form: ToolFormat, single: bool, opening_id: int | None) -> str:
    separator = _literal(f"{form.separators} " if form.many else "\n")
    calls = "call" if single else f"call ({separator} call){{0,{CALLS_MAX - 1}}}"
    if not form.many or form.bare:
        return f"start: {calls}"
    return f"start: {_opening(form, opening_id)} {_literal(form.start)} {calls} {_literal(form.closing)}"


def _call(form: ToolFormat, opening_id: int | None) -> str:
    if form.many:
        return "call: tool"
    return f'call: {_opening(form, opening_id)} "\\n" tool "\\n" {_literal(form.closing)}'


def _opening(form: ToolFormat, opening_id: int | None) -> str:
    return _literal(form.opening) if opening_id is None else f"<[{opening_id}]>"


def _literal(text: str) -> str:
    """``text`` in quotes, as Lark takes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
