"""A reload of one gateway is a reload of all: real gateways, a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_health.v1.health_pb2 import HealthCheckResponse

from gateway.admission.policies import Policies
from gateway.api.server import SERVICE
from gateway.shared.peers import Peers
from gateway.shared.reload import ReloadTimes, sections_of
from sluice.internal.v1.gateway_pb2 import GatewayHeartbeat, PolicyRecord
from sluice.settings import IdentitySettings, Settings, SettingsError
from sluice.settings.mesh import TenantSettings
from sluice.v1.inference_pb2 import ListModelsRequest
from sluice.v1.safety_pb2 import CheckTextRequest
from sluice.wire import subjects
from sluice.wire.codec import pack
from tests.gateway.kit.batcher import BOUND_S, last
from tests.gateway.kit.issuer import Issuer, bearer
from tests.gateway.kit.wire import Wire, events_of, open_wire, prompt, text_of

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def safety(version: str, **more: Any) -> dict[str, Any]:
    return {"default": version, "policies": {version: more}}


def with_safety(wire: Wire, section: dict[str, Any]) -> Settings:
    return wire.settings.model_copy(update={"safety": section})


async def version_at(wire: Wire) -> str:
    answer = await wire.safety.CheckText(CheckTextRequest(text="x"))
    return str(answer.policy.partition("@")[0])


async def publish(wire: Wire, **heartbeat: Any) -> None:
    """Publish a heartbeat in the name of another gateway."""
    await wire.batcher.client.publish(subjects.GATEWAYS, pack(GatewayHeartbeat(**heartbeat)))
    await wire.batcher.client.flush()


@pytest.fixture
async def wires(nats_url: str, model_folder: Path) -> AsyncIterator[tuple[Wire, Wire]]:
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1", safety=safety("1")) as one,
        open_wire(nats_url, model_folder, gateway_id="gw2", safety=safety("1")) as two,
    ):
        await one.until(lambda: one.gateway.shared.peers.alive == ["gw2"])
        await two.until(lambda: two.gateway.shared.peers.alive == ["gw1"])
        yield one, two


async def test_all_gateways_have_the_policies_when_the_reload_is_done(
    wires: tuple[Wire, Wire], nats_url: str, model_folder: Path
) -> None:
    one, two = wires
    await one.reload(with_safety(one, safety("2")))
    assert [await version_at(wire) for wire in wires] == ["2", "2"]
    await two.reload(with_safety(two, safety("3")))
    assert [await version_at(wire) for wire in wires] == ["3", "3"]
    # A file that was replaced is older; one that was never seen is newer.
    for version, in_force in (("1", "3"), ("9", "9")):
        async with open_wire(
            nats_url, model_folder, gateway_id="gw3", safety=safety(version)
        ) as three:
            assert await version_at(three) == in_force
    # Back to a version that was replaced.
    await one.reload(with_safety(one, safety("1")))
    assert [await version_at(wire) for wire in wires] == ["1", "1"]
    async with open_wire(nats_url, model_folder, gateway_id="gw3", safety=safety("1")) as three:
        assert await version_at(three) == "1"


async def test_other_weights_hold_for_rows_that_wait_at_all_gateways(
    wires: tuple[Wire, Wire],
) -> None:
    one, _ = wires
    tenants = {"acme": TenantSettings(weight=3.0)}
    await one.reload(one.settings.model_copy(update={"tenants": tenants}))
    for wire in wires:
        assert wire.gateway.in_force.policies.settings.weights == {"acme": 3.0}


async def test_what_one_gateway_cannot_take_no_gateway_takes(
    wires: tuple[Wire, Wire], tmp_path: Path
) -> None:
    one, two = wires
    words = tmp_path / "words.txt"
    words.write_text("forbidden\n")
    section = safety("2", deny=[str(words)])
    load = two.reload.load

    def load_other_words(settings: Settings, before: Policies) -> Policies:
        words.write_text("something else\n")
        return load(settings, before)

    two.reload.load = load_other_words
    with pytest.raises(SettingsError, match="gateway gw2: word lists"):
        await one.reload(with_safety(one, section))
    words.unlink()
    with pytest.raises(SettingsError, match=r"words\.txt"):
        await one.reload(with_safety(one, section))
    assert [await version_at(wire) for wire in wires] == ["1", "1"]


async def test_missed_reload_is_used_after_the_next_heartbeat(
    wires: tuple[Wire, Wire],
) -> None:
    one, two = wires
    await publish(one, gateway="gw2", leaving=True)
    await one.until(lambda: one.gateway.shared.peers.alive == [])
    await one.reload(with_safety(one, safety("2")))
    await one.gateway.shared.peers.send_heartbeat()
    await two.until(lambda: two.reload.revision == one.reload.revision)
    await two.until(lambda: not two.reload.lock.locked())  # loaded, and in force
    assert await version_at(two) == "2"


@pytest.fixture
async def behind(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> asyncio.Event:
    """The second gateway cannot load the policies "2", which are in force, until the event is set."""
    one, two = wires
    await one.reload(one.settings)
    load, found = two.reload.load, asyncio.Event()

    def fails(settings: Settings, before: Policies) -> Policies:
        if settings.safety == safety("2") and not found.is_set():
            raise SettingsError("safety: words.txt: is not here")
        return load(settings, before)

    two.reload.load = fails
    two.reload.times = ReloadTimes(retry_s=0.05)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(Peers, "heartbeats", {})
        await one.reload(with_safety(one, safety("2")))
    for service in (SERVICE, "model.small"):
        await two.health_becomes(service, NOT_SERVING)
    assert "cannot be used: safety: words.txt: is not here" in caplog.text
    assert await version_at(two) == "1"
    return found


async def test_gateway_serves_only_policies_in_force(
    wires: tuple[Wire, Wire], behind: asyncio.Event
) -> None:
    _, two = wires
    behind.set()
    await two.health_becomes(SERVICE, SERVING)
    assert await version_at(two) == "2"


async def test_a_gateway_that_is_behind_can_be_given_other_policies(
    wires: tuple[Wire, Wire], behind: asyncio.Event
) -> None:
    _, two = wires
    await two.reload(with_safety(two, safety("1")))
    await two.health_becomes(SERVICE, SERVING)
    assert [await version_at(wire) for wire in wires] == ["1", "1"]


async def test_silent_gateway_stops_a_reload(
    wires: tuple[Wire, Wire],
) -> None:
    one, two = wires
    one.reload.times = ReloadTimes(prepare_s=0.2)
    async with two.reload.lock:
        with pytest.raises(SettingsError, match="gateway gw2: no reply; no gateway"):
            await one.reload(with_safety(one, safety("2")))
    assert await one.gateway.shared.policies.read("candidate", PolicyRecord) is None
    one.reload.times = ReloadTimes()
    await one.reload(with_safety(one, safety("3")))
    assert [await version_at(wire) for wire in wires] == ["3", "3"]


async def proposed(wire: Wire) -> int:
    """Waits until ``wire`` has proposed policies; their revision."""
    read = wire.gateway.shared.policies.read
    async with asyncio.timeout(BOUND_S):
        while (found := await read("candidate", PolicyRecord)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[1]


async def test_a_reload_that_another_one_overtakes_changes_nothing(
    wires: tuple[Wire, Wire],
) -> None:
    one, two = wires
    bucket = one.gateway.shared.policies
    async with two.reload.lock:
        reloading = asyncio.ensure_future(one.reload(with_safety(one, safety("2"))))
        await publish(one, gateway="gw9", candidate=await proposed(one) + 1)
        await publish(one, gateway="gw2", candidate=await proposed(one))
        with pytest.raises(SettingsError, match="is reloading; try again"):
            await reloading
    await publish(one, gateway="gw9", leaving=True)
    async with two.reload.lock:
        reloading = asyncio.ensure_future(one.reload(with_safety(one, safety("2"))))
        await proposed(one)
        await bucket.write("gateway", PolicyRecord(sections=sections_of(two.settings)))
    with pytest.raises(SettingsError, match="reloaded at the same time; try again"):
        await reloading
    assert [await version_at(wire) for wire in wires] == ["1", "1"]


async def test_what_was_proposed_and_not_taken_is_never_in_force(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = wires
    one.reload.times = ReloadTimes(prepare_s=1.0)
    await publish(one, gateway="mute")
    await one.until(lambda: "mute" in one.gateway.shared.peers.alive)
    with pytest.raises(SettingsError, match="gateway mute: no reply"):
        await one.reload(with_safety(one, safety("2")))
    await one.until(lambda: one.gateway.shared.peers.heartbeats["gw2"].candidate > 0)
    await publish(one, gateway="mute", leaving=True)
    async with two.reload.lock:  # it does not prepare the next one in time
        with monkeypatch.context() as cut_off:
            cut_off.setattr(Peers, "heartbeats", {})
            await one.reload(with_safety(one, safety("3")))
    await two.until(lambda: two.reload.revision == one.reload.revision)
    assert await version_at(two) == "3"


async def test_replaced_files_of_all_gateways_are_older(
    wires: tuple[Wire, Wire], nats_url: str, model_folder: Path
) -> None:
    one, _ = wires
    for in_force in ("9", "2"):
        async with open_wire(nats_url, model_folder, gateway_id="gw3", safety=safety("9")) as three:
            assert await version_at(three) == in_force
            await one.until(lambda: "gw3" in one.gateway.shared.peers.alive)
            await one.reload(with_safety(one, safety("2")))


async def test_of_two_reloads_at_once_all_gateways_take_one(wires: tuple[Wire, Wire]) -> None:
    one, two = wires
    ended = await asyncio.gather(
        one.reload(with_safety(one, safety("2"))),
        two.reload(with_safety(two, safety("3"))),
        return_exceptions=True,
    )
    refused = [str(error) for error in ended if error is not None]
    assert all("; try again" in error for error in refused)
    assert len(refused) <= 1
    await one.until(lambda: one.reload.revision == two.reload.revision)
    versions = [await version_at(wire) for wire in wires]
    assert versions in (["2", "2"], ["3", "3"])


async def test_running_requests_keep_their_policies(nats_url: str, model_folder: Path) -> None:
    redacts = safety("1", actions={"pii.email": "redact"})
    async with open_wire(nats_url, model_folder, safety=redacts) as wire:
        running = wire.stub.Generate(prompt("hello", model="small"))
        task = await wire.batcher.task()
        await wire.reload(with_safety(wire, safety("2", actions={"pii.email": "allow"})))
        later = wire.stub.Generate(prompt("hello", model="small"))
        for call, asked in ((running, task), (later, await wire.batcher.task())):
            await wire.batcher.send(asked, last(0, wire.tokens("to a@b.example.org")))
            shown = "a@b.example.org" in text_of(await events_of(call))
            assert shown is (call is later)


def with_identity(wire: Wire, **changes: Any) -> Settings:
    identity = wire.settings.identity.model_copy(update=changes)
    return wire.settings.model_copy(update={"identity": identity})


async def taken(wire: Wire, token: str) -> bool:
    """Whether ``wire`` answers who shows ``token``."""
    try:
        await wire.stub.ListModels(ListModelsRequest(), metadata=bearer(token))
    except AioRpcError as refused:
        return refused.code() is not StatusCode.UNAUTHENTICATED
    return True


async def test_identities_are_reloaded_at_all_gateways_or_at_none(
    nats_url: str, model_folder: Path, tmp_path: Path
) -> None:
    path, old, new = tmp_path / "jwks.json", Issuer("old"), Issuer("new")
    jwt = (old.written(path),)
    identity = IdentitySettings(jwt=jwt, mesh_key="0123456789abcdef")
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1", identity=identity) as one,
        open_wire(nats_url, model_folder, gateway_id="gw2", identity=identity) as two,
    ):
        await one.until(lambda: one.gateway.shared.peers.alive == ["gw2"])
        await two.until(lambda: two.gateway.shared.peers.alive == ["gw1"])

        async def both_take(token: str) -> set[bool]:
            return {await taken(wire, token) for wire in (one, two)}

        path.write_text("{}")
        with pytest.raises(SettingsError, match=r"identity\.jwt\.0\.jwks: .*jwks\.json"):
            await one.reload(one.settings)
        assert await both_take(old.token()) == {True}
        # The settings are the same: the file that they name has other keys.
        new.written(path)
        await one.reload(one.settings)
        assert await both_take(new.token()) == {True}
        assert await both_take(old.token()) == {False}
        # Another issuer in place of the first.
        renamed = jwt[0].model_copy(update={"issuer": "https://other.example.org"})
        await two.reload(with_identity(two, jwt=(renamed,)))
        assert await both_take(new.token()) == {False}
        assert await both_take(new.token(iss="https://other.example.org")) == {True}
        found = await one.gateway.shared.policies.read("gateway", PolicyRecord)
        assert found is not None
        assert "0123456789abcdef" not in str(found[0])
        for update in ({"mesh_key": "another secret of it"}, {"jwt": ()}):
            with pytest.raises(SettingsError, match=r"identity.*while running"):
                await one.reload(with_identity(one, **update))
