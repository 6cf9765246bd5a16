"""Answers scrapes: one text over HTTP, from one thread and over few connections.

Everybody may connect, and the process that answers trains. So a connection beyond `MOST` closes the oldest
one, and looks are
`PAUSE_SECONDS` apart: connections that say nothing, little or garbage take a few descriptors, and many
scrapes a small part of the interpreter. A scrape sends its request at once, and is answered in the look that
finds it, whoever waits beside it.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MOST = 16  # connections
PAUSE_SECONDS = 0.02
LONGEST_SECONDS = 10.0  # that a connection may last, however little comes or goes on it
REQUEST_BYTES = 8192
END = b"\r\n\r\n"  # of a request
HEAD = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: "
    "{}\r\nConnection: close\r\n\r\n"
)


@dataclass
class Scrape:
    """A connection: what has come of its request, and what is left to send."""

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    request: bytes = b""
    answer: bytes = b""

    def asks(self) -> bool:
        """Whether the request is whole."""
        return END in self.request


class ScrapeServer:
    """Serves what `text` returns to everybody who asks, until `close`."""

    def __init__(self, port: int, text: Callable[[], bytes]) -> None:
        """Raises `OSError` where the port cannot be had.

        `text` is called in another thread, at most once a look.
        """
        self.text, self.closed = text, False
        self.scrapes: dict[socket.socket, Scrape] = {}  # the oldest first
        self.listener = socket.create_server(("", port), backlog=128)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._serve, name="scrapes", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stops serving."""
        self.closed = True
        self.thread.join()

    def _serve(self) -> None:
        while not self.closed:
            try:
                self._look()
            except Exception:  # it goes on; where no descriptor is left for a connection, this gives one back
                self._drop_oldest()
            time.sleep(PAUSE_SECONDS)
        while self.scrapes:
            self._drop_oldest()
        self.listener.close()
        self.selector.close()

    def _look(self) -> None:
        """Goes on with every connection, and closes those that last too long.

        All requests are read before the text is made, so that no answer is older than its request.
        """
        if any(key.fileobj is self.listener for key, _ in self.selector.select(0.5)):
            self._accept()
        late = time.monotonic() - LONGEST_SECONDS
        for scrape in list(self.scrapes.values()):
            if scrape.since < late or not self._read(scrape):
                self._drop(scrape)
        asking = [scrape for scrape in self.scrapes.values() if scrape.asks()]
        answer = self._answer() if any(not scrape.answer for scrape in asking) else b""
        for scrape in asking:
            if not self._send(scrape, answer):
                self._drop(scrape)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(MOST):
                if len(self.scrapes) >= MOST:
                    self._drop_oldest()
                connection, _ = self.listener.accept()
                connection.setblocking(False)
                # before it is kept: all that is kept can be dropped
                self.selector.register(connection, selectors.EVENT_READ)
                self.scrapes[connection] = Scrape(connection)

    def _read(self, scrape: Scrape) -> bool:
        """Reads what has come of a request; whether the connection is of use still."""
        if scrape.asks():
            return True
        try:
            data = scrape.connection.recv(REQUEST_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # it has gone
            return False
        scrape.request += data
        if scrape.asks():
            self.selector.modify(scrape.connection, selectors.EVENT_WRITE)
        return scrape.asks() or (len(data) > 0 and len(scrape.request) <= REQUEST_BYTES)

    def _answer(self) -> bytes:
        """What everybody gets who asks in this look; nothing where there is no text."""
        try:
            text = self.text()
        except Exception:  # it is somebody else's, and this thread serves others
            return b""
        return HEAD.format(len(text)).encode() + text

    def _send(self, scrape: Scrape, answer: bytes) -> bool:
        """Sends what goes; whether more is left."""
        scrape.answer = scrape.answer or answer
        try:
            scrape.answer = scrape.answer[scrape.connection.send(scrape.answer) :]
        except BlockingIOError:
            return True
        except OSError:  # it has gone
            return False
        return len(scrape.answer) > 0

    def _drop(self, scrape: Scrape) -> None:
        del self.scrapes[scrape.connection]
        self.selector.unregister(scrape.connection)
        scrape.connection.close()

    def _drop_oldest(self) -> None:
        if self.scrapes:
            self._drop(next(iter(self.scrapes.values())))
