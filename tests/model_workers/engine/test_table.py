import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model_workers.engine.protocol import (
    EngineFull,
    RowEnd,
    RowInvalid,
    RowStale,
    RowTooLong,
)
from model_workers.engine.rows import Row, RowState
from model_workers.engine.table import RowTable
from tests.support.rows import row_spec


def joined(table: RowTable) -> list[Row]:
    rows = []
    while (row := table.join()) is not None:
        rows.append(row)
    return rows


def test_rows_over_slots_and_waiting_places_are_refused() -> None:
    table = RowTable(slots=2, max_waiting=1, context_tokens=16)
    for name in "abc":
        table.add(row_spec(name, [1]))
    with pytest.raises(EngineFull) as refused:
        table.add(row_spec("d", [1]))
    assert refused.value.retryable
    assert [row.spec.request_id for row in joined(table)] == ["a", "b"]
    assert (table.load().running, table.load().waiting) == (2, 1)


def test_the_prompt_must_leave_room_for_a_token() -> None:
    table = RowTable(1, 0, context_tokens=8)
    with pytest.raises(RowTooLong, match="8 tokens") as refused:
        table.add(row_spec("r", range(8)))
    assert not refused.value.retryable
    table.add(row_spec("r", range(7)))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RowInvalid):
        RowTable(1, 0, 8).add(row_spec("r", []))


@pytest.mark.parametrize("running", [True, False])
def test_only_a_higher_attempt_replaces(running: bool) -> None:
    table = RowTable(1, 0, 8)
    table.add(row_spec("r", [1], attempt=3))
    old = joined(table) if running else []
    for attempt in (2, 3):
        with pytest.raises(RowStale):
            table.add(row_spec("r", [1], attempt=attempt))
    table.add(row_spec("r", [2], attempt=4))
    swept = table.sweep(0.0)
    assert [row for row, _ in swept] == old
    assert all(row.replaced for row in old)
    (row,) = joined(table)
    assert row.spec.attempt == 4
    table.cancel(["r"])
    assert table.sweep(0.0) == [(row, RowEnd.CANCELLED)]


def test_waiting_rows_end_by_cancel_and_deadline_too() -> None:
    table = RowTable(1, 8, 8)
    for name in "abcd":
        table.add(row_spec(name, [1], deadline=10.0 if name == "c" else None))
    joined(table)
    table.cancel(["b", "unknown"])
    ends = {row.spec.request_id: end for row, end in table.sweep(11.0)}
    assert ends == {"b": RowEnd.CANCELLED, "c": RowEnd.DEADLINE}
    assert (table.load().running, table.load().waiting) == (1, 1)


def test_drain_leaves_out_what_nobody_waits_for() -> None:
    table = RowTable(1, 4, 8)
    table.add(row_spec("r", [1], attempt=0))
    joined(table)
    table.add(row_spec("r", [1], attempt=1))
    assert [row.spec.attempt for row in table.drain()] == [1]
    assert table.load().running + table.load().waiting == 0


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: bounds hold, and every row ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RowTable(slots=3, max_waiting=2, context_tokens=8)
        self.rows: list[Row] = []
        self.accepted = 0
        self.ended = 0
        self.now = 0.0

    @rule(name=st.sampled_from("abcdefg"), attempt=st.integers(0, 3), wait=st.integers(1, 9))
    def add(self, name: str, attempt: int, wait: int) -> None:
        before = self.table.load()
        try:
            self.table.add(row_spec(name, [1], attempt=attempt, deadline=self.now + wait))
        except (EngineFull, RowStale):
            assert self.table.load() == before
            return
        self.accepted += 1
        self.ended += before.waiting + 1 - self.table.load().waiting

    @rule(name=st.sampled_from("abcdefg"))
    def cancel(self, name: str) -> None:
        self.table.cancel([name])

    @rule(passed=st.floats(0, 3))
    def sweep(self, passed: float) -> None:
        self.now += passed
        swept = [row for row, _ in self.table.sweep(self.now)]
        self.ended += len(swept)
        self.rows = [row for row in self.rows if row not in swept]

    @rule()
    def join(self) -> None:
        self.rows += joined(self.table)

    @rule()
    def end_oldest(self) -> None:
        if self.rows:
            self.table.end(self.rows.pop(0))
            self.ended += 1

    @invariant()
    def bounds_hold(self) -> None:
        load = self.table.load()
        assert load.running == len(self.rows) <= 3
        assert all(row.state is RowState.PREFILL for row in self.rows)
        assert self.accepted == self.ended + load.running + load.waiting


TestAnyOrder = AnyOrder.TestCase
