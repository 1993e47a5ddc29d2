"""Results of jobs as lines of OpenAI's batch output."""

from typing import Any

import pytest

from sluice.client.openai_lines import output_line
from sluice.openai.requests import CHAT, COMPLETIONS
from sluice.v1 import inference_pb2, jobs_pb2


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_reasoning_is_beside_the_text(url: str) -> None:
    answer = jobs_pb2.JobAnswer(
        text="yes", reasoning="hm", finish_reason=inference_pb2.FINISH_REASON_STOP
    )
    line = output_line("j", jobs_pb2.JobResult(custom_id="a", url=url, answer=answer))
    choice: dict[str, Any] = line["response"]["body"]["choices"][0]
    said = choice["message"] if url == CHAT else choice
    assert said["reasoning_content"] == "hm"
    assert said["content" if url == CHAT else "text"] == "yes"


def test_tokens_without_text_are_left_out_of_log_probabilities() -> None:
    entries = [inference_pb2.TokenLogprobs(), inference_pb2.TokenLogprobs(text="é", logprob=-0.5)]
    answer = jobs_pb2.JobAnswer(text="é", logprobs=entries)
    line = output_line("j", jobs_pb2.JobResult(url=CHAT, answer=answer))
    (token,) = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("é", -0.5)
