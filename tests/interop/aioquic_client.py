"""A Culvert client in standard mode on aioquic, written from docs/wire-format.md and docs/culvert.proto.

    aioquic_client.py keygen FILE                            writes a private key, prints the public key
    aioquic_client.py echo FILE PORT AGENT SERVICE COUNT     dials 127.0.0.1:PORT, whose public key is AGENT, opens a
                                                             flow to SERVICE and has COUNT datagrams come back, then
                                                             one that fits into no packet, in pieces

It ends with status 0 and says `ok`, or with a traceback.
"""

import asyncio
import base64
import datetime
import os
import ssl
import sys

from aioquic.asyncio import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import DatagramFrameReceived, StreamDataReceived
from aioquic.quic.packet import QuicProtocolVersion
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

CONTROL_STREAM = 0
# Contexts of payloads.
KNOWN, OPENING, CONFIRMED, CLOSED, PIECE = 2, 3, 5, 8, 10
# The feature of a hello: it takes datagrams in pieces.
PIECES = 4
# SubjectPublicKeyInfo of an Ed25519 key, up to its 32 bytes.
SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")
# Seconds after which an opening is sent again, and after which the test has failed.
REPEAT_AFTER, PATIENCE = 0.25, 30


# QUIC's integers (RFC 9000, section 16).


def varint(value):
    for log_length, limit in enumerate((1 << 6, 1 << 14, 1 << 30, 1 << 62)):
        if value < limit:
            length = 1 << log_length
            return (value | log_length << (length * 8 - 2)).to_bytes(length, "big")
    raise ValueError(value)


def take_varint(data):
    """The integer at the front of `data`, and the rest; None and `data` if it is cut short."""
    length = 1 << (data[0] >> 6) if data else 1
    if len(data) < length:
        return None, data
    value = int.from_bytes(data[:length], "big") & ((1 << (length * 8 - 2)) - 1)
    return value, data[length:]


# Protobuf, as much as the messages need.


def base128(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def take_base128(data):
    value = 0
    for index, byte in enumerate(data):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, data[index + 1 :]
    raise ValueError("cut short")


def field(number, value):
    if isinstance(value, int):
        return base128(number << 3) + base128(value)
    return base128(number << 3 | 2) + base128(len(value)) + value


def fields(data):
    while data:
        key, data = take_base128(data)
        value, data = take_base128(data)
        if key & 7 == 2:
            value, data = data[:value], data[value:]
        elif key & 7 != 0:
            raise ValueError(f"wire type {key & 7}")
        yield key >> 3, value


def hello(instance):
    """Envelope.hello: protocol version 1, no lanes, no services."""
    message = field(1, 1) + field(2, instance) + field(3, b"aioquic") + field(4, 1) + field(5, 0) + field(6, 1200)
    return field(1, message + field(8, PIECES))


def services_of(envelope):
    """The services in a Hello: name to number, those that serve UDP."""
    ((kind, message),) = fields(envelope)
    assert kind == 1, f"expected Hello, got kind {kind}"
    values = list(fields(message))
    assert (1, 1) in values, "protocol version 1"
    services = (dict(fields(value)) for number, value in values if number == 7)
    # A number of 0 is not on the wire, as protobuf has it.
    return {service[2].decode(): service.get(1, 0) for service in services if service.get(3)}


class Client(QuicConnectionProtocol):
    """Queues what arrives: messages of the control stream, and payloads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.messages, self.payloads, self.stream = asyncio.Queue(), asyncio.Queue(), b""

    def quic_event_received(self, event):
        if isinstance(event, DatagramFrameReceived):
            self.payloads.put_nowait(event.data)
        elif isinstance(event, StreamDataReceived) and event.stream_id == CONTROL_STREAM:
            self.stream += event.data
            while True:
                length, rest = take_varint(self.stream)
                if length is None or len(rest) < length:
                    break
                self.messages.put_nowait(rest[:length])
                self.stream = rest[length:]

    def say(self, message):
        self._quic.send_stream_data(CONTROL_STREAM, varint(len(message)) + message)
        self.transmit()

    def send(self, context, *numbers, payload=b""):
        self._quic.send_datagram_frame(varint(context) + b"".join(map(varint, numbers)) + payload)
        self.transmit()

    def agent_key(self):
        """The 32 bytes of the key that the agent has proved to have."""
        public = self._quic.tls._peer_certificate.public_key()
        spki = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        assert spki.startswith(SPKI_PREFIX), spki.hex()
        return spki[len(SPKI_PREFIX) :]


def public_bytes(key):
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def certificate(key):
    """Self-signed; nobody looks at anything in it but the key."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "culvert")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    return builder.sign(key, None)


async def open_flow(client, flow, service, payload):
    """Sends the opening form until the flow is confirmed, and takes the echo."""
    confirmed, echo = varint(CONFIRMED) + varint(flow), varint(KNOWN) + varint(flow) + payload
    missing = {confirmed, echo}
    while missing:
        client.send(OPENING, flow, service, payload=payload)
        try:
            while missing:
                answer = await asyncio.wait_for(client.payloads.get(), REPEAT_AFTER)
                assert answer in (confirmed, echo), answer.hex()
                missing.discard(answer)
        except asyncio.TimeoutError:
            pass
    return confirmed, echo


async def echo_in_pieces(client, flow, whole):
    """Sends a datagram in pieces, and takes it back in pieces of whatever length."""
    total = len(whole)
    for offset in range(0, total, 1100):
        client.send(PIECE, flow, 0, total, offset, payload=whole[offset : offset + 1100])
    parts = {}
    while sum(map(len, parts.values())) < total:
        data = await client.payloads.get()
        numbers = []
        for _ in range(5):
            number, data = take_varint(data)
            numbers.append(number)
        assert numbers[:2] == [PIECE, flow] and numbers[3] == total, numbers
        assert numbers[4] not in parts
        parts[numbers[4]] = data
    assert b"".join(parts[offset] for offset in sorted(parts)) == whole


async def echo(key, port, agent, name, count):
    configuration = QuicConfiguration(
        alpn_protocols=["culvert/1"],
        certificate=certificate(key),
        private_key=key,
        max_datagram_frame_size=65535,
        supported_versions=[QuicProtocolVersion.VERSION_1],
        # There is no authority to ask: what counts is the key, which is compared below. The signature is checked.
        verify_mode=ssl.CERT_NONE,
    )
    loop = asyncio.get_running_loop()
    connection = QuicConnection(configuration=configuration)
    transport, client = await loop.create_datagram_endpoint(
        lambda: Client(connection), local_addr=("127.0.0.1", 0)
    )
    client.connect(("127.0.0.1", port))
    await client.wait_connected()
    assert client.agent_key() == agent, "the agent has another key"

    client.say(hello(os.urandom(16)))
    services = services_of(await client.messages.get())
    # The low bit says which end opened the flow: 0 for the smaller key.
    flow = 2 + int(public_bytes(key) > agent)
    stale = await open_flow(client, flow, services[name], b"opening")
    for number in range(count):
        payload = number.to_bytes(4, "big") * 250
        client.send(KNOWN, flow, payload=payload)
        answer = stale[0]
        # Answers to a repeated opening may come late.
        while answer in stale:
            answer = await client.payloads.get()
        assert answer == varint(KNOWN) + varint(flow) + payload, answer.hex()
    await echo_in_pieces(client, flow, bytes(range(250)) * 20)
    client.send(CLOSED, flow)
    # Every packet before the answer to this one has arrived, or is lost.
    await client.ping()
    client.close(error_code=0)
    await client.wait_closed()
    transport.close()


def main():
    match sys.argv[1:]:
        case ["keygen", file]:
            key = Ed25519PrivateKey.generate()
            with open(file, "xb") as out:
                out.write(key.private_bytes_raw())
            print(base64.urlsafe_b64encode(public_bytes(key)).rstrip(b"=").decode())
        case ["echo", file, port, agent, name, count]:
            with open(file, "rb") as source:
                key = Ed25519PrivateKey.from_private_bytes(source.read())
            agent = base64.urlsafe_b64decode(agent + "=")
            asyncio.run(asyncio.wait_for(echo(key, int(port), agent, name, int(count)), PATIENCE))
            print("ok")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
