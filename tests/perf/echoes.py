"""Small exchanges, for tests that ask how long something was silent. Run inside a namespace by `carrier`, `uplinks` and `users`.

    echoes.py serve ADDRESS PORT                     an echo on UDP and TCP, until it is ended
    echoes.py ask udp|tcp ADDRESS PORT MS SECONDS    16 bytes each MS milliseconds, for so long; prints a line for each that came back:
                                                     when it was sent and when it came, in seconds of CLOCK_MONOTONIC

Over TCP all exchanges are on one connection, which is tried anew until something came back on it.
"""

import contextlib
import select
import socket
import struct
import sys
import threading
import time

BYTES = 16
HEAD = struct.Struct("!dQ")


def serve(address, port):
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    datagrams.bind((address, port))
    listener = socket.create_server((address, port))

    def stream(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def streams():
        while True:
            threading.Thread(target=stream, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=streams, daemon=True).start()
    while True:
        with contextlib.suppress(ConnectionError):
            data, client = datagrams.recvfrom(65536)
            datagrams.sendto(data, client)


def connected(kind, address, port, end):
    while True:
        try:
            if kind == "udp":
                made = socket.socket(type=socket.SOCK_DGRAM)
                made.connect((address, port))
                return made
            made = socket.create_connection((address, port), 1)
        except OSError:
            # There is no route yet, or nobody listens.
            if time.monotonic() > end:
                sys.exit("no connection")
            time.sleep(0.02)
            continue
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


def ask(kind, address, port, interval, seconds):
    end = time.monotonic() + seconds
    made = connected(kind, address, port, end)
    number, buffer, answers = 0, b"", []
    at = time.monotonic()
    while (now := time.monotonic()) < end:
        if now >= at:
            with contextlib.suppress(BlockingIOError, ConnectionError, PermissionError):
                made.send(HEAD.pack(now, number), socket.MSG_DONTWAIT)
            number, at = number + 1, max(at + interval, now - interval)
        if not select.select([made], [], [], max(at - time.monotonic(), 0))[0]:
            continue
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            try:
                data = made.recv(65536, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                data = b""
            if not data and answers:
                print("ended", flush=True)
                return
            if not data:
                made, number = connected(kind, address, port, end), 0
                continue
            now = time.monotonic()
            buffer += data
            while len(buffer) >= BYTES:
                sent, _ = HEAD.unpack(buffer[:BYTES])
                buffer = buffer[BYTES:]
                answers.append((sent, now))
    for sent, came in answers:
        print(f"{sent:.6f} {came:.6f}")
    print("sent", number)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        _, _, kind, address, port, ms, seconds = sys.argv
        ask(kind, address, int(port), float(ms) / 1e3, float(seconds))
