"""Logits and greedy text are those of transformers' own forward, however rows are cut, mixed, moved and recomputed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_workers.engine.forward import load_model
from model_workers.engine.forward.hub import HubModel
from model_workers.engine.forward.llama import FusedModel, RmsNorm
from model_workers.engine.paged_model import PagedModel, SequenceChunk
from tests.support.tiny_models import VOCABULARY, tiny_model

NUM_BLOCKS = 80
BLOCK_TOKENS = 16
LENGTHS = (1, 5, 16, 17, 40, 70, 100)

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}

MODELS: dict[str, tuple[str, dict[str, Any], type]] = {
    "llama": ("llama", {}, FusedModel),
    "llama, yarn": ("llama", {"rope_parameters": YARN}, FusedModel),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}, FusedModel),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}, FusedModel),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, FusedModel),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, FusedModel),
    "llama, relu": ("llama", {"hidden_act": "relu"}, HubModel),
    "mistral": ("mistral", {}, FusedModel),
    "qwen2": ("qwen2", {}, FusedModel),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        FusedModel,
    ),
    "qwen3": ("qwen3", {}, FusedModel),
    "gpt2": ("gpt2", {}, HubModel),
    "gemma": ("gemma", {}, HubModel),
    "gemma2": ("gemma2", {}, HubModel),
    "phi": ("phi", {}, HubModel),
}


class Case:
    """A model, transformers' own, and ours on a cache of shuffled blocks."""

    def __init__(self, name: str, folder: Path) -> None:
        family, changes, self.kind = MODELS[name]
        self.reference = tiny_model(family, **changes)
        self.reference.save_pretrained(folder)
        self.loaded = load_model(str(folder), device="cpu")
        self.model: PagedModel = self.loaded.paged(NUM_BLOCKS, BLOCK_TOKENS)
        self.numbers = random.Random(3)
        self.rows = [[self.numbers.randrange(VOCABULARY) for _ in range(n)] for n in LENGTHS]

    def free_blocks(self) -> list[int]:
        return self.numbers.sample(range(NUM_BLOCKS), NUM_BLOCKS)

    @torch.inference_mode()
    def expected(self, row: list[int]) -> Tensor:
        logits: Tensor = self.reference(torch.tensor([row])).logits[0]
        return logits

    def is_greedy(self, row: list[int], prompt: list[int]) -> bool:
        """Whether each token behind the prompt is transformers' choice behind all before it."""
        chosen: list[int] = self.expected(row)[len(prompt) - 1 : -1].argmax(-1).tolist()
        return row == [*prompt, *chosen]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    made = Case(request.param, tmp_path_factory.mktemp("model"))
    assert type(made.model) is made.kind
    return made


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def computed(
    case: Case,
    rows: list[list[int]],
    tables: list[list[int]],
    done: list[int],
    size: Callable[[], int],
) -> None:
    """Computes the rows to their ends in random mixed batches, and holds all logits against transformers'."""
    expected = [case.expected(row) for row in rows]
    while any(d < len(row) for d, row in zip(done, rows, strict=True)):
        chunks, wanted = [], []
        for index, row in enumerate(rows):
            count = min(size(), len(row) - done[index])
            if not count:
                continue
            end = done[index] + count
            logits = case.numbers.randint(0, count)
            chunks.append(SequenceChunk(row[done[index] : end], done[index], tables[index], logits))
            wanted.append(expected[index][end - logits : end])
            done[index] = end
        if chunks:
            close(case.model.forward(chunks), torch.cat(wanted))


def tables_of(case: Case, rows: list[list[int]]) -> list[list[int]]:
    free = case.free_blocks()
    return [[free.pop() for _ in range(-(-len(row) // BLOCK_TOKENS))] for row in rows]


def test_logits_of_mixed_batches(case: Case) -> None:
    tables = tables_of(case, case.rows)
    sizes = (0, 1, 1, 2, 16, 17, 33, 64)
    computed(case, case.rows, tables, [0] * len(LENGTHS), lambda: case.numbers.choice(sizes))


def test_logits_behind_a_shared_prefix(case: Case) -> None:
    prefix = case.rows[5][: 2 * BLOCK_TOKENS]
    rows = [prefix + row for row in case.rows[1:4]]
    tables = tables_of(case, rows)
    case.model.forward([SequenceChunk(prefix, 0, tables[0], 0)])
    for table in tables[1:]:
        table[:2] = tables[0][:2]
    computed(case, rows, tables, [len(prefix)] * len(rows), lambda: case.numbers.choice((1, 7, 40)))


def test_greedy_text_with_a_row_computed_again_elsewhere(case: Case) -> None:
    prompts = case.rows[1:4]
    rows = [list(prompt) for prompt in prompts]
    free = case.free_blocks()
    tables = [[free.pop() for _ in range(5)] for _ in rows]
    firsts = [SequenceChunk(row, 0, table, 1) for row, table in zip(rows, tables, strict=True)]
    logits = case.model.forward(firsts)
    for step in range(12):
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
        if step == 5:  # the second row was preempted: it comes back in one chunk beside the others
            tables[1] = [free.pop() for _ in range(5)]
        starts = [0 if step == 5 and index == 1 else len(row) - 1 for index, row in enumerate(rows)]
        parts = zip(rows, starts, tables, strict=True)
        logits = case.model.forward(
            [SequenceChunk(row[at:], at, table, 1) for row, at, table in parts]
        )
    assert {len(row) - len(prompt) for row, prompt in zip(rows, prompts, strict=True)} == {12}
    assert all(map(case.is_greedy, rows, prompts))


def test_a_copied_block_goes_its_own_way(case: Case) -> None:
    row, other = case.rows[4], case.rows[4][:20] + case.rows[5][:10]
    first, second, third, fourth = case.free_blocks()[:4]
    case.model.forward([SequenceChunk(row[:20], 0, (first, second), 0)])
    case.model.copy_blocks([(second, third)])
    parts = ((row, (first, second, fourth)), (other, (first, third)))
    chunks = [SequenceChunk(tokens[20:30], 20, table, 10) for tokens, table in parts]
    close(
        case.model.forward(chunks),
        torch.cat([case.expected(tokens)[20:30] for tokens, _ in parts]),
    )


def test_a_row_whose_numbers_broke_leaves_nothing_behind(case: Case) -> None:
    table = case.free_blocks()[:3]
    row = case.rows[4][:30]
    case.model.forward([SequenceChunk(row, 0, table, 0)])
    for pages in (*_pages(case.model).keys, *_pages(case.model).values):
        pages[table] = torch.nan
    case.model.clear_blocks(table)
    found = [
        case.model.forward([SequenceChunk(row[at : at + 1], at, table, 1)]).clone()
        for at in range(30)
    ]
    close(torch.cat(found), case.expected(row))


def test_rows_alone_and_together_are_equal_to_the_last_bit(case: Case) -> None:
    tables = tables_of(case, case.rows)
    for row, table in zip(case.rows, tables, strict=True):
        if len(row) > 1:
            case.model.forward([SequenceChunk(row[:-1], 0, table, 0)])
    parts = zip(case.rows, tables, strict=True)
    chunks = [SequenceChunk(row[-1:], len(row) - 1, table, 1) for row, table in parts]
    together = case.model.forward(chunks).clone()
    alone = [case.model.forward([chunk]).clone() for chunk in chunks]
    assert torch.equal(torch.cat(alone), together)


def _pages(model: Any) -> Any:
    return model._attention.cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 1e4])
def test_norms_are_those_of_torch(dtype: torch.dtype, size: float) -> None:
    weight = torch.randn(48).to(dtype)
    norm = RmsNorm(weight, 1e-6)
    x = (size * torch.randn(5, 3, 48)).to(dtype)
    expected = torch.nn.functional.rms_norm(x, (48,), weight, 1e-6)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=0.0)
