import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from jobs.input import Format, Template, read_items
from jobs.items import Item
from sluice.errors import InputInvalid
from sluice.v1 import inference_pb2 as pb

zstd = pytest.importorskip("backports.zstd")


def read(data: bytes, *arguments: Any, **options: Any) -> list[Item]:
    return list(read_items(iter([data]), *arguments, **options))


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def only(data: bytes, *arguments: Any, **options: Any) -> Item:
    (item,) = read(data, *arguments, **options)
    assert item.outcome is None, item
    return item


def bad(data: bytes, *arguments: Any, **options: Any) -> str:
    """Why the only line is a bad one."""
    (line,) = read(data, *arguments, **options)
    assert line.outcome is not None, line
    return line.outcome.error.message


def shown(data: bytes, *arguments: Any, **options: Any) -> list[tuple[object, ...]]:
    """Line, id and prompt of items; line, id and reason of bad lines."""
    return [
        (one.line, one.custom_id, one.request.prompt)  # type: ignore[union-attr]
        if one.outcome is None
        else (one.line, one.custom_id, one.outcome.error.message)
        for one in read(data, *arguments, **options)
    ]


def chat(body: dict[str, Any], url: str = "/v1/chat/completions") -> bytes:
    return jsonl({"custom_id": "a", "method": "POST", "url": url, "body": body})


HELLO = [{"role": "user", "content": "hello"}]


def test_a_plain_line_becomes_a_request() -> None:
    line = {"id": "a", "prompt": "hello", "model": "small", "max_tokens": 5, "temperature": 1}
    item = only(jsonl({**line, "stop": ["x"], "labels": {"task": "sum"}, "json_schema": {}}))
    assert (item.custom_id, item.line) == ("a", 1)
    assert item.request == pb.GenerateRequest(
        prompt="hello",
        model="small",
        labels={"task": "sum"},
        sampling=pb.SamplingParams(max_tokens=5, temperature=1, stop=["x"], json_schema="{}"),
    )


def test_a_line_of_openai_chat_becomes_a_request() -> None:
    turns = [
        {"role": "developer", "content": "be short"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
        },
    ]
    schema = {"type": "object"}
    body = {
        "model": "large",
        "messages": turns,
        "max_completion_tokens": 9,
        "stop": "\n",
        "n": 1,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 2,
        "user": "me",
        "seed": 7,
        "metadata": {"k": "v"},
        "top_p": 0.5,
        "logit_bias": {"5": -100},
        "presence_penalty": None,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    item = only(chat(body))
    assert item.url == "/v1/chat/completions"
    chat_input = pb.ChatInput(
        messages=[
            pb.ChatMessage(role=pb.ROLE_SYSTEM, content="be short"),
            pb.ChatMessage(role=pb.ROLE_USER, content="hello"),
        ]
    )
    sampling = pb.SamplingParams(
        max_tokens=9,
        stop=["\n"],
        logprobs=2,
        seed=7,
        top_p=0.5,
        json_schema=json.dumps(schema),
        response_format=json.dumps(body["response_format"]),
        logit_bias={5: -100},
    )
    assert item.request == pb.GenerateRequest(
        chat=chat_input, model="large", sampling=sampling, labels={"k": "v", "user": "me"}
    )


def test_a_line_of_openai_completions_is_a_raw_prompt() -> None:
    body = {"model": "small", "prompt": ["once"], "max_tokens": 3, "logprobs": 0}
    request = only(chat(body, "/v1/completions")).request
    assert request.raw_prompt
    assert request.prompt == "once"
    assert request.sampling == pb.SamplingParams(max_tokens=3, logprobs=0)


@pytest.mark.parametrize(
    ("body", "url", "named"),
    [
        ({"messages": HELLO, "n": 2}, "", "body.n"),
        ({"messages": HELLO, "tools": [{}]}, "", "body.tools"),
        ({"messages": HELLO, "logit_bias": {"x": 2}}, "", "body.logit_bias.x"),
        ({"messages": HELLO, "logit_bias": [1]}, "", "body.logit_bias: is not an object"),
        ({"messages": HELLO, "temperature": "hot"}, "", "body.temperature: is not a number"),
        ({"messages": HELLO, "max_tokens": -1}, "", "body.max_tokens"),
        ({"messages": HELLO, "max_tokens": 2.5}, "", "max_tokens: is not a whole number"),
        ({"messages": HELLO, "stop": [1]}, "", "body.stop"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "", "body.messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "nom": "y"}]}, "", "messages[0].nom"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "", "of type text"),
        ({"messages": "hi"}, "", "body.messages"),
        ({"messages": HELLO, "metadata": {"k": []}}, "", "body.metadata.k"),
        ({"messages": HELLO, "metadata": "k"}, "", "metadata"),
        ({"messages": HELLO, "response_format": {"type": "x"}}, "", "response_format"),
        ({}, "", "body.messages: is required"),
        ({"prompt": "a"}, "", "body.prompt: is not a field of"),
        ({"messages": HELLO, "top_logprobs": 1}, "", "body.top_logprobs: needs"),
        ({"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "", "differs"),
        ({"prompt": ["a", "b"]}, "/v1/completions", "body.prompt"),
        ({"input": "a"}, "/v1/moderations", "url: '/v1/moderations' is not supported"),
    ],
)
def test_what_openai_has_and_the_mesh_has_not_is_named(
    body: dict[str, Any], url: str, named: str
) -> None:
    assert named in bad(chat(body, url or "/v1/chat/completions"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "\\ud800": 1}', "surrogate"),
        (b'{"messages": [{"role": [], "content": "a"}]}', "role"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": ""}', "prompt: is empty"),
        (b'{"prompt": 5}', "prompt: is not text"),
        (b'{"prompt": "a", "messages": []}', "send either prompt or messages"),
        (b'{"prompt": "a", "colour": 1}', "colour: is not supported"),
        (b'{"id": [], "prompt": "a"}', "custom_id"),
        (b'{"id": "", "prompt": "a"}', "custom_id"),
        (b'{"id": "a\\n", "prompt": "a"}', "printable"),
        (b'{"a":' * 30_000, "is nested too deeply"),
        (b'{"a":[' + b"[]," * 70_000 + b"1]}", "values"),
        (b'{"prompt": "' + b"a" * 2_000_000 + b'"}', "longer than 1048576 bytes"),
    ],
)
def test_a_bad_line_says_why_and_those_behind_it_are_read(line: bytes, reason: str) -> None:
    (_, _, told), second = shown(line + b"\n\n" + jsonl({"prompt": "good"}))
    assert reason in str(told)
    assert second == (3, "3", "good")


def test_lines_say_more_than_the_defaults() -> None:
    system = pb.ChatMessage(role=pb.ROLE_SYSTEM, content="be kind")
    defaults = pb.GenerateRequest(
        chat=pb.ChatInput(messages=[system]),
        model="small",
        sampling=pb.SamplingParams(max_tokens=5, stop=["x"], temperature=0.5),
    )
    own = {"role": "system", "content": "be brief"}
    data = jsonl(
        {"prompt": "a", "max_tokens": 7, "stop": ["y"]},
        {"messages": HELLO},
        {"messages": [own, *HELLO]},
        {"prompt": "b", "raw_prompt": True},
    )
    items = [item for item in read(data, Format.AUTO, None, defaults) if item.outcome is None]
    assert items[0].request.sampling == pb.SamplingParams(max_tokens=7, stop=["y"], temperature=0.5)
    turns = [[turn.content for turn in item.request.chat.messages] for item in items]
    assert turns == [["be kind", "a"], ["be kind", "hello"], ["be brief", "hello"], []]
    assert items[3].request.prompt == "b"


def table(*rows: list[str]) -> bytes:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return b"\xef\xbb\xbf" + file.getvalue().encode()


SKU = table(["sku", "text"], ["7", "a,\nb"], ["8"], ["9", "\xe9"])
TWICE = jsonl({"id": "a", "prompt": "1"}, {"id": "b", "prompt": "2"}, {"id": "a", "prompt": "3"})
DOUBLE = "custom_id: 'a' is that of an earlier line"


@pytest.mark.parametrize(
    ("data", "options", "rows"),
    [
        (
            SKU,
            {"format": Format.CSV, "template": "Sum {{up}}: {text}", "id_field": "sku"},
            [
                (2, "7", "Sum {up}: a,\nb"),
                (4, "", "has 1 cells, the header 2"),
                (5, "9", "Sum {up}: \xe9"),
            ],
        ),
        (b"prompt\na\n\nb\n", {"format": Format.CSV}, [(2, "2", "a"), (4, "4", "b")]),
        (b"one\n\n two \r\n", {"format": Format.TEXT}, [(1, "1", "one"), (3, "3", "two")]),
        (jsonl({"id": 3, "n": 4, "other": []}), {"template": "{n} {n}"}, [(1, "3", "4 4")]),
        (
            jsonl({"a": "x"}),
            {"template": "{a.__class__}"},
            [(1, "1", "a.__class__: missing or null, but the template needs it")],
        ),
        (TWICE, {}, [(1, "a", "1"), (2, "b", "2"), (3, "a", DOUBLE)]),
        (TWICE, {"skipped": 2}, [(3, "a", DOUBLE)]),
        (b'{"prompt": "a"}\n[1]\n', {}, [(1, "1", "a"), (2, "", "is no JSON object")]),
    ],
    ids=["csv", "empty-row", "text", "objects", "attribute", "twice", "skipped", "no-object"],
)
def test_rows_become_prompts(
    data: bytes, options: dict[str, Any], rows: list[tuple[object, ...]]
) -> None:
    template = Template(options["template"]) if "template" in options else None
    assert shown(data, **{**options, "template": template}) == rows


def test_an_id_that_comes_twice_is_told_from_a_bad_line() -> None:
    outcomes = [one.outcome.error.reason for one in read(TWICE + b"{") if one.outcome]
    assert outcomes == ["DUPLICATE_ID", "BAD_LINE"]


def test_csv_that_is_no_utf8_costs_its_row() -> None:
    (_, _, reason), second = shown(b"prompt\na\xff\nb\n", Format.CSV)
    assert "UTF-8" in str(reason)
    assert second == (3, "3", "b")


@pytest.mark.parametrize(
    ("data", "format", "said"),
    [
        (table(["id", "text"], ["1", "a"]), Format.CSV, "no column prompt: the input has id, text"),
        (b'prompt\n"a', Format.CSV, None),
        (b'prompt\n"' + b"a" * 2_000_000, Format.CSV, "quote"),
        (b"", Format.AUTO, "empty"),
        (b"\n\n", Format.JSONL, "empty"),
        (b"hello\n", Format.AUTO, "is not JSONL"),
        (b'[{"prompt": "a"}]', Format.AUTO, "array"),
        (b"PAR1xxxx", Format.AUTO, "no Parquet"),
        (b"\x1f\x8bgarbage", Format.AUTO, "damaged"),
        (gzip.compress(jsonl({"prompt": "a"}), mtime=0)[:-9], Format.AUTO, "damaged after line"),
        (zstd.compress(jsonl({"prompt": "a"}))[:-3], Format.AUTO, "damaged"),
        (zstd.compress(b"a")[:5] + b"garbage", Format.AUTO, "damaged"),
    ],
)
def test_an_input_that_cannot_be_read_is_an_error_of_the_whole(
    data: bytes, format: Format, said: str | None
) -> None:
    if said is None:
        assert read(data, format)  # what csv reads of an open quote at the end
        return
    with pytest.raises(InputInvalid, match=said):
        read(data, format)


@pytest.mark.parametrize("template", ["{}", "{a!r}", "{a:>9}", "{a", "a}"])
def test_a_template_has_names_alone(template: str) -> None:
    with pytest.raises(Exception, match="template"):
        Template(template)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1.5, "1.5"),
        ("true", "true"),
        ({"a": False, "b": ["ä", None]}, '{"a": false, "b": ["ä", null]}'),
        (["x", 'y"'], '["x", "y\\""]'),
    ],
)
def test_template_value_stands_as_json(value: object, text: str) -> None:
    item = only(jsonl({"v": value}), Format.AUTO, Template("<{v}>"))
    assert item.request.prompt == f"<{text}>"


def test_rows_of_parquet_fill_a_template() -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {"id": [1, 2, 3], "text": ["a", None, "c"], "unused": [{"x": 1}] * 3}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    data = sink.getvalue().to_pybytes()
    template = Template("Say {text}")
    reason = "text: missing or null, but the template needs it"
    rows = [(1, "1", "Say a"), (2, "2", reason), (3, "3", "Say c")]
    assert shown(data, Format.AUTO, template) == rows
    with pytest.raises(InputInvalid, match="no column prompt"):
        read(data)
    with pytest.raises(InputInvalid, match="no Parquet"):
        read(data[:-8], Format.PARQUET, template)


def test_bytes_of_parquet_are_text() -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {
        "id": pa.array([b"a", b"b", b"c"], pa.binary()),
        "prompt": pa.array(
            [b"Gr\xc3\xbc\xc3\x9fe", b"\xff", b"Gr\xc3\xbc\xc3\x9fe"], pa.large_binary()
        ),
        "tags": pa.array([[b"\xc3\xbc"], [b"x"], [b"\xfe"]], pa.list_(pa.binary())),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    data = sink.getvalue().to_pybytes()
    wrong = "has bytes that are not valid UTF-8"
    rows = [(1, "a", "Grüße"), (2, "", f"column prompt: {wrong}"), (3, "c", "Grüße")]
    assert shown(data) == rows
    tags = [(1, "a", '["ü"]'), (2, "b", '["x"]'), (3, "", f"column tags: {wrong}")]
    assert shown(data, Format.AUTO, Template("{tags}")) == tags


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd.compress])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_pieces_and_compression_do_not_matter(compress: Any, size: int) -> None:
    half = jsonl(*({"id": n, "prompt": "x" * n} for n in range(1, 40)))
    other = jsonl(*({"id": n, "prompt": "x" * n} for n in range(40, 80)))
    data = compress(half) + compress(other)  # two members, as `cat a.gz b.gz` makes
    pieces = (data[at : at + size] for at in range(0, len(data), size))
    items = list(read_items(pieces))
    assert [item.custom_id for item in items] == [str(n) for n in range(1, 80)]


def test_what_the_source_raises_passes_through() -> None:
    def pieces() -> Iterator[bytes]:
        yield jsonl({"prompt": "a" * 100})
        raise ConnectionError("lost")

    items = read_items(pieces())
    assert next(items).outcome is None
    with pytest.raises(ConnectionError):
        next(items)


def test_names_tell_formats() -> None:
    names = {"a.JSONL": "jsonl", "b/a.csv.gz": "csv", "a.parquet": "parquet", "a.txt.zst": "text"}
    assert {name: Format.of_name(name).value for name in names} == names
    assert Format.of_name("s3://bucket/a") is Format.AUTO


def test_memory_does_not_grow_with_the_input() -> None:
    def peak(count: int) -> int:
        lines = (jsonl({"id": n, "prompt": "x" * 500}) for n in range(count))
        tracemalloc.start()
        assert sum(1 for _ in read_items(lines)) == count
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = peak(300), peak(3000)
    assert many - few < 24 * 3000 + 150_000  # the hashes of the ids; the input has 1.5 MB


def test_a_small_file_that_grows_huge_is_read_in_bounded_memory() -> None:
    data = zstd.compress(b'{"prompt": "' + b"a" * 50_000_000 + b'"}\n')
    tracemalloc.start()
    assert "longer" in bad(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20_000_000


def test_a_line_of_openai_embeddings_becomes_a_request() -> None:
    body = {"input": ["one", "two"], "dimensions": 3, "user": "ann"}
    defaults = pb.GenerateRequest(model="embed", labels={"team": "search", "user": "all"})
    item = only(chat(body, "/v1/embeddings"), defaults=defaults)
    assert item.url == "/v1/embeddings"
    assert item.request == pb.EmbedRequest(
        texts=["one", "two"], dimensions=3, model="embed", labels={"team": "search", "user": "ann"}
    )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": []}, "body.input"),
        ({"input": [[1]]}, "body.input: token ids are not supported"),
        ({"input": "a", "encoding_format": "base64"}, "body.encoding_format: must be float"),
        ({"input": "a", "n": 2}, "body.n: is not supported"),
    ],
)
def test_what_embeddings_of_a_job_have_not_is_named(body: dict[str, Any], named: str) -> None:
    assert named in bad(chat(body, "/v1/embeddings"))


def test_of_what_is_skipped_only_the_ids_are_read() -> None:
    rows = [{"id": one, "prompt": one} for one in "acab"]
    data = jsonl(rows[0], {"id": "b", "promp": "no item"}, *rows[1:])
    rest = read(data, skipped=2)

    assert rest == read(data)[2:]
    assert [one.custom_id for one in rest if one.outcome is not None] == ["a", "b"]
