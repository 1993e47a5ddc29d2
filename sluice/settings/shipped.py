"""What a mesh without a configuration serves, and how it routes.

The two specialists were trained for support tasks (docs/concepts/tiers.md); the general model answers everything else.
The patterns below find a task by how it is asked for. They were written with the tuning half of
`bench/tiers/routed_prompts.json` and are judged by the other half (docs/concepts/routing.md).
"""

from typing import Final

from sluice.settings.model_cache import chat_problem
from sluice.settings.models import CHAT_PATH, ModelSettings
from sluice.settings.routing import RouteRule, RoutingSettings

SPECIALISTS: Final = (
    ModelSettings(name="small", tier="small", path="builtin:small"),
    ModelSettings(name="large", tier="large", path="builtin:large"),
)
"""The shipped models that were trained for support tasks."""
CHAT: Final = ModelSettings(
    name="chat",
    tier="general",
    path=CHAT_PATH,
    slots=8,
    context_tokens=2048,
    cache_gb=0.75,
)
"""The shipped general model, SmolLM2-135M-Instruct; served where its weights were downloaded."""
FALLBACKS: Final[dict[str, tuple[str, ...]]] = {"large": ("small",)}
"""The general model has none: a specialist answers other prompts with nonsense, which is worse than a refusal."""

SPECIALIST_ROUTING: Final = RoutingSettings(
    default="small",
    rules=(
        RouteRule(
            model="large",
            min_numbers=4,
            max_prompt_chars=120,
            reason="four numbers or more to work on, and little else",
        ),
    ),
    fallbacks=FALLBACKS,
)
"""Of the specialists alone."""

_ASK: Final = (
    r"(?i)^(?:please |can you |could you |calculate |compute |find |give me |tell me "
    r"|(?:what|how much) is |the )*"
)
"""How a sum or a list to sort is asked for before its verb."""
_LIST: Final = r"\d[\d.]*(?:(?:,? and |, ?| ?\+ ?)\d[\d.]*)+"
"""Two numbers or more."""
_UP: Final = r"\b(?:ascending|order|low|lowest|small|smallest|lowest to highest)\b"
_TEXT: Final = r"\s*\S.{9,}"
"""The ticket that an instruction is about."""
_TICKET: Final = r"\b(?:this|the|following) (?:\w+ )?ticket\b"
_REPLY: Final = r"(?is)^[^\n:.?]{0,40}\b(?:reply|answer|respond|response)\b[^\n:.?]{0,20}"

_SUMS: Final = (
    rf"{_ASK}(?:add|add up|total|sum)\b[^\d\n]*{_LIST}(?:\W|euros?|together|please|for me)*$",
    rf"(?is)\bfor {_LIST} euros\W+(?:what|how much)\b[^\n]*\btotal\W*$",
    rf"(?i)^what do {_LIST} add up to\W*$",
)
_SORTS: Final = (
    rf"{_ASK}sort\b[^\d\n]*{_LIST}[^\d\n]{{0,40}}$",
    rf"{_ASK}(?:order|arrange|rank|put|list)\b[^\d\n]*{_UP}[^\d\n]*{_LIST}[^\d\n]{{0,40}}$",
    rf"{_ASK}(?:order|arrange|rank|put|list)\b[^\d\n]*{_LIST}[^\d\n]*{_UP}[^\d\n]{{0,20}}$",
)
_TICKETS: Final = (
    # A label for it.
    r"(?is)^[^\n:.?]{0,40}\b(?:classify|determine|label|categor\w+|topic)\b[^\n:.?]{0,40}"
    rf"{_TICKET}[^\n:.?]{{0,30}}[:.?\n]{_TEXT}",
    rf"(?is)^(?:what|which) (?:kind|sort|type|category|label)\b[^\n:.?]{{0,30}}\bticket\b[^\n:.?]{{0,20}}\?{_TEXT}",
    rf"(?is)^(?:what )?is this ticket\b[^\n:.?]{{0,40}}\?{_TEXT}",
    r"(?is)^ticket: .*\n(?:label|category|topic|[^\n]{0,20}order[^\n]{0,20}amount[^\n]{0,20}):\s*$",
    # Order number and amount.
    rf"(?is)^[^\n]{{0,40}}\border(?: number)?,? and (?:the )?amount\b[^\n]{{0,60}}[:.?\n]{_TEXT}",
    # A reply.
    rf"{_REPLY}{_TICKET}(?: below)?[:.\n]{_TEXT}",
    rf"{_REPLY}\b(?:this|the) customer(?: below)?[:.\n]{_TEXT}",
    rf"(?is)^write a polite (?:reply|answer)\.\s*\n{_TEXT}",
)

GENERAL_ROUTING: Final = RoutingSettings(
    default=CHAT.name,
    rules=(
        RouteRule(
            model="large",
            min_numbers=2,
            contains=_SUMS,
            reason="a sum of two numbers or more",
        ),
        RouteRule(
            model="large",
            min_numbers=4,
            contains=_SORTS,
            reason="four numbers or more to sort",
        ),
        RouteRule(
            model="small",
            min_numbers=2,
            contains=_SORTS,
            reason="a few numbers to sort",
        ),
        RouteRule(
            model="small",
            contains=_TICKETS,
            reason="a support ticket to label, to extract from or to answer",
        ),
    ),
    fallbacks=FALLBACKS,
)
"""Of the specialists beside the general model: they get the tasks that they were trained for."""


def shipped_models() -> tuple[ModelSettings, ...]:
    """Return the models of a mesh without a configuration: the specialists, and `CHAT` if its weights are there."""
    return SPECIALISTS if chat_problem() else (*SPECIALISTS, CHAT)


def shipped_routing(models: tuple[ModelSettings, ...]) -> RoutingSettings | None:
    """Return the routing of a mesh that serves `models`, where the shipped ones are among them; else None."""
    if not {model.name for model in SPECIALISTS} <= {model.name for model in models}:
        return None
    has_chat = any((model.name, model.path) == (CHAT.name, CHAT.path) for model in models)
    return GENERAL_ROUTING if has_chat else SPECIALIST_ROUTING
