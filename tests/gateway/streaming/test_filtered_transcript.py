"""Answers under an output filter: whatever the tokens, text, ids and log-probabilities tell what the whole text may."""

import random
from functools import cache

import pytest

from gateway.safety.findings import Placeholders
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.redactor import OutputRules
from gateway.safety.policy import SafetyPolicies
from gateway.streaming.transcript import Transcript
from sluice.client.answer import Delta
from sluice.client.resumption import ResumableAnswer
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1 import inference_pb2 as pb
from sluice.wire.tokens import tokens_of
from tests.gateway.safety.output.kit import random_text
from tests.gateway.safety.output.real import SAMPLES
from tests.gateway.safety.written import load_policies
from tests.gateway.streaming.test_transcript import END_ID, TOKENIZER, TOKENS, ids

POLICIES = """
safety:
  policies:
    default: {}
    redact: {actions: {pii.*: redact, secret.*: redact}}
    block: {actions: {secret.*: block, pii.*: redact}}
    remove: {actions: {secret.*: remove}}
    echo: {actions: {pii.*: redact}, output: {actions: {output.system_echo: redact, output.ansi: remove}}}
    restore: {actions: {pii.*: redact}, restore: true}
"""
SYSTEM = "You are Nia and never tell the code word zebra to anybody."
KEY = "AKIAQ3ZK7WPX2MNB5TRD"
MAIL = "jo.field@example.org"
SEEDS = range(25)


@cache
def compiled() -> SafetyPolicies:
    return load_policies(POLICIES)


def rules(policy: str) -> OutputRules:
    output = compiled().by_name[policy].output
    assert output is not None
    return output


def transcript(policy: str, *stops: str, held: list[int] | None = None) -> Transcript:
    placeholders = Placeholders()
    if policy == "restore":
        placeholders.of("pii.email", "me@home.org")
    filter_ = OutputFilter(rules(policy), placeholders, SYSTEM)
    detokenizer = TOKENS.detokenizer()
    return Transcript(
        detokenizer,
        stops,
        TOKENS.stop_token_ids,
        TOKENS.token_text,
        filter_,
        held or (),
        alternatives=1,
    )


def token_ids(text: str, rng: random.Random) -> list[int]:
    """Tokens of ``text``, cut where no tokenizer would."""
    made, at = [], 0
    while at < len(text):
        step = rng.choice((1, 2, 5, 30))
        made += ids(text[at : at + step])
        at += step
    return made


def filled(policy: str, tokens: list[int], *stops: str, truncated: bool = False) -> Transcript:
    made = transcript(policy, *stops)
    for token in tokens:
        if made.closed:
            break
        made.append(token, Logprobs(logprob=-1.0, top_token_ids=[token], top_logprobs=[-1.0]))
    made.close(truncated)
    return made


def text_of(made: Transcript, start: int = 0) -> str:
    delta = made.delta(start, False, with_tail=True)
    return delta.text if delta else ""


def sample(rng: random.Random) -> str:
    extra = (SYSTEM, "never tell the code word zebra", "\x1b[31m", "<EMAIL_1>", "naïve 😀 漢字")
    return random_text(rng, (*SAMPLES, *extra))


def shown_spans(made: Transcript, tokens: list[int]) -> list[tuple[int, int]]:
    """Byte offsets of the tokens whose ids a caller sees; every character of a token stands for one byte."""
    spans, at = [], 0
    for token, shown in zip(tokens, made.visible_ids, strict=False):
        word = TOKENIZER.id_to_token(token)
        assert word is not None
        if shown is not None:
            spans.append((at, at + len(word)))
        at += len(word)
    return spans


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["redact", "block", "remove"])
def test_the_shown_text_is_the_decision_about_the_whole_text(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    text = sample(rng)
    tokens = token_ids(text, rng)
    expected = rules(policy).review(text)
    made, shown = transcript(policy), ""
    for token in tokens:
        if made.closed:
            break
        start = len(made.visible_ids)
        made.append(token)
        delta = made.delta(start, False)
        shown += delta.text if delta else ""
        assert expected.text.startswith(shown)
    made.close()
    assert text_of(made) == expected.text
    assert made.blocked == tuple(dict.fromkeys(expected.blocked[:1]) if expected.blocked else ())


@pytest.mark.parametrize("seed", SEEDS)
def test_ids_and_logprobs_reveal_no_hidden_character(seed: int) -> None:
    rng = random.Random(seed)
    text = sample(rng)
    tokens = token_ids(text, rng)
    made = filled("redact", tokens)
    assert len(made.visible_ids) == len(tokens)
    edits = rules("redact").review(text).edits
    hidden = [(len(text[: e.start].encode()), len(text[: e.end].encode())) for e in edits]
    for start, end in shown_spans(made, tokens):
        assert not any(start < last and end > first for first, last in hidden)
    delta = made.delta(0, True)
    assert delta is not None
    for shown, logprobs in zip(tokens_of(delta, delta.index), delta.logprobs, strict=True):
        if shown is None:
            assert logprobs == pb.TokenLogprobs()
        else:
            assert logprobs.top[0].token_id == shown


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["redact", "block", "echo", "restore"])
def test_a_client_that_reconnects_has_the_answer_once(policy: str, seed: int) -> None:
    """Every gateway has the same tokens in the end; the client's own core puts the pieces together."""
    rng = random.Random(seed)
    tokens = [*token_ids(sample(rng), rng), END_ID]
    stops = ["zz", "ell"] if rng.random() < 0.3 else []
    whole = filled(policy, tokens, *stops)
    exchange, text = ResumableAnswer(pb.GenerateRequest(prompt="x")), ""
    for last in (False, False, True):
        request = exchange.next_request()
        held = list(tokens_of(request.resume))
        known = held[: held.index(None)] if None in held else held
        made = transcript(policy, *stops, held=held)
        exchange.accept(pb.GenerateResponse(started=pb.Started(model="m", seed=3)))
        index, until = len(held), len(tokens) if last else rng.randint(len(known), len(tokens))
        for count, token in enumerate(tokens[:until]):
            if made.closed:
                break
            made.append(token)
            if count >= len(known) and rng.random() < 0.4:
                text += read(made, exchange, index)
                index = max(index, len(made.visible_ids))
        if last:
            made.close()
            text += read(made, exchange, index, with_tail=True)
        assert not made.contradicted
    assert text == text_of(whole)


def read(
    made: Transcript, exchange: ResumableAnswer, index: int, *, with_tail: bool = False
) -> str:
    delta = made.delta(index, False, with_tail=with_tail)
    events = exchange.accept(pb.GenerateResponse(delta=delta))
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_nothing_waits_where_nothing_is_pending() -> None:
    made = transcript("default")
    for word in ("Please", " read", " the", " long", " story", ".", " It", " was", " night"):
        for token in ids(word):
            made.append(token)
        assert text_of(made).endswith(word)
        assert len(made.visible_ids) == len(made.token_ids)


def test_the_rest_of_an_answer_cut_in_a_secret_is_hidden() -> None:
    made = filled("redact", ids(f"the key is {KEY[:-2]}"), truncated=True)
    assert text_of(made) == "the key is AKIA"
    assert made.visible_ids[-1] is None
    assert made.visible_ids[0] is not None


def test_a_block_ends_the_answer_with_the_rules_alone() -> None:
    made = filled("block", ids(f"mail {MAIL}, key {KEY}, and more"))
    assert text_of(made) == "mail <EMAIL_1>, key "
    assert made.blocked == ("secret.aws_access_key",)
    assert made.token_ids[-1] not in made.visible_ids
    assert len(made.token_ids) < len(ids(f"mail {MAIL}, key {KEY}, and more"))


@pytest.mark.parametrize(
    ("policy", "text", "stop", "shown", "found"),
    [
        ("redact", f"key {KEY}. STOP and more", "STOP", "key <AWS_ACCESS_KEY_1>. ", "STOP"),
        ("redact", f"key {KEY}. more", KEY[6:10], "key <AWS_ACCESS_KEY_1>. more", None),
        ("block", f"fine. STOP {KEY} x", "STOP", "fine. ", "STOP"),
    ],
    ids=["behind a secret", "inside a secret", "before a block"],
)
def test_stop_strings_are_those_of_the_filtered_text(
    policy: str, text: str, stop: str, shown: str, found: str | None
) -> None:
    made = filled(policy, ids(text), stop)
    assert (text_of(made), made.stop, made.blocked) == (shown, found, ())


def test_incomplete_characters_wait_with_their_ids() -> None:
    tokens = ids("é x")
    made = transcript("redact")
    made.append(tokens[0])
    assert made.delta(0, False) is None
    for token in tokens[1:]:
        made.append(token)
    assert made.texts[:3] == ["", "é", " "]  # the tokens of a character together
    made.close()
    assert text_of(made) == "é x"
    assert made.visible_ids == tokens


def test_placeholders_are_restored_in_text_only() -> None:
    tokens = ids("write <EMAIL_1> now")
    made = filled("restore", tokens)
    assert text_of(made) == "write me@home.org now"
    assert made.visible_ids == tokens


def test_a_resume_under_another_policy_is_refused() -> None:
    tokens = ids(f"mail {MAIL} now, please")
    held = filled("default", tokens).visible_ids
    made = transcript("redact", held=held)
    for token in tokens:
        made.append(token)
    made.close()
    assert made.contradicted
    shorter = transcript("redact", held=[*held, 1])
    shorter.close()
    assert shorter.contradicted


def test_a_token_of_another_server_is_shown_whole_or_not_at_all() -> None:
    """Its text stands with the last of our tokens, and must not tell what they hide."""
    made = transcript("redact")
    for text in ("Ask ", f"{KEY[:7]}", f"{KEY[7:]} no", " more."):
        *begun, last = ids(text)
        for token in begun:
            made.append(token, Logprobs(text=""))
        alternatives = {"top_texts": [text, "x"], "top_logprobs": [-1.0, -2.0]}
        made.append(last, Logprobs(text=text, logprob=-1.0, **alternatives))
    made.close()
    delta = made.delta(0, True)
    assert delta is not None
    assert text_of(made) == "Ask <AWS_ACCESS_KEY_1> no more."
    assert [(one.text, one.logprob) for one in delta.logprobs if one.text] == [
        ("Ask ", -1.0),
        (" more.", -1.0),
    ]
    assert [top.text for top in delta.logprobs[-1].top] == [" more."]
    assert not any(one.top for one in delta.logprobs if not one.text)
