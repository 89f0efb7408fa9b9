"""An HTTP/3 client on aioquic, which knows nothing of Culvert, at the port of an agent with [http].

    web_client.py get PORT CA NAME PATH       prints the status and the content
    web_client.py post PORT CA NAME BYTES     posts so many bytes; prints the status and the content
    web_client.py method PORT CA NAME METHOD  prints the status
    web_client.py curl PORT CA NAME METHOD    the same with libcurl (curl_cffi), whose ClientHello is Chrome's; prints status and content
    web_client.py silent PORT NAME            begins handshakes for a second; prints how many bytes came back. NAME may be "-": none
    web_client.py hostile PORT CA NAME COUNT  COUNT requests one after another: whole, in pieces, reset, stopped, malformed; prints how
                                              many were answered, and then does a GET on a connection that has broken no rule
    web_client.py flood PORT CA NAME COUNT    COUNT packets that nothing opens to a connection of its own, and then a GET on it; prints the
                                              status
    web_client.py crowd PORT CA NAME COUNT    sixteen requests on each of COUNT connections; prints how many get 503 within five seconds

It ends with status 0, or with a traceback.
"""

import asyncio
import contextlib
import io
import socket
import ssl
import sys
import time

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, StreamReset

PATIENCE = 30


def configuration(name, ca=None):
    made = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=name)
    made.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    if ca:
        made.load_verify_locations(ca)
    return made


class Client(QuicConnectionProtocol):
    """HTTP/3 on one connection; answers by stream."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.http = H3Connection(self._quic)
        self.answers, self.over, self.terminated = {}, {}, None

    def quic_event_received(self, event):
        if isinstance(event, ConnectionTerminated):
            self.terminated = event
            for over in self.over.values():
                over.done() or over.set_result(False)
        if isinstance(event, StreamReset):
            over = self.over.get(event.stream_id)
            over is None or over.done() or over.set_result(False)
        for event in self.http.handle_event(event):
            answer = self.answers.setdefault(event.stream_id, [None, bytearray()])
            if isinstance(event, HeadersReceived):
                answer[0] = dict(event.headers)
            elif isinstance(event, DataReceived):
                answer[1] += event.data
            if event.stream_ended:
                over = self.over.get(event.stream_id)
                over is None or over.done() or over.set_result(True)

    def open(self):
        stream = self._quic.get_next_available_stream_id()
        self.over[stream] = asyncio.get_running_loop().create_future()
        return stream

    async def answer(self, stream):
        """Status and content of the answer; None if the stream was reset."""
        whole = await asyncio.wait_for(self.over[stream], PATIENCE)
        del self.over[stream]
        headers, content = self.answers.pop(stream, (None, b""))
        return (int(headers[b":status"]), bytes(content)) if whole else None

    def headers(self, name, method="GET", path="/", more=()):
        fields = [(":method", method), (":scheme", "https"), (":authority", name), (":path", path), *more]
        return [(name.encode(), value.encode()) for name, value in fields]

    async def ask(self, name, method="GET", path="/", content=None, more=()):
        stream = self.open()
        if content is not None:
            more = [*more, ("content-length", str(len(content)))]
        fields = self.headers(name, method, path, more)
        if method == "CONNECT":
            fields = [fields[0], (b":authority", b"b.example:443")]
        self.http.send_headers(stream, fields, end_stream=content is None and method != "CONNECT")
        if content is not None:
            self.http.send_data(stream, content, end_stream=True)
        self.transmit()
        return await self.answer(stream)


def connected(port, ca, name):
    return connect("127.0.0.1", port, configuration=configuration(name, ca), create_protocol=Client)


async def single(port, ca, name, **request):
    async with connected(port, ca, name) as client:
        status, content = await client.ask(name, **request)
        print(status, content.decode())


def curl(port, ca, name, method):
    from curl_cffi import Curl, CurlInfo, CurlOpt

    content, handle = io.BytesIO(), Curl()
    handle.setopt(CurlOpt.URL, f"https://{name}:{port}/curl".encode())
    handle.setopt(CurlOpt.RESOLVE, [f"{name}:{port}:127.0.0.1".encode()])
    # CURL_HTTP_VERSION_3ONLY
    handle.setopt(CurlOpt.HTTP_VERSION, 31)
    handle.setopt(CurlOpt.CAINFO, ca.encode())
    handle.setopt(CurlOpt.NOBODY, method == "HEAD")
    handle.setopt(CurlOpt.TIMEOUT, PATIENCE)
    handle.setopt(CurlOpt.WRITEDATA, content)
    handle.impersonate("chrome")
    handle.setopt(CurlOpt.HTTP_VERSION, 31)
    handle.perform()
    assert handle.getinfo(CurlInfo.HTTP_VERSION) == 30, "HTTP/3"
    print(handle.getinfo(CurlInfo.RESPONSE_CODE), content.getvalue().decode())


def silent(port, name):
    """How many bytes come back to handshakes that give `name`: one, and another at each probe."""
    received = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        plain.settimeout(0.1)
        made = configuration(None if name == "-" else name)
        quic = QuicConnection(configuration=made)
        quic.connect(("127.0.0.1", port), now=time.monotonic())
        end = time.monotonic() + 1
        while time.monotonic() < end:
            timer = quic.get_timer()
            if timer is not None and timer <= time.monotonic():
                quic.handle_timer(time.monotonic())
            for datagram, _ in quic.datagrams_to_send(time.monotonic()):
                plain.sendto(datagram, ("127.0.0.1", port))
            try:
                received += len(plain.recv(65536))
            except TimeoutError:
                pass
    print(received)


async def hostile(port, ca, name, count):
    answered = 0
    async with connected(port, ca, name) as client:
        quic = client._quic
        section = client.http._encode_headers
        for number in range(count):
            stream = client.open()
            fields = client.headers(name, path=f"/{number}")
            request = encode_uint_var(1)
            encoded = section(stream, fields)
            request += encode_uint_var(len(encoded)) + encoded
            grease = encode_uint_var(0x21) + encode_uint_var(40) + bytes(40)
            kind = number % 5
            if kind == 0:
                quic.send_stream_data(stream, grease + request + grease, end_stream=True)
            elif kind == 1 and number % 100 == 1:
                # Byte by byte, each in a packet of its own.
                for byte in request:
                    quic.send_stream_data(stream, bytes([byte]))
                    client.transmit()
                quic.send_stream_data(stream, b"", end_stream=True)
            elif kind == 2:
                # A request, and at once no interest in it.
                quic.send_stream_data(stream, request[: len(request) // 2])
                quic.reset_stream(stream, 0x10C)
                quic.stop_stream(stream, 0x10C)
                client.over.pop(stream)
            elif kind == 3:
                quic.send_stream_data(stream, request + encode_uint_var(0x21) + encode_uint_var((1 << 62) - 1) + bytes(100))
                client.transmit()
                if number % 2:
                    quic.reset_stream(stream, 0x10C)
                quic.stop_stream(stream, 0x10C)
                number % 2 or quic.reset_stream(stream, 0x10C)
                client.over.pop(stream)
            elif kind == 4:
                # Malformed: it has no path.
                encoded = section(stream, fields[:3])
                quic.send_stream_data(stream, encode_uint_var(1) + encode_uint_var(len(encoded)) + encoded, end_stream=True)
            else:
                quic.send_stream_data(stream, request, end_stream=True)
            client.transmit()
            if stream in client.over:
                answer = await client.answer(stream)
                answered += answer is not None and answer[0] == 200
            elif number % 10 == 2:
                # Streams come back one by one as the server forgets them.
                await asyncio.sleep(0)
        assert client.terminated is None, client.terminated
        status, _ = await client.ask(name)
        assert status == 200, status
    # Rules of the connection: DATA first, HEADERS of the dynamic table, a second control stream.
    for break_rule in (
        lambda client: client._quic.send_stream_data(client.open(), b"\0\x01x"),
        lambda client: client._quic.send_stream_data(client.open(), b"\x01\x03\x05\x00\x80"),
        lambda client: client._quic.send_stream_data(client._quic.get_next_available_stream_id(True), b"\0\x04\0"),
    ):
        async with connected(port, ca, name) as client:
            break_rule(client)
            client.transmit()
            await asyncio.wait_for(client.wait_closed(), PATIENCE)
            assert client.terminated.error_code in (0x103, 0x105, 0x200), client.terminated
    print(answered)


async def flood(port, ca, name, count):
    """Sends packets that nothing can open to a connection of its own."""
    async with connected(port, ca, name) as client:
        known = client._quic._peer_cid.cid
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
            plain.connect(("127.0.0.1", port))
            for _ in range(count):
                try:
                    plain.send(b"\x40" + known + bytes(40))
                except BlockingIOError:
                    pass
        status, _ = await client.ask(name)
        print(status)


async def crowd(port, ca, name, connections):
    """Sixteen requests on each of some connections; how many are answered with 503 within some seconds."""
    refused = 0

    async def one(client):
        nonlocal refused
        status, _ = await client.ask(name)
        refused += status == 503

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port, ca, name)) for _ in range(connections)]
        asking = [asyncio.ensure_future(one(client)) for client in clients for _ in range(16)]
        await asyncio.wait(asking, timeout=5)
        print(refused)
        for task in asking:
            task.cancel()


verb, port, *rest = sys.argv[1:]
port = int(port)
if verb == "get":
    asyncio.run(single(port, rest[0], rest[1], path=rest[2], more=[("cookie", "a=1"), ("cookie", "b=2")]))
elif verb == "post":
    asyncio.run(single(port, rest[0], rest[1], method="POST", content=bytes(int(rest[2]))))
elif verb == "method":
    asyncio.run(single(port, rest[0], rest[1], method=rest[2]))
elif verb == "curl":
    curl(port, *rest)
elif verb == "silent":
    silent(port, rest[0])
elif verb == "hostile":
    asyncio.run(hostile(port, rest[0], rest[1], int(rest[2])))
elif verb == "crowd":
    asyncio.run(crowd(port, rest[0], rest[1], int(rest[2])))
elif verb == "flood":
    asyncio.run(flood(port, rest[0], rest[1], int(rest[2])))
else:
    raise SystemExit(__doc__)
