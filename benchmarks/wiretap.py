"""A relay on loopback that counts bytes in each direction, and when they were sent.

It counts what TCP carries, TLS and HTTP included, without the headers of TCP and IP. To check it
against a small web server, run: python benchmarks/wiretap.py
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

BLOCK = 1 << 16  # bytes
UP, DOWN = "up", "down"  # towards the target, and back from it


@dataclass(frozen=True)
class Traffic:
    up: int
    down: int


class Wiretap:
    """Connections to `address` are passed on to `target`; both are "host:port"."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = host, int(port)
        self.passed: list[tuple[int, str, int]] = []  # when (ns since the epoch), which way, bytes
        self.sockets: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def between(self, begin: int, end: int) -> Traffic:
        """The bytes sent after `begin` and until `end`, in ns since the epoch."""
        total = {UP: 0, DOWN: 0}
        for when, way, count in list(self.passed):
            if begin < when <= end:
                total[way] += count
        return Traffic(total[UP], total[DOWN])

    def close(self) -> None:
        for one in [self.listener, *self.sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self.listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self.target, timeout=10)
        except OSError:  # no server: the client sees the connection end
            near.close()
            return
        far.settimeout(None)
        self.sockets += near, far
        for one in near, far:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._carry, args=(far, near, DOWN), daemon=True)
        back.start()
        self._carry(near, far, UP)
        back.join()
        near.close()
        far.close()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        """Copies one direction until its end, and passes the end on."""
        with suppress(OSError):
            while block := source.recv(BLOCK):
                self.passed.append((time.time_ns(), way, len(block)))
                sink.sendall(block)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def check() -> None:
    """Compares the counts with what a client of a web server sends and receives."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body * 2)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began, sent, received = time.time_ns(), 0, 0
    with Wiretap(f"127.0.0.1:{server.server_address[1]}") as tap:
        host, _, port = tap.address.rpartition(":")
        for size in (0, 1, BLOCK, 3_000_001):
            head = f"POST / HTTP/1.0\r\nContent-Length: {size}\r\n\r\n".encode()
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(head + bytes(size))
                sent += len(head) + size
                while block := client.recv(BLOCK):
                    received += len(block)
        ended = time.time_ns()
        counted = tap.between(began, ended)
    server.shutdown()
    server.server_close()
    assert counted == Traffic(sent, received), f"{counted}, not {sent} up and {received} down"
    assert tap.between(ended, time.time_ns()) == Traffic(0, 0)
    print(f"all of {sent} bytes up and {received} down were counted")


if __name__ == "__main__":
    check()
