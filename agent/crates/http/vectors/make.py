#!/usr/bin/env python3
"""Makes the vectors of this folder with code that is not ours, and reads ours with it.

    python3 -m venv venv && venv/bin/pip install aioquic==1.7.2 pylsqpack==1.0.0
    venv/bin/python make.py

sections.txt: field sections that ls-qpack wrote without a dynamic table.
ours.txt:     field sections that this crate writes (CULVERT_WRITE_VECTORS=1 cargo test -p culvert-http). Here it is checked that ls-qpack
              reads the same fields from them.
client.txt:   what aioquic's HTTP/3 client writes on its streams: a line each, the number of the stream and its bytes.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pylsqpack
from aioquic.h3.connection import H3Connection

FOLDER = Path(__file__).parent


def get(*more):
    return [(":method", "GET"), (":scheme", "https"), (":authority", "gw.example.net"), (":path", "/"), *more]


LISTS = [
    get(),
    get(("user-agent", "curl/8.21.0"), ("accept", "*/*")),
    get(("cookie", "a=1"), ("cookie", "b=2"), ("accept-encoding", "gzip, deflate, br"), ("priority", "u=0, i")),
    get(("x-latin", "sm\xf8rrebr\xf8d"), ("x-empty", ""), ("x-long", "0123456789" * 40)),
    [*get()[:3], (":path", "/" + "a" * 300)],
    [(":method", "CONNECT"), (":authority", "b.example:443"), ("proxy-authorization", "Basic YTpi")],
    [(":method", "CONNECT"), (":protocol", "connect-udp"), (":scheme", "https"), (":authority", "gw.example.net"),
     (":path", "/.well-known/masque/udp/192.0.2.1/53/"), ("capsule-protocol", "?1")],
    [(":status", "200"), ("content-type", "text/html; charset=utf-8"), ("set-cookie", "x"), ("set-cookie", "y")],
    [(":status", "404"), ("content-length", "0"), ("date", "Mon, 21 Oct 2013 20:13:21 GMT")],
    [(":status", "599"), ("server", "Culvert"), ("alt-svc", 'h3=":443"')],
    [("trailing", "x")],
]


def fields(lines):
    return "".join(f"{name}|{value.encode('latin-1').hex()}\n" for name, value in lines)


def sections():
    encoder = pylsqpack.Encoder()
    encoder.apply_settings(0, 0)
    for lines in LISTS:
        instructions, section = encoder.encode(0, [(n.encode(), v.encode("latin-1")) for n, v in lines])
        assert instructions == b""
        yield f"section {section.hex()}\n{fields(lines)}"
    decoder = pylsqpack.Decoder(0, 0)
    for index in range(99):
        section = bytes([0, 0]) + (bytes([0xC0 | index]) if index < 63 else bytes([0xFF, index - 63]))
        _, lines = decoder.feed_header(index * 4, section)
        yield f"section {section.hex()}\n{fields([(n.decode(), v.decode()) for n, v in lines])}"


def check_ours():
    text = (FOLDER / "ours.txt").read_text()
    decoder = pylsqpack.Decoder(0, 0)
    for number, block in enumerate(text.split("section ")[1:]):
        section, *lines = block.splitlines()
        _, read = decoder.feed_header(number * 4, bytes.fromhex(section))
        assert [f"{n.decode()}|{v.hex()}" for n, v in read] == lines, (number, read, lines)
    print(f"ours.txt: ls-qpack reads {number + 1} sections as they were meant")


def client():
    written = {}

    class Quic:
        """As much of a QUIC connection as an HTTP/3 client writes to."""
        configuration = SimpleNamespace(is_client=True)
        _quic_logger = None
        _remote_max_datagram_frame_size = 65536
        unidirectional = 2

        def get_next_available_stream_id(self, is_unidirectional=False):
            stream = self.unidirectional
            self.unidirectional += 4
            return stream

        def send_stream_data(self, stream_id, data, end_stream=False):
            written.setdefault(stream_id, bytearray()).extend(data)

    http = H3Connection(Quic())
    encoded = lambda lines: [(n.encode(), v.encode()) for n, v in lines]
    http.send_headers(0, encoded(get(("cookie", "a=1"), ("cookie", "b=2"))), end_stream=True)
    post = [(":method", "POST"), *get()[1:], ("content-length", "11")]
    http.send_headers(4, encoded(post))
    http.send_data(4, b"hello ", end_stream=False)
    http.send_data(4, b"world", end_stream=False)
    http.send_headers(4, [(b"trailing", b"x")], end_stream=True)
    http.send_headers(8, encoded(LISTS[6]))
    for stream, data in sorted(written.items()):
        yield f"{stream} {bytes(data).hex()}\n"


(FOLDER / "sections.txt").write_text("".join(sections()))
(FOLDER / "client.txt").write_text("".join(client()))
check_ours()
sys.exit(0)
