"""/v1/completions with token ids, several prompts, and prompts in front of their answers; as evaluations ask."""

import asyncio
from array import array
from typing import Any, Final

import pytest

from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_LENGTH, Logprobs, TaskError
from sluice.internal.v1.task_pb2 import Task
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.http import Reply, ask, events_in
from tests.gateway.kit.tokenizer import BOS, END
from tests.gateway.kit.wire import Wire, open_wire

PATH: Final = "/v1/completions"


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": prompt, "max_tokens": 4, **fields}


def asking(wire: Wire, prompt: Any, **fields: Any) -> "asyncio.Task[Reply]":
    return asyncio.ensure_future(ask(wire.http, PATH, body(prompt, **fields)))


def ids(task: Task) -> list[int]:
    return list(task.prompt_token_ids)


async def score(wire: Wire, task: Task, *, top: int) -> None:
    """Answer a task with -1, -2 and so on for its tokens, each the most probable one."""
    scored = task.values.scored_token_ids
    assert task.values.scored_alternatives == top
    whole = last(0)
    scores = [-1.0 - at for at in range(len(scored))]
    whole.final.values = array(
        "f", [*scores, *scored, *scores][: len(scored) * (1 + 2 * top)]
    ).tobytes()
    await wire.batcher.send(task, whole)


async def test_token_ids_reach_the_model_as_sent(http: Wire) -> None:
    """Not as the tokenizer would cut the text; a first token that begins a text stays."""
    begin = http.tokens(BOS)
    for sent in ([*http.tokens("h"), *http.tokens("ello")], [*begin, *http.tokens("hello")], begin):
        call = asking(http, sent)
        task = await http.batcher.task()
        assert ids(task) == sent
        await http.batcher.send(task, last(0, http.tokens(" world")))
        reply = await call
        assert reply.json["choices"][0]["text"] == " world"
        assert reply.json["usage"]["prompt_tokens"] == len(sent)


async def test_token_ids_are_inspected_as_text(nats_url: str, model_folder: Any) -> None:
    actions = {"pii.email": "redact", "pii.iban": "block"}
    safety = {"default": "own", "policies": {"own": {"actions": actions}}}
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", safety=safety) as wire:
        call = asking(wire, wire.tokens("mail ann@example.org now"))
        task = await wire.batcher.task()
        text = wire.catalog["small"].tokenizer.tokenizer.decode(ids(task))
        assert text == "mail <EMAIL_1> now"
        await wire.batcher.send(task, last(0, wire.tokens("x")))
        assert (await call).status == 200
        reply = await asking(wire, wire.tokens("to DE89370400440532013000"))
        assert (reply.status, reply.error["code"]) == (400, "content_filter")


REFUSED: Final[list[tuple[Any, dict[str, Any], str, str]]] = [
    ([104, 4], {}, "prompt", "has the special token 4 (<|assistant|>)"),
    ([104, 5], {}, "prompt", "has the special token 5"),
    ([104, 1 << 20], {}, "prompt", "must be below"),
    ([7] * 300, {}, "prompt", "context"),
    ([], {}, "prompt", "is empty"),
    ([1, "a"], {}, "prompt[0]", "must be a text or a list"),
    (["a", 1.5], {}, "prompt[1]", "must be a text or a list"),
    ([[7], []], {}, "prompt[1]", "must be a text or a list"),
    ([-1], {}, "prompt[0]", "must be a text or a list"),
    ([True], {}, "prompt[0]", "must be a text or a list"),
    (["a"] * 129, {}, "prompt", "at most 128"),
    (["a", ""], {}, "prompt", "is empty"),
    ([7, 8], {"model": "auto"}, "model", "name their model"),
    ("a", {"model": "auto", "echo": True, "logprobs": 1}, "model", "is required"),
    ("a", {"max_tokens": 0}, "max_tokens", "must be in [1"),
    ("a", {"max_tokens": 0, "echo": True}, "max_tokens", "echo with logprobs"),
    (["a", "b"], {"max_tokens": 0}, "max_tokens", "echo with logprobs"),
    ("a", {"echo": "yes"}, "echo", "true or false"),
    ("a", {"echo": ""}, "echo", "true or false"),
    ("hello", {"echo": True, "logprobs": 21}, "logprobs", "[0, 20]"),
]


async def test_prompt_that_is_not_served_says_why(http: Wire) -> None:
    for prompt, fields, param, says in REFUSED:
        reply = await ask(http.http, PATH, body(prompt, **fields))
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert says in reply.error["message"]


async def test_each_prompt_has_its_choices(http: Wire) -> None:
    texts = {"one": " a", "two": " b", "three": " c"}
    prompts = ["one", http.tokens("two"), "three"]
    call = asking(http, prompts, n=2, temperature=1)
    seeds = set()
    for _ in range(6):
        task = await http.batcher.task()
        seeds.add(task.sampling.seed)
        prompt = http.catalog["small"].tokenizer.tokenizer.decode(ids(task))
        await http.batcher.send(task, last(0, http.tokens(texts[prompt])))
    answer = (await call).json
    choices = [(one["index"], one["text"]) for one in answer["choices"]]
    assert choices == [(0, " a"), (1, " a"), (2, " b"), (3, " b"), (4, " c"), (5, " c")]
    counted = sum(len(http.tokens(text)) for text in texts)
    assert answer["usage"]["prompt_tokens"] == counted
    assert len(seeds) == 6


async def test_prompts_are_streamed_by_their_index(http: Wire) -> None:
    call = asking(http, ["one", "two"], stream=True, stream_options={"include_usage": True})
    for _ in range(2):
        task = await http.batcher.task()
        await http.batcher.send(task, last(0, ids(task)))
    *events, usage, done = events_in((await call).body)
    assert done == "[DONE]"
    texts = {0: "", 1: ""}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "one", 1: "two"}
    assert usage["usage"]["prompt_tokens"] == len(http.tokens("one")) + len(http.tokens("two"))
    assert len({event["id"] for event in events}) == 1


async def test_prompt_that_fails_fails_the_call(http: Wire) -> None:
    call = asking(http, ["one", "two"])
    tasks = [await http.batcher.task() for _ in range(2)]
    error = TaskError(message="no memory")
    await http.batcher.send(tasks[1], frame(0, end=TASK_END_FAILED, error=error))
    assert (await call).error["code"] == "engine_failed"
    await http.batcher.cancelled(tasks[0])
    await http.until(lambda: http.gateway.active == 0)


async def test_key_covers_each_prompt(http: Wire) -> None:
    for _ in range(2):
        given = ask(http.http, PATH, body(["one", "two"]), idempotency_key="k")
        call = asyncio.ensure_future(given)
        if _ == 0:
            for _ in range(2):
                task = await http.batcher.task()
                await http.batcher.send(task, last(0, ids(task)))
        reply = await call
        assert [one["text"] for one in reply.json["choices"]] == ["one", "two"]


async def test_echo_repeats_the_prompt(http: Wire) -> None:
    for prompt in ("hello", http.tokens("hello")):
        call = asking(http, prompt, echo=True)
        task = await http.batcher.task()
        await http.batcher.send(task, last(0, http.tokens(" world")))
        (choice,) = (await call).json["choices"]
        assert (choice["text"], choice["logprobs"]) == ("hello world", None)


@pytest.mark.parametrize("streams", [False, True])
async def test_loglikelihood_of_lm_evaluation_harness(http: Wire, streams: bool) -> None:
    """The request of its ``local-completions``: it counts entries from the end, where one token was drawn."""
    sent = [*http.tokens(BOS), *http.tokens("hello \U0001f600")]
    fields = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True, "stream": streams}
    call = asking(http, [sent], **{**fields, "max_tokens": 1})
    task = await http.batcher.task()
    assert ids(task) == sent[:-1]
    assert list(task.values.scored_token_ids) == sent[1:]
    await score(http, task, top=1)
    task = await http.batcher.task()
    assert (ids(task), task.sampling.max_tokens) == (sent, 1)
    (drawn,) = http.tokens(END)
    logged = Logprobs(logprob=-9, top_token_ids=[drawn], top_logprobs=[-9])
    await http.batcher.send(task, frame(0, [drawn], logprobs=[logged], end=TASK_END_LENGTH))
    reply = await call
    parts = [one["choices"][0] for one in events_in(reply.body)[:-1]] if streams else []
    if streams:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logged_parts = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {name: [v for part in logged_parts for v in part[name]] for name in names}
        text = "".join(part["text"] for part in parts)
    else:
        (choice,) = reply.json["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "hello \U0001f600" == "".join(logprobs["tokens"])
    assert {len(values) for values in logprobs.values()} == {len(sent) + 1}
    scores = logprobs["token_logprobs"]
    assert scores == [None, *(-1.0 - at for at in range(len(sent) - 1)), -9.0]
    tops = logprobs["top_logprobs"]
    assert all(max(top.values()) == score for top, score in zip(tops[1:], scores[1:], strict=True))
    assert logprobs["text_offset"][:3] == [0, 0, len(logprobs["tokens"][1])]


async def test_prompt_alone_is_scored(http: Wire) -> None:
    call = asking(http, "hello world", echo=True, logprobs=0, max_tokens=0)
    task = await http.batcher.task()
    await score(http, task, top=0)
    answer = (await call).json
    (choice,) = answer["choices"]
    tokens = http.tokens("hello world")
    assert (choice["text"], choice["finish_reason"]) == ("hello world", "length")
    assert len(choice["logprobs"]["tokens"]) == len(tokens)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == len(tokens)
    alone = (await asking(http, "hello", echo=True, logprobs=1, max_tokens=0)).json["choices"][0]
    assert alone["logprobs"]["token_logprobs"] == [None]
