"""A resume token is good for one request, model, seed and beginning of an answer."""

import pytest

from gateway.identity.resume_token import TOKEN_BYTES, ResumeKey

FINGERPRINT, MODEL, SEED = b"f" * 32, "small", 7
TOKENS = (5, 6, None, 7)


def proof(key: ResumeKey) -> bytes:
    return key.token(FINGERPRINT, MODEL, SEED).after(TOKENS)


def test_resume_tokens_do_not_depend_on_deltas() -> None:
    key = ResumeKey("secret")
    given = proof(key)
    assert len(given) == TOKEN_BYTES
    token = key.token(FINGERPRINT, MODEL, SEED)
    before = token.after(TOKENS[:1])
    assert token.after(TOKENS[1:]) == given
    assert key.issued(given, FINGERPRINT, MODEL, SEED, TOKENS)
    assert key.issued(before, FINGERPRINT, MODEL, SEED, TOKENS[:1])
    assert ResumeKey("secret").issued(given, FINGERPRINT, MODEL, SEED, TOKENS), "another gateway"


@pytest.mark.parametrize(
    "changed",
    [
        (b"g" * 32, MODEL, SEED, TOKENS),
        (FINGERPRINT, "large", SEED, TOKENS),
        (FINGERPRINT, MODEL, 8, TOKENS),
        (FINGERPRINT, MODEL, SEED, TOKENS[:-1]),
        (FINGERPRINT, MODEL, SEED, (*TOKENS, 8)),
        (FINGERPRINT, MODEL, SEED, (5, 6, 0, 7)),
        (FINGERPRINT, MODEL, SEED, (5, None, 6, 7)),
        (FINGERPRINT, MODEL, SEED, ()),
    ],
)
def test_anything_else_is_refused(changed: tuple[bytes, str, int, tuple[int | None, ...]]) -> None:
    key = ResumeKey("secret")
    assert not key.issued(proof(key), *changed)


@pytest.mark.parametrize("forged", [b"", b"\0" * TOKEN_BYTES, b"x", proof(ResumeKey("other"))])
def test_a_token_of_no_gateway_or_another_secret_is_refused(forged: bytes) -> None:
    key = ResumeKey("secret")
    given = proof(key)
    for resume_token in (forged, given[:-1]):
        assert not key.issued(resume_token, FINGERPRINT, MODEL, SEED, TOKENS)
    key.use("another")
    assert not key.issued(given, FINGERPRINT, MODEL, SEED, TOKENS)
    assert key.issued(proof(key), FINGERPRINT, MODEL, SEED, TOKENS)
