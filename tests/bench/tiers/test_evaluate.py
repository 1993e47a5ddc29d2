from pathlib import Path

import pytest

from bench.tiers.evaluate import ServedModel, score_answers
from bench.tiers.tokenizer import load_tokenizer
from model_workers.tiers.tasks import heldout

SMALL = Path(__file__).parents[3] / "model_workers" / "models" / "small"


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_worker_answers_the_easy_tasks(quantization: str) -> None:
    served = ServedModel(SMALL, dtype="float32", quantization=quantization, rows=8)
    tokenizer = load_tokenizer(SMALL)
    scores = score_answers(lambda group: served.answers(tokenizer, group), heldout(6, 11))
    easy = [right for (_, level), right in scores.items() if level == "easy"]
    assert min(easy) > 0.8
