"""Watches the first model's answer until its commit point: keep it, or ask the better model.

Plain code over log-probabilities and text. Before the commit point nothing has been promised to the caller; the answer
passes it after ``commit_tokens`` tokens without doubt, or at its end when the checks of the whole answer find nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from gateway.routing.cascade.checks import has_wrong_sum, is_json
from gateway.routing.cascade.lists import is_as_asked
from gateway.routing.scores import Score
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.routing import CascadeRoute

DECIDE_TOKENS: Final = 4
"""Before so many tokens a mean says nothing."""


class Verdict(Enum):
    """What to do about the answer now."""

    PENDING = auto()
    """Go on watching."""
    COMMIT = auto()
    """It is promised to the caller."""
    DOUBT = auto()
    """The better model should answer."""


class Judge(Protocol):
    """A learned cascade: predicts what the better model would gain."""

    def judge(self, prompt: str, answer: str) -> "Judgement":
        """Of a whole answer."""


@dataclass(frozen=True)
class Judgement:
    """What a judge says."""

    doubt: str
    """Why the better model should answer, one sentence without any text; empty when it need not."""
    score: Score


class Watch:
    """One answer under watch.

    Attributes:
        reason: why it is in doubt, one sentence without any text of the answer.
        tokens: how many have come.
        score: what the judge predicted, when it was asked.
    """

    def __init__(
        self, route: CascadeRoute, prompt: str, *, wants_json: bool, judge: Judge | None = None
    ) -> None:
        self.reason = ""
        self.score: Score | None = None
        self._route = route
        self._prompt = prompt
        self._wants_json = wants_json
        self._judge = judge
        self.tokens = 0
        self._logprob = 0.0
        self._margin = 1.0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far."""
        return self._logprob / self.tokens if self.tokens else 0.0

    def push(self, logprobs: Sequence[Logprobs]) -> Verdict:
        """The next tokens."""
        for one in logprobs:
            self.tokens += 1
            self._logprob += one.logprob
            self._margin = min(self._margin, _margin(one))
            verdict = self._confidence()
            if verdict is not Verdict.PENDING:
                return verdict
        return Verdict.PENDING

    def end(self, text: str, *, truncated: bool) -> Verdict:
        """The answer is complete before its commit point; ``truncated``: it ran out of tokens."""
        self.reason = self._fault(text, truncated)
        return Verdict.DOUBT if self.reason else Verdict.COMMIT

    def _confidence(self) -> Verdict:
        if self.tokens < DECIDE_TOKENS:
            return Verdict.PENDING
        self.reason = self._unsure()
        if self.reason:
            return Verdict.DOUBT
        done = self.tokens >= self._route.commit_tokens
        return Verdict.COMMIT if done else Verdict.PENDING

    def _unsure(self) -> str:
        route = self._route
        if self.mean_logprob < route.min_logprob:
            return (
                f"mean log-probability {self.mean_logprob:.2f} of {self.tokens} tokens"
                f" is below {route.min_logprob:g}"
            )
        if self._margin < route.min_margin:
            return (
                f"a token was only {self._margin:.2f} ahead of the next, below {route.min_margin:g}"
            )
        return ""

    def _fault(self, text: str, truncated: bool) -> str:
        checks = self._route.checks
        if truncated and "finished" in checks:
            return "the answer is unfinished"
        if self._wants_json and "json" in checks and not is_json(text):
            return "the answer is not JSON"
        as_asked = is_as_asked(self._prompt, text) if "lists" in checks else None
        if as_asked is not None:  # worked out: what else there is to say are guesses
            return "" if as_asked else "the numbers are not sorted or added up as asked"
        if self.tokens and (unsure := self._unsure()):
            return unsure
        if "sums" in checks and has_wrong_sum(text):
            return "a sum in the answer does not add up"
        return "" if self._judge is None else self._judged(self._judge, text)

    def _judged(self, judge: Judge, text: str) -> str:
        judgement = judge.judge(self._prompt, text)
        self.score = judgement.score
        return judgement.doubt


def _margin(one: Logprobs) -> float:
    """Probability of the drawn token minus that of the best other one."""
    others = one.top_logprobs[:2]
    if not others:
        return 1.0
    runner_up = others[0] if not math.isclose(others[0], one.logprob, abs_tol=1e-6) else None
    if runner_up is None:
        runner_up = others[1] if len(others) > 1 else -math.inf
    return math.exp(one.logprob) - math.exp(runner_up)
