"""Asks a gateway what it holds of a request."""

from typing import Final

import nats.errors
from nats.aio.client import Client

from sluice.internal.v1 import control_pb2
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, pack, unpack

ANSWER_S: Final = 2.0


async def ask_held(
    nats_client: Client, gateway: str, request_id: str
) -> control_pb2.HeldTokensResponse | None:
    """The gateway's answer; "does not wait" when it is gone; None when there was none in time."""
    question = pack(control_pb2.HeldTokensRequest(request_id=request_id))
    try:
        reply = await nats_client.request(subjects.held(gateway), question, timeout=ANSWER_S)
        return unpack(control_pb2.HeldTokensResponse, reply.data)
    except nats.errors.NoRespondersError:
        return control_pb2.HeldTokensResponse(waiting=False)
    except (nats.errors.Error, MalformedMessage):
        return None
