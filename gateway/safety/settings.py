"""Settings of the YAML section `safety:`, validated key by key."""

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

from gateway.safety.findings import Action, Choice
from gateway.safety.patterns import PatternError, compiled
from gateway.safety.rules.validators import FOR_ANY_PATTERN

CHARS_MAX: Final = 200_000
"""Longest text of a prompt that is inspected unless a policy says otherwise, in characters."""
CUSTOM: Final = "custom"
"""Family of the operator's rules."""
_RULE: Final = r"^(\*|[a-z0-9_]+(\.[a-z0-9_]+)*(\.\*)?)$"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_PLAIN: Final = {a.name.lower(): a for a in Action if a is not Action.ROUTE}


def _read_choice(value: object, info: ValidationInfo) -> Choice:
    """Parse an action. The context of a validation has the labels of all models by name; classifiers cannot answer."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str) and value in _PLAIN:
        return Choice(_PLAIN[value])
    if isinstance(value, dict) and list(value) == ["route"] and isinstance(value["route"], str):
        models: Mapping[str, Sequence[str]] = info.context or {}
        if models.get(value["route"]) != ():
            answering = ", ".join(name for name, labels in models.items() if not labels)
            raise ValueError(f"no model {value['route']!r}; known: {answering}")
        return Choice(Action.ROUTE, value["route"])
    raise ValueError(f"must be one of {', '.join(_PLAIN)}, or {{route: MODEL}}")


def _write_choice(choice: Choice) -> str | dict[str, str | None]:
    return {"route": choice.model} if choice.action is Action.ROUTE else choice.action.name.lower()


ActionSpec = Annotated[
    Choice, PlainValidator(_read_choice), PlainSerializer(_write_choice, return_type=Any)
]
"""An action, or `{route: MODEL}`."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


RuleName = Annotated[str, Field(pattern=_RULE, max_length=100)]
SeverityName = Literal["low", "medium", "high", "critical"]


Stage = Literal["input", "output"]
Template = Literal[
    "llama_guard", "shieldgemma", "granite_guardian", "classifier", "token_classifier", "custom"
]

_ONLY_OF: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("custom",),
    "unsafe": ("custom",),
    "safe": ("custom",),
    "criterion": ("shieldgemma", "granite_guardian"),
}
"""Templates that use a key, for keys that not all use."""
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "custom": ("prompt", "unsafe", "safe"),
    "classifier": ("categories",),
}
"""Keys that a template requires."""


class GuardSettings(_Section):
    """One guard model of a policy."""

    model: Name
    """Name of the model that checks."""
    template: Template
    """Family of the guard: how it is prompted, and how its answer is read."""
    checks: tuple[Stage, ...] = Field(("input",), min_length=1)
    """What it checks: prompts ("input"), answers ("output") or both."""
    threshold: float | None = Field(None, gt=0, le=1)
    """Least score at which the guard objects; unset: its word, or the most probable label, decides.
    For a token classifier: the least probability of an entity.
    """
    categories: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Categories that are acted on; others are only flagged. Empty: all. For a classifier: the labels
    that object; for a token classifier: the entities that are findings.
    """
    action: ActionSpec = Choice(Action.BLOCK)
    """Action when it objects: block, flag or `{route: MODEL}`."""
    fail: Literal["open", "closed"] = "open"
    """What happens without a verdict: "open" lets the text pass, "closed" blocks it."""
    budget_s: float = Field(1.0, gt=0, le=60)
    """Longest wait for a verdict, in seconds."""
    window_tokens: int = Field(64, ge=0)
    """Tokens between two checks of a growing answer; 0: only the end is checked. For a token
    classifier: longest part that is read at once.
    """
    hold: bool = False
    """Show nothing of an answer before the verdict about all of it."""
    criterion: str | None = Field(None, min_length=1)
    """What counts as an objection. For `shieldgemma`: the text of its guideline; unset: its four harm
    types. For `granite_guardian`: the name of a risk; unset: harm.
    """
    prompt: str | None = None
    """Prompt of a custom guard, with {prompt}, and {answer} if answers are checked."""
    unsafe: str | None = None
    """Pattern of verdicts that object; its group "category" names the category."""
    safe: str | None = None
    """Pattern of verdicts that do not object."""

    @field_validator("action")
    @classmethod
    def _check_action(cls, choice: Choice) -> Choice:
        if choice.action not in (Action.BLOCK, Action.FLAG, Action.ROUTE):
            raise ValueError("must be block, flag, or {route: MODEL}")
        return choice

    @field_validator("unsafe", "safe")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                compiled(pattern)
            except PatternError as error:
                raise ValueError(str(error)) from None
        return pattern

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str | None) -> str | None:
        if prompt is not None and "{prompt}" not in prompt:
            raise ValueError("needs the field {prompt}")
        return prompt

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        for key, templates in _ONLY_OF.items():
            if self.template not in templates and getattr(self, key) is not None:
                raise ValueError(f"{key}: only template {' and '.join(templates)} has it")
        for key in _NEEDED.get(self.template, ()):
            if not getattr(self, key):
                raise ValueError(f"template {self.template} needs {key}")
        # Its findings are rules of the policy, which have their actions there.
        if self.template == "token_classifier":
            self._check_entities()
        if self.template == "custom" and self.threshold is not None:
            raise ValueError("threshold: a custom template gives no score")
        if self.action.action is Action.ROUTE and self.checks != ("input",):
            raise ValueError("an answer cannot be routed; use checks: [input]")
        if "output" in self.checks and self.prompt is not None and "{answer}" not in self.prompt:
            raise ValueError("prompt: needs the field {answer} to check answers")
        return self

    def _check_entities(self) -> None:
        if "action" in self.model_fields_set:
            raise ValueError(
                "action: its findings are rules ner.LABEL; set actions of the policy for them"
            )
        if self.hold or self.window_tokens == 0:
            raise ValueError(
                "a token classifier reads answers in windows; remove hold and window_tokens: 0"
            )


class OutputSettings(_Section):
    """Actions on answers. "block" ends the answer; routes of the prompt's actions are flags here."""

    actions: dict[RuleName, ActionSpec] = Field(default_factory=dict)
    """Actions that differ from those on prompts, by rule. Of the rules for answers only,
    `output.canary` blocks and the others allow unless they are named here.
    """
    canaries: tuple[Annotated[str, Field(min_length=4, max_length=200)], ...] = ()
    """Strings in a system message that must never come out; finding one blocks."""
    image_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$")], ...] = ()
    """Hosts whose images `output.markdown_image` ignores."""

    @field_validator("actions")
    @classmethod
    def _refuse_routes(cls, actions: dict[str, Choice]) -> dict[str, Choice]:
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

    enabled: bool = True
    """Apply rules and guard models. Normalization and the limit of length always apply."""
    actions: dict[RuleName, ActionSpec] = Field(default_factory=dict)
    """Actions by the name of a rule, or by a prefix such as `pii.*`."""
    severity: dict[SeverityName, ActionSpec] = Field(default_factory=dict)
    """Actions from a severity upwards, for rules that `actions` does not name; the others are flagged."""
    restore: bool = False
    """Put the caller's own values back into the answer in place of their placeholders."""
    deny: tuple[str, ...] = ()
    """Files with one denied word or phrase a line."""
    allow: tuple[str, ...] = ()
    """Files with one allowed word or phrase a line; findings inside one are dropped."""
    phone_regions: tuple[PhoneRegion, ...] | None = None
    """Regions (ISO 3166) whose telephone numbers count as they are dialled there; unset: those of the
    rule.
    """
    max_chars: int = Field(CHARS_MAX, ge=1)
    """Longest text of a prompt that is inspected, in characters; longer ones are blocked."""
    output: OutputSettings = OutputSettings()
    """Actions on answers."""
    guard: dict[Name, GuardSettings] = Field(default_factory=dict, max_length=8)
    """Guard models, by a name of the operator's choice."""


class ChooseRule(_Section):
    """Gives `policy` to requests of a tenant, with labels, or both."""

    policy: Name
    """Name of the policy."""
    tenant: str | None = None
    """Tenant whose requests get it; unset: any."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that a request must have."""

    @model_validator(mode="after")
    def _check_condition(self) -> Self:
        if self.tenant is None and not self.labels:
            raise ValueError("needs tenant or labels")
        return self

    def holds(self, tenant: str, labels: Mapping[str, str]) -> bool:
        """Return whether a request gets the policy."""
        same_tenant = self.tenant is None or self.tenant == tenant
        return same_tenant and all(labels.get(key) == value for key, value in self.labels.items())


class RuleSettings(_Section):
    """A rule of the operator, for the prompts and answers of all policies."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,48}$")
    """Name of the rule; findings are called "custom.NAME"."""
    pattern: str
    """Pattern in RE2's syntax with an upper bound of its matches, see `gateway.safety.patterns`."""
    validator: str = ""
    """One of `FOR_ANY_PATTERN`; decides whether a match is a finding, and which part of it."""
    action: ActionSpec | None = None
    """Action for policies that do not name the rule in `actions`; unset: by severity, as for any rule.
    """
    must_match: tuple[str, ...] = Field(min_length=1)
    """Texts with a finding of the rule, checked when the configuration is loaded."""
    must_not_match: tuple[str, ...] = ()
    """Texts without a finding of the rule, checked likewise."""

    @field_validator("validator")
    @classmethod
    def _check_validator(cls, validator: str) -> str:
        if validator and validator not in FOR_ANY_PATTERN:
            raise ValueError(f"no validator {validator!r}; known: {', '.join(FOR_ANY_PATTERN)}")
        return validator

    @property
    def id(self) -> str:
        """Name of its findings."""
        return f"{CUSTOM}.{self.name}"


class SafetySettings(_Section):
    """The section `safety:`."""

    policies: dict[Name, PolicySettings] = Field(
        default_factory=lambda: {"default": PolicySettings()}
    )
    """Policies by name."""
    default: Name = "default"
    """Policy of requests that no rule of `choose` covers."""
    choose: tuple[ChooseRule, ...] = ()
    """The first rule that holds decides, else `default`."""
    rules: tuple[RuleSettings, ...] = ()
    """Rules of the operator."""
    dry_run: Name | None = None
    """Policy that is tried beside the active one: its decisions are counted, never carried out."""
