"""A user of an agent's web server on aioquic, which knows nothing of Culvert. CREDENTIALS are name:password, or "-": none.

    users_client.py connect PORT CA NAME CREDENTIALS AUTHORITY BYTES   sends so many bytes to an echo and ends; prints the status, and how
                                                                       many came back before the end
    users_client.py udp PORT CA NAME CREDENTIALS HOST TARGET COUNT     COUNT datagrams, one after the other, to an echo at HOST's port
                                                                       TARGET, every third as a capsule; prints the status and how many
                                                                       came back
    users_client.py reset PORT CA NAME CREDENTIALS AUTHORITY           opens a connection and resets it
    users_client.py broken PORT CA NAME CREDENTIALS AUTHORITY          opens a connection, which the target breaks off; prints the code
    users_client.py answers PORT CA NAME CREDENTIALS                   what CONNECT, extended CONNECT and GET are answered
    users_client.py curl PORT CA NAME CREDENTIALS URL VERSION          asks for URL by libcurl (curl_cffi) with the agent as its HTTP/3
                                                                       proxy; with VERSION 3 by HTTP/3 inside HTTP/3; prints the status
                                                                       and the content
    users_client.py hostile PORT CA NAME CREDENTIALS HOST TARGET COUNT COUNT sessions one after another, each broken in its own way, and
                                                                       then a good one; prints what that got

It ends with status 0, or with a traceback.
"""

import asyncio
import base64
import io
import ssl
import sys

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DatagramReceived, DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import StreamReset

PATIENCE = 30
CANCELLED = 0x10C


class Client(QuicConnectionProtocol):
    """HTTP/3 with datagrams; what comes is in a queue for each stream."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # The one switch of aioquic that says H3_DATAGRAM in SETTINGS.
        self.http = H3Connection(self._quic, enable_webtransport=True)
        self.events = {}

    def quic_event_received(self, event):
        if isinstance(event, StreamReset):
            self.of(event.stream_id).put_nowait(("reset", event.error_code))
        for event in self.http.handle_event(event):
            queue = self.of(event.stream_id)
            if isinstance(event, HeadersReceived):
                queue.put_nowait(("headers", event.headers))
            elif isinstance(event, DataReceived):
                event.data and queue.put_nowait(("data", event.data))
            elif isinstance(event, DatagramReceived):
                queue.put_nowait(("datagram", event.data))
            if getattr(event, "stream_ended", False):
                queue.put_nowait(("end", None))

    def of(self, stream):
        return self.events.setdefault(stream, asyncio.Queue())

    async def next(self, stream):
        return await asyncio.wait_for(self.of(stream).get(), PATIENCE)

    def ask(self, fields, credentials, end=False, field="proxy-authorization"):
        stream = self._quic.get_next_available_stream_id()
        if credentials != "-":
            fields = [*fields, (field, "Basic " + base64.b64encode(credentials.encode()).decode())]
        self.http.send_headers(stream, [(name.encode(), value.encode()) for name, value in fields], end_stream=end)
        self.transmit()
        return stream

    async def headers(self, stream):
        # Datagrams may overtake the answer (RFC 9297, section 2.1): they are kept for whoever asks next.
        early = []
        while (event := await self.next(stream))[0] == "datagram":
            early.append(event)
        for datagram in early:
            self.of(stream).put_nowait(datagram)
        assert event[0] == "headers", event
        return event[1]

    async def status(self, stream):
        return int(dict(await self.headers(stream))[b":status"])


def tcp(authority):
    return [(":method", "CONNECT"), (":authority", authority)]


def udp(name, host, target, protocol="connect-udp"):
    path = f"/.well-known/masque/udp/{host.replace(':', '%3A')}/{target}/"
    return [(":method", "CONNECT"), (":protocol", protocol), (":scheme", "https"), (":authority", name), (":path", path), ("capsule-protocol", "?1")]


def get(name):
    return [(":method", "GET"), (":scheme", "https"), (":authority", name), (":path", "/")]


def capsule(kind, value):
    return encode_uint_var(kind) + encode_uint_var(len(value)) + value


def connected(port, ca, name):
    made = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=name, max_datagram_frame_size=65536)
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(ca)
    return connect("127.0.0.1", port, configuration=made, create_protocol=Client)


async def connect_tcp(port, ca, name, credentials, authority, count):
    async with connected(port, ca, name) as client:
        stream = client.ask(tcp(authority), credentials)
        status = await client.status(stream)
        if status != 200:
            print(status, 0)
            return
        # Without "!", at which the echo resets.
        content = bytes(34 + index % 199 for index in range(int(count)))
        client.http.send_data(stream, content, end_stream=True)
        client.transmit()
        back = bytearray()
        while (event := await client.next(stream))[0] == "data":
            back += event[1]
        assert event[0] == "end" and back == content, (event, len(back))
        print(status, len(back))


async def connect_udp(port, ca, name, credentials, host, target, count):
    async with connected(port, ca, name) as client:
        stream = client.ask(udp(name, host, target), credentials)
        # Before the answer: a client need not wait.
        client.http.send_datagram(stream, b"\0early")
        client.transmit()
        headers = dict(await client.headers(stream))
        status = int(headers[b":status"])
        if status != 200:
            print(status, 0)
            return
        assert headers[b"capsule-protocol"] == b"?1"
        assert await client.next(stream) == ("datagram", b"\0early")
        back = 0
        for number in range(int(count)):
            payload = b"\0" + str(number).encode() + bytes(number % 900)
            if number % 3 == 2:
                client.http.send_data(stream, capsule(0, payload), end_stream=False)
            else:
                client.http.send_datagram(stream, payload)
            client.transmit()
            assert await client.next(stream) == ("datagram", payload)
            back += 1
        # Too large for a DATAGRAM frame: the answer is a capsule, too.
        large = b"\0" + bytes(9000)
        client.http.send_data(stream, capsule(0, large), end_stream=False)
        client.transmit()
        came = b""
        while len(came) < len(capsule(0, large)):
            kind, data = await client.next(stream)
            assert kind == "data", kind
            came += data
        assert came == capsule(0, large)
        client.http.send_data(stream, b"", end_stream=True)
        client.transmit()
        assert await client.next(stream) == ("end", None)
        print(status, back)


async def reset(port, ca, name, credentials, authority):
    async with connected(port, ca, name) as client:
        stream = client.ask(tcp(authority), credentials)
        assert await client.status(stream) == 200
        client.http.send_data(stream, b"x", end_stream=False)
        client.transmit()
        assert await client.next(stream) == ("data", b"x")
        client._quic.reset_stream(stream, CANCELLED)
        client.transmit()
        kind, code = await client.next(stream)
        print(kind, hex(code))


async def broken(port, ca, name, credentials, authority):
    async with connected(port, ca, name) as client:
        stream = client.ask(tcp(authority), credentials)
        assert await client.status(stream) == 200
        client.http.send_data(stream, b"!", end_stream=False)
        client.transmit()
        while (event := await client.next(stream))[0] == "data":
            pass
        print(event[0], event[1] and hex(event[1]))


async def answers(port, ca, name, credentials):
    asked = [tcp("127.0.0.1:9"), tcp("web:80"), udp(name, "127.0.0.1", 9), udp(name, "web", 80, "connect-ip"), get(name)]
    async with connected(port, ca, name) as client:
        for fields in asked:
            for field in ("proxy-authorization", "authorization"):
                stream = client.ask(fields, credentials, end=fields == get(name), field=field)
                said = [await client.headers(stream)]
                while (event := await client.next(stream))[0] == "data":
                    said.append(event)
                print(said, event)


async def hostile(port, ca, name, credentials, host, target, count):
    async with connected(port, ca, name) as client:
        quic = client._quic
        for number in range(int(count)):
            stream = client.ask(udp(name, host, target), credentials)
            kind = number % 8
            if kind == 0:
                # An endless capsule of a known type, and one of an unknown type behind a whole one.
                quic.send_stream_data(stream, encode_uint_var(0) + encode_uint_var(3000) + b"\0" + encode_uint_var((1 << 62) - 1)[:1])
            elif kind == 1:
                endless = encode_uint_var(0) + encode_uint_var((1 << 62) - 1) + bytes(2000)
                client.http.send_data(stream, endless, end_stream=False)
            elif kind == 2:
                endless = encode_uint_var(0x29) + encode_uint_var((1 << 62) - 1) + bytes(2000)
                client.http.send_data(stream, capsule(0x1234, bytes(100)) + endless, end_stream=False)
            elif kind == 3:
                # Other contexts, none, and a stream that nobody opened.
                client.http.send_datagram(stream, b"\x01x")
                client.http.send_datagram(stream, b"")
                client.http.send_datagram(stream + 4000, b"\0x")
            elif kind == 4:
                quic.reset_stream(stream, CANCELLED)
            elif kind == 5:
                quic.stop_stream(stream, CANCELLED)
            elif kind == 6:
                await client.status(stream)
                quic.stop_stream(stream, CANCELLED)
            client.transmit()
            if kind in (1, 2, 3, 7):
                status = await client.status(stream)
                assert status == 200, status
            if kind not in (4,):
                quic.reset_stream(stream, CANCELLED)
                client.transmit()
        stream = client.ask(udp(name, host, target), credentials)
        status = await client.status(stream)
        client.http.send_datagram(stream, b"\0still there")
        client.transmit()
        assert await client.next(stream) == ("datagram", b"\0still there")
        print(status)


async def curl(port, ca, name, credentials, url, version):
    from curl_cffi import Curl, CurlInfo, CurlOpt

    content, handle = io.BytesIO(), Curl()
    handle.setopt(CurlOpt.URL, url.encode())
    handle.setopt(CurlOpt.PROXY, f"https://{name}:{port}".encode())
    # CURLPROXY_HTTPS3
    handle.setopt(CurlOpt.PROXYTYPE, 8)
    handle.setopt(CurlOpt.HTTPPROXYTUNNEL, 1)
    # As a field of its own: with PROXYUSERPWD this libcurl puts :protocol behind the credentials, which RFC 9114 §4.3 forbids.
    field = base64.b64encode(credentials.encode())
    handle.setopt(CurlOpt.PROXYHEADER, [b"proxy-authorization: Basic " + field])
    # libcurl's HTTP/3 proxies take no PROXY_CAINFO.
    handle.setopt(CurlOpt.PROXY_SSL_VERIFYPEER, 0)
    handle.setopt(CurlOpt.CAINFO, ca.encode())
    handle.setopt(CurlOpt.RESOLVE, [f"{name}:{port}:127.0.0.1".encode()])
    handle.setopt(CurlOpt.NOPROXY, b"")
    handle.setopt(CurlOpt.TIMEOUT, PATIENCE)
    handle.setopt(CurlOpt.WRITEDATA, content)
    if version == "3":
        # CURL_HTTP_VERSION_3ONLY
        handle.setopt(CurlOpt.HTTP_VERSION, 31)
    handle.perform()
    print(handle.getinfo(CurlInfo.RESPONSE_CODE), content.getvalue().decode())


verbs = {"connect": connect_tcp, "udp": connect_udp, "reset": reset, "broken": broken, "answers": answers, "curl": curl, "hostile": hostile}
verb, port, *rest = sys.argv[1:]
asyncio.run(verbs[verb](int(port), *rest))
