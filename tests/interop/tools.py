"""Runs programs that nobody here wrote."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROTOS: Final = Path(__file__).parents[2] / "protos"
BOUND_S: Final = 120.0


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what it wrote."""

    code: int
    out: str
    err: str


async def run(*argv: str | Path, cwd: Path | None = None, bound_s: float = BOUND_S) -> Ran:
    """Run a program to its end, within ``bound_s`` seconds."""
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), bound_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())
