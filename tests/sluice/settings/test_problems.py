"""What is wrong in a configuration is said with its place: all of it, and what was meant."""

from pathlib import Path

import pytest

from sluice import settings
from sluice.settings import SettingsError


def message_of(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "mesh.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SettingsError) as caught:
        settings.load(path)
    return str(caught.value).replace(f"{path}: ", "")


MODEL = "models:\n- {name: a, path: b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{MODEL}, slot: 4}}", "line 2: models.0.slot: no such key; did you mean slots?"),
        ("\nroutng: {}\n", "line 2: routng: no such key; did you mean routing?"),
        ("tenants:\n  acme:\n    weigth: 2\n", "line 3: tenants.acme.weigth: no such key; did"),
        ("nats: {xyz: 1}", "line 1: nats.xyz: no such key; there are url, port,"),
        ("1: 2", "line 1: 1: no such key; there are models,"),
        ("gateway:\n  drain_s: -1\n", "line 2: gateway.drain_s: -1 should be greater than or"),
        ("nats: {port: 70000}", "nats.port: 70000 should be less than or equal to 65535"),
        ("nats: {port: many}", "nats.port: 'many' should be a valid integer"),
        ("gateway: {address: 5}", "gateway.address: 5 should be a valid string"),
        ("jobs: 7", "jobs: 7 should be a section; write keys below it"),
        ("gateway:\n", "line 1: gateway: null should be a section; write keys below it"),
        ("models: 7", "models: 7 should be a list; write [...]"),
        ("models:\n  - path: x\n", "line 2: models.0.name: is missing"),
        ("telemetry: {log_level: loud}", "'loud' should be 'debug', 'info', 'warning' or 'error'"),
        ("models:\n  - {path: {{ MODEL }}}\n", "line 2: {{ MODEL }} is a placeholder that was"),
        ("{{- if .Values.x }}\ngateway: {}\n", "line 1: {{- if .Values.x }} is a placeholder"),
        ("http: {hosts: [a, '${HOST}']}", "line 1: ${HOST} is a placeholder"),
        ("nats: {port: 010}", "line 1: nats.port: 010 may be read as octal; write it without"),
        ("gateway: {drain_s: yes}", "gateway.drain_s: true is a switch, not a number"),
        (f"{MODEL}, devices: [on]}}", "models.0.devices: true is a switch, not a number"),
        ("gateway: {drain_s: .inf}", "gateway.drain_s: inf should be a finite number"),
        ("gateway: {drain_s: 1e999}", "gateway.drain_s: '1e999' should be a finite number"),
        ("gateway: {drain_s: .nan}", "gateway.drain_s: nan should be a finite number"),
        ("gateway: {drain_s: 1e300}", "'1e300' should be less than or equal to 1000000000"),
        ("records: {max_mib: 99999999999999999999}", "99999999999999999999 should be less"),
        ("routing: {default: smal}", "routing.default: no model 'smal'; did you mean small?"),
        ("batcher:\n  policies: {smal: length}", "line 2: batcher.policies.smal: there is no such"),
        (f"{MODEL}}}\n- {{name: auto, path: b}}", "line 3: models.1.name: "),
        (f"{MODEL}, server: {{url: 'http://x', model: y}}}}", "line 2: models.0.server: belongs"),
        ("models:\n\t- name: a\n", "line 2, column 1: found character '\\t' that cannot"),
        ("gateway: {}\ngateway: {}\n", "line 2, column 1: gateway is there twice"),
        ("gateway: &a\n  drain_s: *a\n", "is nested too deeply"),
        (f"gateway: {'[' * 5000}{']' * 5000}", "is nested too deeply; use at most a hundred"),
        ("? [a, b]\n: 1\n", "line 1, column 3: keys are words; put text that begins with {"),
        ("gateway: {}\n---\njobs: {}\n", "line 2, column 1: but found another document"),
        ("gateway: !!python/name:os.system x", "line 1, column 10: could not determine"),
        ("gateway: *a", "line 1, column 10: found undefined alias 'a'"),
        ("- a\n- b\n", "must be a mapping; write sections such as models: and gateway:"),
        (b"a: 1\nb: \xff\n", "is not UTF-8; save the file as UTF-8"),
        (b"a: 1\nb: \0\n", "is not YAML: unacceptable character #x0000"),
    ],
)
def test_a_problem_is_one_line_with_its_place(tmp_path: Path, text: str | bytes, says: str) -> None:
    message = message_of(tmp_path, text)
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            f"{MODEL}, slot: 4}}\nroutng: {{}}\ngateway: {{drain_s: x}}\n",
            ["line 2: models.0.slot", "line 3: routng", "line 4: gateway.drain_s"],
        ),
        (
            "gateway: {drain_s: x}\nrouting:\n  default: huge\n  fallbacks: {large: [smal]}\n"
            "batcher: {policies: {smal: length}}\n",
            [
                "line 1: gateway.drain_s",
                "line 3: routing.default",
                "line 4: routing.fallbacks.large",
                "line 5: batcher.policies.smal",
            ],
        ),
        (
            "batcher: &shared\n  drain_s: x\ngateway:\n  <<: *shared\n",
            ["line 2: gateway.drain_s", "line 2: batcher.drain_s"],
        ),
        (
            "batcher: &a\n  drain_s: x\njobs: &b\n  drain_s: y\ngateway:\n  <<: [*a, *b]\n",
            ["line 2: gateway.drain_s", "line 2: batcher.drain_s", "line 4: jobs.drain_s"],
        ),
    ],
    ids=[
        "in the order of the file",
        "between sections too",
        "with lines of their origin",
        "of several origins",
    ],
)
def test_all_problems_are_listed(tmp_path: Path, text: str, lines: list[str]) -> None:
    head, *rest = message_of(tmp_path, text).splitlines()
    assert head == f"{len(lines)} problems"
    assert [":".join(line.split(":")[:2]).strip() for line in rest] == lines


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: Is a directory; name a YAML file"):
        settings.load(tmp_path)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    more = (f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    message = message_of(tmp_path, "a0: &a0 [x, x]\n" + "".join(more))
    assert "more than 100000 values with aliases" in message


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
    path.write_text(loaded.to_yaml(), encoding="utf-8")
    assert settings.load(path) == loaded


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in message_of(tmp_path, "identity: {mesh_key: hunter2}")
    assert "hunter2" not in message_of(tmp_path, "nats: {port: 'nats://me:hunter2@host'}")


PREFIXES = "SLUICE_JOBS__INPUT_PREFIXES"
DRAIN = "SLUICE_GATEWAY__DRAIN_S"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SLUICE_NATS", "nats://h:4222", "nats: 'nats://h:4222' should be a section"),
        ("SLUICE_HTTP", "5", "http: 5 should be a section"),
        (PREFIXES, "s3://a", "jobs.input_prefixes: 's3://a' should be a list; write [...]"),
        (PREFIXES, "[s3://a]", "jobs.input_prefixes: '[s3://a]' should be a list"),
        (DRAIN, "soon", "gateway.drain_s: 'soon' should be a valid number"),
        (DRAIN, "{{ s }}", "{{ s }} is a placeholder"),
        ("SLUICE_GATEWAY__DRAINS", "1", "gateway.drains: no such key; did you mean drain_s"),
        (f"{DRAIN}__X", "1", "gateway.drain_s: {'x': '1'} should be a valid number"),
        ("SLUICE_GATEWAY", '{"drain_s": true}', "gateway.drain_s: true is a switch"),
        ("SLUICE_MODELS", '[{"name": "a"}]', "models.0.path: is missing"),
        ("SLUICE_GATWAY__DRAIN_S", "1", f"gatway.drain_s: no such key; did you mean {DRAIN}"),
        ("SLUICE_GATEWAY_DRAIN_S", "1", f"gateway_drain_s: no such key; did you mean {DRAIN}"),
        ("SLUICE_XYZ__ABC", "1", "xyz.abc: no such key; sections are models, retiring,"),
        ("sluice_gateway__drain_s", "soon", "gateway.drain_s: 'soon' should be"),
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
    assert [line.split(" should")[0] for line in message.splitlines()] == [
        f"{tmp_path / 'mesh.yaml'} and environment: 3 problems",
        "  SLUICE_NATS: nats: 'x'",
        f"  {tmp_path / 'SLUICE_RECORDS__MAX_MIB'}: records.max_mib: 'y'",
        "  line 1: gateway.drain_s: 'z'",
    ]


@pytest.mark.parametrize(
    ("name", "value", "window_items"),
    [
        (DRAIN, "", 512),
        (PREFIXES, "", 512),
        ("SLUICE_GATWAY__DRAIN_S", "", 512),
        ("SLUICE_NATS_PORT", "tcp://10.0.0.1:4222", 512),
        ("SLUICE_STATE_DIR", "/tmp", 512),
        ("SLUICE_JOBS__WINDOW_ITEMS", "1_000", 1000),
        ("SLUICE_JOBS__WINDOW_ITEMS", " 1000 ", 1000),
        ("SLUICE_JOBS", '{"window_items": 1000}', 1000),
    ],
)
def test_a_variable_sets_what_it_names_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, window_items: int
) -> None:
    plain = settings.load()
    monkeypatch.setenv(name, value)
    jobs = plain.jobs.model_copy(update={"window_items": window_items})
    assert settings.load() == plain.model_copy(update={"jobs": jobs})
