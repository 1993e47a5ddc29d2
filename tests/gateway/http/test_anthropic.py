"""Errors in the form of Anthropic's API, and which calls get it."""

import pytest

from gateway.http.api import ANTHROPIC
from gateway.http.models import page_of
from sluice import errors
from sluice.errors import FieldViolation, SluiceError

ERRORS: list[tuple[SluiceError, int, str]] = [
    (errors.InvalidRequest("x"), 400, "invalid_request_error"),
    (errors.SafetyBlocked("x"), 400, "invalid_request_error"),
    (errors.Unauthenticated("x"), 401, "authentication_error"),
    (errors.PermissionDenied("x"), 403, "permission_error"),
    (errors.UnknownModel("x"), 404, "not_found_error"),
    (errors.IdempotencyConflict("x"), 409, "invalid_request_error"),
    (errors.MessageTooLarge("x"), 413, "request_too_large"),
    (errors.LimitReached("x", retry_after_s=3), 429, "rate_limit_error"),
    (errors.BudgetSpent("x", retry_after_s=3600), 429, "rate_limit_error"),
    (errors.InternalError("x"), 500, "api_error"),
    (errors.EngineFailed("x"), 500, "api_error"),
    (errors.ModelUnavailable("x", retry_after_s=1), 503, "overloaded_error"),
    (errors.ShuttingDown("x", retry_after_s=1), 503, "overloaded_error"),
    (errors.DeadlinePassed("x"), 504, "timeout_error"),
    (errors.Overloaded("x", retry_after_s=1), 529, "overloaded_error"),
    (errors.ExpectedLate("x", retry_after_s=1), 529, "overloaded_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=lambda one: type(one).__name__)
def test_status_and_type_of_an_error(error: SluiceError, status: int, kind: str) -> None:
    found, headers, body = ANTHROPIC.error(error, str, "req-1")
    assert (found, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == headers["request-id"] == headers["x-request-id"] == "req-1"
    waits = error.retry_after_s is not None
    assert ("retry-after" in headers) is waits
    assert ("x-should-retry" in headers) is (
        error.retry_after_s == 3600 or (status in (409, 500, 504) and not waits)
    )


def test_error_names_its_request_and_fields() -> None:
    violations = [FieldViolation("a", "is wrong"), FieldViolation("b", "is too")]
    error = errors.InvalidRequest("a: is wrong; b: is too", violations=violations)
    _, headers, body = ANTHROPIC.error(error.of_request("req-2"), str.upper, "req-1")
    assert body["error"]["message"] == "A: is wrong; B: is too"
    assert body["request_id"] == headers["x-request-id"] == "req-2"
    event = ANTHROPIC.event(body)
    assert event.startswith(b'event: error\ndata: {"type":"error",')
    assert event.endswith(b"\n\n")


def test_long_message_is_cut() -> None:
    _, _, body = ANTHROPIC.error(errors.InvalidRequest("x" * 5000), str, "req-1")
    assert body["error"]["message"] == "x" * 1000


def test_prompt_that_is_too_long_has_anthropics_words() -> None:
    sizes = {"prompt_tokens": "9", "context_tokens": "8"}
    _, _, body = ANTHROPIC.error(errors.PromptTooLong("shorten it", metadata=sizes), str, "req-1")
    said = body["error"]["message"]
    assert said == "prompt is too long: 9 tokens > 8 maximum: shorten it"
    # A worker does not say its limit.
    _, _, body = ANTHROPIC.error(errors.PromptTooLong("shorten it"), str, "req-1")
    assert body["error"]["message"] == "prompt is too long: shorten it"


MODELS = [{"id": name} for name in "abcde"]


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": "5"}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"limit": "2", "before_id": "d"}, "bc", True),
        ({"limit": "3", "before_id": "d"}, "abc", False),
        ({"limit": "1", "after_id": "a", "before_id": "d"}, "b", True),
        ({"limit": "", "beta": "true"}, "abcde", False),
    ],
)
def test_pages_of_models(query: dict[str, str], names: str, has_more: bool) -> None:
    page = page_of(MODELS, query)
    assert "".join(model["id"] for model in page["data"]) == names
    ends = (names[0], names[-1]) if names else (None, None)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (has_more, *ends)
