"""What engines without a KV cache share: rows in and out by the scheduler, limited by slots alone."""

from collections.abc import Collection

from model_workers.engine.blocks import BlockManager
from model_workers.engine.protocol import RowEnd, RowStep
from model_workers.engine.roster import Limits
from model_workers.engine.scheduler import Scheduler
from sluice.internal.v1 import worker_pb2


class CachelessEngine:
    """The parts of `Engine` that do not depend on what is computed; `add` and `step` are the engine's own."""

    def __init__(self, limits: Limits) -> None:
        # One block a row, and one of reserve: there is nothing to cache, so only slots limit it.
        blocks = BlockManager(2 * limits.slots, limits.context_tokens, prefix_cache=False)
        self._scheduler = Scheduler(blocks, limits)
        self._steps = 0

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Engine.cancel`."""
        self._scheduler.cancel(request_ids)

    def abort(self, message: str) -> list[RowStep]:
        """See `Engine.abort`."""
        rows = self._scheduler.rows()
        for row in rows:
            self._scheduler.finish(row)
        return [row.closing(RowEnd.FAILED, message) for row in rows]

    def has_rows(self) -> bool:
        """See `Engine.has_rows`."""
        return self._scheduler.has_rows()

    def load(self) -> worker_pb2.WorkerLoad:
        """See `Engine.load`."""
        load = self._scheduler.load(self._steps)
        load.block_tokens = load.cache_blocks = load.free_blocks = 0
        return load
