import re
from typing import Final

import pytest

from sluice.constraint_reasons import reason_for
from sluice.constraints import problem_before, problem_of

LIBRARY: Final = re.compile("lexer|fuel|Unimplemented|Unsatisfiable|registry|recursion|f64")
"""Words of llguidance that callers cannot know."""

SCHEMAS = [
    ('{"type": "foo"}', "type must be one of JSON's, and is foo"),
    ('{"not": {"type": "integer"}}', 'keywords that cannot be enforced: "not"; leave'),
    ('{"x-guidance": {"lenient": true}, "uniqueItems": true}', 'cannot be enforced: "uniqueItems"'),
    ("[1]", "must be a JSON object"),
    ("false", "must be a JSON object"),
    ("{nope", "not JSON at line 1, column 2"),
    ('{"a":' * 2000, "nested too deeply"),
    ('{"$ref": "http://elsewhere/schema"}', "http://elsewhere/schema is not fetched"),
    ('{"enum": []}', "no value satisfies it: anyOf is empty"),
    ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ('{"title": "' + "x" * (64 << 10) + '"}', "at most 65536 bytes"),
    ('{"multipleOf": true}', "multipleOf must be a number"),
    ('{"multipleOf": NaN}', "not JSON at line 1, column"),
    ('{"multipleOf": 1e999}', "not JSON at line 1, column"),
    (
        '{"properties": {"' + "x" * 2000 + '": {"multipleOf": 10007}}}',
        "xxx.multipleOf: what must be",
    ),
]
REGEXES = [
    ("(a", "is no valid regular expression: unclosed group"),
    ("(?=a)b", "look-around"),
    ("(a)\\1", "back references are not supported"),
    ("a[^\\x00-\\U0010FFFF]", "no text matches it"),
    ("é" * 4097, "at most 8192 bytes"),
    ("a{10000000}", "is too complex; make it simpler"),
    ("(a{1000}){1000}", "is too complex"),
]


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_schemas_that_cannot_be_held(schema: str, reason: str) -> None:
    problem = problem_of("json_schema", schema)
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem
    assert not LIBRARY.search(problem)


@pytest.mark.parametrize(("regex", "reason"), REGEXES, ids=range(len(REGEXES)))
def test_regexes_that_cannot_be_held(regex: str, reason: str) -> None:
    problem = problem_of("regex", regex)
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem
    assert not LIBRARY.search(problem)


@pytest.mark.parametrize(
    "schema",
    [
        "true",
        "{}",
        ' {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
        '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "string", "format": "date"}',
        '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}',
    ],
)
def test_schemas_that_can(schema: str) -> None:
    assert problem_of("json_schema", schema) is None


@pytest.mark.parametrize("regex", ["", "[0-9]{3}", "^ab$", "(?i)yes|no", "\\p{L}+", ".{0,5000}"])
def test_regexes_that_can(regex: str) -> None:
    assert problem_of("regex", regex) is None


@pytest.mark.parametrize("value", ["true", "NaN", "1e999", "-1e999", "null", '"3"', "1e-320"])
def test_schema_is_checked_behind_a_multiple_that_is_no_number(value: str) -> None:
    schema = f'{{"allOf": [{{"multipleOf": {value}}}, {{"multipleOf": {value}}}]}}'
    assert problem_before("json_schema", schema) is None


def test_a_message_that_is_not_known_is_not_passed_on() -> None:
    assert reason_for("panicked at src/x.rs:12") == "cannot be enforced; write it in another way"
