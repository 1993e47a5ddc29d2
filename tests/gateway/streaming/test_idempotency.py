"""Complete answers that a repeated request gets again, and which gateway answers a key."""

from typing import Any

import pytest

from gateway.identity.resume_token import ResumeKey
from gateway.streaming.idempotency import Replay, ReplayCache, is_whole
from sluice.internal.v1.gateway_pb2 import KeyRecord, ReplacedModel, StoredAnswer
from sluice.v1 import inference_pb2 as pb
from sluice.wire.tokens import put_tokens, tokens_of
from tests.support.events import events_in, kinds_of


def record(tail: str = "", **fields: Any) -> KeyRecord:
    """An answer "ab" of three tokens, of which the second is hidden, "m" gave it after "small"."""
    delta = pb.Delta(text=f"ab{tail}", resume_token=b"proof")
    put_tokens(delta, (7, None, 8))
    answer = StoredAnswer(
        started=pb.Started(request_id="r1", model="m", prompt_tokens=3, seed=4),
        delta=delta,
        text_lengths=[1, 0, 1],
        notices=[pb.Notice(message="one"), pb.Notice(message="two"), pb.Notice(message="three")],
        restart_notice=1,
        replaced=[ReplacedModel(model="small", prompt_tokens=5)],
        finished=pb.Finished(model="m", attempts=[pb.ModelUsage(model="m")]),
    )
    return KeyRecord(fingerprint=b"f", gateway="gw", answer=answer, **fields)


def read_by(replay: Replay, held: int, model: str) -> tuple[pb.Started, list[pb.GenerateResponse]]:
    """What a caller gets who holds so many tokens of a model, but for the notice that it is a replay."""
    reader = replay.join(held, model=model)
    events = list(events_in(replay.read(reader)))
    if not replay.finished.usage.cached:
        assert events.pop(0).notices[0].kind == pb.NOTICE_KIND_REPLAYED
    return replay.started(reader, model), events


def events_of(replay: Replay, held: int, model: str) -> list[pb.GenerateResponse]:
    return read_by(replay, held, model)[1]


def begun(replay: Replay, model: str) -> pb.Started:
    return read_by(replay, 0, model)[0]


def test_a_replay_is_what_a_caller_may_see() -> None:
    replay = Replay(record())
    assert (replay.fingerprint, replay.finished.model) == (b"f", "m")
    with pytest.raises(AssertionError, match="complete answers"):
        Replay(KeyRecord(fingerprint=b"f"))


@pytest.mark.parametrize(
    ("held", "text", "tokens"),
    [(0, "ab", (7, None, 8)), (1, "b", (None, 8)), (2, "b", (8,)), (3, None, ())],
)
def test_a_replay_goes_on_behind_what_the_caller_holds(
    held: int, text: str | None, tokens: tuple[int | None, ...]
) -> None:
    for tail in ("", "!"):
        events = events_of(Replay(record(tail)), held, "m")
        deltas = [one.delta for one in events if one.HasField("delta")]
        assert len(deltas) == bool(text or tail)
        for delta in deltas:
            assert (delta.text, delta.index) == ((text or "") + tail, held)
            assert delta.resume_token == (b"proof" if tokens else b"")
            assert tokens_of(delta, held) == tokens
        assert kinds_of(events)[-1] == "finished"
        assert "notices" not in kinds_of(events)


def test_logprobs_go_with_their_tokens() -> None:
    kept = record()
    kept.answer.delta.logprobs.extend(pb.TokenLogprobs(logprob=-one) for one in range(3))
    events = events_of(Replay(kept), 1, "m")
    assert [one.logprob for one in events[0].delta.logprobs] == [-1, -2]


def test_tokens_of_a_replaced_model_resume_at_the_restart() -> None:
    replay = Replay(record())
    events = events_of(replay, 2, "small")
    assert kinds_of(events) == ["notices", "notices", "delta", "finished"]
    assert [one.notices[0].message for one in events[:2]] == ["two", "three"]
    assert events[2].delta.text == "ab"
    assert replay.matches((1, 2, 3, 4), "small")
    started = begun(replay, "small")
    assert (started.model, started.prompt_tokens, started.seed) == ("small", 5, 4)
    for model in ("", "m", "other"):
        started = begun(replay, model)
        assert (started.model, started.prompt_tokens) == ("m", 3)
        assert replay.matches((7, None), model)
        assert not replay.matches((7, 0), model)
        assert not replay.matches((7, None, 8, 9), model)


def test_the_text_before_a_token() -> None:
    replay = Replay(record("!"))
    assert [replay.text_before(index) for index in range(5)] == ["", "a", "a", "ab", "ab"]


def test_a_cached_answer_has_nothing_of_the_first_call() -> None:
    timings = pb.Timings()
    timings.total.FromMilliseconds(1500)
    key = ResumeKey("secret")
    started = pb.Started(request_id="r2", model="auto", prompt_tokens=99, seed=77)
    first = Replay(record("!"))
    replay = first.answer_to(started, timings, key.token(b"g", "m", 4))
    assert (begun(replay, "").request_id, begun(replay, "").model) == ("r2", "m")
    assert (begun(replay, "").prompt_tokens, begun(replay, "").seed) == (3, 4)
    assert begun(replay, "small").model == "m"
    events = events_of(replay, 0, "")
    assert kinds_of(events) == ["delta", "finished"]
    assert key.issued(events[0].delta.resume_token, b"g", "m", 4, (7, None, 8))
    finished = events[-1].finished
    assert (finished.usage.cached, finished.timings, len(finished.attempts)) == (True, timings, 0)
    assert not first.finished.usage.cached, "the first one stays as it was"
    assert events_of(first, 0, "") == events_of(Replay(record("!")), 0, "")


def test_an_answer_of_which_tokens_have_no_text_is_not_whole() -> None:
    assert is_whole(record())
    broken = record()
    broken.answer.text_lengths.append(1)
    assert not is_whole(broken)
    assert not is_whole(KeyRecord(fingerprint=b"f"))
    assert is_whole(KeyRecord(answer=StoredAnswer()))


def sized(size: int) -> KeyRecord:
    made = KeyRecord(answer=StoredAnswer(delta=pb.Delta(text="x" * size)))
    made.answer.delta.text = "x" * (2 * size - made.ByteSize())
    assert made.ByteSize() == size
    return made


def test_an_answer_is_kept_until_its_time_and_no_longer() -> None:
    cache = ReplayCache(9, 5.0)
    kept = record()
    cache.put("a", kept, 1.0)
    assert cache.record("a", 5.999) == kept
    assert cache.record("a", 6.0) is None
    assert cache.get("b", 1.0) is None
    cache.expire(5.999)
    cache.put("b", kept, 5.0)
    cache.expire(6.0)
    assert kept_in(cache, 5.5) == "b"
    cache.expire(100.0)
    cache.expire(100.0)
    assert kept_in(cache, 5.5) == ""


def kept_in(cache: ReplayCache, now: float = 2.0) -> str:
    return "".join(key for key in "abcde" if cache.record(key, now) is not None)


def test_bounds_of_one_answer_and_of_all() -> None:
    cache = ReplayCache(3, 60.0)
    cache.put("a", sized(256 * 1024), 0.0)
    cache.put("b", sized(256 * 1024 + 1), 0.0)
    assert kept_in(cache) == "a"
    for name in "cd":
        cache.put(name, sized(100), 0.0)
    assert kept_in(cache) == "acd"
    cache.put("e", sized(100), 0.0)
    assert kept_in(cache) == "cde"
    # One that is written again is the newest.
    cache.put("c", sized(200), 1.0)
    cache.put("a", sized(100), 1.0)
    assert kept_in(cache) == "ace"
    cache.drop(lambda key: key in "ac")
    assert kept_in(cache) == "e"
    small = ReplayCache(9, 60.0, bytes_max=300)
    for name in "abcd":
        small.put(name, sized(100), 0.0)
    assert kept_in(small) == "bcd"
