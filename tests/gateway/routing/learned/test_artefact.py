"""A router as a file: what comes back is what went in, and nothing else is taken for one."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from gateway.routing.learned import artefact
from gateway.routing.learned.model import LearnedRouter
from tests.learning.made_up import outcomes

TEXTS = [row.prompt for row in outcomes(20)]


@pytest.fixture
def file(by_answer: LearnedRouter, tmp_path: Path) -> Path:
    artefact.save_to(by_answer, tmp_path / "router")
    return tmp_path / "router"


def test_round_trip(by_answer: LearnedRouter, file: Path) -> None:
    loaded = artefact.load(file)
    answer = "It is 1 + 1 = 3."
    for theirs, ours in ((by_answer.prompts, loaded.prompts), (by_answer.cascade, loaded.cascade)):
        assert theirs is not None
        assert ours is not None
        scores = [[head.score(text, answer) for text in TEXTS] for head in (theirs, ours)]
        assert scores[0] == scores[1]
    for share in (0.9, 0.95, 1.0):
        made, read = (router.prompts.calibration for router in (by_answer, loaded))
        assert made.for_quality(share) == read.for_quality(share)


def test_the_version_is_of_the_content(
    by_answer: LearnedRouter, by_prompt: LearnedRouter, tmp_path: Path
) -> None:
    first, again = (artefact.save_to(by_answer, tmp_path / name) for name in ("a", "b"))
    other = artefact.save_to(by_prompt, tmp_path / "c")
    assert first.version == again.version == artefact.load(tmp_path / "a").version
    assert other.version != first.version
    assert artefact.load(tmp_path / "c").cascade is None


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(file: Path, kept: float) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(artefact.BadArtefact, match="truncated"):
        artefact.load(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_byte_is_refused(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = file.with_name("damaged")
    damaged.write_bytes(
        whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    )
    with pytest.raises(artefact.BadArtefact):
        artefact.load(damaged)


@pytest.mark.parametrize(
    ("changes", "omitted", "problem"),
    [
        ({"format": "3"}, "x", "format 3, this program reads format 4: run `sluice router train`"),
        ({"columns": "other"}, "x", "other columns"),
        ({}, ".weak", r"no prompts\.calibration\.weak"),
    ],
    ids=["format", "columns", "part"],
)
def test_other_formats_columns_and_parts_are_refused(
    by_prompt: LearnedRouter, tmp_path: Path, changes: dict[str, str], omitted: str, problem: str
) -> None:
    arrays = artefact.tensors_of(by_prompt)
    tensors = {name: array for name, array in arrays if not name.endswith(omitted)}
    artefact.write(tmp_path / "router", tensors, artefact.ABOUT | changes)
    with pytest.raises(artefact.BadArtefact, match=problem):
        artefact.load(tmp_path / "router")


def test_what_is_no_router_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(artefact.BadArtefact, match="cannot be read"):
        artefact.load(path)
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(artefact.BadArtefact, match="truncated or not a router"):
        artefact.load(path)
    path.write_bytes(save({"a": np.zeros(3)}))
    with pytest.raises(artefact.BadArtefact, match="not a router"):
        artefact.load(path)


def test_a_write_that_fails_leaves_the_old_file(by_prompt: LearnedRouter, file: Path) -> None:
    before = file.read_bytes()
    broken = replace(by_prompt, prompts=replace(by_prompt.prompts, part=object()))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        artefact.save_to(broken, file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]
