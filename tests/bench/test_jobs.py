"""Inputs of the benchmarks of jobs: as many items as asked for, none like another."""

import json

from bench.support.job_speed import pieces, short_lines, task_lines


def test_tasks_are_new_for_each_seed_and_none_is_there_twice() -> None:
    one, two = (task_lines(300, seed, 16) for seed in (1, 2))
    prompts = [line["prompt"] for line in (*one, *two)]
    assert len(one) == len({line["id"] for line in one}) == 300
    assert len(set(prompts)) == 600
    assert all(line["min_tokens"] == line["max_tokens"] == 16 for line in one)
    assert [line["max_tokens"] for line in task_lines(3, 1, 8, 16)] == [8, 16, 8]


def test_a_file_is_sent_in_pieces_that_a_call_takes() -> None:
    sent = list(pieces(short_lines(20_000, 8)))
    assert len(sent) > 1
    assert max(map(len, sent)) <= 512 * 1024
    lines = [json.loads(line) for line in b"".join(sent).splitlines()]
    assert lines == list(short_lines(20_000, 8))
