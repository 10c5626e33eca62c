"""`tandem chat` at a real terminal: Ctrl-C stops the answer, not the chat."""

import asyncio
import os
import pty
import signal
import sys

from tests.support.fake_gateway import FakeGateway, running

DEADLINE_S = 20.0


class Terminal:
    """The person's end of a pseudo terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def until(self, text: str) -> None:
        """Read until `text` has been shown; what was shown before it is forgotten."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S):
            while text.encode() not in self._seen:
                readable = asyncio.Event()
                loop.add_reader(self._descriptor, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._descriptor)
                self._seen += os.read(self._descriptor, 4096)
        self._seen = self._seen.partition(text.encode())[2]


async def test_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    ours, theirs = pty.openpty()
    async with running(FakeGateway(tokens=("Hel", "lo"), fail="hang")) as gateway:
        chat = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem", "chat", "--url", gateway.url, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        terminal = Terminal(ours)
        try:
            await terminal.until("> ")
            terminal.type("hi\n")
            await terminal.until("Hel")
            chat.send_signal(signal.SIGINT)
            await terminal.until("(stopped)")
            gateway.fail = ""
            terminal.type("again\n")
            await terminal.until("Hello")
            terminal.type("/quit\n")
            assert await asyncio.wait_for(chat.wait(), DEADLINE_S) == 0
        finally:
            if chat.returncode is None:
                chat.kill()
                await chat.wait()
            os.close(ours)
    assert [message["content"] for message in gateway.bodies[1]["messages"]] == ["hi", "Hel", "again"]
