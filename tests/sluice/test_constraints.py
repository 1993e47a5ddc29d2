import pytest

from sluice.constraints import problem_before, problem_of

SCHEMAS = [
    ('{"type": "foo"}', "Invalid type: foo"),
    ('{"not": {"type": "integer"}}', 'Unimplemented keys: ["not"]'),
    ('{"x-guidance": {"lenient": true}, "uniqueItems": true}', "Unimplemented"),
    ("[1]", "must be a JSON object"),
    ("false", "must be a JSON object"),
    ("{nope", "line 1 column 2"),
    ('{"a":' * 2000, "recursion limit"),
    ('{"$ref": "http://elsewhere/schema"}', "does not fetch"),
    ('{"enum": []}', "Unsatisfiable"),
    ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ('{"title": "' + "x" * (64 << 10) + '"}', "at most 65536 bytes"),
    ('{"multipleOf": true}', "got true"),
    ('{"multipleOf": NaN}', "line 1 column"),
    ('{"multipleOf": 1e999}', "out of range"),
    (
        '{"properties": {"' + "x" * 2000 + '": {"multipleOf": 10007}}}',
        "xxx.multipleOf: what must be",
    ),
]
REGEXES = [
    ("(a", "unclosed group"),
    ("(?=a)b", "look-around"),
    ("(a)\\1", "backreferences are not supported"),
    ("a[^\\x00-\\U0010FFFF]", "no text matches it"),
    ("é" * 4097, "at most 8192 bytes"),
    ("a{10000000}", "too many"),
    ("(a{1000}){1000}", "too many"),
]


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_schemas_that_cannot_be_held(schema: str, reason: str) -> None:
    problem = problem_of("json_schema", schema)
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem


@pytest.mark.parametrize(("regex", "reason"), REGEXES, ids=range(len(REGEXES)))
def test_regexes_that_cannot_be_held(regex: str, reason: str) -> None:
    problem = problem_of("regex", regex)
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem


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
def test_a_multiple_that_is_no_number_does_not_stop_the_look_at_the_schema(value: str) -> None:
    schema = f'{{"allOf": [{{"multipleOf": {value}}}, {{"multipleOf": {value}}}]}}'
    assert problem_before("json_schema", schema) is None
