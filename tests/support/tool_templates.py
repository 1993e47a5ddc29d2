"""The small tier with a chat template that takes tools."""

import shutil
from pathlib import Path
from typing import Final

from sluice.settings import resolve_model_path

# A model knows the format by its template alone.
MARKS: Final = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
TEMPLATE: Final = (
    "<|bos|>{{# {mark} #}}{{% for tool in tools or [] %}}<|user|>{{{{ tool.function.name }}}}<|end|>{{% endfor %}}"
    "{{% for message in messages %}}<|user|>{{{{ message.content }}}}"
    "{{{{ message.tool_calls | tojson if message.tool_calls else '' }}}}<|end|>{{% endfor %}}<|assistant|>"
)


def small_with_tools(folder: Path, tool_format: str) -> str:
    """Copies the small tier to ``folder``, which it makes; its path."""
    shutil.copytree(resolve_model_path("builtin:small"), folder)
    template = TEMPLATE.format(mark=MARKS[tool_format])
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(folder)
