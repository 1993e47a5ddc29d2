"""The output filter in the whole mesh: the echo engine says the prompt again, but its secret does not come back."""

import grpc
import pytest

from gateway.config.models import load_catalog
from sluice.client import AsyncClient, FinishReason
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.wire.tokens import put_tokens, tokens_of
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

KEY = "AKIAQ3ZK7WPX2MNB5TRD"
PROMPT = f"The key is {KEY}; keep it. "


async def test_a_secret_of_the_prompt_does_not_come_back(mesh: RunningMesh) -> None:
    tokenization = load_catalog(mesh.settings)["echo"].tokenizer
    asked = tokenization.encode_text(PROMPT)
    async with AsyncClient(mesh.address) as client:
        answer = await client.generate(
            PROMPT, model="echo", raw_prompt=True, max_tokens=2 * len(asked), logprobs=1
        ).answer()
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.text == PROMPT.replace(KEY, "<AWS_ACCESS_KEY_1>") * 2
    assert len(answer.token_ids) == answer.usage.completion_tokens == 2 * len(asked)
    shown = [token for token in answer.token_ids if token is not None]
    assert 0 < len(shown) < len(answer.token_ids)
    assert "AKIA" not in tokenization.tokenizer.decode(shown)
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token is not None or not entry.top


async def test_an_answer_goes_on_behind_hidden_tokens(mesh: RunningMesh) -> None:
    """As after the loss of a gateway: another request, which holds the beginning of the answer as it was shown."""
    asked = load_catalog(mesh.settings)["echo"].tokenizer.encode_text(PROMPT)
    request = pb.GenerateRequest(
        prompt=PROMPT,
        model="echo",
        raw_prompt=True,
        # So many, and sent at every step, that they do not arrive in one delta, however busy the machine is.
        priority=pb.PRIORITY_INTERACTIVE,
        sampling=pb.SamplingParams(max_tokens=20 * len(asked)),
    )
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stub = InferenceServiceStub(channel)
        for _ in range(10):  # on a busy machine all of it may come in one delta
            held: list[int | None] = []
            token = ""
            async for event in stub.Generate(request):
                if event.delta.token_ids and None not in held:
                    held += tokens_of(event.delta, event.delta.index)
                    token = event.delta.resume_token
            if len(held) < request.sampling.max_tokens:
                break
        assert None in held
        put_tokens(request.resume, held)
        request.resume.resume_token = token
        rest = [e.delta async for e in stub.Generate(request) if e.HasField("delta")]
    assert rest[0].index == len(held)
    assert "".join(delta.text for delta in rest).endswith(
        "The key is <AWS_ACCESS_KEY_1>; keep it. "
    )
