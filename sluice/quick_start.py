"""The first import of every process: no core dumps, nats-py without aiohttp, no garbage collected until `freeze_heap`.

Collections during the imports find next to nothing, and take a tenth of their time.
"""

import gc

import sluice.wire.light_nats  # noqa: F401
from sluice.core_dumps import forbid_core_dumps

gc.disable()
forbid_core_dumps()
