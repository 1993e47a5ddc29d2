"""How families of models write calls of tools.

A block of calls: ``opening``, then JSON objects with name and arguments, then ``closing``. Between the
objects stand blanks and ``separators``.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

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
