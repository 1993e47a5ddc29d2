"""What clients say and get about texts, and the files of `sluice embed`: a real gRPC server that counts words."""

import json
import os
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.client import AsyncClient
from sluice.client.texts import TEXTS_A_CALL
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from tests.cli.commands import Cli, served


class Words(InferenceServiceServicer):
    """An embedding is the number of words and of characters; a text "long" is too long."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        self.calls.append(request)
        if "long" in request.texts:
            status = PromptTooLong("texts[0]: has too many tokens").to_status()
            details = (("grpc-status-details-bin", status.SerializeToString()),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, status.message, details)
        found = [
            pb.Embedding(
                values=array("f", [len(text.split()), len(text)]).tobytes(),
                token_count=len(text.split()),
            )
            for text in request.texts
        ]
        return pb.EmbedResponse(request_id=f"r{len(self.calls)}", model="words", embeddings=found)

    async def Rerank(self, request: pb.RerankRequest, context: Any) -> pb.RerankResponse:
        self.calls.append(request)
        return pb.RerankResponse(model="m", results=[pb.RankedDocument(index=1, score=0.5)])

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self.calls.append(request)
        answer = pb.ScoredAnswer(logprob=-1.5, token_ids=[7, 8], logprobs=[-1, -0.5])
        return pb.ScoreResponse(model="m", answers=[answer])


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, Words]]:
    words = Words()
    async with served(add_InferenceServiceServicer_to_server, words) as address:
        yield address, words


async def test_a_long_list_is_several_calls_and_one_result_in_order() -> None:
    texts = [f"{'w ' * (n % 7)}w{n}" for n in range(2 * TEXTS_A_CALL + 5)]
    async with serving() as (address, words), AsyncClient(address) as client:
        found = await client.embed(texts, prompt_name="query", priority="standard", model="words")
    assert [vector[0] for vector in found.vectors] == [1 + n % 7 for n in range(len(texts))]
    assert len(words.calls) == len(found.request_ids) == 3
    assert {call.prompt_name for call in words.calls} == {"query"}
    assert {call.priority for call in words.calls} == {pb.PRIORITY_STANDARD}
    assert found.prompt_tokens == sum(1 + n % 7 for n in range(len(texts)))
    assert np.array(found.vectors).dtype == np.float32


async def test_the_first_error_of_several_calls_is_raised() -> None:
    async with serving() as (address, _), AsyncClient(address) as client:
        with pytest.raises(PromptTooLong):
            await client.embed(["a"] * TEXTS_A_CALL + ["long"])
        with pytest.raises(InvalidRequest, match="send a list of texts"):
            await client.embed("one text")


async def test_ranking_and_scores() -> None:
    async with serving() as (address, words), AsyncClient(address) as client:
        ranking = await client.rerank("q", ["a", "b"], top_n=1)
        scores = await client.score(["yes"], "is it?", raw_prompt=True)
    assert [(one.index, one.score) for one in ranking.results] == [(1, 0.5)]
    assert scores.answers[0].logprobs == [-1, -0.5]
    assert (words.calls[1].prompt, words.calls[1].raw_prompt) == ("is it?", True)


async def test_embed_writes_files_in_the_order_of_the_texts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo words\nand three words\n")
    rows = '{"id": "x", "text": "one"}\n{"text": "two words"}\n'
    async with serving() as (address, _):
        at = ("--address", address)
        out = str(tmp_path / "out.npy")
        ran = await cli("embed", str(tmp_path / "in.txt"), "-o", out, "--json", *at)
        assert ran.code == 0, ran.err
        assert '"texts": 3, "tokens": 6, "model": "words"' in ran.out
        found = np.load(out)
        assert found.dtype == np.float32
        assert found.tolist() == [[1, 3], [2, 9], [3, 15]]
        lines = str(tmp_path / "out.jsonl")
        assert (await cli("embed", "-", "-o", lines, *at, stdin=rows.encode())).code == 0
        with open(lines) as written:  # noqa: ASYNC230
            found = written.read().splitlines()
        assert found == [
            '{"index": 0, "id": "x", "tokens": 1, "embedding": [1.0, 3.0]}',
            '{"index": 1, "tokens": 2, "embedding": [2.0, 9.0]}',
        ]


async def test_embed_leaves_empty_lines_out(cli: Cli, tmp_path: Path) -> None:
    async with serving() as (address, _):
        for text in ("\none\n \ntwo words\n\n", '\r\n{"text": "one"}\n\n{"text": "two words"}\n\n'):
            out = str(tmp_path / "out.npy")
            command = ("embed", "-", "-o", out, "--address", address)
            ran = await cli(*command, stdin=text.encode())
            assert (ran.code, np.load(out).tolist()) == (0, [[1, 3], [2, 9]]), ran.err
            ran = await cli(*command, "--json", stdin=text.encode())
            assert json.loads(ran.out)["empty_lines"] == 3


async def test_embed_says_which_line_is_wrong_and_leaves_no_file(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    async with serving() as (address, _):
        for text, words in (
            ('{"text": "a"}\n{"other": "b"}\n', "line 2 has no text in 'text'"),
            ("a\nlong\n", "too many tokens"),
        ):
            command = ("embed", "-", "-o", str(out), "--address", address)
            ran = await cli(*command, stdin=text.encode())
            assert ran.code == 1
            assert words in ran.err
    assert os.listdir(tmp_path) == []
