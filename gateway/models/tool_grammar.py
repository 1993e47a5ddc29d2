"""The grammar of an answer with calls of tools, in the format of a model.

The answer must be calls, or calls or a text of a JSON schema, or it is free; what it calls is held to the schemas of
strict tools.
"""

import json
import re
from dataclasses import replace
from typing import Final

from gateway.models.tools import Tool, ToolFormat, ToolUse
from sluice.constraints import json_in_lark

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
