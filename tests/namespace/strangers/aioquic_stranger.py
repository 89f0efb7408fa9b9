"""A browser that knows nothing of Culvert, on aioquic.

    aioquic_stranger.py get HOST PORT CA BYTES    fetches /BYTES, changes its port in the midst, fetches it again, closes
    aioquic_stranger.py silence HOST PORT CA      connects until it gives up; not one datagram may come

It ends with status 0 and says what happened, or with a traceback.
"""

import asyncio
import sys

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration

NAME = "site.example"
# Bytes of credit: the rest of an answer cannot come before the client has moved.
WINDOW = 65_536
# Seconds: until the client of a silent port gives up, and until the test has failed.
GIVE_UP, PATIENCE = 2.0, 30


class Browser(QuicConnectionProtocol):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.http = H3Connection(self._quic)
        self.answers = {}
        self.half_way = asyncio.Event()

    def quic_event_received(self, event):
        for answer in self.http.handle_event(event):
            status, body, ended = self.answers[answer.stream_id]
            if isinstance(answer, HeadersReceived):
                status = dict(answer.headers)[b":status"]
            elif isinstance(answer, DataReceived):
                body += answer.data
            if len(body) >= WINDOW // 2:
                self.half_way.set()
            self.answers[answer.stream_id] = (status, body, ended)
            if answer.stream_ended:
                ended.set()

    async def get(self, size):
        """Fetches /size, and compares what comes."""
        stream = self._quic.get_next_available_stream_id()
        ended = asyncio.Event()
        self.answers[stream] = (None, bytearray(), ended)
        names = (b":method", b":scheme", b":authority", b":path")
        values = (b"GET", b"https", NAME.encode(), b"/%d" % size)
        self.http.send_headers(stream, list(zip(names, values)), end_stream=True)
        self.transmit()
        await ended.wait()
        status, body, _ = self.answers[stream]
        assert status == b"200", status
        expected = (bytes(range(251)) * (size // 251 + 1))[:size]
        assert body == expected, f"{len(body)} bytes, not those of the site"

    async def rebind(self):
        """Goes on from another port."""
        before = self._transport
        loop = asyncio.get_running_loop()
        # A protocol sends by the transport that was made last.
        await loop.create_datagram_endpoint(lambda: self, local_addr=("::", 0))
        assert self._transport is not before
        before.close()


class Listener(QuicConnectionProtocol):
    heard = 0

    def datagram_received(self, data, addr):
        Listener.heard += len(data)
        super().datagram_received(data, addr)


def configuration(ca, **more):
    configuration = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=NAME, **more)
    configuration.load_verify_locations(cafile=ca)
    return configuration


async def get(host, port, ca, size):
    credit = configuration(ca, max_data=WINDOW, max_stream_data=WINDOW)
    async with connect(host, int(port), configuration=credit, create_protocol=Browser) as browser:
        fetched = asyncio.ensure_future(browser.get(int(size)))
        await browser.half_way.wait()
        assert not fetched.done(), "the answer came too early to move in its midst"
        await browser.rebind()
        await fetched
        await browser.get(int(size))
    print("fetched")


async def silence(host, port, ca):
    brief = configuration(ca, idle_timeout=GIVE_UP)
    try:
        async with connect(host, int(port), configuration=brief, create_protocol=Listener):
            raise AssertionError("connected")
    except ConnectionError:
        pass
    assert Listener.heard == 0, f"{Listener.heard} bytes came"
    print("silence")


asyncio.run(asyncio.wait_for({"get": get, "silence": silence}[sys.argv[1]](*sys.argv[2:]), PATIENCE))
