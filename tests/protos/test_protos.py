"""The protos keep their rules, and the committed code is what they generate."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
GENERATED = ("sluice/v1", "sluice/internal/v1")


def generated_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in GENERATED
        for path in sorted((root / folder).iterdir())
        if path.suffix in (".py", ".pyi") and path.name != "__init__.py"
    }


def buf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "buf"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run(
        [str(ROOT / "scripts/gen_protos"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
        capture_output=True,
        timeout=60,
    )

    fresh, committed = generated_files(tmp_path), generated_files(ROOT)

    assert sorted(fresh) == sorted(committed)
    stale = [name for name, content in fresh.items() if committed[name] != content]
    assert stale == [], "run scripts/gen_protos"
    baseline = Path("protos/baseline.binpb")
    assert (tmp_path / baseline).read_bytes() == (ROOT / baseline).read_bytes()


def test_removed_field_breaks_the_wire_until_a_new_baseline(tmp_path: Path) -> None:
    for name in ("protos", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    proto = tmp_path / "protos/sluice/v1/inference.proto"
    text = proto.read_text(encoding="utf-8")
    comment, field = "  // The text of the turn.\n", "  string content = 2;\n"
    assert comment + field in text
    proto.write_text(text.replace(comment + field, ""), encoding="utf-8")

    def gen_protos(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tmp_path / "scripts/gen_protos"), *arguments, str(tmp_path)],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=60,
        )

    refused = gen_protos()
    assert refused.returncode == 1
    assert "breaks the wire" in refused.stderr
    assert "content" in refused.stdout
    assert buf("breaking", "protos", "--against", "protos/baseline.binpb", cwd=tmp_path).returncode
    assert gen_protos("--break").returncode == 0
    assert gen_protos().returncode == 0


def test_buf_lint_is_clean() -> None:
    result = buf("lint", "protos")

    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("  string note = 1000;", "should have a non-empty comment"),
        ("  string BadName = 1000;", "lower_snake_case"),
    ],
)
def test_buf_lint_would_see_a_missing_comment_or_a_wrong_name(
    tmp_path: Path, line: str, problem: str
) -> None:
    for source in (ROOT / "protos").rglob("*"):
        if source.is_file():
            copy = tmp_path / source.relative_to(ROOT / "protos")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    proto = tmp_path / "sluice/v1/inference.proto"
    text = proto.read_text(encoding="utf-8")
    proto.write_text(text.replace("message Usage {", f"message Usage {{\n{line}"), encoding="utf-8")

    result = buf("lint", ".", cwd=tmp_path)

    assert result.returncode != 0
    assert problem in result.stdout
