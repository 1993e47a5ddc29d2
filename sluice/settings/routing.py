"""Settings of the section `routing`; docs/concepts/routing.md explains each part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from sluice.settings.base import Count, Name, Positive, Section, Share


class TenantMatch(Section):
    """Selects requests by their tenants."""

    tenants: tuple[Name, ...] = ()
    """Tenants, any of them; empty: every tenant."""


class RequestMatch(TenantMatch):
    """Selects requests by tenants and labels; both must hold."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that the request has with these values."""


class ModelChoice(Section):
    """Gives requests to a model."""

    model: Name
    """Name of the model."""


class RouteRule(RequestMatch, ModelChoice):
    """Sends a request to `model` when all conditions that are set hold."""

    reason: str = Field(min_length=1, max_length=200)
    """Why, for people: shown by `sluice explain`."""
    min_numbers: Count | None = None
    """At least this many numbers in the prompt."""
    contains: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(
        (), max_length=100
    )
    """Regular expressions (RE2), of which one is found in the caller's last turn."""
    min_prompt_tokens: Count | None = None
    """At least this many tokens of the default model in the prompt."""
    max_prompt_chars: Count | None = None
    """At most this many characters in the caller's turns."""
    languages: tuple[Annotated[str, Field(pattern=r"^[a-z]{2}$")], ...] = ()
    """Any of them, ISO 639-1; of a text whose language is uncertain the rule does not hold."""
    code: bool | None = None
    """Whether the prompt holds program code."""
    findings: tuple[str, ...] = ()
    """Rules of the safety layer, such as "pii.iban" or "pii.*", of which one was found."""

    @model_validator(mode="after")
    def _has_condition(self) -> Self:
        conditions = self.model_dump(exclude={"model", "reason"}).values()
        if all(value in (None, (), {}) for value in conditions):
            raise ValueError("a rule needs a condition, such as min_numbers, labels or tenants")
        return self


class Target(Section):
    """Chooses the threshold of a learned router by its held-out outcomes; exactly one is set."""

    quality: Share | None = None
    """Keep this share of the strong model's quality, as cheaply as possible."""
    strong_share: Share | None = None
    """Send at most this share of requests to the strong model."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.quality is None) == (self.strong_share is None):
            raise ValueError("set either quality or strong_share")
        return self


class TrainedRoute(Section):
    """Decides by an artefact of `sluice router train`."""

    artefact: str | None = None
    """File or folder of the artefact: of a router, or of one that judges answers which end before the commit point."""
    target: Target = Target(quality=0.99)
    """Chooses the threshold of the artefact."""


class LearnedRoute(TrainedRoute):
    """Asks a trained router (`sluice router train`) whether the strong model would be better."""

    weak: Name
    """The model that answers where that is good enough."""
    strong: Name
    """The better, more expensive model."""

    @model_validator(mode="after")
    def _has_artefact(self) -> Self:
        if self.artefact is None:
            raise ValueError("artefact: is missing; name the file of a trained router")
        return self


DRAFT: Final = "{draft}"
"""Where a cascade's hint has the first model's answer."""
HINT: Final = (
    "Another model began this answer and was not sure of it. It may be wrong or unfinished. "
    f"Answer yourself, and use what is right in it:\n{DRAFT}"
)
"""The hint that `hint: true` stands for."""


class CascadeRoute(TrainedRoute):
    """Starts with `first` and escalates to `second` when the answer is in doubt before the commit point."""

    first: Name
    """The model that begins the answer."""
    second: Name
    """The model that answers when the first one is in doubt."""
    mode: Literal["hold", "replace"] = "hold"
    """"hold" sends nothing before the commit point; "replace" streams at once to callers that accept a replacement."""
    commit_tokens: Count = 32
    """After so many tokens without doubt the first model's answer is promised to the caller."""
    min_logprob: float = Field(-0.7, le=0)
    """Mean log-probability of the tokens so far below which the answer is in doubt."""
    checks: tuple[Name, ...] = ("finished", "json", "sums")
    """Checks of an answer that ends before the commit point, in this order; docs/concepts/routing.md lists them."""
    max_share: ClassVar[float] = 0.5
    """Share of a tenant's latest 100 requests that may escalate; above it the first answer stays."""
    hint: str | None = Field(None, max_length=2000)
    """Text behind the prompt of the second model, with the first model's answer so far for "{draft}"; true: `HINT`.
    Unset or false: the second model sees the prompt alone."""

    @field_validator("hint", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        """Read true as the default hint, false as none."""
        if isinstance(value, bool):
            return HINT if value else None
        return value

    @field_validator("hint")
    @classmethod
    def _has_place_for_draft(cls, value: str | None) -> str | None:
        if value is not None and value.count(DRAFT) != 1:
            raise ValueError(f"must contain {DRAFT} once; write true for the default wording")
        return value


class Budget(TenantMatch, ModelChoice):
    """Hourly spending limit of the named tenants, in the currency of the prices; above it `model` answers."""

    per_hour: Positive
    """Spending of each tenant in the last hour, in the currency of the prices."""


class LoadRoute(ModelChoice):
    """Where the expected wait for the chosen model is above `max_wait_s`, `model` answers."""

    max_wait_s: Positive
    """Longest expected wait for the chosen model, in seconds."""


class Trial(ModelChoice):
    """A canary or shadow: a new model tried beside the one that it may replace."""

    of: Name
    """The model of whose requests it gets a share."""
    share: Share
    """Share of the requests of `of`, above 0 and at most 1."""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.model == self.of:
            raise ValueError(f"model and of are the same model, {self.of}")
        return self


class RoutingPolicy(Section):
    """How "auto" is resolved: the first rule that holds, else the learned router, else `default`."""

    default: Name = "small"
    """The model of requests that nothing else decides."""
    rules: tuple[RouteRule, ...] = ()
    """Rules, in their order; the first that holds decides."""
    learned: LearnedRoute | None = None
    """The trained router that decides where no rule holds; unset: none."""
    cascade: CascadeRoute | None = None
    """For requests that routing gives to its `first` model."""
    budgets: tuple[Budget, ...] = ()
    """Hourly spending limits above which a cheaper model answers."""
    load: LoadRoute | None = None
    """Where another model answers while the chosen one is overloaded; unset: nowhere."""
    canaries: tuple[Trial, ...] = ()
    """Models that answer a share of the requests of another one in its place."""
    shadows: tuple[Trial, ...] = ()
    """Models that get a share of the requests of another one after its answer has ended; callers do not see theirs."""

    @property
    def pair(self) -> tuple[str, str] | None:
        """The weak and the strong model, as far as this policy names them."""
        if self.learned is not None:
            return self.learned.weak, self.learned.strong
        if self.cascade is not None:
            return self.cascade.first, self.cascade.second
        return None

    @model_validator(mode="after")
    def _pairs_differ(self) -> Self:
        if self.learned is not None and self.learned.weak == self.learned.strong:
            raise ValueError("learned: weak and strong are the same model")
        if self.cascade is not None and self.cascade.first == self.cascade.second:
            raise ValueError("cascade: first and second are the same model")
        return self


class Selection(RequestMatch):
    """Requests of these tenants with these labels are routed by `policy`."""

    policy: Name
    """Name of the policy, a key of `routing.policies`."""

    @model_validator(mode="after")
    def _has_condition(self) -> Self:
        if not self.tenants and not self.labels:
            raise ValueError("name tenants or labels")
        return self


@dataclass(frozen=True)
class BreakerRules:
    """When a model gets no requests.

    Attributes:
        failures: failures in a row that open the breaker.
        open_s: how long it stays open before a probe, in seconds.
    """

    failures: int = 5
    open_s: float = 5.0


@dataclass(frozen=True)
class DriftRules:
    """When a learned router counts as drifted: docs/concepts/routing.md, "Drift".

    Attributes:
        window: newest predictions of a head, and newest outcomes, that are considered.
        min_predictions: predictions before the inputs of a head are judged.
        stability_max: population stability index above which its inputs have shifted.
        min_outcomes: outcomes before its accuracy is judged.
        confidence: probability that a bias of its predictions is not chance, 0.5 to 1.
    """

    window: int = 1000
    min_predictions: int = 200
    stability_max: float = 0.25
    min_outcomes: int = 50
    confidence: float = 0.99


class OutcomeSettings(Section):
    """Keeps outcomes of models with their prompts as training data, only for the tenants that are named here."""

    tenants: tuple[Name, ...] = ()
    """Those that let their prompts be kept."""
    pair: tuple[Name, Name] | None = None
    """The weak and the strong model that are compared, in policies without `learned` and `cascade`."""
    max_mib: ClassVar[int] = 256
    """Storage of all outcomes, in MiB; a trained router needs a few thousand of about 4 KiB."""
    max_age_h: ClassVar[float] = 24.0 * 30
    """Age after which outcomes are deleted, in hours."""

    @field_validator("pair")
    @classmethod
    def _are_two(cls, pair: tuple[str, str] | None) -> tuple[str, str] | None:
        if pair is not None and pair[0] == pair[1]:
            raise ValueError("names the same model twice")
        return pair


class RoutingSettings(RoutingPolicy):
    """The policy of requests that no selection matches, and the settings that all policies share."""

    policies: dict[Name, RoutingPolicy] = Field(default_factory=dict)
    """Further policies by name, for the requests that `select` gives them."""
    select: tuple[Selection, ...] = ()
    """Which requests a policy of `policies` routes; the first that fits decides."""
    fallbacks: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)
    """By model: smaller ones that may answer when it could not in time, and the caller allows it; in this order."""
    breaker: ClassVar[BreakerRules] = BreakerRules()
    outcomes: OutcomeSettings = OutcomeSettings()
    drift: ClassVar[DriftRules] = DriftRules()

    @model_validator(mode="after")
    def _outcomes_have_a_pair(self) -> Self:
        pairs = [self.outcomes.pair, self.pair, *(one.pair for one in self.policies.values())]
        if self.outcomes.tenants and not any(pairs):
            raise ValueError("outcomes: name the two models that are compared in pair")
        return self

    @model_validator(mode="after")
    def _selections_exist(self) -> Self:
        for i, one in enumerate(self.select):
            if one.policy not in self.policies:
                names = ", ".join(self.policies) or "none"
                raise ValueError(f"select.{i}.policy: no policy {one.policy!r}; known: {names}")
        return self

    def all_models(self) -> list[tuple[str, str]]:
        """Return every model that is named anywhere, with its key."""
        named = list(_named_models(self))
        for model, smaller in self.fallbacks.items():
            named += [(f"fallbacks.{model}", name) for name in (model, *smaller)]
        return named


_OF_MODELS: Final = frozenset({"default", "model", "weak", "strong", "first", "second", "of"})
"""Keys that name a model."""


def _named_models(section: Any) -> Iterator[tuple[str, str]]:
    """Yield every model that `section`, or a list or mapping of sections, names, with its key."""
    entries = enumerate(section) if isinstance(section, tuple) else dict(section).items()
    for key, value in entries:
        if key in _OF_MODELS and isinstance(value, str):
            yield str(key), value
        elif key == "pair" and isinstance(value, tuple):
            yield from ((f"pair.{number}", name) for number, name in enumerate(value))
        elif isinstance(value, Section | tuple) or key == "policies":
            for below, name in _named_models(value):
                yield f"{key}.{below}", name
