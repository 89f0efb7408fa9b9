"""A user of CONNECT-IP (RFC 9484) on aioquic, which knows nothing of Culvert: packets are made here, without a device.

    packets_client.py ping HOST PORT CA NAME CREDENTIALS PATH TARGET...     pings each TARGET three times; prints the status, the addresses,
                                                                            the routes and how many answers came
    packets_client.py hold HOST PORT CA NAME CREDENTIALS PATH               prints the addresses whenever they are told, answers pings, and
                                                                            prints the end
    packets_client.py hostile HOST PORT CA NAME CREDENTIALS PATH TARGET     breaks sessions, each in its own way, and then pings TARGET in a
                                                                            good one; prints what each ended with, and how many answers came

It ends with status 0, or with a traceback.
"""

import asyncio
import base64
import ipaddress
import ssl
import struct
import sys

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.buffer import Buffer, encode_uint_var
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DatagramReceived, DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import StreamReset

PATIENCE = 20


class Client(QuicConnectionProtocol):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # The one switch of aioquic that says H3_DATAGRAM in SETTINGS.
        self.http = H3Connection(self._quic, enable_webtransport=True)
        self.sessions = {}

    def quic_event_received(self, event):
        if isinstance(event, StreamReset) and event.stream_id in self.sessions:
            self.sessions[event.stream_id].put(("end", hex(event.error_code)))
        for event in self.http.handle_event(event):
            session = self.sessions.get(event.stream_id)
            if session is None:
                continue
            if isinstance(event, HeadersReceived):
                session.put(("headers", dict(event.headers)))
            elif isinstance(event, DataReceived):
                session.data(event.data)
            elif isinstance(event, DatagramReceived):
                session.datagram(event.data)
            if getattr(event, "stream_ended", False):
                session.put(("end", None))

    def ask(self, name, credentials, path):
        stream = self._quic.get_next_available_stream_id()
        field = "Basic " + base64.b64encode(credentials.encode()).decode()
        fields = [(":method", "CONNECT"), (":protocol", "connect-ip"), (":scheme", "https"), (":authority", name), (":path", path), ("capsule-protocol", "?1"), ("proxy-authorization", field)]
        self.sessions[stream] = Session(self, stream)
        self.http.send_headers(stream, [(key.encode(), value.encode()) for key, value in fields], end_stream=False)
        self.transmit()
        return self.sessions[stream]


class Session:
    """A request: headers, capsules, packets and the end, in the order in which they came."""

    def __init__(self, client, stream):
        self.client, self.stream, self.events, self.bytes = client, stream, asyncio.Queue(), b""

    def put(self, event):
        self.events.put_nowait(event)

    def datagram(self, data):
        assert data[:1] == b"\0", data[:4]
        self.put(("packet", data[1:]))

    def data(self, data):
        self.bytes += data
        while True:
            buffer = Buffer(data=self.bytes)
            try:
                kind, length = buffer.pull_uint_var(), buffer.pull_uint_var()
                value = buffer.pull_bytes(length)
            except ValueError:
                return
            self.bytes = self.bytes[buffer.tell() :]
            if kind == 0:
                self.datagram(value)
            else:
                self.put(({1: "addresses", 3: "routes"}[kind], value))

    async def next(self, *kinds, patience=PATIENCE):
        while True:
            kind, value = await asyncio.wait_for(self.events.get(), patience)
            if not kinds or kind in kinds:
                return kind, value
            assert kind != "end", f"ended with {value}, and not {kinds}"

    def send_packet(self, packet):
        if len(packet) > 1000:
            # More than this client's packets hold.
            return self.send(capsule(0, b"\0" + packet))
        self.client.http.send_datagram(self.stream, b"\0" + packet)
        self.client.transmit()

    def send(self, data):
        self.client.http.send_data(self.stream, data, end_stream=False)
        self.client.transmit()

    async def opened(self):
        """The status, the addresses and the routes."""
        headers = (await self.next("headers"))[1]
        status = int(headers[b":status"])
        if status != 200:
            return status, [], headers[b"proxy-status"].decode()
        assert headers[b"capsule-protocol"] == b"?1"
        addresses = [address for _, address in assigned((await self.next("addresses"))[1])]
        return status, addresses, routes((await self.next("routes"))[1])

    async def pings(self, source, target, size=100):
        answers = 0
        for number in range(3):
            self.send_packet(echo(source, target, number, bytes(size)))
            while True:
                _, packet = await self.next("packet")
                if is_answer(packet, source, target, number, size):
                    break
            answers += 1
        return answers


def assigned(value):
    buffer, found = Buffer(data=value), []
    while not buffer.eof():
        request, version = buffer.pull_uint_var(), buffer.pull_uint8()
        address = ipaddress.ip_address(buffer.pull_bytes(4 if version == 4 else 16))
        found.append((request, f"{address}/{buffer.pull_uint8()}"))
    return found


def routes(value):
    buffer, found = Buffer(data=value), []
    while not buffer.eof():
        size = 4 if buffer.pull_uint8() == 4 else 16
        first, last = (ipaddress.ip_address(buffer.pull_bytes(size)) for _ in range(2))
        found.append(f"{first}-{last}/{buffer.pull_uint8()}")
    return ",".join(found)


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data)) if len(data) % 2 == 0 else checksum_odd(data)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def checksum_odd(data):
    return sum(struct.unpack(f"!{len(data) // 2 + 1}H", data + b"\0"))


def packet_of(source, target, protocol, payload):
    source, target = ipaddress.ip_address(source), ipaddress.ip_address(target)
    if source.version == 4:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0x4000, 64, protocol, 0) + source.packed + target.packed
        return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload
    return struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + source.packed + target.packed + payload


def icmp(source, target, kind, rest):
    source, target = ipaddress.ip_address(source), ipaddress.ip_address(target)
    message = struct.pack("!BBH", kind, 0, 0) + rest
    pseudo = b"" if source.version == 4 else source.packed + target.packed + struct.pack("!II", len(message), 58)
    message = message[:2] + struct.pack("!H", checksum(pseudo + message)) + message[4:]
    return packet_of(source, target, 1 if source.version == 4 else 58, message)


def echo(source, target, number, payload):
    return icmp(source, target, 8 if ipaddress.ip_address(source).version == 4 else 128, struct.pack("!HH", 77, number) + payload)


def is_answer(packet, source, target, number, size):
    if packet[0] >> 4 == 4:
        ends, protocol, message, kind = packet[12:20], packet[9], packet[20:], 0
    else:
        ends, protocol, message, kind = packet[8:40], packet[6], packet[40:], 129
    wanted = ipaddress.ip_address(target).packed + ipaddress.ip_address(source).packed
    return ends == wanted and protocol in (1, 58) and message[0] == kind and message[4:8] == struct.pack("!HH", 77, number) and len(message) == 8 + size


def answer_to(packet):
    """The answer to an echo request, if `packet` is a whole one."""
    if packet[0] >> 4 == 4:
        source, target, protocol, message = packet[12:16], packet[16:20], packet[9], packet[20:]
        whole = struct.unpack("!H", packet[6:8])[0] & 0x3FFF == 0
        kinds = (8, 0)
    else:
        source, target, protocol, message = packet[8:24], packet[24:40], packet[6], packet[40:]
        whole, kinds = True, (128, 129)
    if protocol not in (1, 58) or not whole or message[0] != kinds[0]:
        return None
    return icmp(ipaddress.ip_address(target), ipaddress.ip_address(source), kinds[1], message[4:])


def capsule(kind, value):
    return encode_uint_var(kind) + encode_uint_var(len(value)) + value


def connected(host, port, ca, name):
    made = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=name, max_datagram_frame_size=65536)
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(ca)
    return connect(host, int(port), configuration=made, create_protocol=Client)


async def ping(host, port, ca, name, credentials, path, *targets):
    async with connected(host, port, ca, name) as client:
        session = client.ask(name, credentials, path)
        status, addresses, where = await session.opened()
        answers = 0
        for target in targets:
            version = ipaddress.ip_address(target).version
            own = next(one for one in addresses if ipaddress.ip_interface(one).version == version)
            answers += await session.pings(own.split("/")[0], target)
        print(status, ",".join(addresses), where, answers)
        if status == 200:
            client.http.send_data(session.stream, b"", end_stream=True)
            client.transmit()
            assert (await session.next("end"))[1] is None


async def hold(host, port, ca, name, credentials, path):
    async with connected(host, port, ca, name) as client:
        session = client.ask(name, credentials, path)
        status, addresses, _ = await session.opened()
        print(status, *addresses, flush=True)
        while True:
            kind, value = await session.next(patience=120)
            if kind == "packet" and (answer := answer_to(value)):
                session.send_packet(answer)
            elif kind == "addresses":
                print("now", *(address for _, address in assigned(value)), flush=True)
            elif kind == "end":
                print("end", value, flush=True)
                return


async def hostile(host, port, ca, name, credentials, path, target):
    async with connected(host, port, ca, name) as client:
        said = []

        async def broken(*data):
            session = client.ask(name, credentials, path)
            await session.opened()
            for part in data:
                session.send(part)
            said.append((await session.next("end"))[1])

        any_address = encode_uint_var(1) + b"\4" + bytes(4) + b"\x20"
        # A capsule of a known type that never ends, thousands of addresses, a flood of routes, and what is malformed.
        await broken(encode_uint_var(1) + encode_uint_var((1 << 62) - 1) + bytes(2000))
        await broken(capsule(2, any_address * 5000))
        await broken(*[capsule(3, b"\4" + bytes(4) + bytes([255] * 4) + b"\0")] * 300)
        await broken(capsule(2, b""))
        await broken(capsule(2, b"\1\4\x0a\0\0\1\x10"))
        await broken(capsule(3, b"\4\x0a\0\0\2\x0a\0\0\1\0"))

        session = client.ask(name, credentials, path)
        # Before there are addresses.
        session.send_packet(echo("10.8.1.2", target, 1, b""))
        _, addresses, _ = await session.opened()
        own = addresses[0].split("/")[0]
        # Endless ones of an unknown type do no harm, as long as nothing follows.
        session.send(capsule(0x1234, bytes(100)))
        for source, wrong in [("10.8.1.200", target), ("10.9.0.1", target), (own, "10.9.0.1"), (own, "192.0.2.77"), (own, "127.0.0.1"), (own, "224.0.0.1"), (own, "10.8.1.255")]:
            session.send_packet(echo(source, wrong, 1, b""))
        session.send_packet(b"")
        session.send_packet(b"\x45")
        session.send_packet(echo(own, target, 1, b"")[:-3])
        client.http.send_datagram(session.stream, b"\1x")
        client.http.send_datagram(session.stream, b"")
        # Two addresses of one family: the second is not given.
        session.send(capsule(2, encode_uint_var(5) + any_address[1:] + encode_uint_var(6) + any_address[1:]))
        answer = assigned((await session.next("addresses"))[1])
        assert [request for request, _ in answer] == [5, 0, 6] and answer[2][1] == "0.0.0.0/32", answer
        print(*said, await session.pings(own, target))


if __name__ == "__main__":
    verbs = {"ping": ping, "hold": hold, "hostile": hostile}
    verb, *rest = sys.argv[1:]
    asyncio.run(verbs[verb](*rest))
