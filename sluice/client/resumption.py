"""Resume an answer over several calls: track what the caller has, and find what is new in each message.

Rules:
- A new call repeats the request with its idempotency key and adds what the client has: the token ids, and the seed, so
  that the remaining tokens are sampled as they would have been.
- It also has the resume token of the last delta: a gateway continues only what a gateway has sent.
- The gateway continues after those tokens, or replays the answer from an earlier index. What the caller has seen is not
  returned again: tokens are counted by index, text by its length.
- Text may lag behind tokens (a character or a stop string may be incomplete), but how much text is out after n tokens
  depends on those tokens alone. So a call that begins at token n begins at the text length noted when token n came.
- When a cascade escalates, the second model starts over; the client names the model whose tokens it has.
- An answer that contradicts what the caller has seen ends with an error.

There is no I/O here: call `next_request`, then `accept` for each message, until `complete` or the call breaks off.
"""

from sluice.client.answer import (
    Answer,
    AnswerBuilder,
    Delta,
    Event,
    Notice,
    NoticeKind,
    Started,
    delta_of,
    finished_of,
    notice_of,
    started_of,
)
from sluice.errors import InternalError
from sluice.v1 import inference_pb2 as pb
from sluice.wire.tokens import VisibleToken, put_tokens


class _HeldText:
    """A text of the answer as far as the caller has it, by the rule about text that lags behind tokens."""

    def __init__(self) -> None:
        self._length = 0
        self._length_at = {0: 0}
        self._position: int | None = None
        """Characters that the current call has sent or skipped; None before its first delta."""

    def call_begins(self) -> None:
        """Start another call."""
        self._position = None

    def unseen(self, text: str, index: int) -> str:
        """Return the part of a delta's `text` at token `index` that the caller has not seen.

        Raises:
            InternalError: The delta begins inside a delta of an earlier call.
        """
        # The first delta of a call says where it begins; what the caller has seen is skipped.
        if self._position is None:
            self._position = self._length_at.get(index)
        if self._position is None:
            raise InternalError(f"the answer continues at token {index}, inside a piece")
        skipped = max(0, self._length - self._position)
        self._position += len(text)
        return text[skipped:]

    def keep(self, text: str, tokens: int) -> None:
        """Record that the caller gets `text`, and then has `tokens` tokens."""
        self._length += len(text)
        self._length_at.setdefault(tokens, self._length)


class ResumableAnswer:
    """The part of an answer that the client has.

    Attributes:
        started: The first `Started`; None before it.
        complete: Whether `Finished` has arrived.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.started: Started | None = None
        self.complete = False
        self._request = request
        self._model = ""
        self._token_ids: list[VisibleToken] = []
        self._resume_token = b""
        self._text, self._reasoning = _HeldText(), _HeldText()
        self._call_started = False

    def next_request(self) -> pb.GenerateRequest:
        """Return the message that opens the next call."""
        self._call_started = False
        self._text.call_begins()
        self._reasoning.call_begins()
        if self.started is None:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.seed = self.started.seed
        put_tokens(request.resume, self._token_ids)
        request.resume.model = self._model
        request.resume.resume_token = self._resume_token
        return request

    def accept(self, response: pb.GenerateResponse) -> list[Event]:
        """Return the events in `response` that the caller has not seen. A later `Started` becomes a `Notice`.

        Raises:
            InternalError: The message does not continue the answer.
        """
        events: list[Event] = []
        if response.HasField("started"):
            events.append(self._accept_started(started_of(response.started)))
        elif not self._call_started:
            raise InternalError("the stream began without started")
        events += [self._accept_notice(notice_of(notice)) for notice in response.notices]
        if response.HasField("delta"):
            new = self._accept_delta(delta_of(response.delta), response.delta.resume_token)
            events += () if new is None else (new,)
        if response.HasField("finished"):
            self.complete = True
            events.append(finished_of(response.finished))
        return events

    def _accept_started(self, event: Started) -> Event:
        self._call_started = True
        if self.started is None:
            self.started, self._model = event, event.model
            return event
        # Another model would not draw the same tokens.
        if self._token_ids and event.model != self._model:
            raise InternalError(
                f"the answer of {self._model} came back from {event.model}: it cannot be continued"
            )
        self._model = event.model
        return Notice(
            NoticeKind.RECONNECTED,
            f"continues as request {event.request_id}, trace {event.trace_id}",
        )

    def _accept_notice(self, notice: Notice) -> Notice:
        """Discard what the caller has seen if another model takes over."""
        if notice.kind is NoticeKind.ESCALATED:
            # The second model starts over: nothing of the first answer may be resumed.
            self._model = notice.model
            self._token_ids.clear()
            self._resume_token = b""
            self._text, self._reasoning = _HeldText(), _HeldText()
        return notice

    def _accept_delta(self, delta: Delta, resume_token: bytes) -> Delta | None:
        known_count = self._known_tokens(delta)
        # Only a delta with new tokens has a resume token for all that the caller holds.
        if len(delta.token_ids) > known_count:
            self._resume_token = resume_token
        has_news = len(delta.token_ids) > known_count or not delta.token_ids
        return self._keep(
            Delta(
                text=self._text.unseen(delta.text, delta.index),
                token_ids=delta.token_ids[known_count:],
                index=delta.index + known_count,
                logprobs=delta.logprobs[known_count:],
                tool_calls=delta.tool_calls if has_news else (),
                reasoning=self._reasoning.unseen(delta.reasoning, delta.index),
            )
        )

    def _known_tokens(self, delta: Delta) -> int:
        """Return how many tokens of `delta` the caller has; raise InternalError if they differ."""
        count = len(self._token_ids)
        if delta.index > count:
            raise InternalError(f"tokens {count} to {delta.index - 1} of the answer are missing")
        overlap = min(count - delta.index, len(delta.token_ids))
        if tuple(self._token_ids[delta.index : delta.index + overlap]) != delta.token_ids[:overlap]:
            raise InternalError("the answer differs from what came before the reconnect")
        return overlap

    def _keep(self, new: Delta) -> Delta | None:
        if not (new.text or new.token_ids or new.reasoning or new.tool_calls):
            return None
        self._token_ids.extend(new.token_ids)
        self._text.keep(new.text, len(self._token_ids))
        self._reasoning.keep(new.reasoning, len(self._token_ids))
        return new


class SeveralAnswers:
    """The answers to one request with `n`, from one call; a call that breaks off is repeated as a whole."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._parts: list[tuple[ResumableAnswer, AnswerBuilder]] = []

    @property
    def complete(self) -> bool:
        """Whether every answer has its `Finished`."""
        return bool(self._parts) and all(answer.complete for answer, _ in self._parts)

    def next_request(self) -> pb.GenerateRequest:
        """Return the message that opens the next call."""
        count = max(1, self._request.sampling.n)
        self._parts = [(ResumableAnswer(self._request), AnswerBuilder()) for _ in range(count)]
        return self._request

    def accept(self, response: pb.GenerateResponse) -> list[Event]:
        """Accept the next message; return no events, because callers get whole answers.

        Raises:
            InternalError: It does not continue its answer.
        """
        if response.answer_index >= len(self._parts):
            raise InternalError(
                f"the mesh sent answer {response.answer_index}, which was not asked for"
            )
        answer, builder = self._parts[response.answer_index]
        for event in answer.accept(response):
            builder.add(event)
        return []

    def build(self) -> tuple[Answer, ...]:
        """Return the answers; valid only when `complete`."""
        return tuple(builder.build() for _, builder in self._parts)
