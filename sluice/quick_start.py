"""The first import of gateway and batcher: nats-py without aiohttp, and no garbage is collected until `freeze_heap`.

Collections during the imports find next to nothing, and take a tenth of their time.
"""

import gc

import sluice.wire.light_nats  # noqa: F401

gc.disable()
