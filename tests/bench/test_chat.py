"""The benchmark of the general model beside vLLM, without either."""

from bench.chat import HOW, Setup, figures, prompts


async def test_figures_without_vllm_say_how_to_get_it() -> None:
    (figure,) = await figures(7, None, Setup("float32", 1), (1, 8))
    assert (figure.figure, figure.ours) == ("chat_vs_vllm", None)
    assert HOW in figure.note


def test_prompts_are_of_the_seed_and_new() -> None:
    first, second = prompts(1, 16), prompts(1, 16)
    texts = [[one.partition(": ")[2] for one in side] for side in (first, second)]
    assert texts[0] == texts[1]
    assert texts[0] != [one.partition(": ")[2] for one in prompts(2, 16)]
    assert not set(first) & set(second)
