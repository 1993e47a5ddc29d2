"""How much JSON is read."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.openai.fields import VALUES_MAX, load_json, values_in

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def counted(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + counted(one) for one in value.values())
    return 1 + (sum(map(counted, value)) if isinstance(value, list) else 0)


@given(JSON)
def test_no_value_is_overlooked(value: Any) -> None:
    assert counted(value) <= values_in(json.dumps(value))


@given(st.text())
def test_text_is_no_value(text: str) -> None:
    assert values_in(json.dumps({"a": text * 2000})) <= 1024 + 3
    assert values_in(json.dumps([text, '"[{,:\\' * 2000])) <= 1024 + 3


@pytest.mark.parametrize("piece", ["[]", "{}", '{"a":1}', '""', "1"])
def test_a_text_with_too_many_values_is_not_read(piece: str) -> None:
    def of(count: int) -> str:
        return f"[{','.join([piece] * count)}]"

    each = max(1, values_in(f"[{piece}]") - 2) + 1
    assert len(load_json(of(VALUES_MAX // each - 1))) == VALUES_MAX // each - 1
    with pytest.raises(ValueError, match=f"over {VALUES_MAX} values"):
        load_json(of(VALUES_MAX))


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 300_000 + "\\", '"' * 300_001, '["' + "\\" * 500_000]
)
def test_a_string_that_does_not_end_is_looked_at_once(text: str) -> None:
    assert values_in("," * 2000 + text) <= 2001 + len(text)
