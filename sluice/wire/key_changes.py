"""Makes every gateway read the API keys again, and waits until all have: then a change by `sluice keys` is in force.

The request goes to `subjects.GATEWAYS`, on which gateways publish heartbeats. Each gateway that has read the keys
replies with a heartbeat that names the gateways it knows, so the sender knows when all have replied.
"""

import asyncio
import secrets
from typing import Final

from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import Header

from sluice.internal.v1.gateway_pb2 import GatewayHeartbeat
from sluice.wire import permissions, subjects
from sluice.wire.codec import pack, unpack

WAIT_S: Final = 2.0
"""How long gateways get to read the keys, in seconds. One that does not answer reads them within a second of its next
contact with NATS."""


async def refresh_keys(client: Client, wait_s: float = WAIT_S) -> list[str]:
    """Return once all gateways have read the API keys, or after `wait_s`: the ids of those that did not answer.

    Without any answer no gateway is known, and the list is empty.
    """
    inbox = f"{permissions.inbox(permissions.GATEWAY, 'keys')}.{secrets.token_hex(8)}"
    answers = await client.subscribe(inbox)
    gateways, answered = set[str](), set[str]()
    try:
        await client.publish(
            subjects.GATEWAYS, pack(GatewayHeartbeat(refreshes_keys=True)), reply=inbox
        )
        async with asyncio.timeout(wait_s):
            while not answered or gateways - answered:
                message = await answers.next_msg(timeout=wait_s)
                if message.headers and Header.STATUS.value in message.headers:
                    break  # no gateway runs
                heartbeat = unpack(GatewayHeartbeat, message.data)
                answered.add(heartbeat.gateway)
                gateways.update(heartbeat.peers)
    except (TimeoutError, NatsTimeoutError):
        pass
    finally:
        await answers.unsubscribe()
    return sorted(gateways - answered)
