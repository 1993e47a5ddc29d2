"""Chat templates, rendered as Hugging Face's tokenizers do, in a sandbox: a template is code that came with a model.

The conventions are those of transformers' chat templating documentation: blocks are trimmed, ``raise_exception``,
``strftime_now`` and a ``tojson`` that keeps non-ASCII characters exist, ``{% generation %}`` is allowed
and has no effect.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice.settings import SettingsError

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class TemplateRefused(Exception):
    """The template does not take this conversation; the message is the template's own."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the variables such as ``bos_token``.

        Raises:
            SettingsError: the template is not valid.
        """
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError(f"the chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any] = _NONE
    ) -> str:
        """The prompt up to where the assistant begins to speak; ``variables`` are the template's own.

        Raises:
            TemplateRefused: the template does not take this order of roles, or fails on it.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **{**self._special_tokens, **variables},
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateRefused(str(error)) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
