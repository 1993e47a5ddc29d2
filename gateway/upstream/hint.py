"""The hint of a cascade: the second model's prompt with the first model's draft in it.

The draft is text of a model, so it is treated like any text that a model is to read:

1. Only what the output rules leave of it is used. Placeholders stay: the second model sees no more than the first.
2. The rules for prompts inspect it. A draft that they would change, route or block is not shown.
3. It is a part of the last user turn, encoded like any message: special tokens in it are plain text, and nothing in it
   is rendered as a template.

An escalation never fails because of its hint: without room, or where a rule above forbids it, the second model gets the
prompt alone, and the record says why.
"""

from dataclasses import replace
from typing import Final

from gateway.admission.prompts import encode_now, fit
from gateway.admission.request_context import PreparedPrompt, RequestContext
from gateway.admission.turns import TURN_COST
from gateway.safety.inspector import RequestInspection
from gateway.streaming.model_run import ModelRun
from gateway.validation.conversation import USER
from sluice.errors import PromptTooLong, SluiceError
from sluice.settings.routing import DRAFT

ENCODED_CHARS: Final = 8192
"""Longer prompts are not encoded again for a hint; a message counts as `TURN_COST` characters beside its text."""


class HintDropped(Exception):
    """The second model does not see the draft; says why, without any text of it."""


def add_hint(
    context: RequestContext, prepared: PreparedPrompt, run: ModelRun, template: str
) -> tuple[PreparedPrompt, int]:
    """Put the draft of `run` into the prompt `prepared` of the second model; return that and the tokens added.

    Raises:
        HintDropped: the prompt stays as it is.
    """
    draft = _inspected(context, _filtered(run))
    # At the end of the last turn, which must be the user's.
    *before_last, last = context.conversation.turns
    if context.conversation.raw or last.role != USER:
        raise HintDropped("only a user's message has a place for it")
    note = template.replace(DRAFT, draft)
    turns = (*before_last, replace(last, content=f"{last.content}\n\n{note}"))
    conversation = replace(context.conversation, turns=turns)
    if sum(len(text) + TURN_COST for text in conversation.texts) > ENCODED_CHARS:
        raise HintDropped("the prompt is too long to be encoded again beside other calls")
    model = prepared.model
    try:
        token_ids = encode_now(conversation, model)
        sampling = fit(context.request, model, len(token_ids))
    except PromptTooLong as error:
        raise HintDropped(f"{model.name} has no room for it") from error
    except SluiceError as error:
        raise HintDropped(f"{model.name} does not take it") from error
    before = prepared.sampling.max_tokens
    # Half of the answer's room where the caller leaves its length to the model, else all that was asked for.
    needed = before if context.request.sampling.max_tokens else before // 2
    if sampling.max_tokens < needed:
        raise HintDropped(f"{model.name} has no room for it beside the answer")
    sampling.seed = prepared.sampling.seed
    added = len(token_ids) - len(prepared.prompt_token_ids)
    return replace(prepared, prompt_token_ids=token_ids, sampling=sampling), added


def _filtered(run: ModelRun) -> str:
    """Return the draft as the output rules leave it."""
    if run.is_unread:
        raise HintDropped("token classifiers have not read all of it")
    if run.output is None:
        return run.raw_text
    decision = run.output.review()
    if decision.blocked:
        raise HintDropped(f"the safety policy blocks it: {', '.join(decision.blocked)}")
    return decision.text


def _inspected(context: RequestContext, draft: str) -> str:
    """Return the draft normalized, if the rules for prompts leave it as it is."""
    request = context.request
    policy = context.policies.inspector.choose(request.tenant, request.labels)
    inspection = RequestInspection(policy, [draft])
    inspection.decide()
    (text,) = inspection.edited
    verdict = inspection.verdict
    if verdict.blocked or verdict.route is not None or inspection.edited != inspection.normalized:
        rules = sorted({rule for rule, _ in verdict.taken})
        raise HintDropped(f"the safety policy for prompts does not pass it: {', '.join(rules)}")
    if not text.strip():
        raise HintDropped("it is empty")
    return text
