"""A whole answer, collected from its events."""

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.client.events import (
    Delta,
    Event,
    Finished,
    FinishReason,
    LegUsage,
    Notice,
    NoticeKind,
    Route,
    Started,
    Timings,
    TokenLogprobs,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What `generate` gives when nobody watches it stream; the fields are those of the events.

    Attributes:
        request_id: the request as the mesh first named it.
        finish_reason: why the text ends.
        stop: the stop string that ended it, or empty.
        rules: the rules of the safety policy that ended it, if they did.
        model: whose answer it is; after a cascade not the one that was asked first.
        usage: of that model; `legs` has that of every model that worked on it.
    """

    request_id: str
    trace_id: str
    model: str
    route: Route
    seed: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    notices: tuple[Notice, ...]
    finish_reason: FinishReason
    stop: str
    usage: Usage
    timings: Timings
    rules: tuple[str, ...] = ()
    legs: tuple[LegUsage, ...] = ()

    @property
    def tier(self) -> str:
        """The tier of the model that was asked first."""
        return self.route.tier


class AnswerBuilder:
    """Collects the events of one answer."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._deltas: list[Delta] = []
        self._notices: list[Notice] = []
        self._finished: Finished | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(delta.text for delta in self._deltas)

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case Started():
                self._started = event
            case Delta():
                self._deltas.append(event)
            case Notice():
                self._notices.append(event)
                if event.kind is NoticeKind.ESCALATED:
                    self._deltas.clear()
            case Finished():
                self._finished = event

    def build(self) -> Answer:
        """The answer; only after `Finished`."""
        started, finished = self._started, self._finished
        assert started is not None, "the answer did not start"
        assert finished is not None, "the answer is not complete"
        return Answer(
            request_id=started.request_id,
            trace_id=started.trace_id,
            model=finished.model or started.model,
            route=started.route,
            seed=started.seed,
            text=self.text,
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
            notices=tuple(self._notices),
            finish_reason=finished.reason,
            stop=finished.stop,
            usage=finished.usage,
            timings=finished.timings,
            rules=finished.rules,
            legs=finished.legs,
        )


def collect(events: Iterable[Event]) -> Answer:
    """The answer that `events` make."""
    builder = AnswerBuilder()
    for event in events:
        builder.add(event)
    return builder.build()
