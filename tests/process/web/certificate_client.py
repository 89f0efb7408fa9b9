"""Clients with certificates and chosen passwords, on aioquic, h2 and ssl, and the library that made the password's hash.

    certificate_client.py connect PORT VERSION CERTIFICATE CREDENTIALS AUTHORITY   what a CONNECT is answered. VERSION of HTTP is 1, 2 or 3,
                                                                   or 1-1.2: over TLS 1.2. CERTIFICATE is a path without .pem and .key,
                                                                   or "-": none. CREDENTIALS likewise
    certificate_client.py get PORT VERSION CERTIFICATE CREDENTIALS PATH            the status and the content of a page; the credentials
                                                                   are in authorization
    certificate_client.py revoked PORT PATH CREDENTIALS            opens extended CONNECT over HTTP/3, prints "open", waits for its end, and
                                                                   prints how that came
    certificate_client.py crowd PORT COUNT                         begins COUNT handshakes over QUIC and completes none; prints, of one that
                                                                   it completes then, how often it was asked to prove its address, and the
                                                                   status of a page
    certificate_client.py guess PORT NAME SECONDS                  guesses NAME's password from many prefixes at once; prints how many
                                                                   guesses were answered 405
    certificate_client.py hash PASSWORD                            the Argon2id hash of it, by argon2-cffi
    certificate_client.py verify HASH PASSWORD                     whether it is that of it

It ends with status 0, or with a traceback.
"""

import asyncio
import base64
import functools
import socket
import ssl
import sys
import threading
import time

from aioquic.asyncio import QuicConnectionProtocol, connect as connect_quic
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamReset

import user_client
from visitor import NAME

PATIENCE = 30


def connect_tls(port, *protocols, certificate="-", version=None, ragged=True, host="127.0.0.1", source=None):
    plain = socket.create_connection((host, port), timeout=60, source_address=source)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(protocols)
    if version:
        context.maximum_version = version
    if certificate != "-":
        context.load_cert_chain(certificate + ".pem", certificate + ".key")
    return context.wrap_socket(plain, server_hostname=NAME, suppress_ragged_eofs=ragged)


def tunnel(port, version, certificate):
    version, _, tls = version.partition("-")
    tls = ssl.TLSVersion.TLSv1_2 if tls else None
    user_client.connect_tls = functools.partial(connect_tls, certificate=certificate, version=tls)
    return user_client.tunnel(port, version)


class Client(QuicConnectionProtocol):
    """HTTP/3; what comes is in a queue for each stream."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # The one switch of aioquic that says H3_DATAGRAM in SETTINGS.
        self.http, self.events = H3Connection(self._quic, enable_webtransport=True), {}

    def of(self, stream):
        return self.events.setdefault(stream, asyncio.Queue())

    def quic_event_received(self, event):
        if isinstance(event, StreamReset):
            self.of(event.stream_id).put_nowait(("reset", event.error_code))
        for event in self.http.handle_event(event):
            if isinstance(event, HeadersReceived):
                self.of(event.stream_id).put_nowait(("headers", dict(event.headers)))
            elif isinstance(event, DataReceived) and event.data:
                self.of(event.stream_id).put_nowait(("data", event.data))
            if getattr(event, "stream_ended", False):
                self.of(event.stream_id).put_nowait(("end", None))

    async def next(self, stream):
        return await asyncio.wait_for(self.of(stream).get(), PATIENCE)

    async def ask(self, head, end=False):
        stream = self._quic.get_next_available_stream_id()
        self.http.send_headers(stream, [(name.encode(), value.encode()) for name, value in head], end_stream=end)
        self.transmit()
        kind, headers = await self.next(stream)
        assert kind == "headers", (kind, headers)
        return stream, headers[b":status"].decode()


def quic(certificate="-"):
    made = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=NAME, max_datagram_frame_size=65536)
    made.verify_mode = ssl.CERT_NONE
    if certificate != "-":
        made.load_cert_chain(certificate + ".pem", certificate + ".key")
    return made


def http3(port, certificate="-"):
    return connect_quic("127.0.0.1", port, configuration=quic(certificate), create_protocol=Client)


def page(path):
    return [(":method", "GET"), (":scheme", "https"), (":authority", NAME), (":path", path)]


async def connect_http3(port, certificate, credentials, authority):
    async with http3(port, certificate) as client:
        head = [(":method", "CONNECT"), (":authority", authority)] + user_client.fields(credentials)
        print((await client.ask(head))[1])


async def get_http3(port, certificate, credentials, path):
    async with http3(port, certificate) as client:
        stream, status = await client.ask(page(path) + user_client.fields(credentials, "authorization"), end=True)
        content = b""
        while (event := await client.next(stream))[0] == "data":
            content += event[1]
        print(status, content.decode())


def connect(port, version, certificate, credentials, authority):
    if version == "3":
        return asyncio.run(connect_http3(port, certificate, credentials, authority))
    print(tunnel(port, version, certificate).connect(authority, user_client.fields(credentials)))


def get(port, version, certificate, credentials, path):
    if version == "3":
        return asyncio.run(get_http3(port, certificate, credentials, path))
    client, fields = tunnel(port, version, certificate), user_client.fields(credentials, "authorization")
    if version == "2":
        status = client.open(page(path) + fields)
        client.end()
    else:
        status = client.open(f"GET {path} HTTP/1.1", fields + [("Connection", "close")])
    content = b""
    while data := client.receive():
        content += data
    print(status, content.decode())


async def revoked_http3(port, path, credentials):
    async with http3(port) as client:
        protocol = "connect-ip" if "/ip/" in path else "connect-udp"
        head = [(":method", "CONNECT"), (":protocol", protocol), (":scheme", "https"), (":authority", NAME),
                (":path", path), ("capsule-protocol", "?1")]
        stream, status = await client.ask(head + user_client.fields(credentials))
        assert status == "200", status
        print("open", flush=True)
        while (event := await client.next(stream))[0] == "data":
            pass
        print(*event)


def revoked(port, path, credentials):
    asyncio.run(revoked_http3(port, path, credentials))


async def crowd_http3(port, count):
    sockets = []
    for number in range(count):
        plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # One prefix has no more than a few connections.
        plain.bind((f"127.{1 + number}.0.1", 0))
        begun = QuicConnection(configuration=quic())
        begun.connect(("127.0.0.1", port), now=time.monotonic())
        for datagram, _ in begun.datagrams_to_send(time.monotonic()):
            plain.sendto(datagram, ("127.0.0.1", port))
        sockets.append(plain)
    time.sleep(0.5)
    async with http3(port) as client:
        _, status = await client.ask(page("/echo"), end=True)
        print(client._quic._retry_count, status)


def crowd(port, count):
    asyncio.run(crowd_http3(port, int(count)))


def guess(port, name, seconds):
    end, answered = time.monotonic() + float(seconds), []

    def guesses(number):
        while time.monotonic() < end:
            try:
                # Each from a prefix of its own.
                tls = connect_tls(port, "http/1.1", source=(f"127.{number}.{len(answered) % 250}.1", 0))
            except OSError:
                # Handshakes have a bound, too.
                time.sleep(0.02)
                continue
            field = base64.b64encode(f"{name}:guess {number} {time.monotonic()}".encode()).decode()
            tls.sendall(f"CONNECT web:80 HTTP/1.1\r\nHost: {NAME}\r\nProxy-Authorization: Basic {field}\r\n\r\n".encode())
            answered.append(tls.recv(65536)[9:12])
            tls.close()
            # Handshakes stay below their own bound, which is for all: forty guesses a second at most.
            time.sleep(0.1)

    threads = [threading.Thread(target=guesses, args=[number]) for number in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answered) == {b"405"}, set(answered)
    print(len(answered))


def hash(password):
    import argon2

    print(argon2.PasswordHasher(time_cost=2, memory_cost=8192, parallelism=2).hash(password))


def verify(kept, password):
    import argon2

    try:
        print(argon2.PasswordHasher().verify(kept, password))
    except argon2.exceptions.VerifyMismatchError:
        print(False)


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb not in ("hash", "verify"):
        rest[0] = int(rest[0])
    globals()[verb](*rest)
