"""A user of CONNECT-IP (RFC 9484) over TCP, on h2 and on ssl: packets and capsules as those of packets_client.py.

    packets_tcp_client.py VERSION ping HOST PORT CREDENTIALS PATH TARGET...   pings each TARGET three times; prints the status, the addresses,
                                                                              the routes and how many answers came
    packets_tcp_client.py VERSION hold HOST PORT CREDENTIALS PATH             prints the addresses whenever they are told, answers pings, and
                                                                              prints the end
    packets_tcp_client.py VERSION hostile HOST PORT CREDENTIALS PATH TARGET   breaks sessions, each in its own way, and then pings TARGET in
                                                                              a good one; prints what each ended with, and how many answers
                                                                              came
    packets_tcp_client.py VERSION deaf HOST PORT CREDENTIALS PATH TARGET      pings TARGET 12,000 times and takes no answer, until its input
                                                                              ends; prints a line once all are sent

VERSION is 1 or 2, of HTTP. It ends with status 0, or with a traceback.
"""

import ipaddress
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../process/web"))

from packets_client import answer_to, assigned, capsule, echo, is_answer, routes
from user_client import Closed, Http1, Http2, fields

from aioquic.buffer import encode_uint_var


class Session:
    def __init__(self, version, host, port, credentials, path):
        self.bytes, self.ended = b"", None
        client = Http1(int(port), host=host) if version == "1" else Http2(int(port), host=host)
        status = client.packets(path, fields(credentials))
        self.client, self.status = client, int(status)

    def next(self, *kinds):
        """The next capsule that is of one of these kinds: "packet", "addresses", "routes"."""
        while True:
            kind, value = self.capsule()
            if not kinds or kind in kinds:
                return kind, value

    def integer(self, at):
        self.fill(at + 1)
        size = 1 << (self.bytes[at] >> 6)
        self.fill(at + size)
        return int.from_bytes(self.bytes[at:at + size], "big") & (1 << size * 8 - 2) - 1, at + size

    def fill(self, count):
        while len(self.bytes) < count:
            data = self.client.receive()
            if not data:
                raise Closed("ended")
            self.bytes += data

    def capsule(self):
        kind, at = self.integer(0)
        length, at = self.integer(at)
        self.fill(at + length)
        value, self.bytes = self.bytes[at:at + length], self.bytes[at + length:]
        if kind == 0:
            assert value[:1] == b"\0", value
            return "packet", value[1:]
        return {1: "addresses", 3: "routes"}[kind], value

    def opened(self):
        if self.status not in (101, 200):
            return [], ""
        addresses = [address for _, address in assigned(self.next()[1])]
        return addresses, routes(self.next("routes")[1])

    def send_packet(self, packet):
        self.client.send(capsule(0, b"\0" + packet))

    def pings(self, source, target, size=1300):
        answers = 0
        for number in range(3):
            self.send_packet(echo(source, target, number, bytes(size)))
            while not is_answer(self.next("packet")[1], source, target, number, size):
                pass
            answers += 1
        return answers


def ping(version, host, port, credentials, path, *targets):
    session = Session(version, host, port, credentials, path)
    addresses, where = session.opened()
    answers = 0
    for target in targets:
        family = ipaddress.ip_address(target).version
        own = next(one for one in addresses if ipaddress.ip_interface(one).version == family)
        answers += session.pings(own.split("/")[0], target)
    print(session.status, ",".join(addresses), where, answers)
    if session.status in (101, 200):
        session.client.end()
        try:
            session.next("end")
        except Closed as how:
            assert str(how) == "ended", how


def hold(version, host, port, credentials, path):
    session = Session(version, host, port, credentials, path)
    print(session.status, *session.opened()[0], flush=True)
    while True:
        try:
            kind, value = session.next()
        except Closed as how:
            print(how, flush=True)
            return
        if kind == "packet" and (answer := answer_to(value)):
            session.send_packet(answer)
        elif kind == "addresses":
            print("now", *(address for _, address in assigned(value)), flush=True)


def hostile(version, host, port, credentials, path, target):
    said = []

    def broken(*data):
        session = Session(version, host, port, credentials, path)
        session.opened()
        try:
            for part in data:
                session.client.send(part)
            session.next("end")
        except (Closed, ConnectionError) as how:
            # Over HTTP/1.1 the end may overtake what is still sent.
            said.append(str(how) if str(how) in ("ended", "reset") else "reset")

    any_address = encode_uint_var(1) + b"\4" + bytes(4) + b"\x20"
    broken(encode_uint_var(1) + encode_uint_var((1 << 62) - 1) + bytes(2000))
    broken(capsule(2, any_address * 5000))
    broken(capsule(2, b""))
    broken(capsule(3, b"\4\x0a\0\0\2\x0a\0\0\1\0"))
    session = Session(version, host, port, credentials, path)
    own = session.opened()[0][0].split("/")[0]
    session.client.send(capsule(0x1234, bytes(100)))
    for source, wrong in [("10.8.1.200", target), (own, "10.9.0.1"), (own, "192.0.2.77"), (own, "127.0.0.1")]:
        session.send_packet(echo(source, wrong, 1, b""))
    session.send_packet(b"\x45")
    # In pieces.
    for byte in capsule(0, b"\0" + echo(own, "10.9.0.1", 1, b"")):
        session.client.send(bytes([byte]))
    # What it may not reach it is told, as far as that is a host.
    for wrong in ("10.9.0.1", "192.0.2.77", "10.9.0.1"):
        refused = session.next("packet")[1]
        ends = ipaddress.ip_address(wrong).packed + ipaddress.ip_address(own).packed
        assert (refused[9], refused[20:22], refused[12:20]) == (1, b"\x03\x0d", ends), refused
    session.client.send(capsule(2, encode_uint_var(5) + any_address[1:] + encode_uint_var(6) + any_address[1:]))
    answer = assigned(session.next("addresses")[1])
    assert [request for request, _ in answer] == [5, 0, 6] and answer[2][1] == "0.0.0.0/32", answer
    print(*said, session.pings(own, target))


def deaf(version, host, port, credentials, path, target):
    session = Session(version, host, port, credentials, path)
    own = session.opened()[0][0].split("/")[0]
    # Answers that nobody reads, far more than all buffers hold.
    for number in range(12000):
        session.send_packet(echo(own, target, number, bytes(1300)))
    print("sent", flush=True)
    sys.stdin.read()


version, verb, *rest = sys.argv[1:]
{"ping": ping, "hold": hold, "hostile": hostile, "deaf": deaf}[verb](version, *rest)
