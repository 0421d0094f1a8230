"""A relay on loopback that counts what passes, each way, and when; it reads nothing of it.

What is counted is what TCP carries: TLS and HTTP included, the headers of TCP and IP not. Its own
check, against a small web server: python benchmarks/wiretap.py
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
    """Whoever connects to `address` speaks with `target`; both are "host:port"."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = host, int(port)
        self.passed: list[tuple[int, str, int]] = []  # when (ns since the epoch), which way, bytes
        self.sockets: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def between(self, begin: int, end: int) -> Traffic:
        """What passed after `begin` and until `end`, as time.time_ns() and files tell time."""
        total = {UP: 0, DOWN: 0}
        for when, way, count in list(self.passed):
            if begin < when <= end:
                total[way] += count
        return Traffic(total[UP], total[DOWN])

    def close(self) -> None:
        for one in [self.listener, *self.sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
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
        except OSError:  # nobody is there: whoever asked sees the connection end
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
        """One way, until its end; the end is passed on too."""
        with suppress(OSError):
            while block := source.recv(BLOCK):
                self.passed.append((time.time_ns(), way, len(block)))
                sink.sendall(block)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def check() -> None:
    """Counts what a client of a web server sends and gets, byte for byte."""
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
    began, sent, got = time.time_ns(), 0, 0
    with Wiretap(f"127.0.0.1:{server.server_address[1]}") as tap:
        host, _, port = tap.address.rpartition(":")
        for size in (0, 1, BLOCK, 3_000_001):
            head = f"POST / HTTP/1.0\r\nContent-Length: {size}\r\n\r\n".encode()
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(head + bytes(size))
                sent += len(head) + size
                while block := client.recv(BLOCK):
                    got += len(block)
        ended = time.time_ns()
        found = tap.between(began, ended)
    server.shutdown()
    server.server_close()
    assert found == Traffic(sent, got), f"{found}, but {sent} were sent and {got} came back"
    assert tap.between(ended, time.time_ns()) == Traffic(0, 0)
    print(f"all of {sent} bytes up and {got} down were counted")


if __name__ == "__main__":
    check()
