"""Tool calls of a server's answer: their pieces become text that the gateway reads again.

A server sends calls in fields of their own, in pieces; in the mesh an answer is text. So each call is written as Hermes
does: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call is written when it is complete: pieces of
several calls may alternate, and text may come between them.

Servers number their calls in different ways. A piece belongs

1. to the last call with its id, of several to the one with its index;
2. else to the last call with its index, or without an index to the last one.

It begins a call where there is none, and where it has a name and

3. the call has another name, or has its id and another index;
4. its id is new, unless it goes on with incomplete arguments of a call of that name: some servers invent an id for each
   piece;
5. it has no id, and the arguments of the call are complete.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from model_workers.remote.faults import ServerFault

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
CALLS_CHARS_MAX: Final = 4 * 1024 * 1024
"""Maximum length of the arguments of all calls of an answer, in characters."""
CALLS_MAX: Final = 2048
"""Maximum number of calls of an answer."""


@dataclass(eq=False, slots=True)
class StreamedCall:
    """A piece of a call as a server sends it; the first piece collects the arguments of the others."""

    index: int | None
    id: str
    name: str
    arguments: str
    is_written: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a whole JSON object."""
        if not self.arguments.rstrip().endswith("}"):
            return False
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False

    @property
    def text(self) -> str:
        """The call as Hermes writes it; for no arguments servers send nothing, null or an empty text."""
        arguments = self.arguments.strip()
        if arguments in ("", "null", '""'):
            arguments = "{}"
        return f'{BEGIN}{{"name": {json.dumps(self.name)}, "arguments": {arguments}}}{END}'


class CallText:
    """The calls of one answer as text."""

    def __init__(self) -> None:
        self._calls: list[StreamedCall] = []
        self._unwritten: deque[StreamedCall] = deque()
        self._chars = 0

    def push(self, pieces: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of the calls that `pieces` complete.

        Raises:
            ServerFault: A piece belongs to no call or to one that is complete, or there are too many.
            AttributeError: A piece is not an object.
        """
        texts: list[str] = []
        for piece in map(_piece_of, pieces):
            self._chars += len(piece.arguments)
            if self._chars > CALLS_CHARS_MAX:
                raise ServerFault("the server sent tool calls without an end")
            call = self._call_of(piece)
            if call is None:
                self._begin(piece)
                # Write the calls before the newest one, up to the first that may get more pieces.
                while len(self._unwritten) > 1 and self._unwritten[0].is_complete:
                    texts.append(self._write())
            elif not call.is_written:
                call.arguments += piece.arguments
            elif piece.arguments.strip():
                raise ServerFault("the server went on with a tool call that was complete")
        return "".join(texts)

    def close(self) -> str:
        """Return the text of all other calls when the answer has ended."""
        return "".join([self._write() for _ in range(len(self._unwritten))])

    def _write(self) -> str:
        call = self._unwritten.popleft()
        call.is_written = True
        return call.text

    def _call_of(self, piece: StreamedCall) -> StreamedCall | None:
        """Return the call that `piece` belongs to; None: it begins one."""
        latest, index = self._calls[::-1], piece.index
        same_id = [call for call in latest if piece.id and call.id == piece.id]
        at_index = [call for call in same_id or latest if index is None or call.index == index]
        call = next(iter(at_index or same_id), None)
        if call is None or not piece.name:
            return call
        return None if _begins(piece, call, is_known=bool(same_id)) else call

    def _begin(self, piece: StreamedCall) -> None:
        if not piece.name:
            raise ServerFault("the server sent a tool call without a name")
        if len(self._calls) == CALLS_MAX:
            raise ServerFault(f"the server sent over {CALLS_MAX} tool calls")
        self._calls.append(piece)
        self._unwritten.append(piece)


def _begins(piece: StreamedCall, call: StreamedCall, *, is_known: bool) -> bool:
    """Return whether a piece with a name begins another call than `call`, whose id it has if `is_known`."""
    if piece.name != call.name:
        return True
    if is_known:
        return piece.index is not None and call.index not in (None, piece.index)
    if not piece.id:
        return call.is_complete
    goes_on = call.arguments and piece.arguments and not piece.arguments.startswith("{")
    return not goes_on or call.is_complete


def _piece_of(piece: Mapping[str, Any]) -> StreamedCall:
    """Read a piece; some servers send the arguments as an object.

    Raises:
        AttributeError: It is not an object.
    """
    function, index = piece.get("function") or {}, piece.get("index")
    arguments = function.get("arguments") or ""
    return StreamedCall(
        index if isinstance(index, int) else None,
        str(piece.get("id") or ""),
        str(function.get("name") or ""),
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    )
