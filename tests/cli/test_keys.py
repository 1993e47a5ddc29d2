"""`sluice keys` against a real nats-server."""

import json
from pathlib import Path

import pytest

from sluice.settings import NatsSettings, Settings
from sluice.wire.api_keys import id_of
from tests.cli.commands import Cli


@pytest.fixture
def config(nats_url: str, tmp_path: Path) -> str:
    path = tmp_path / "mesh.yaml"
    path.write_text(Settings(nats=NatsSettings(url=nats_url)).to_yaml())
    return str(path)


async def test_a_key_is_shown_once_replaced_and_revoked(cli: Cli, config: str) -> None:
    made = await cli("keys", "create", "acme", "--name", "ci", "--config", config)
    (text,) = made.out.splitlines()
    key_id = id_of(text)
    assert made.code == 0
    assert key_id

    listed = await cli("keys", "list", "--config", config)
    header, row = listed.out.splitlines()
    assert header.split() == ["id", "tenant", "roles", "name", "created", "state"]
    assert row.split()[:4] == [key_id, "acme", "caller", "ci"]
    assert row.endswith("active")
    assert text not in listed.out

    replaced = await cli(
        "keys", "rotate", key_id, "--overlap-s", "60", "--json", "--config", config
    )
    new = json.loads(replaced.out)
    assert id_of(new["key"]) == new["id"] != key_id
    revoked = await cli("keys", "revoke", key_id, "--config", config)
    assert "gateways refuse it now" in revoked.out
    found = json.loads((await cli("keys", "list", "--json", "--config", config)).out)["keys"]
    assert [one["state"].split()[0] for one in found] == ["revoked", "active"]
    again = await cli("keys", "rotate", key_id, "--config", config)
    assert (again.code, again.err.split(": ")[1]) == (1, "KEY_REVOKED")


async def test_the_environment_may_name_the_mesh(
    cli: Cli, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_NATS__URL", nats_url)
    made = await cli("keys", "create", "acme")
    assert made.code == 0
    assert id_of(made.out.strip())


async def test_roles_and_an_end(cli: Cli, config: str) -> None:
    words = ("keys", "create", "ops", "--role", "operator", "--role", "auditor")
    made = await cli(*words, "--expires-days", "1", "--json", "--config", config)
    described = json.loads(made.out)
    assert described["roles"] == "operator,auditor"
    assert described["state"].startswith("until 20")


async def test_wrong_input_is_told_in_one_line(cli: Cli, config: str, tmp_path: Path) -> None:
    without = tmp_path / "without.yaml"
    without.write_text("{}")
    for words, reason in (
        (("create", "a b", "--config", config), "USAGE"),
        (("create", "acme", "--role", "god", "--config", config), "USAGE"),
        (("revoke", "0000", "--config", config), "KEY_UNKNOWN"),
        (("revoke", "a.b", "--config", config), "KEY_UNKNOWN"),
        (("list", "--config", str(without)), "NO_MESH"),
        (("list", "--state-dir", str(tmp_path / "none")), "NO_MESH"),
    ):
        ran = await cli("keys", *words)
        assert ran.code != 0
        assert ran.err.startswith(f"sluice: {reason}: "), ran.err
        assert len(ran.err.splitlines()) == 1
