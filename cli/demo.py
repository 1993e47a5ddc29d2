"""`sluice demo`: starts a mesh, asks every model four sample prompts, stops the mesh."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from cli import output
from cli.commands import wants_json
from cli.failure import CommandFailed
from sluice.client.aio import AsyncClient
from sluice.client.answer import Answer, AnswerBuilder, Delta
from sluice.errors import SluiceError

PROMPTS: Final = (
    "Which label fits this ticket?\n"
    "Hi there, I got a tent. I never ordered that, I wanted the rain jacket. Best, Fatima",
    "Extract the order and the amount: Dear team, It cost me 409.46 euros. "
    "It is about order E-90867. Best, Gustav",
    "What is the total of 314, 272, 973, 323, 486?",
    "Write a polite reply.\nHi there, My order is D-91198. I changed my mind about the bike light, "
    "please do not send it. Regards, Marco",
)
"""One of each kind of task that the shipped tiers are trained on."""

ANSWER_TOKENS: Final = 112
ANSWER_S: Final = 120.0


def demo() -> None:
    """Start a mesh on free ports, let both tiers answer four prompts, stop it.

    Prints each answer as it streams, with the route, the trace id and where the time went. Exits with 0 only when every
    prompt was answered.
    """
    output.show({"answers": asyncio.run(_demo())})


async def _demo() -> list[dict[str, Any]]:
    # Imported here: these need the extra "mesh".
    from sluice.settings import load
    from supervisor.mesh import running_mesh

    settings = load()
    gateway = settings.gateway.model_copy(update={"address": "127.0.0.1:0"})
    _say("starting nats-server, tritonserver, batcher and gateway ...\n")
    async with running_mesh(settings.model_copy(update={"gateway": gateway})) as mesh:
        _say(f"ready in {mesh.ready_s:.1f} s at {mesh.address}\n")
        answers = await ask_all(mesh.address, [model.name for model in settings.models])
    _say("\nstopped\n")
    return answers


async def ask_all(address: str, models: Sequence[str]) -> list[dict[str, Any]]:
    """Asks every model of the mesh at `address` every prompt, one after the other; returns the answers for `--json`.

    Raises:
        CommandFailed: not everything was answered.
    """
    answers: list[dict[str, Any]] = []
    errors: list[SluiceError] = []
    async with AsyncClient(address) as client:
        for number, prompt in enumerate(PROMPTS, start=1):
            _say(f"\n[{number}/{len(PROMPTS)}] {prompt}\n")
            for model in models:
                try:
                    answer = await _ask(client, model, prompt)
                    answers.append({"prompt": prompt, **output.answer_object(answer)})
                except SluiceError as error:
                    _say(f"{error.reason}: {error}\n")
                    errors.append(error)
    if errors:
        asked = len(PROMPTS) * len(models)
        message = f"{len(errors)} of {asked} prompts got no answer: {errors[0]}"
        raise CommandFailed("UNANSWERED", message, {"answers": answers})
    return answers


async def _ask(client: AsyncClient, model: str, prompt: str) -> Answer:
    builder = AnswerBuilder()
    _say(f"\n{model}: ")
    stream = client.generate(prompt, model=model, max_tokens=ANSWER_TOKENS, timeout_s=ANSWER_S)
    async with stream:
        async for event in stream:
            builder.add(event)
            if isinstance(event, Delta):
                _say(event.text)
    answer = builder.build()
    _say(f"\n  {output.summary(answer)}\n")
    return answer


def _say(text: str) -> None:
    """What people see while it runs."""
    if not wants_json():
        output.write_text(text)
