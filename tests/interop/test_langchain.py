"""LangChain's ChatOpenAI at the suite's mesh."""

from importlib.util import find_spec

import pytest
from openai import DefaultAsyncHttpxClient

from tests.support.mesh import RunningMesh

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.long,
    pytest.mark.skipif(not find_spec("langchain_openai"), reason="needs langchain-openai"),
]


async def test_answers_streams_and_batches(mesh: RunningMesh) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    client = DefaultAsyncHttpxClient()  # its own is never closed
    model = ChatOpenAI(
        model="small",
        base_url=f"http://{mesh.http}/v1",
        api_key=SecretStr("none"),
        max_completion_tokens=32,
        temperature=0,
        stream_usage=True,
        http_async_client=client,
    )
    question = "Sort ascending: 31, 7, 19"
    answer = await model.ainvoke([("system", "Be brief."), ("user", question)])
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    chunks = [chunk async for chunk in model.astream(question)]
    assert "".join(str(chunk.content) for chunk in chunks) == "7, 19, 31"
    answers = await model.abatch([question, question, "Sort ascending: 5, 2"])
    assert [one.content for one in answers[:2]] == ["7, 19, 31"] * 2
    structured = model.with_structured_output(
        {
            "title": "Label",
            "description": "the label of a ticket",
            "type": "object",
            "properties": {"label": {"enum": ["refund", "delivery"]}},
            "required": ["label"],
            "additionalProperties": False,
        },
        method="json_schema",
    )
    said = await structured.ainvoke("Which label fits this ticket? I never got my lamp.")
    assert isinstance(said, dict)
    assert said["label"] in ("refund", "delivery")
    await client.aclose()
