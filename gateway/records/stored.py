"""What the stores of records share: their streams in JetStream, and reading from them with a limit."""

import asyncio
from typing import Final

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

from sluice.errors import TransportUnavailable

READ_S: Final = 2.0
MIB: Final = 1024 * 1024


async def ensure(js: JetStreamContext, config: StreamConfig) -> None:
    """Creates the stream, or gives it the limits of ``config``.

    Raises:
        nats.errors.Error: JetStream does not answer, or refuses the limits.
    """
    try:
        await js.add_stream(config)
    except BadRequestError:  # it exists with other limits
        await js.update_stream(config)


async def last(js: JetStreamContext, stream: str, subject: str, *, direct: bool) -> bytes | None:
    """The last message of ``subject``, which may have wildcards unless ``direct``; None: there is none.

    Raises:
        TransportUnavailable: JetStream does not answer.
    """
    try:
        async with asyncio.timeout(READ_S):
            message = await js.get_last_msg(stream, subject, direct=direct)
    except NotFoundError:
        return None
    except (TimeoutError, NatsError) as error:
        raise away(error) from error
    return message.data or b""


def away(error: Exception) -> TransportUnavailable:
    """JetStream does not answer, or with ``error``."""
    return TransportUnavailable(
        f"the store of records does not answer ({type(error).__name__})", retry_after_s=1.0
    )
