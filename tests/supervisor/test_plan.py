import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_workers.deploy import render_workers
from sluice.errors import SetupError
from sluice.settings import Settings, SettingsError
from sluice.startup import ENGINE_NICE, free_port
from supervisor.plan import ENGINES_NICE, MeshPlan, kind_of, make_plan
from supervisor.specs import (
    MESH_KEY,
    RESUME_KEY,
    nats_spec,
    remote_spec,
    server_spec,
    triton_spec,
)
from supervisor.state import StateDir


def settings(**sections: object) -> Settings:
    model = {"name": "echo", "path": "builtin:small", "engine": "echo"}
    base = {
        "models": [model],
        "routing": {"default": "echo"},
        "gateway": {"address": "127.0.0.1:0"},
    }
    return Settings.model_validate({**base, **sections})


def plan(root: Path, **sections: object) -> MeshPlan:
    return make_plan(settings(**sections), StateDir(root))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_every_address_is_filled_in(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert made.nats is not None
    (triton,) = made.tritons
    assert made.settings.nats.url == made.nats.url_of("operator")
    assert made.nats.url == f"nats://127.0.0.1:{made.nats.port}"
    assert made.settings.models[0].triton_urls == (f"127.0.0.1:{triton.port}",)
    host, port = made.settings.gateway.address.split(":")
    assert host == "127.0.0.1"
    assert len({int(port), made.nats.port, triton.port, 0}) == 4
    assert (triton.name, triton.models) == ("triton-echo", ("echo",))
    assert not any(tmp_path.iterdir())


def test_tritons_take_ports_from_the_one_that_is_set(tmp_path: Path) -> None:
    port = free_port()
    models = [settings().models[0].model_copy(update={"name": name}) for name in ("a", "b")]
    made = plan(tmp_path, models=models, routing={"default": "a"}, triton={"port": port})
    assert [triton.port for triton in made.tritons] == [port, port + 1]


def test_a_server_is_named_alike_at_each_start_in_a_folder(tmp_path: Path) -> None:
    roots = (tmp_path, tmp_path, tmp_path / "other")
    first, again, other = (plan(root).tritons[0] for root in roots)
    assert first.shm_prefix == again.shm_prefix != other.shm_prefix
    assert first.secret != again.secret


MINE = '"routing": {"default": "mine"}, "models": [{"name": "mine", "path": "builtin:small"'


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ('"gateway": {"address": "127.0.0.1:TAKEN"}', "gateway.address: .* in use by .*; free it"),
        ('"http": {"address": "127.0.0.1:TAKEN"}', "http.address: .* in use by .*; free it"),
        ('"nats": {"port": TAKEN}', "nats.port: .* in use by .*; free it"),
        ('"triton": {"port": TAKEN}', "triton.port: .* in use by .*; free it"),
        ('"nats": {"port": FREE}, "triton": {"port": FREE}', r"triton.port: port \d+ is"),
        ('"gateway": {"address": "0.0.0.0:0"}', "gateway.address: .*encrypted.* who they are"),
        ('"gateway": {"address": "[::]:0"}', "gateway.address: .*encrypted.* who they are"),
        (
            '"telemetry": {"prometheus": {"gateway": "0.0.0.0:9464"}}',
            "telemetry.prometheus.gateway: .*credentials",
        ),
        ('"nats": {"url": "127.0.0.1:FREE"}', "nats.url: nothing answers at 127.0.0.1:"),
        ('"triton": {"url": "127.0.0.1:FREE"}', "triton.url: nothing answers at 127.0.0.1:"),
        (MINE.replace("builtin:small", "/none") + "}]", "models: mine: [^:]*does not exist"),
        (
            MINE + ', "engine": "openai", "server": {"url": "http://h/v1", "model": "m", '
            '"api_key_env": "NO_KEY"}}]',
            "models: mine: server: NO_KEY holds no key",
        ),
    ],
)
def test_a_mesh_that_cannot_start_names_the_setting(
    tmp_path: Path, taken_port: int, sections: str, problem: str
) -> None:
    text = sections.replace("TAKEN", str(taken_port)).replace("FREE", str(free_port()))
    with pytest.raises((SetupError, SettingsError), match=f"^{problem}") as caught:
        plan(tmp_path, **json.loads(f"{{{text}}}"))
    assert "\n" not in str(caught.value)


def test_metrics_page_gets_a_port_on_loopback(tmp_path: Path) -> None:
    made = plan(tmp_path, telemetry={"prometheus": {"gateway": "127.0.0.1:0"}})
    page = made.settings.telemetry.prometheus.get("gateway")
    assert page is not None
    assert page.startswith("127.0.0.1:")
    assert not page.endswith(":0")
    assert plan(tmp_path).settings.telemetry.prometheus.get("gateway") is None


def test_external_servers_are_used_and_not_started(tmp_path: Path, taken_port: int) -> None:
    url = f"127.0.0.1:{taken_port}"
    made = plan(tmp_path, nats={"url": f"nats://user:word@{url}"}, triton={"url": url})
    assert made.nats is None
    assert made.tritons == ()
    assert made.settings.nats.url == f"nats://user:word@{url}"
    assert made.settings.triton.url == url


def test_a_model_of_another_triton_is_not_served_here(tmp_path: Path, taken_port: int) -> None:
    here = {"name": "echo", "path": "builtin:small", "engine": "echo"}
    there = {**here, "name": "far", "triton_url": f"127.0.0.1:{taken_port}"}
    both, far = plan(tmp_path, models=[here, there]), [there]
    assert [triton.models for triton in both.tritons] == [("echo",)]
    assert both.settings.models[1].triton_url == f"127.0.0.1:{taken_port}"
    assert plan(tmp_path, models=far, routing={"default": "far"}).tritons == ()


def test_every_worker_has_a_server_and_an_address(tmp_path: Path, taken_port: int) -> None:
    model = {"name": "echo", "path": "builtin:small", "engine": "echo", "replicas": 2}
    here = plan(tmp_path, models=[model], routing={"default": "echo"})
    assert [triton.name for triton in here.tritons] == ["triton-echo", "triton-echo.1"]
    (served,) = here.settings.models
    assert served.triton_urls == tuple(triton.address for triton in here.tritons)
    assert served.triton_models == ("echo",)
    assert len({triton.shm_prefix for triton in here.tritons}) == 2
    urls = [f"127.0.0.1:{taken_port}", here.tritons[0].address]
    with pytest.raises(SetupError, match=r"^models\.0\.triton_url: nothing answers at"):
        plan(tmp_path, models=[{**model, "triton_url": urls}], routing={"default": "echo"})


def test_a_standby_is_one_more_worker(tmp_path: Path) -> None:
    model = {"name": "echo", "path": "builtin:small", "engine": "echo", "standby": 1}
    made = plan(tmp_path, models=[model])
    assert [triton.name for triton in made.tritons] == ["triton-echo", "triton-echo.1"]
    (served,) = made.settings.models
    assert (len(served.triton_urls), served.replicas, served.standby) == (2, 1, 1)
    assert Settings.model_validate(made.settings.model_dump()) == made.settings


def test_a_missing_libpython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    with pytest.raises(SetupError, match=r"^libpython3.* was not found; install"):
        plan(tmp_path)


def test_gateways_have_consecutive_ports_and_own_environments(tmp_path: Path) -> None:
    port = free_port()
    address, page = f"127.0.0.1:{port}", {"gateway": "127.0.0.1:0"}
    made = plan(
        tmp_path,
        gateway={"address": address, "replicas": 2},
        http={"address": "127.0.0.1:0"},
        telemetry={"prometheus": page},
    )
    first, second = made.gateways
    assert (first.name, second.name) == ("gateway", "gateway.1")
    assert (first.address, second.address) == (address, f"127.0.0.1:{port + 1}")
    assert made.settings.gateway.address == address
    assert made.settings.http.address == first.http != second.http
    one, two = server_spec(made, first), server_spec(made, second)
    assert made.nats is not None
    assert two.env.items() - one.env.items() == {
        ("SLUICE_NATS__URL", made.nats.url_of("gateway-1")),
        ("SLUICE_GATEWAY__ADDRESS", second.address),
        ("SLUICE_HTTP__ADDRESS", second.http),
        ("SLUICE_TELEMETRY__PROMETHEUS__GATEWAY", second.page),
    }
    assert (two.name, two.port, two.log) == ("gateway.1", port + 1, made.state.log("gateway.1"))
    free = plan(tmp_path, gateway={"address": "127.0.0.1:0", "replicas": 3}).gateways
    assert len({one.address for one in free}) == 3


def test_each_process_has_a_password_of_its_own_for_nats(tmp_path: Path) -> None:
    made = plan(tmp_path, gateway={"address": "127.0.0.1:0", "replicas": 2})
    assert made.nats is not None
    specs = {
        "batcher": server_spec(made, made.batcher),
        "jobs": server_spec(made, made.jobs[0]),
        **{one.name.replace(".", "-"): server_spec(made, one) for one in made.gateways},
    }
    urls = {name: spec.env["SLUICE_NATS__URL"] for name, spec in specs.items()}
    assert urls == {name: made.nats.url_of(name) for name in specs}
    passwords = made.nats.passwords
    assert passwords.keys() == {*specs, "operator"} == made.nats.users.keys()
    again = plan(tmp_path).nats
    assert again is not None
    both = [*passwords.values(), *again.passwords.values()]
    assert len(set(both)) == len(both)
    assert min(map(len, both)) >= 32


def test_processes_of_a_kind_have_its_keys(tmp_path: Path) -> None:
    made = plan(tmp_path)
    gateway, batcher, job = (
        server_spec(made, one).env for one in (*made.gateways, made.batcher, *made.jobs)
    )
    assert gateway[MESH_KEY] == job[MESH_KEY]
    assert MESH_KEY not in batcher
    assert RESUME_KEY in gateway
    assert RESUME_KEY not in job
    names = ("gateway.1", "triton-small.1", "jobs", "remote-gpt")
    assert [kind_of(name) for name in names] == ["gateway", "triton", "jobs", "remote"]


def test_only_jobs_keep_their_names_over_a_restart(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert server_spec(made, made.jobs[0]).argv[-2:] == ("--id", "jobs")
    assert "--id" not in (
        *server_spec(made, made.gateways[0]).argv,
        *server_spec(made, made.batcher).argv,
    )


def test_jobs_give_way_to_engines_and_to_what_answers(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert made.nats is not None
    first = [nats_spec(made.nats, made.state), server_spec(made, made.batcher)]
    first += [server_spec(made, one) for one in made.gateways]
    first += [triton_spec(one, None) for one in made.tritons]
    assert {spec.nice for spec in first} == {0}
    assert server_spec(made, made.jobs[0]).nice > ENGINES_NICE


def test_engines_give_way_where_they_could_take_every_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    model: dict[str, object] = {"name": "echo", "path": "builtin:small", "replicas": 2}
    for threads, nice in ((1, 0), (2, ENGINES_NICE)):
        made = plan(tmp_path, models=[{**model, "threads": threads}])
        found = [triton_spec(one, None).env for one in made.tritons]
        assert [one[ENGINE_NICE] for one in found] == [str(nice)] * 2


def test_a_nats_of_its_own_gets_no_passwords(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"nats://127.0.0.1:{server.getsockname()[1]}"
        made = plan(tmp_path, nats={"url": url})
    assert (made.nats, made.settings.nats.url) == (None, url)
    assert "SLUICE_NATS__URL" not in server_spec(made, made.batcher).env


def remote(name: str, **server: object) -> dict[str, object]:
    values = {"url": "http://127.0.0.1:1/v1", "model": "m", **server}
    return {"name": name, "path": "builtin:small", "engine": "openai", "server": values}


def test_a_model_of_another_server_has_workers_without_triton(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]
    made = plan(tmp_path, models=[remote("gpt", url=urls)], routing={"default": "gpt"})
    assert not made.tritons
    assert [(one.name, one.number) for one in made.remotes] == [
        ("remote-gpt", 0),
        ("remote-gpt.1", 1),
    ]
    addresses = tuple(f"127.0.0.1:{one.port}" for one in made.remotes)
    assert made.settings.models[0].triton_urls == addresses
    spec = remote_spec(made, made.remotes[1])
    assert spec.argv[-6:-2] == ("--model", "gpt", "--number", "1")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"engine": "echo"}, 'belongs to the engine "openai"'),
        ({"server": None}, 'belongs to the engine "openai"'),
        ({"server": {"url": "localhost:8000", "model": "m"}}, "server.url"),
        ({"server": {"url": [], "model": "m"}}, "name an address"),
        ({"server": {"url": "http://h", "model": "m", "parameters": {"x": "y"}}}, "parameters.x"),
        ({"devices": [0]}, "leave out draft, devices"),
        (
            {
                "server": {
                    "url": "http://h",
                    "model": "m",
                    "api": "completions",
                    "parameters": {"logprobs": "l"},
                }
            },
            "only the api tokens",
        ),
    ],
)
def test_servers_that_cannot_work_are_told(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings(models=[{**remote("gpt"), **change}], routing={"default": "gpt"})


def test_a_cascade_needs_log_probabilities_of_its_first_model() -> None:
    cascade = {"default": "gpt", "cascade": {"first": "gpt", "second": "echo"}}
    routing = {"default": "gpt", "policies": {"both": cascade}}
    echo = {"name": "echo", "path": "builtin:small", "engine": "echo"}
    with pytest.raises(ValueError, match=r"both\.cascade\.first: the server of 'gpt'"):
        settings(models=[remote("gpt"), echo], routing=routing)
    settings(models=[remote("gpt", api="tokens"), echo], routing=routing)


def test_each_worker_has_a_repository_with_its_own_devices(tmp_path: Path) -> None:
    model = {"name": "large", "path": "builtin:large", "devices": [0, 1], "replicas": 2}
    made = plan(tmp_path, models=[model], routing={"default": "large"})
    render_workers(made.models, made.state.models)
    devices = []
    for triton_ in made.tritons:
        text = (triton_.repository / "large/config.pbtxt").read_text(encoding="utf-8")
        devices += re.findall(r"cuda:\d", text)
    assert devices == ["cuda:0", "cuda:1"]
