"""The benchmark of `engine: openai` before vLLM, without it."""

from bench.chat import HOW
from bench.remote import figures


async def test_figure_without_vllm_says_how_to_get_it() -> None:
    (figure,) = await figures(7, None, "tokens", (1, 8))
    assert (figure.figure, figure.ours) == ("openai_vs_vllm", None)
    assert HOW in figure.note
