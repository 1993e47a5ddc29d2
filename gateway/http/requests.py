"""A body of OpenAI's API becomes a `GenerateRequest`, or an error that names the field."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.http import headers as header_fields
from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField, load_json
from sluice.openai.requests import request_of_body
from sluice.v1.inference_pb2 import GenerateRequest


def namer(*rules: tuple[str, str]) -> Callable[[str], str]:
    """What an API calls the field at a path of the proto; ``rules``: patterns in it, and what stands in their place."""

    def named(path: str) -> str:
        for pattern, name in rules:
            path = re.sub(pattern, name, path)
        return path

    return named


RULES: Final = (
    ("^sampling.json_schema$", "response_format"),
    ("^idempotency_key$", header_fields.IDEMPOTENCY_KEY),
    ("^raw_prompt$", "prompt"),
    ("^chat$", "messages"),
    ("^texts", "input"),
    ("^audio.data$", "file"),
    (r"^(audio|sampling|chat|metadata)\.", ""),
    (r"^(tools\[\d+\])\.(?!function)", r"\1.function."),
)
field_name: Final = namer(*RULES)
chat_field_name: Final = namer(("^sampling.logprobs$", "top_logprobs"), *RULES)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of ``body``.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        value = load_json(body.decode())
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is no JSON object")
    return value


StreamOptions = Mapping[str, bool]
"""The ``stream_options`` of a body whose answer is streamed."""


def generate_request(
    url: str, body: Mapping[str, Any]
) -> tuple[GenerateRequest, StreamOptions | None]:
    """What a body of ``url`` asks for; with None its answer is not streamed.

    Raises:
        BadField: a field is not served, or its value does not fit.
    """
    asked = dict(body)
    options = _take_stream_options(asked)
    return request_of_body(url, asked, GenerateRequest()), options


def _take_stream_options(body: dict[str, Any]) -> StreamOptions | None:
    """Takes ``stream`` and ``stream_options`` out of ``body``; None: no stream."""
    streams, options = body.pop("stream", None) or False, body.pop("stream_options", None)
    if not isinstance(streams, bool):
        raise BadField("stream: is not true or false")
    if options is None:
        return {} if streams else None
    if not streams:
        raise BadField("stream_options: needs stream: true")
    if not isinstance(options, dict):
        raise BadField("stream_options: is no object")
    for name, value in options.items():
        if name in ("include_usage", "continuous_usage_stats") and isinstance(value, bool):
            continue
        if name != "include_obfuscation" or value:
            raise BadField(f"stream_options.{name}: is not served, or not true or false")
    if options.get("continuous_usage_stats") and not options.get("include_usage"):
        raise BadField("stream_options.continuous_usage_stats: needs include_usage: true")
    return options
