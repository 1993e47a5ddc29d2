"""Settings of the YAML section ``safety:``, validated key by key."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from phonenumbers import SUPPORTED_REGIONS
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.safety.actions import Action, Choice
from gateway.safety.patterns import PatternError, compiled
from gateway.safety.rules.validators import FOR_ANY_PATTERN

CUSTOM: Final = "custom"
"""The family of the operator's rules."""
_RULE: Final = r"^(\*|[a-z0-9_]+(\.[a-z0-9_]+)*(\.\*)?)$"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_PLAIN: Final = {a.name.lower(): a for a in Action if a is not Action.ROUTE}


def _read_choice(value: object, info: ValidationInfo) -> Choice:
    """The context of a validation: all models by name, with the labels of those that classify, which answer nobody."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str) and value in _PLAIN:
        return Choice(_PLAIN[value])
    if isinstance(value, dict) and list(value) == ["route"] and isinstance(value["route"], str):
        models: Mapping[str, Sequence[str]] = info.context or {}
        if models and models.get(value["route"]) != ():
            answering = ", ".join(name for name, labels in models.items() if not labels)
            raise ValueError(f"no model {value['route']!r}; known: {answering}")
        return Choice(Action.ROUTE, value["route"])
    raise ValueError(f"must be one of {', '.join(_PLAIN)}, or {{route: MODEL}}")


def _write_choice(choice: Choice) -> str | dict[str, str | None]:
    return {"route": choice.model} if choice.action is Action.ROUTE else choice.action.name.lower()


ActionSpec = Annotated[
    Choice, PlainValidator(_read_choice), PlainSerializer(_write_choice, return_type=Any)
]
"""An action, or ``{route: MODEL}``."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


RuleName = Annotated[str, Field(pattern=_RULE, max_length=100)]
SeverityName = Literal["low", "medium", "high", "critical"]
OutputAction = Literal["allow", "redact", "remove", "block"]


Stage = Literal["input", "output"]
Template = Literal[
    "llama_guard", "shieldgemma", "granite_guardian", "classifier", "token_classifier", "custom"
]

_ONLY_OF: Final[dict[str, tuple[str, ...]]] = {
    "shieldgemma": ("guideline",),
    "granite_guardian": ("risk",),
    "custom": ("prompt", "unsafe", "safe", "answer_tokens"),
}
"""Keys that mean something with one template alone."""
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "custom": ("prompt", "unsafe", "safe"),
    "classifier": ("categories",),
}


class GuardSettings(_Section):
    """One guard model of a policy."""

    model: Name
    template: Template
    checks: tuple[Stage, ...] = Field(("input",), min_length=1)
    threshold: float | None = Field(None, gt=0, le=1)
    """From this score on the guard objects; unset: by its word, or the most probable label. Of a token classifier: the
    least probability of an entity."""
    categories: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """What is acted on; anything else is flagged. Empty: everything is. Of a classifier: the labels that object; of a
    token classifier: the entities that are findings."""
    action: ActionSpec = Choice(Action.BLOCK)
    fail: Literal["open", "closed"] = "open"
    """What happens without a verdict: the text passes, or it does not."""
    budget_s: float = Field(1.0, gt=0, le=60)
    """Longest wait for a verdict."""
    window_tokens: int = Field(64, ge=0)
    """An answer is checked each time it has grown by so many tokens; 0: at its end alone. Of a token classifier: the
    longest part that is read at once."""
    hold: bool = False
    """Nothing of an answer is shown before the verdict about all of it."""
    guideline: str | None = None
    risk: str | None = Field(None, pattern=r"^[a-z_]{1,64}$")
    prompt: str | None = None
    """With {prompt}, and {answer} where answers are checked."""
    unsafe: str | None = None
    """A pattern that objections match; its group "category" names what to."""
    safe: str | None = None
    """A pattern that verdicts without objection match."""
    answer_tokens: int | None = Field(None, ge=1, le=512)
    """Longest answer of the guard."""

    @field_validator("action")
    @classmethod
    def _possible(cls, choice: Choice) -> Choice:
        if choice.action not in (Action.BLOCK, Action.FLAG, Action.ROUTE):
            raise ValueError("must be block, flag, or {route: MODEL}")
        return choice

    @field_validator("unsafe", "safe")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                compiled(pattern)
            except PatternError as error:
                raise ValueError(str(error)) from None
        return pattern

    @field_validator("prompt")
    @classmethod
    def _has_place(cls, prompt: str | None) -> str | None:
        if prompt is not None and "{prompt}" not in prompt:
            raise ValueError("must say where the prompt stands: {prompt}")
        return prompt

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for template, keys in _ONLY_OF.items():
            for key in keys:
                if template != self.template and getattr(self, key) is not None:
                    raise ValueError(f"{key} goes with template {template} alone")
        for key in _NEEDED.get(self.template, ()):
            if not getattr(self, key):
                raise ValueError(f"template {self.template} needs {key}")
        if self.template == "token_classifier":
            self._check_entities()
        if self.template == "custom" and self.threshold is not None:
            raise ValueError("threshold: a custom template gives no score")
        if self.action.action is Action.ROUTE and self.checks != ("input",):
            raise ValueError("an answer cannot be routed; use checks: [input]")
        if "output" in self.checks and self.prompt is not None and "{answer}" not in self.prompt:
            raise ValueError("prompt must say where the answer stands: {answer}")
        return self

    def _check_entities(self) -> None:
        if "action" in self.model_fields_set:
            raise ValueError(
                "action: what it finds are findings ner.LABEL; set actions of the policy"
            )
        if self.hold or self.window_tokens == 0:
            raise ValueError(
                "a token classifier reads an answer in windows: leave out hold and window_tokens 0"
            )


class LimitSettings(_Section):
    """Limits on one text of a prompt; exceeding one is a finding of a ``limit.*`` rule."""

    max_chars: int = Field(200_000, ge=1)
    """What is longer is blocked: it is not inspected."""
    max_run_chars: int = Field(2_000, ge=600)
    """The same character or phrase of up to 256 characters in a row; the search would overlook less than 600."""


class EchoSettings(_Section):
    """When an answer repeats the system message."""

    words: int = Field(8, ge=3, le=64)
    """That many words in a row count as one match."""
    matches: int = Field(1, ge=1)
    """From this match on something is done; overlapping runs count one for each word."""
    action: OutputAction = "block"


class OutputSettings(_Section):
    """Actions on answers. "block" ends the answer; routes of the prompt's actions are flags here."""

    enabled: bool = True
    actions: dict[RuleName, ActionSpec] = Field(default_factory=dict)
    """Over those of the prompt, name by name."""
    echo: EchoSettings | None = None
    canaries: tuple[Annotated[str, Field(min_length=4, max_length=200)], ...] = ()
    """Strings that stand in a system message and must never come out; finding one blocks."""
    markdown_images: OutputAction = "allow"
    image_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$")], ...] = ()
    """Hosts that images may come from."""
    ansi: OutputAction = "allow"
    """Terminal escape sequences."""
    truncated_chars: int = Field(4, ge=0, le=64)
    """Characters that may show of a possible match that the end of a cut answer leaves open."""

    @field_validator("actions")
    @classmethod
    def _no_route(cls, actions: dict[str, Choice]) -> dict[str, Choice]:
        for rule, choice in actions.items():
            if choice.action is Action.ROUTE:
                raise ValueError(f"{rule}: an answer cannot be routed")
        return actions


def _is_region(region: str) -> str:
    if region not in SUPPORTED_REGIONS:
        raise ValueError(f"no region {region!r}; name one of ISO 3166, such as US, DE or JP")
    return region


PhoneRegion = Annotated[str, AfterValidator(_is_region)]


class PolicySettings(_Section):
    """One policy."""

    version: str = Field("1", coerce_numbers_to_str=True)
    enabled: bool = True
    """False: no rule looks at prompts or answers. Normalization and the limit of length stay."""
    actions: dict[RuleName, ActionSpec] = Field(default_factory=dict)
    severity: dict[SeverityName, ActionSpec] = Field(default_factory=dict)
    """From this severity on, for rules that ``actions`` does not name."""
    default: ActionSpec = Choice(Action.FLAG)
    restore: bool = False
    """The caller's own values come back in the answer in the place of their placeholders."""
    deny: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    """Files with one word or phrase a line."""
    phone_regions: tuple[PhoneRegion, ...] | None = None
    """Regions (ISO 3166) whose telephone numbers count as they are dialled there; unset: those of the rule."""
    limits: LimitSettings = LimitSettings()
    output: OutputSettings = OutputSettings()
    guard: dict[Name, GuardSettings] = Field(default_factory=dict, max_length=8)
    """Guard models by a name of the operator's choice."""


class ChooseRule(_Section):
    """Gives ``policy`` to requests of a tenant, with labels, or both."""

    policy: Name
    tenant: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_condition(self) -> Self:
        if self.tenant is None and not self.labels:
            raise ValueError("needs tenant or labels")
        return self

    def holds(self, tenant: str, labels: Mapping[str, str]) -> bool:
        """Whether a request gets the policy."""
        ours = self.tenant is None or self.tenant == tenant
        return ours and all(labels.get(key) == value for key, value in self.labels.items())


class RuleSettings(_Section):
    """A rule of the operator, for the prompts and answers of all policies."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,48}$")
    """Findings are called "custom.NAME"."""
    pattern: str
    """See `gateway.safety.patterns`; without an upper bound of its matches it is refused."""
    validator: str = ""
    """One of `FOR_ANY_PATTERN`, which decides whether a match is a finding, and what of it."""
    severity: SeverityName = "high"
    action: ActionSpec | None = None
    """For policies that do not name the rule in ``actions``; unset: by severity, as for any rule."""
    must_match: tuple[str, ...] = Field(min_length=1)
    must_not_match: tuple[str, ...] = ()
    """Texts with and without a finding of the rule, checked when the file is loaded."""

    @field_validator("validator")
    @classmethod
    def _is_registered(cls, validator: str) -> str:
        if validator and validator not in FOR_ANY_PATTERN:
            raise ValueError(f"no validator {validator!r}; known: {', '.join(FOR_ANY_PATTERN)}")
        return validator

    @property
    def id(self) -> str:
        """The name of its findings."""
        return f"{CUSTOM}.{self.name}"


class SafetySettings(_Section):
    """The whole section."""

    policies: dict[Name, PolicySettings] = Field(
        default_factory=lambda: {"default": PolicySettings()}
    )
    default: Name = "default"
    choose: tuple[ChooseRule, ...] = ()
    """The first that holds decides, else ``default``."""
    rules: tuple[RuleSettings, ...] = ()
    """The operator's own."""
    dry_run: Name | None = None
    """A policy that is tried beside the active one: its decisions are counted, never carried out."""
