"""What a request and a token cost this tree and another checkout of Sluice, interleaved.

    python bench/against.py CHECKOUT [PART ...] [--json] [--runs N]

CHECKOUT has a complete .venv of its own (`scripts/environment dev` there). Each round begins both meshes anew, which
first alternates, because a process keeps the luck of its addresses for life: of one tree against itself such a pair
differs by up to 5 %. Each is started by its own `sluice up` with one `engine: echo` model, 64 slots and everything else
as shipped; one load generator (bench/support/load.py, which defines prompts and CPU time) calls one mesh and then the
other. What the idle one takes meanwhile counts for neither. A round is `SLICES` times the answers of a load to each
side in turn, which goes first alternates; one slice before them is left out.

`requests` (without a PART): one-token answers.
- `against_gateway_cpu`: 32 callers; milliseconds of CPU of the gateway's process a request.
- `against_mesh_cpu`: the same runs; of all processes.
- `against_requests_per_s`: the same runs; requests answered a second, client on the same machine.
- `gateway_cpu_vs_bare_grpc`: the same runs with 32 callers; the gateway's process and that of a grpc.aio server that
  sends the messages that the gateway sends (bench/support/bare_stream.py), whose runs alternate with the others.

`tokens`: `against_token_cpu`, 64 callers, answers of 128 to 512 tokens; microseconds of CPU of all processes a token.

`remote`: `against_remote_hop`, 32 callers, one-token answers; milliseconds of CPU of all processes a request of a
model of `engine: openai` beyond those of the `engine: echo` model of the same mesh, in alternating slices. The server
is bench/support/openai_upstream.py, asked through its chat API; its process does not count.

`idle`: `against_idle_cpu`, both meshes as `sluice up` starts them with both shipped specialists and no caller, on the
same cores at the same time, `SETTLE_S` after their start; CPU of all processes over `IDLE_S`, percent of one core.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import uvloop
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import ROOT, Figure, emit, options_of, paired
from bench.support.load import Cost, Load, Server, bare_server, cost, families, interleaved
from bench.support.meshes import ports_of, program

MODEL: Final = "echo"
REMOTE: Final = "remote"
SLOTS: Final = 64
SLICES: Final = 6
MANY: Final = Load(32, 1000)
STREAMS: Final = Load(64, 128, (128, 256, 384, 512))
TOKEN_SLICES: Final = 3
CONFIG: Final[dict[str, Any]] = {
    "models": [
        {"name": MODEL, "tier": "small", "path": "builtin:small", "engine": "echo", "slots": SLOTS}
    ],
    "routing": {"default": MODEL},
}
UP_S: Final = 600
SETTLE_S: Final = 15.0
IDLE_S: Final = 20.0
IDLE: Final[dict[str, Any]] = {
    "models": [
        {"name": name, "tier": name, "path": f"builtin:{name}"} for name in ("small", "large")
    ]
}
"""What both versions serve: the general model came later."""

Sides = tuple[list[Cost], list[Cost]]


@asynccontextmanager
async def mesh_of(checkout: Path, folder: Path, config: dict[str, Any]) -> AsyncIterator[Server]:
    """A mesh of ``checkout``, with its state in ``folder``."""
    sluice, state = str(checkout / ".venv/bin/sluice"), str(folder / "state")
    up = [sluice, "up", "--detach", "--address", "127.0.0.1:0", "--http", "off"]
    up += ["--config", _written(folder, config), "--state-dir", state]
    await asyncio.to_thread(subprocess.run, up, check=True, timeout=UP_S, cwd=folder)
    try:
        found = json.loads((folder / "state/state.json").read_text(encoding="utf-8"))
        processes = families({one["name"]: one["pid"] for one in found["processes"]})
        processes["supervisor"] = psutil.Process(found["pid"])
        async with grpc.aio.insecure_channel(found["address"]) as channel:
            yield Server(channel, MODEL, processes)
    finally:
        down = [sluice, "down", "--state-dir", state]
        await asyncio.to_thread(subprocess.run, down, check=True, timeout=UP_S, cwd=folder)


@asynccontextmanager
async def pair(
    checkout: Path, *, ours_first: bool = True, config: dict[str, Any] = CONFIG
) -> AsyncIterator[tuple[Server, Server]]:
    """A mesh of this tree and one of ``checkout``."""
    with tempfile.TemporaryDirectory(prefix="sluice-against-") as folder:
        async with AsyncExitStack() as stack:
            started: dict[Path, Server] = {}
            for tree in (ROOT, checkout) if ours_first else (checkout, ROOT):
                mesh = mesh_of(tree, Path(folder, str(len(started))), config)
                started[tree] = await stack.enter_async_context(mesh)
            yield started[ROOT], started[checkout]


def _written(folder: Path, config: dict[str, Any]) -> str:
    """A file with ``config`` in a new folder."""
    folder.mkdir()
    (folder / "sluice.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(folder / "sluice.yaml")


class Against:
    """The parts, each against one checkout."""

    def __init__(self, checkout: Path, rounds: int) -> None:
        self._checkout = checkout
        self._rounds = rounds
        git = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=30)
        self._head = done.stdout.strip()

    async def requests(self) -> list[Figure]:
        many: list[list[Cost]] = [[], [], []]
        async with bare_server() as bare:
            for number in range(self._rounds):
                async with pair(self._checkout, ours_first=number % 2 == 0) as meshes:
                    costs = await interleaved((*meshes, bare), MANY, SLICES, number)
                    for side, of_round in zip(many, costs, strict=True):
                        side.append(of_round)
        ours, theirs, bare_costs = many
        what, answers = "a one-token request", SLICES * MANY.answers
        gateway, every = _cpu_of(1e3 / answers, "gateway", "bare"), _cpu_of(1e3 / answers)
        pair_, bare_words = (ours, theirs), "a bare grpc.aio server"
        return [
            self._figure("against_gateway_cpu", "ms of CPU", what, pair_, gateway, MANY),
            self._figure("against_mesh_cpu", "ms of CPU", what, pair_, every, MANY),
            self._figure(
                *("against_requests_per_s", "requests/s", what, pair_),
                *(lambda one: answers / one.wall_s, MANY),
            ),
            self._figure(
                *("gateway_cpu_vs_bare_grpc", "ms of CPU", what, (ours, bare_costs)),
                *(gateway, MANY, bare_words),
            ),
        ]

    async def tokens(self) -> list[Figure]:
        found: Sides = ([], [])
        for number in range(self._rounds):
            async with pair(self._checkout, ours_first=number % 2 == 0) as meshes:
                costs = await interleaved(meshes, STREAMS, TOKEN_SLICES, number)
                for side, of_round in zip(found, costs, strict=True):
                    side.append(of_round)
        cpu = _cpu_of(1e6 / (TOKEN_SLICES * STREAMS.answer_tokens))
        what = "a token of a stream, all processes"
        return [self._figure("against_token_cpu", "us of CPU", what, found, cpu, STREAMS)]

    async def remote(self) -> list[Figure]:
        ours: list[float] = []
        theirs: list[float] = []
        async with program("openai_upstream") as process:
            (port,) = await ports_of(process)
            for number in range(self._rounds):
                config = _with_remote(port)
                async with pair(
                    self._checkout, ours_first=number % 2 == 0, config=config
                ) as meshes:
                    servers = [
                        replace(mesh, model=name) for mesh in meshes for name in (MODEL, REMOTE)
                    ]
                    costs = await interleaved(servers, MANY, SLICES, number)
                    ours.append(_hop_ms(*costs[:2]))
                    theirs.append(_hop_ms(*costs[2:]))
        return [
            paired(
                "against_remote_hop",
                ours,
                theirs,
                unit="ms of CPU",
                higher_is_better=False,
                note=f"engine: openai beyond engine: echo, a one-token request; peer: {self._head}",
                settings={"callers": MANY.callers, "answers": MANY.answers, "slots": SLOTS},
            )
        ]

    async def idle(self) -> list[Figure]:
        found: Sides = ([], [])
        async with pair(self._checkout, config=IDLE) as meshes:
            await asyncio.sleep(SETTLE_S)
            for _ in range(self._rounds):
                costs = await asyncio.gather(*(cost(one.processes, _idle) for one in meshes))
                for side, of_round in zip(found, costs, strict=True):
                    side.append(of_round)
        what = f"all {len(found[0][0].cpu_s)} processes of an idle mesh"
        cpu = _cpu_of(100 / IDLE_S)
        return [self._figure("against_idle_cpu", "% of one core", what, found, cpu, Load(0, 0))]

    def _figure(
        self,
        name: str,
        unit: str,
        what: str,
        sides: Sides,
        of: Callable[[Cost], float],
        load: Load,
        peer: str = "",
    ) -> Figure:
        return paired(
            name,
            *([of(one) for one in side] for side in sides),
            unit=unit,
            higher_is_better=unit.endswith("/s"),
            note=f"{what}; peer: {peer or self._head}",
            settings={"callers": load.callers, "answers": load.answers, "tokens": load.tokens, "slots": SLOTS},
            also={name: statistics.median(one.cpu_s[name] for one in sides[0]) for name in sides[0][0].cpu_s},
        )  # fmt: skip


def _cpu_of(scale: float, *names: str) -> Callable[[Cost], float]:
    """CPU of the processes of these names, without any of all, times ``scale``."""
    return lambda one: scale * sum(s for name, s in one.cpu_s.items() if name in names or not names)


def _with_remote(port: int) -> dict[str, Any]:
    """Return a configuration with the echo model and one of a server on this port."""
    server = {
        "url": f"http://127.0.0.1:{port}/v1",
        "model": MODEL,
        "api": "chat",
        # Every load asks for answers of an exact length.
        "parameters": {"min_tokens": "min_tokens"},
    }
    remote = {**CONFIG["models"][0], "name": REMOTE, "engine": "openai", "server": server}
    return {**CONFIG, "models": [*CONFIG["models"], remote]}


def _hop_ms(echo: Cost, remote: Cost) -> float:
    """Return what a request of the remote model costs beyond one of the echo model, in milliseconds of CPU."""
    return 1e3 * (remote.all_s - echo.all_s) / (SLICES * MANY.answers)


async def _idle() -> float:
    await asyncio.sleep(IDLE_S)
    return IDLE_S


PARTS: Final = ("requests", "tokens", "remote", "idle")


async def measure(against: Against, parts: Sequence[str], as_json: bool) -> None:
    """Prints the figures of each part as soon as they are there."""
    for name in parts:
        emit(await getattr(against, name)(), as_json)


def main() -> None:
    """Prints the figures."""
    parser = options_of(__doc__, "rounds, each with new meshes")
    parser.add_argument("checkout", type=Path)
    # The default of "*" must be one of the choices as a whole.
    parser.add_argument("part", nargs="*", choices=(*PARTS, []), metavar="PART")
    options = parser.parse_args()
    against = Against(options.checkout.resolve(), options.runs)
    uvloop.run(measure(against, options.part or PARTS[:1], options.json))


if __name__ == "__main__":
    main()
