"""Embed, Rerank and Score: a real gateway, a real nats-server, the test as batcher."""

import re
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from sluice.errors import InvalidRequest, Overloaded, PromptTooLong, SafetyBlocked, UnknownModel
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_STOP, TaskError
from sluice.internal.v1.items_pb2 import RunRequest
from sluice.internal.v1.items_pb2_grpc import ItemsServiceStub
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import CacheSettings, ModelSettings
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import ClearAnswersRequest
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.cascades import explained
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Opened, Wire, error_of
from tests.support.tiny_encoders import add_modules, config_of, save_reranker, save_transformer

KEEPING = pytest.mark.wire(cache=CacheSettings(enabled=True))
PROMPTS = {"prompts": {"query": "w0 w1 ", "spoken": "w9 "}, "default_prompt_name": "spoken"}


@pytest.fixture(scope="module")
def more_models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[ModelSettings]:
    root = tmp_path_factory.mktemp("encoders")
    encoder, reranker = root / "encoder", root / "reranker"
    save_transformer(encoder, config_of("bert"))
    add_modules(encoder, {"pooling_mode_mean_tokens": True}, about=PROMPTS)
    save_reranker(reranker)
    return (
        ModelSettings(name="embed", path=str(encoder), engine="embedding", prompt_price=2.0),
        ModelSettings(name="rank", path=str(reranker), engine="reranker"),
    )


async def tasks_of(wire: Wire, count: int, model: str, of_class: str = "interactive") -> list[Task]:
    return [await wire.batcher.task(model, of_class) for _ in range(count)]


async def answer(wire: Wire, task: Task, numbers: Sequence[float]) -> None:
    whole = frame(0, end=TASK_END_STOP)
    whole.final.values = array("f", numbers).tobytes()
    await wire.batcher.send(task, whole)


def ids(task: Task) -> list[int]:
    return list(task.prompt_token_ids)


async def test_embeddings_come_in_the_order_of_the_texts(wire: Wire) -> None:
    request = pb.EmbedRequest(texts=["w1 w2", "W3"], prompt_name="query", dimensions=3)
    call = wire.stub.Embed(request)
    tasks = await tasks_of(wire, 2, "embed")
    assert [ids(task) for task in tasks] == [[2, 5, 6, 6, 7, 3], [2, 5, 6, 8, 3]]
    assert [task.values.dimensions for task in tasks] == [3, 3]
    assert not tasks[0].values.HasField("normalize")
    assert tasks[0].sampling.max_tokens == 1
    await answer(wire, tasks[1], [4, 5, 6])
    await answer(wire, tasks[0], [1, 2, 3])
    response = await call
    found = [array("f", one.values).tolist() for one in response.embeddings]
    assert found == [[1, 2, 3], [4, 5, 6]]
    assert [one.token_count for one in response.embeddings] == [6, 5]
    assert response.model == "embed"
    assert response.usage.prompt_tokens == 11
    assert len(wire.gateway.registry) == 0


async def test_records_metrics_and_spans_speak_of_the_call(wire: Wire) -> None:
    call = wire.stub.Embed(pb.EmbedRequest(texts=["w1"], priority=pb.PRIORITY_STANDARD))
    (task,) = await tasks_of(wire, 1, "embed", "standard")
    assert ids(task) == [2, 14, 6, 3]  # with the folder's default prompt
    await answer(wire, task, [1, 2])
    response = await call
    record = await explained(wire, response.request_id)
    assert (record.operation, record.requested_model) == ("embeddings", "embed")
    (attempt,) = record.attempts
    assert (attempt.model, attempt.rows, attempt.prompt_tokens) == ("embed", 1, 4)
    assert attempt.cost == pytest.approx(8e-6)
    (labels,) = values(wire.metrics, "sluice.requests")
    assert {value for _, value in labels} == {"embed", "standard", "stop"}
    assert list(values(wire.metrics, "sluice.tokens").values()) == [4]
    await wire.until(lambda: wire.span(names.SPAN_EMBED) is not None)
    about = wire.span(names.SPAN_EMBED).attributes
    assert about[names.GEN_AI_OPERATION] == "embeddings"
    assert about[names.GEN_AI_INPUT_TOKENS] == 4
    assert about[names.GEN_AI_DIMENSIONS] == 2


async def test_documents_come_best_first(wire: Wire) -> None:
    request = pb.RerankRequest(query="w1", documents=["w2", "w3 w4", "w5"], top_n=2)
    call = wire.stub.Rerank(request)
    tasks = await tasks_of(wire, 3, "rank")
    assert ids(tasks[1]) == [2, 6, 3, 8, 9, 3]
    assert [task.values.second_text for task in tasks] == [3, 3, 3]
    for task, score in zip(tasks, (0.25, 0.5, 0.5), strict=True):
        await answer(wire, task, [score])
    response = await call
    assert [(one.index, one.score) for one in response.results] == [(1, 0.5), (2, 0.5)]
    await wire.until(lambda: wire.span(names.SPAN_RERANK) is not None)
    assert wire.span(names.SPAN_RERANK).attributes[names.TEXTS] == 3  # the query is none of them


async def test_answers_get_the_log_probabilities_of_their_tokens(wire: Wire) -> None:
    request = pb.ScoreRequest(prompt="hello", answers=[" world", "the answer"], raw_prompt=True)
    request.model = "small"
    call = wire.stub.Score(request)
    tasks = await tasks_of(wire, 2, "small")
    hello = wire.tokens("hello")
    for task, text in zip(tasks, request.answers, strict=True):
        scored = wire.tokens(text)
        assert ids(task) == [*hello, *scored][:-1]
        assert list(task.values.scored_token_ids) == scored
        await answer(wire, task, [-0.5] * len(scored))
    response = await call
    first = response.answers[0]
    assert first.logprob == pytest.approx(-0.5 * len(wire.tokens(" world")))
    assert list(first.token_ids) == wire.tokens(" world")
    assert list(first.logprobs) == [-0.5] * len(first.token_ids)


WRONG_TOKENS = [
    (pb.ScoreRequest(token_answers=[{"token_ids": [7]}]), "model"),
    (pb.ScoreRequest(model="small", token_answers=[{}]), "token_answers"),
    (pb.ScoreRequest(model="small", answers=["a"], token_answers=[{"token_ids": [7]}]), "answers"),
    (pb.ScoreRequest(model="small", answers=["a b"], alternatives=21), "alternatives"),
    (
        pb.ScoreRequest(model="small", token_answers=[{"token_ids": [7, 4]}]),
        "token_answers[0].token_ids",
    ),
]


async def test_wrong_tokens_are_named(wire: Wire) -> None:
    for request, field in WRONG_TOKENS:
        _, error = await error_of(wire.stub.Score(request))
        assert isinstance(error, InvalidRequest)
        assert [one.field for one in error.violations] == [field]


async def test_a_remedy_is_one_that_the_method_has(wire: Wire) -> None:
    long = "w1 " * 1_000
    embed = pb.EmbedRequest(texts=["w1", long])
    rerank = pb.RerankRequest(query=long, documents=["w1"], truncate=True)
    score = pb.ScoreRequest(
        model="small", prompt="hello", answers=["hello " * 400], raw_prompt=True
    )
    for call, field, remedy in (
        (wire.stub.Embed(embed), "texts[1]", "shorten it, or set truncate"),
        (wire.stub.Rerank(rerank), "query", "shorten it"),
        (wire.stub.Score(score), "answers[0]", "shorten it"),
    ):
        _, error = await error_of(call)
        assert [one.field for one in error.violations] == [field]
        assert error.message.endswith(f"; {remedy}")


OWN = {"actions": {"pii.email": "redact", "pii.iban": "block"}}


@pytest.mark.wire(safety={"default": "own", "policies": {"own": OWN}})
async def test_texts_pass_the_safety_policy(wire: Wire) -> None:
    call = wire.stub.Embed(pb.EmbedRequest(texts=["w1", "w2 ann@example.org w3"]))
    tasks = await tasks_of(wire, 2, "embed")
    assert len(tasks[1].prompt_token_ids) == 6  # [CLS] w9 w2 PLACEHOLDER w3 [SEP]
    call.cancel()
    blocked = pb.EmbedRequest(texts=["w1", "w2 DE89370400440532013000"])
    _, error = await error_of(wire.stub.Embed(blocked))
    assert isinstance(error, SafetyBlocked)
    assert "pii.iban" in error.metadata["rules"]


async def test_a_row_that_fails_ends_the_call_and_the_other_rows(wire: Wire) -> None:
    call = wire.stub.Embed(pb.EmbedRequest(texts=["w1", "w2"]))
    first, second = await tasks_of(wire, 2, "embed")
    error = TaskError(reason="ENGINE_FAILED", message="the model's output is not a number")
    await wire.batcher.send(first, frame(0, end=TASK_END_FAILED, error=error))
    _, raised = await error_of(call)
    assert "not a number" in raised.message
    await wire.batcher.cancelled(second)
    assert raised.metadata["request_id"]


async def test_a_caller_that_goes_cancels_its_rows(wire: Wire) -> None:
    call = wire.stub.Embed(pb.EmbedRequest(texts=["w1", "w2"]))
    tasks = await tasks_of(wire, 2, "embed")
    call.cancel()
    for task in tasks:
        await wire.batcher.cancelled(task)


WRONG = [
    ("Embed", pb.EmbedRequest(), InvalidRequest, "texts: must have 1 to 2048 entries"),
    ("Embed", pb.EmbedRequest(texts=["a"] * 2049), InvalidRequest, "texts: must have 1 to 2048"),
    ("Embed", pb.EmbedRequest(texts=["a"], labels={"": "v"}), InvalidRequest, "labels: must have"),
    ("Embed", pb.EmbedRequest(texts=["a"], priority=9), InvalidRequest, "priority: must be"),
    ("Embed", pb.EmbedRequest(texts=["a", " "]), InvalidRequest, r"texts\[1\]: must not be"),
    ("Embed", pb.EmbedRequest(texts=["a"], model="gone"), UnknownModel, "there are embed"),
    ("Embed", pb.EmbedRequest(texts=["a"], model="small"), InvalidRequest, "engine embedding"),
    ("Embed", pb.EmbedRequest(texts=["a"], dimensions=33), InvalidRequest, "at most 32"),
    ("Embed", pb.EmbedRequest(texts=["a"], prompt_name="x"), InvalidRequest, "no such prompt"),
    ("Embed", pb.EmbedRequest(texts=["a", "w1 " * 70]), PromptTooLong, r"texts\[1\]: has 71"),
    ("Rerank", pb.RerankRequest(documents=["a"]), InvalidRequest, "query: must not be empty"),
    ("Rerank", pb.RerankRequest(query="w " * 70, documents=["a"]), PromptTooLong, "query: has"),
    ("Rerank", pb.RerankRequest(query="a", documents=["a"] * 2049), InvalidRequest, "documents: m"),
    ("Score", pb.ScoreRequest(answers=["a"] * 2049), InvalidRequest, "answers: must have 1 to"),
    ("Score", pb.ScoreRequest(answers=["a"], model="embed"), InvalidRequest, "known: small"),
    ("Score", pb.ScoreRequest(answers=["h"]), InvalidRequest, r"answers\[0\]: is one token"),
    ("Generate", pb.GenerateRequest(prompt="a", model="embed"), InvalidRequest, "by small, large"),
]  # fmt: skip


async def test_what_is_wrong_is_named(wire: Wire) -> None:
    for method, request_, kind, words in WRONG:
        call = getattr(wire.stub, method)(request_)
        _, error = await error_of(call if method != "Generate" else _first(call))
        assert isinstance(error, kind)
        assert re.search(words, error.message), error.message


async def _first(call: Any) -> None:
    async for _ in call:
        return


async def test_texts_are_cut_where_the_caller_says_so(wire: Wire) -> None:
    call = wire.stub.Embed(pb.EmbedRequest(texts=["w1 " * 70], truncate=True))
    (task,) = await tasks_of(wire, 1, "embed")
    assert len(task.prompt_token_ids) == 64
    assert ids(task)[-1] == 3
    await answer(wire, task, [1.0])
    assert (await call).embeddings[0].truncated
    call = wire.stub.Rerank(pb.RerankRequest(query="w1", documents=["w2 " * 70], truncate=True))
    (task,) = await tasks_of(wire, 1, "rank")
    assert len(task.prompt_token_ids) == 64
    await answer(wire, task, [1.0])
    assert (await call).results[0].truncated


async def test_the_texts_of_one_tenant_do_not_fill_the_queue_of_all(wire: Wire) -> None:
    wire.gateway.limiter.texts.maximum = 16
    many = pb.EmbedRequest(texts=[f"w{n}" for n in range(10)])
    first = wire.stub.Embed(many)
    tasks = await tasks_of(wire, 10, "embed")
    _, error = await error_of(wire.stub.Embed(many))
    assert isinstance(error, Overloaded)
    assert "16 texts of your tenant" in error.message
    other = wire.stub.Embed(pb.EmbedRequest(texts=["w1"]), metadata=(("sluice-tenant", "other"),))
    for task in [*tasks, *await tasks_of(wire, 1, "embed")]:
        await answer(wire, task, [1.0])
    assert len((await first).embeddings) == 10
    assert len((await other).embeddings) == 1


async def test_an_item_of_a_job_may_ask_for_embeddings(wire: Wire) -> None:
    stub: Any = ItemsServiceStub(wire.channel)
    call = stub.Run()
    asked = pb.EmbedRequest(texts=["w1"], priority=pb.PRIORITY_BULK)
    await call.write(RunRequest(id=7, embed=asked))
    task = await wire.batcher.task("embed", "bulk")
    await answer(wire, task, [1, 2])
    response = await call.read()
    await call.write(RunRequest(id=8, embed=pb.EmbedRequest()))
    refused = await call.read()
    await call.done_writing()
    assert (response.id, response.embedded.model) == (7, "embed")
    assert array("f", response.embedded.embeddings[0].values).tolist() == [1, 2]
    assert response.cost == pytest.approx(8e-6)
    assert (refused.id, refused.WhichOneof("outcome")) == (8, "error")


async def embedded(
    wire: Wire,
    texts: Sequence[str],
    computed: Sequence[float],
    tenant: str = "default",
    **more: Any,
) -> pb.EmbedResponse:
    """The embeddings of ``texts``, of which the worker gets as many as ``computed``, and answers each with a number."""
    request = pb.EmbedRequest(texts=texts, model="embed", **more)
    call = wire.stub.Embed(request, metadata=(("sluice-tenant", tenant),))
    for number in computed:
        await answer(wire, await wire.batcher.task("embed"), [number])
    response: pb.EmbedResponse = await call
    return response


@KEEPING
async def test_embeddings_are_kept_item_by_item(wire: Wire) -> None:
    first = await embedded(wire, ["w1", "w2", "w1"], [1, 2])
    assert [array("f", one.values)[0] for one in first.embeddings] == [1, 2, 1]
    assert not first.usage.cached
    second = await embedded(wire, ["w3", "w2"], [3])
    assert [array("f", one.values)[0] for one in second.embeddings] == [3, 2]
    assert not second.usage.cached
    spent = wire.gateway.limits.spending.spent("default", 0.0)
    whole = await embedded(wire, ["w2", "w1", "w3"], [])
    assert [array("f", one.values)[0] for one in whole.embeddings] == [2, 1, 3]
    assert whole.usage.cached
    assert whole.usage.prompt_tokens == 3 * whole.embeddings[0].token_count
    assert wire.gateway.limits.spending.spent("default", 0.0) == spent
    assert (await explained(wire, whole.request_id)).cached
    assert sum(values(wire.metrics, "sluice.cached_answers").values()) == 1


@KEEPING
async def test_embeddings_asked_for_otherwise_are_others(wire: Wire) -> None:
    await embedded(wire, ["w1"], [1])
    assert (await embedded(wire, ["w1"], [], tenant="default")).usage.cached
    for more in (
        {"tenant": "acme"},
        {"dimensions": 4},
        {"prompt_name": "query"},
        {"normalize": True},
    ):
        assert not (await embedded(wire, ["w1"], [2], **more)).usage.cached


@KEEPING
async def test_embeddings_are_found_by_another_gateway(
    wire: Wire, opened: Opened, more_models: Sequence[ModelSettings]
) -> None:
    await embedded(wire, ["w1"], [1])
    await wire.gateway.shared.answers.close(30)
    cache = CacheSettings(enabled=True)
    async with opened(gateway_id="gw2", more_models=more_models, cache=cache) as other:
        assert (await embedded(other, ["w1"], [])).usage.cached
        answers = other.gateway.shared.answers
        keys = list(answers._memory._entries)
        assert len(await answers.find_embeddings(keys)) == 1
        assert not await answers.clear(ClearAnswersRequest(model="embed"))
        assert await answers.find_embeddings(keys) == {}
