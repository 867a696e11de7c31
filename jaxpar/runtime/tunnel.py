"""A process between this host's JAX client and the coordination service on host 0: ``tunnel.py ADDRESS PORT``.

It prints the local port to connect to, and ends with the process that started it. When host 0 dies it keeps the local
connection open, in silence. A JAX client that sees the connection break aborts its process within milliseconds with a
C++ stack trace, which no option turns off; ``link.py`` notices the same death and says it in one line. A process rather
than a thread, since the client may hold the interpreter lock while it waits for an answer.

Only the standard library: it starts in a few hundredths of a second.
"""

import contextlib
import signal
import socket
import sys
import threading


def carry(source: socket.socket, target: socket.socket, then_close: bool) -> None:
    """Bytes from ``source`` to ``target`` until either ends; then close ``target``, or leave it open in silence."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    if then_close:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def serve(server: socket.socket, address: tuple[str, int]) -> None:
    """Carry every local connection to ``address``; one that cannot be made is closed, and the client tries again."""
    while True:
        local, _ = server.accept()
        try:
            remote = socket.create_connection(address, timeout=10)
        except OSError:
            local.close()
            continue
        remote.settimeout(None)
        for end in (local, remote):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=carry, args=(local, remote, True), daemon=True).start()
        threading.Thread(target=carry, args=(remote, local, False), daemon=True).start()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the process that started this one
        signal.signal(number, signal.SIG_IGN)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    threading.Thread(target=serve, args=(listening, (sys.argv[1], int(sys.argv[2]))), daemon=True).start()
    sys.stdin.read()  # its end is the end of the process that started this one
