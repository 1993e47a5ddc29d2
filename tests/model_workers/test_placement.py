import pytest

from model_workers.deploy import place
from sluice.settings import ModelSettings, SettingsError


def model(name: str, **changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "path": "none", **changes})


def told(*models: ModelSettings) -> dict[str, tuple[str, float | None]]:
    return {name: (one.device, one.memory_share) for name, one in place(models).items()}


def test_one_worker_has_its_device_alone() -> None:
    assert told(model("a")) == {"a": ("auto", 1.0)}


def test_workers_of_a_device_share_it() -> None:
    found = told(model("a"), model("b", device="cuda:0", replicas=2), model("c", device="cuda:1"))
    third = pytest.approx(1 / 3)
    assert found == {
        "a": ("auto", third),
        "b": ("cuda:0", third),
        "b.1": ("cuda:0", third),
        "c": ("cuda:1", 1.0),
    }


def test_replicas_are_spread_over_devices() -> None:
    found = told(model("a", replicas=3, devices=[0, 2]), model("b", devices=[2], memory_share=0.25))
    assert found == {
        "a": ("cuda:0", 0.5),
        "a.1": ("cuda:2", 0.75),
        "a.2": ("cuda:0", 0.5),
        "b": ("cuda:2", 0.25),
    }


def test_ranks_take_neighbouring_devices() -> None:
    sharded = model("a", replicas=2, tensor_parallel=2, devices=[0, 1, 2, 3])
    found = place([sharded, model("b", device="cuda:3")])
    assert [found[name].devices for name in ("a", "a.1")] == [(0, 1), (2, 3)]
    assert [found[name].memory_share for name in ("a", "a.1", "b")] == [1.0, 0.5, 0.5]
    first = place([model("a", tensor_parallel=2), model("b", device="cuda:1")])
    assert [worker.memory_share for worker in first.values()] == [0.5, 0.5]


def test_what_has_no_cache_takes_no_share() -> None:
    found = told(model("a"), model("guard", engine="classifier"), model("echo", engine="echo"))
    assert found == {"a": ("auto", 1.0), "guard": ("auto", None), "echo": ("auto", None)}


@pytest.mark.parametrize(
    "models",
    [
        (model("a", memory_share=0.7), model("b", memory_share=0.4)),
        (model("a", memory_share=1.0), model("b")),
        (model("a", memory_share=0.6, replicas=2),),
    ],
)
def test_more_than_a_device_is_refused(models: tuple[ModelSettings, ...]) -> None:
    with pytest.raises(SettingsError, match="memory_share"):
        place(models)


@pytest.mark.parametrize(
    "wrong", [{"devices": [0], "device": "cuda:1"}, {"devices": [1, 1]}, {"devices": [-1]}]
)
def test_devices_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="devices"):
        model("a", **wrong)
