"""The command on a pseudo-terminal."""

import asyncio
import os
import pty
import sys

from tests.cli.commands import BOUND_S, COMMAND

ON_TERMINAL = (
    "import fcntl, os, signal, sys, termios;"
    "signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "signal.pthread_sigmask(signal.SIG_SETMASK, ());"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Makes the pseudo-terminal the controlling one, so that Ctrl-C is a signal, and takes signals as a program that a
shell starts: tests that ran before in this process may have changed that. Not between fork and exec of this process:
gRPC's handlers of a fork hang or break there now and then."""


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, main: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._main = main
        self._seen = b""
        self._more = asyncio.Event()
        self._closed = False
        asyncio.get_running_loop().add_reader(main, self._read)

    @classmethod
    async def of(cls, address: str, *arguments: str, term: str = "dumb") -> "Terminal":
        main, side = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ON_TERMINAL),
            *COMMAND,
            *arguments,
            stdin=side,
            stdout=side,
            stderr=side,
            env={
                **os.environ,
                "SLUICE_ADDRESS": address,
                "TERM": term,
                "SLUICE_STATE_DIR": "/nonexistent",
            },
            start_new_session=True,
        )
        os.close(side)
        return cls(main, process)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    async def expect(self, text: str) -> None:
        """Waits for `text`, and forgets what came up to its end."""
        try:
            async with asyncio.timeout(BOUND_S):
                while text.encode() not in self._seen:
                    assert not self._closed, (text, self._seen, self.process.returncode)
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError((text, self._seen)) from None
        self._seen = self._seen.partition(text.encode())[2]

    async def end(self) -> int:
        try:
            return await asyncio.wait_for(self.process.wait(), BOUND_S)
        finally:
            if self.process.returncode is None:
                self.process.kill()
            asyncio.get_running_loop().remove_reader(self._main)
            os.close(self._main)

    def _read(self) -> None:
        try:
            self._seen += os.read(self._main, 65536)
        except OSError:  # the other end is closed
            self._closed = True
            asyncio.get_running_loop().remove_reader(self._main)
        self._more.set()
