"""What a changed configuration makes of the versions of models that a mesh serves."""

from dataclasses import replace

from sluice.settings import ModelSettings
from supervisor.versions import Change, Version, change_of


def model(name: str = "small", **more: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "path": f"/models/{name}", **more})


def served(asked: ModelSettings, files: str = "f", generation: int = 0) -> Version:
    numbered = asked.model_copy(update={"generation": generation})
    return Version(
        asked, files, numbered.model_copy(update={"triton_url": (f"127.0.0.1:{generation}",)})
    )


SMALL, LARGE = served(model()), served(model("large"))
SEEN = {"small": 0, "large": 0}


def change(*asked: ModelSettings, files: str = "f", retiring: tuple[Version, ...] = ()) -> Change:
    return change_of([(one, files) for one in asked], (SMALL, LARGE), retiring, SEEN)


def task_names(versions: tuple[Version, ...]) -> list[str]:
    return [one.settings.task_name for one in versions]


def test_what_is_asked_for_as_it_is_served_stays() -> None:
    for small in (model(), SMALL.settings):
        same = change(small, model("large"))
        assert (same.models, same.new, same.retired, same.words) == ((SMALL, LARGE), (), (), {})


def test_prices_and_limits_change_without_other_workers() -> None:
    dearer = change(model(prompt_price=2.0), model("large"))
    assert dearer.new == ()
    assert dearer.words == {"small": "changed"}
    assert dearer.models[0].settings == SMALL.settings.model_copy(update={"prompt_price": 2.0})


def test_a_model_is_added_and_another_removed() -> None:
    other = change(model(), model("tiny"))
    assert task_names(other.new) == ["tiny"]
    assert other.retired == (LARGE,)
    assert other.words == {"tiny": "added", "large": "removed"}


def test_another_folder_or_other_files_in_it_are_another_version() -> None:
    for moved in (change(model(path="/models/v2"), model("large")), change(model(), files="g")):
        assert moved.words["small"] == "replaced"
        assert task_names(moved.new)[0] == "small--1"
        assert SMALL in moved.retired


def test_a_rollback_takes_back_the_version_that_is_still_loaded() -> None:
    second = served(model(path="/models/v2"), generation=1)
    asked = [(model(), "f"), (model("large"), "f")]
    back = change_of(asked, (second, LARGE), (SMALL,), {"small": 1, "large": 0})
    assert (back.models, back.new, back.retired) == ((SMALL, LARGE), (), (second,))
    assert back.words == {"small": "replaced"}


def test_ended_version_is_loaded_again_under_a_new_number() -> None:
    second = served(model(path="/models/v2"), generation=1)
    asked = [(model(), "f"), (model("large"), "f")]
    back = change_of(asked, (second, LARGE), (), {"small": 1, "large": 0})
    assert task_names(back.new) == ["small--2"]


def test_what_is_retiring_already_goes_on_retiring() -> None:
    old = replace(SMALL, settings=SMALL.settings.model_copy(update={"generation": 7}))
    old = replace(old, files="other")
    assert change(model(), model("large"), retiring=(old,)).retired == (old,)
