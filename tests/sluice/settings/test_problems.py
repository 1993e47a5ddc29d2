"""What is wrong in a configuration is said in words of ours: all of it, where it is, and what was meant."""

from pathlib import Path

import pytest

from sluice import settings
from sluice.settings import SettingsError


def message_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mesh.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        settings.load(path)
    return str(caught.value).replace(f"{path}: ", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "models:\n  - name: small\n    path: x\n    slot: 4\n",
            "line 4: models.0.slot: no such key; did you mean slots?",
        ),
        ("\nroutng: {default: small}\n", "line 2: routng: no such key; did you mean routing?"),
        (
            "tenants:\n  acme:\n    weigth: 2\n",
            "line 3: tenants.acme.weigth: no such key; did you mean weight?",
        ),
        ("nats: {xyz: 1}", "line 1: nats.xyz: no such key; there are url, port,"),
        ("gateway:\n  drain_s: -1\n", "line 2: gateway.drain_s: -1 is too small; use at least 0"),
        ("nats: {port: 70000}", "line 1: nats.port: 70000 is too large; use at most 65535"),
        ("nats: {port: many}", "line 1: nats.port: 'many' is not a whole number"),
        ("gateway: {drain_s: soon}", "line 1: gateway.drain_s: 'soon' is not a number"),
        ("gateway: {address: 5}", "line 1: gateway.address: 5 is not a text; put it in quotes"),
        ("jobs: 7", "line 1: jobs: 7 is not a section; write keys below it"),
        ("models: 7", "line 1: models: 7 is not a list; write [...] or lines that"),
        ("models:\n  - path: x\n", "line 2: models.0.name: is missing"),
        ("telemetry: {log_level: loud}", "'loud' is not one of debug, info, warning, error"),
        ("identity: {api_keys: perhaps}", "'perhaps' is neither true nor false"),
        ("models:\n  - {path: {{ MODEL }}}\n", "line 2, column 13: {{ MODEL }} is a placeholder"),
        (
            "gateway:\n  drain_s: {{ .Values.s }}\n",
            "line 2, column 13: {{ .Values.s }} is a placeh",
        ),
        ("{{- if .Values.x }}\ngateway: {}\n", "line 1, column 3: is not YAML: expected the node"),
        (
            "models:\n  - {name: a, path: '{{ X }}'}",
            "line 2: models.0.path: {{ X }} is a placeholder",
        ),
        ("http: {hosts: [a, '${HOST}']}", "line 1: http.hosts: ${HOST} is a placeholder that"),
        (
            "gateway: {drain_s: yes}",
            "line 1: gateway.drain_s: true is a switch, not a number; write",
        ),
        ("models: [{name: a, path: b, devices: [on]}]", "models.0.devices: true is a switch, not"),
        ("gateway: {drain_s: .inf}", "line 1: gateway.drain_s: inf is not a finite number; write"),
        ("gateway: {drain_s: 1e999}", "gateway.drain_s: '1e999' is not a finite number"),
        ("gateway: {drain_s: .nan}", "gateway.drain_s: nan is not a finite number"),
        ("gateway: {drain_s: 1e300}", "gateway.drain_s: '1e300' is too large; use at most 1e+09"),
        ("records: {max_mib: -5}", "records.max_mib: -5 is too small; use at least 0"),
        (
            "records: {max_mib: 99999999999999999999}",
            "records.max_mib: 99999999999999999999 is too l",
        ),
        (
            "nats: {port: 010}",
            "line 1: nats.port: 010 may be read as octal; write it without zeros",
        ),
        ("gateway:\n", "line 1: gateway: is empty; write what belongs below it, or leave it out"),
        (
            "routing: {default: smal}",
            "line 1: routing.default: no model 'smal'; did you mean small?",
        ),
        ("batcher:\n  policies: {smal: length}", "line 2: batcher.policies.smal: there is no such"),
        ("models:\n- {name: a, path: b}\n- {name: auto, path: b}", "line 3: models.1.name: "),
        (
            "models:\n- name: a\n  path: b\n  server: {url: 'http://x', model: y}",
            "line 4: models.0.se",
        ),
        ("models:\n\t- name: a\n", "line 2, column 1: is not YAML: found character '\\t' that can"),
        (
            "gateway: {}\ngateway: {}\n",
            "line 2, column 1: gateway is there twice; keep one of them",
        ),
        ("gateway: &a\n  drain_s: *a\n", "line 1, column 10: contains itself through an alias"),
        ("? [a, b]\n: 1\n", "line 1, column 3: is not a key: keys are words; put text that begins"),
        ("1: 2", "line 1: 1: no such key; there are models,"),
        (
            "gateway: {}\n---\njobs: {}\n",
            "line 2, column 1: is not YAML: but found another document",
        ),
        (
            "gateway: !!python/name:os.system x",
            "line 1, column 10: is not YAML: could not determine",
        ),
        ("gateway: *a", "line 1, column 10: is not YAML: found undefined alias 'a'; put text that"),
        (
            f"gateway: {'[' * 5000}{']' * 5000}",
            "is nested too deeply; use at most a hundred levels",
        ),
        ("- a\n- b\n", "must be a mapping; write sections such as models: and gateway:"),
    ],
)
def test_a_problem_is_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    message = message_of(tmp_path, text)
    assert says in message
    assert "\n" not in message


def test_all_problems_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "models:\n  - {name: a, path: b, slot: 4}\nroutng: {}\ngateway: {drain_s: x}\n"
    assert message_of(tmp_path, text).splitlines() == [
        "3 problems",
        "  line 2: models.0.slot: no such key; did you mean slots?",
        "  line 3: routng: no such key; did you mean routing?",
        "  line 4: gateway.drain_s: 'x' is not a number; write one such as 2.5",
    ]


def test_problems_between_sections_are_listed_too(tmp_path: Path) -> None:
    text = (
        "gateway: {drain_s: x}\n"
        "routing:\n  default: huge\n  fallbacks: {large: [smal]}\n"
        "batcher: {policies: {smal: length}}\n"
    )
    assert [line.split(";")[0] for line in message_of(tmp_path, text).splitlines()] == [
        "4 problems",
        "  line 1: gateway.drain_s: 'x' is not a number",
        "  line 3: routing.default: no model 'huge'",
        "  line 4: routing.fallbacks.large: no model 'smal'",
        "  line 5: batcher.policies.smal: there is no such model",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: 1\nb: \xff\n", "line 2: is not UTF-8 (byte 0xff); save the file as UTF-8"),
        ("gateway: {}\n".encode("utf-16"), "line 1: is not UTF-8 (byte 0xff); save the file"),
        (b"a: 1\nb: \0\n", "line 2: has a control character; remove it"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        settings.load(path)
    assert says in str(caught.value)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: Is a directory; name a YAML file"):
        settings.load(tmp_path)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    text = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
    )
    assert "more than 100000 values with its aliases" in message_of(tmp_path, text)


def test_words_mean_what_people_write(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(
        "batcher: &shared {drain_s: 3}\n"
        "gateway: {<<: *shared, address: 127.0.0.1:20}\n"
        "telemetry: {log_level: info}\n"
        "tenants: {007: {weight: 2}, no: {weight: 1e1}, 1: {weight: 1.5}}\n"
        "http: {address: 1:20}\n",
        encoding="utf-8-sig",
    )
    loaded = settings.load(path)
    assert loaded.gateway.drain_s == 3
    assert loaded.http.address == "1:20"
    assert loaded.weights == {"007": 2, "no": 10, "1": 1.5}
    again = tmp_path / "again.yaml"
    again.write_text(loaded.to_yaml(), encoding="utf-8")
    assert settings.load(again) == loaded


def test_a_section_taken_over_has_the_lines_of_its_origin(tmp_path: Path) -> None:
    text = "batcher: &shared\n  drain_s: 3\ngateway:\n  <<: *shared\n  drain_s: x\n"
    assert message_of(tmp_path, text).startswith("line 5: gateway.drain_s: 'x' is not")
    text = "batcher: &shared\n  drain_s: x\ngateway:\n  <<: *shared\n"
    assert [line.split(": ")[:2] for line in message_of(tmp_path, text).splitlines()[1:]] == [
        ["  line 2", "gateway.drain_s"],
        ["  line 2", "batcher.drain_s"],
    ]


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in message_of(tmp_path, "identity: {mesh_key: hunter2}")
    assert "hunter2" not in message_of(tmp_path, "nats: {port: 'nats://me:hunter2@host'}")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "SLUICE_NATS",
            "nats://h:4222",
            "nats: 'nats://h:4222' is not a section; write it as JSON",
        ),
        ("SLUICE_HTTP", "127.0.0.1:80", "http: '127.0.0.1:80' is not a section"),
        ("SLUICE_HTTP", "5", "http: 5 is not a section"),
        (
            "SLUICE_JOBS__INPUT_PREFIXES",
            "s3://a",
            "jobs.input_prefixes: 's3://a' is not a list; write",
        ),
        (
            "SLUICE_JOBS__INPUT_PREFIXES",
            "[s3://a]",
            "jobs.input_prefixes: '[s3://a]' is not a list",
        ),
        ("SLUICE_GATEWAY__DRAIN_S", "soon", "gateway.drain_s: 'soon' is not a number"),
        ("SLUICE_GATEWAY__DRAIN_S", "inf", "gateway.drain_s: 'inf' is not a finite number"),
        ("SLUICE_GATEWAY__DRAIN_S", "{{ s }}", "gateway.drain_s: {{ s }} is a placeholder"),
        ("SLUICE_GATEWAY__DRAINS", "1", "gateway.drains: no such key; did you mean drain_s"),
        ("SLUICE_GATEWAY__DRAIN_S__X", "1", "gateway.drain_s: {'x': '1'} is not a number"),
        ("SLUICE_GATEWAY", '{"drain_s": true}', "gateway.drain_s: true is a switch, not a number"),
        ("SLUICE_MODELS", '[{"name": "a"}]', "models.0.path: is missing"),
        (
            "SLUICE_GATWAY__DRAIN_S",
            "1",
            "gatway.drain_s: no such key; did you mean SLUICE_GATEWAY__D",
        ),
        (
            "SLUICE_GATEWAY_DRAIN_S",
            "1",
            "gateway_drain_s: no such key; did you mean SLUICE_GATEWAY__",
        ),
        ("SLUICE_XYZ__ABC", "1", "xyz.abc: no such key; sections are models, retiring,"),
        ("sluice_gateway__drain_s", "soon", "gateway.drain_s: 'soon' is not a number"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    message = message_of(tmp_path, "gateway: {replicas: 1}")
    assert message.startswith(f"{name}: {says}")
    assert "mesh.yaml" not in message


def test_variables_and_file_are_told_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLUICE_GATEWAY", '{"replicas": 1}')
    monkeypatch.setenv("SLUICE_NATS", "x")
    (tmp_path / "SLUICE_NATS__PORT").write_text("y")
    (tmp_path / "SLUICE_RECORDS__MAX_MIB").write_text("y")
    monkeypatch.setenv("SLUICE_SECRETS", str(tmp_path))
    message = message_of(tmp_path, "gateway: {drain_s: z}")
    assert [line.split(" is not")[0] for line in message.splitlines()] == [
        f"{tmp_path / 'mesh.yaml'} and environment: 3 problems",
        "  SLUICE_NATS: nats: 'x'",
        f"  {tmp_path / 'SLUICE_RECORDS__MAX_MIB'}: records.max_mib: 'y'",
        "  line 1: gateway.drain_s: 'z'",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLUICE_GATEWAY__DRAIN_S", ""),
        ("SLUICE_NATS", ""),
        ("SLUICE_JOBS__INPUT_PREFIXES", ""),
        ("SLUICE_GATWAY__DRAIN_S", ""),
        ("SLUICE_NATS_PORT", "tcp://10.0.0.1:4222"),
        ("SLUICE_STATE_DIR", "/tmp"),
    ],
)
def test_a_variable_that_sets_nothing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    plain = settings.load()
    monkeypatch.setenv(name, value)
    assert settings.load() == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLUICE_JOBS__WINDOW_ITEMS", "1_000"),
        ("SLUICE_JOBS__WINDOW_ITEMS", " 1000 "),
        ("SLUICE_JOBS", '{"window_items": 1000}'),
    ],
)
def test_a_number_in_a_variable_is_read(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert settings.load().jobs.window_items == 1000
