"""A rule of the operator on a call's way: the model's prompt, the caller's answer, the spans and the audit."""

from pathlib import Path

from sluice.telemetry import names
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import events_of, open_wire, prompt, text_of
from tests.gateway.records.test_records import audited

SAFETY = {
    "rules": [
        {
            "name": "ticket",
            "pattern": r"\bTCK-\d{6}\b",
            "action": "redact",
            "must_match": ["TCK-123456"],
        }
    ]
}


async def test_an_own_rule_works_in_prompts_and_in_answers(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, safety=SAFETY) as wire:
        call, task = await wire.begin(prompt("see TCK-123456"))
        tokens = wire.tokens("It is TCK-123456, not TCK-654321, I think.")
        for at, token in enumerate(tokens):
            await wire.batcher.send(task, frame(at, [token]))
        await wire.batcher.send(task, last(len(tokens)))
        events = await events_of(call)
        tokenizer = wire.catalog["small"].tokenizer.tokenizer
        assert "see <TICKET_1>" in tokenizer.decode(list(task.prompt_token_ids))
        assert text_of(events) == "It is <TICKET_1>, not <TICKET_2>, I think."
        findings = ("custom.ticket:redact",)
        assert wire.span(names.SPAN_SAFETY).attributes[names.FINDINGS] == findings
        entry = await audited(nats_url, events[0].started.request_id)
        assert {(d.rule, d.action) for d in entry.decisions} == {("custom.ticket", "redact")}
        assert sum(d.count for d in entry.decisions) == 3
