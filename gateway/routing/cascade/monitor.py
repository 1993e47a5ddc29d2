"""Monitors the first model's answer until its commit point: keep it, or escalate to the second model.

Plain code over log-probabilities and text. Before the commit point nothing has been promised to the caller. The answer
commits after ``commit_tokens`` tokens without doubt, or at its end when its checks find nothing.
"""

import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from gateway.routing.cascade.checks import CHECKS, WholeAnswer
from gateway.routing.prediction import AnswerPredictor, HeadScore
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.routing import CascadeRoute

DECIDE_TOKENS: Final = 4
"""A mean of fewer tokens is not compared."""


class CascadeDecision(Enum):
    """What to do with the first answer now."""

    PENDING = auto()
    """Keep monitoring."""
    COMMIT = auto()
    """It is promised to the caller."""
    ESCALATE = auto()
    """It is in doubt: the second model should answer."""


class AnswerMonitor:
    """Monitors one answer.

    Attributes:
        reason: why it is in doubt, one sentence without any text of the answer.
        tokens: received so far.
        score: what ``predictor`` predicted, once it was asked.
    """

    def __init__(
        self,
        route: CascadeRoute,
        prompt: str,
        *,
        wants_json: bool,
        predictor: AnswerPredictor | None = None,
    ) -> None:
        self.reason = ""
        self.score: HeadScore | None = None
        self.tokens = 0
        self._route = route
        self._prompt = prompt
        self._wants_json = wants_json
        self._predictor = predictor
        self._logprob = 0.0
        self._margin = 1.0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far."""
        return self._logprob / self.tokens if self.tokens else 0.0

    def push(self, logprobs: Sequence[Logprobs]) -> CascadeDecision:
        """Takes the next tokens."""
        for one in logprobs:
            self.tokens += 1
            self._logprob += one.logprob
            self._margin = min(self._margin, _margin(one))
            decision = self._by_confidence()
            if decision is not CascadeDecision.PENDING:
                return decision
        return CascadeDecision.PENDING

    def end(self, text: str, *, truncated: bool) -> CascadeDecision:
        """The answer ended before its commit point; ``truncated``: it ran out of tokens."""
        self.reason = self._doubt(WholeAnswer(text, truncated, self._wants_json))
        return CascadeDecision.ESCALATE if self.reason else CascadeDecision.COMMIT

    def _by_confidence(self) -> CascadeDecision:
        if self.tokens < DECIDE_TOKENS:
            return CascadeDecision.PENDING
        self.reason = self._low_confidence()
        if self.reason:
            return CascadeDecision.ESCALATE
        done = self.tokens >= self._route.commit_tokens
        return CascadeDecision.COMMIT if done else CascadeDecision.PENDING

    def _low_confidence(self) -> str:
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

    def _doubt(self, answer: WholeAnswer) -> str:
        """Checks in the order of the policy, then confidence, then the prediction; the first doubt counts."""
        for name in self._route.checks:
            if reason := CHECKS[name](answer):
                return reason
        if self.tokens and (reason := self._low_confidence()):
            return reason
        return "" if self._predictor is None else self._predicted(self._predictor, answer.text)

    def _predicted(self, predictor: AnswerPredictor, text: str) -> str:
        prediction = predictor.predict(self._prompt, text)
        self.score = prediction.score
        return prediction.reason if prediction.strong else ""


def _margin(one: Logprobs) -> float:
    """Probability of the drawn token minus that of the best other one."""
    others = one.top_logprobs[:2]
    if not others:
        return 1.0
    runner_up = others[0] if not math.isclose(others[0], one.logprob, abs_tol=1e-6) else None
    if runner_up is None:
        runner_up = others[1] if len(others) > 1 else -math.inf
    return math.exp(one.logprob) - math.exp(runner_up)
