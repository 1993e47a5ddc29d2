"""Validators of secrets: tell tokens from samples and placeholders."""

import base64
import binascii
import json
import math
import re
from collections import Counter
from typing import Final

from gateway.safety.rules.spec import RuleMatch, Span

_JWT_RUN: Final = re.compile(r"[A-Za-z0-9_.-]*")
_PEM_BODY: Final = re.compile(r"(?:[A-Za-z0-9+/=\s\\:,.]|-(?!-))*")
_PEM_END: Final = re.compile(r"-----END [A-Z0-9 ]{1,48}-----")
_PEM_LINE: Final = re.compile(r"[A-Za-z0-9+/=]{40}")
_VALUE: Final = re.compile(
    r"""(?:=>|:=|[:=]|\b(?:is|ist|est|es)\b)[\s"'`:]*(?P<value>[^\s"'`,;(){}<>\[\]]+)\Z"""
)
_STAND_IN: Final = re.compile(
    r"example|change_?me|your|placeholder|dummy|redacted|secret_?here|xxx|\*\*|\.\.\.|1234567|abcdef|"
    r"^(?:https?:|/|\./|\$|%|test|pass(?:word|wd)?|my_?pass|secret|token|none|null|true|false|\d{4}-\d\d)",
    re.IGNORECASE,
)
_CODE: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\Z|[A-Za-z_]+\Z|[A-Z][A-Z0-9_]+\Z")
_ENTROPY_MIN: Final = 2.7
_SAMPLES = (
    "password passwd pass pw pwd secret changeme example mypassword user username "
    "postgres root guest admin test foo bar"
)
_PASSWORDS_IN_DOCS: Final = frozenset(_SAMPLES.split())


def entropy(value: str) -> float:
    """Bits per character of the value's own letters."""
    total = len(value)
    return -sum(n / total * math.log2(n / total) for n in Counter(value).values())


def token(found: RuleMatch) -> Span | None:
    """What is behind the prefix varies as a random token does, so that slugs and samples are none."""
    body = found.value[_prefix_length(found.value) :]
    if entropy(body) < 3.0 or not any(char.isdecimal() for char in body):
        return None
    return None if re.search(r"example|xxxx|your", found.value, re.IGNORECASE) else found.span


def _prefix_length(value: str) -> int:
    return max(value.find("-", 0, 8), value.find("_", 0, 8)) + 1


def aws_key(found: RuleMatch) -> Span | None:
    """Not the key of AWS's own documentation."""
    return None if found.value.endswith("EXAMPLE") else found.span


def assignment(found: RuleMatch) -> Span | None:
    """The value behind ``password=`` and the like, when it is one: a mix of letters and digits, no sample, no code."""
    part = _VALUE.search(found.value)
    if not part or found.after(1) in {"(", "[", "{"}:
        return None
    value = part["value"].rstrip(".:!?") if len(part["value"]) > 12 else part["value"]
    if len(value) < 8 or _STAND_IN.search(value) or _CODE.match(value):
        return None
    has_digit = any(char.isdecimal() for char in value)
    has_letter = any(char.isalpha() for char in value)
    if not (has_digit and has_letter) or entropy(value) < _ENTROPY_MIN:
        return None
    start = found.start + part.start("value")
    return start, start + len(value)


def jwt(found: RuleMatch) -> Span | None:
    """Three parts, of which the first decodes to a header with an algorithm."""
    if found.before(1) and found.before(1) in "._-":
        return None
    end = found.run(_JWT_RUN, found.start)
    parts = found.text[found.start : end].rstrip("._-").split(".")
    if len(parts) < 3 or not parts[1] or not _is_header(parts[0]):
        return None
    return found.start, found.start + sum(map(len, parts[:5])) + len(parts[:5]) - 1


def _is_header(part: str) -> bool:
    try:
        header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and ("alg" in header or "enc" in header)


def private_key(found: RuleMatch) -> Span | None:
    """From the first line to the last; a key that is cut off goes as far as it looks like one."""
    body_end = found.run(_PEM_BODY, found.end)
    if not _PEM_LINE.search(found.text, found.end, min(body_end, found.end + 400)):
        return None
    end = _PEM_END.match(found.text, body_end, body_end + 64)
    return found.start, min(end.end() if end else body_end, found.start + found.spec.max_length)


def azure_client_secret(found: RuleMatch) -> Span | None:
    """From the mark in the middle on; the three characters before it stay."""
    return found.start + 3, found.end


def telegram_bot(found: RuleMatch) -> Span | None:
    """What stands behind the public number of the bot."""
    return found.start + found.value.index(":") + 1, found.end


def connection_string(found: RuleMatch) -> Span | None:
    """A password in a URL that is more than the sample of a manual; from the user to the host."""
    scheme, _, rest = found.value.partition("://")
    user, _, password = rest.rpartition("@")[0].partition(":")
    if password.lower() in _PASSWORDS_IN_DOCS or password == user or _only_stands_in(password):
        return None
    return found.start + len(scheme) + 3, found.end


def _only_stands_in(password: str) -> bool:
    return bool(
        re.search(r"\*\*|xxx|\$|\{|^%[A-Z_]+%$|your|change_?me|password", password, re.IGNORECASE)
    )
