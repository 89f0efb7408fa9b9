"""Visitors of the web server on TCP, good and bad ones, on h2, hpack and wsproto.

Usage: visitor.py VERB PORT. It prints what it met."""

import socket
import ssl
import struct
import sys
import time

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import wsproto
from wsproto.events import AcceptConnection, CloseConnection, Request, TextMessage

NAME = "gw.example.net"
HEADERS = [(":method", "GET"), (":scheme", "https"), (":authority", NAME), (":path", "/echo")]


def connect(port, *protocols, ragged=True, host="127.0.0.1"):
    """A TLS connection; unless `ragged`, an end without close_notify is an error."""
    plain = socket.create_connection((host, port), timeout=60)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(protocols)
    tls = context.wrap_socket(plain, server_hostname=NAME, suppress_ragged_eofs=ragged)
    assert tls.selected_alpn_protocol() == protocols[0], tls.selected_alpn_protocol()
    return tls


def http2(port):
    tls = connect(port, "h2")
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    tls.sendall(connection.data_to_send())
    return tls, connection


def read_events(tls, connection):
    data = tls.recv(65536)
    if not data:
        return None
    events = connection.receive_data(data)
    tls.sendall(connection.data_to_send())
    return events


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def goaway(tls):
    """The error of the GOAWAY by which the server ends the connection; "closed" without one."""
    said, rest = "closed", b""
    try:
        while data := tls.recv(65536):
            rest += data
            while len(rest) >= 9:
                length = int.from_bytes(rest[:3], "big")
                if len(rest) < 9 + length:
                    break
                if rest[3] == 7:
                    said = f"goaway {int.from_bytes(rest[13:17], 'big')}"
                rest = rest[9 + length:]
    except (ConnectionError, ssl.SSLError):
        pass
    return said


def shy(port):
    """Asks 100 times, takes one byte of each answer, and only then the rest; prints how many got the site's, and which came whole."""
    tls, connection = http2(port)
    connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1})
    statuses, ended, received = {}, set(), {}

    def read():
        for event in read_events(tls, connection):
            if isinstance(event, h2.events.ResponseReceived):
                statuses[event.stream_id] = dict(event.headers)[b":status"].decode()
            elif isinstance(event, h2.events.DataReceived):
                received[event.stream_id] = received.get(event.stream_id, 0) + len(event.data)
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                ended.add(event.stream_id)
        tls.sendall(connection.data_to_send())

    def ask(stream):
        head = HEADERS[:3] + [(":path", "/zeros/3000")]
        connection.send_headers(stream, head, end_stream=True)
        tls.sendall(connection.data_to_send())
        while stream not in statuses:
            read()
        return statuses[stream]

    # The window is in effect once the server has said so.
    tls.sendall(connection.data_to_send())
    time.sleep(0.5)
    streams = [2 * number + 1 for number in range(100)]
    for stream in streams:
        ask(stream)
        time.sleep(0.01)
    good = [stream for stream in streams if statuses[stream] == "200"]
    refused = [stream for stream in streams if statuses[stream] == "503"]
    # The client takes all: there is room again.
    connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 65535})
    tls.sendall(connection.data_to_send())
    while not ended.issuperset(streams):
        read()
    whole = [stream for stream in good if received[stream] == 3000]
    print(len(good), len(refused), len(whole), ask(201))


def send_until_closed(tls, make, most):
    """Sends what `make` makes of the numbers below `most`, and reads only afterwards."""
    try:
        for number in range(most):
            tls.sendall(make(number))
    except (ConnectionError, ssl.SSLError):
        pass
    return goaway(tls)


def raw_http2(port):
    tls = connect(port, "h2")
    tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    return tls


def rapid_reset(port):
    tls, encoder = raw_http2(port), hpack.Encoder()

    def make(number):
        stream = 2 * number + 1
        return frame(1, 5, stream, encoder.encode(HEADERS)) + frame(3, 0, stream, struct.pack(">I", 8))
    print(send_until_closed(tls, make, 20000))


def slow_reset(port):
    """Resets that come after the request was looked at."""
    tls, encoder = raw_http2(port), hpack.Encoder()

    def make(number):
        stream = 2 * number + 1
        tls.sendall(frame(1, 5, stream, encoder.encode(HEADERS[:3] + [(":path", "/zeros/9000000")])))
        time.sleep(0.01)
        tls.settimeout(0.01)
        try:
            tls.recv(65536)
        except TimeoutError:
            pass
        tls.settimeout(10)
        return frame(3, 0, stream, struct.pack(">I", 8))
    try:
        for number in range(400):
            tls.sendall(make(number))
    except (ConnectionError, ssl.SSLError):
        print("closed")
        return
    print("open")


def continuation(port):
    tls, encoder = raw_http2(port), hpack.Encoder()
    tls.sendall(frame(1, 1, 1, encoder.encode(HEADERS)))
    # A literal without indexing, again and again, and never the end.
    piece = b"\x00\x04x-aa\x7f\x81\x01" + b"b" * 256
    print(send_until_closed(tls, lambda _: frame(9, 0, 1, piece * 40), 20000))


def headers(port):
    """A list of 20 KiB is refused on its stream, and the connection goes on."""
    tls, connection = http2(port)
    many = [(f"x-{number}", "y" * 100) for number in range(150)]
    connection.send_headers(1, HEADERS + many, end_stream=True)
    connection.send_headers(3, HEADERS, end_stream=True)
    tls.sendall(connection.data_to_send())
    statuses = {}
    while len(statuses) < 2:
        for event in read_events(tls, connection):
            if isinstance(event, h2.events.ResponseReceived):
                statuses[event.stream_id] = dict(event.headers)[b":status"].decode()
    print(statuses[1], statuses[3])


def streams(port):
    """What the server allows, and how many requests of so many in a row are answered."""
    tls, connection = http2(port)
    while not (allowed := connection.remote_settings.max_concurrent_streams) < 1000:
        read_events(tls, connection)
    answered = 0
    for number in range(300):
        connection.send_headers(2 * number + 1, HEADERS, end_stream=True)
        tls.sendall(connection.data_to_send())
        done = False
        while not done:
            for event in read_events(tls, connection):
                done |= isinstance(event, h2.events.StreamEnded)
        answered += 1
    print(allowed, answered)


def stalled_reader(port):
    """Asks for much, reads nothing of it, and waits to be closed."""
    tls = connect(port, "http/1.1")
    tls.sendall(f"GET /zeros/50000000 HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    began = time.monotonic()
    time.sleep(35)
    received = 0
    try:
        while data := tls.recv(1 << 20):
            received += len(data)
    except (ConnectionError, ssl.SSLError):
        pass
    assert received < 50000000, received
    print("closed", int(time.monotonic() - began) // 10)


def silent(port):
    """Says nothing after the handshake."""
    tls = connect(port, "http/1.1")
    began = time.monotonic()
    assert tls.recv(1) == b""
    print("closed", round(time.monotonic() - began))


def websocket(port):
    tls = connect(port, "http/1.1")
    client = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    tls.sendall(client.send(Request(host=NAME, target="/ws")))
    converse(client, tls.recv, tls.sendall)


def converse(client, receive, send):
    said = []
    while True:
        data = receive(65536)
        client.receive_data(data or None)
        for event in client.events():
            said.append(type(event).__name__)
            if isinstance(event, AcceptConnection):
                send(client.send(TextMessage("hello " * 5000)))
            elif isinstance(event, TextMessage) and event.message_finished:
                send(client.send(CloseConnection(code=1000)))
            elif isinstance(event, CloseConnection):
                print(said[0], said[-1], event.code)
                return
        assert data, said


def websocket2(port):
    """RFC 8441."""
    tls, connection = http2(port)
    while not connection.remote_settings.get(h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL):
        read_events(tls, connection)
    head = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "https"), (":authority", NAME),
            (":path", "/ws"), ("sec-websocket-version", "13")]
    connection.send_headers(1, head)
    tls.sendall(connection.data_to_send())
    client = wsproto.Connection(wsproto.ConnectionType.CLIENT)
    pending = []

    def send(data):
        connection.send_data(1, data)
        tls.sendall(connection.data_to_send())
    status, text = None, 0
    while True:
        for event in read_events(tls, connection):
            if isinstance(event, h2.events.ResponseReceived):
                status = dict(event.headers)[b":status"].decode()
                send(client.send(TextMessage("hello " * 500)))
            elif isinstance(event, h2.events.DataReceived):
                connection.acknowledge_received_data(event.flow_controlled_length, 1)
                client.receive_data(event.data)
                for message in client.events():
                    if isinstance(message, TextMessage):
                        text += len(message.data)
                        if message.message_finished:
                            send(client.send(CloseConnection(code=1000)))
                    elif isinstance(message, CloseConnection):
                        print(status, text, message.code)
                        return
            elif isinstance(event, h2.events.StreamReset):
                print("reset", event.error_code)
                return


def early(port):
    """Bytes before the 101 are dropped with the connection."""
    tls = connect(port, "http/1.1")
    client = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    tls.sendall(client.send(Request(host=NAME, target="/ws")) + b"\x81\x80\x00\x00\x00\x00")
    received = b""
    try:
        while data := tls.recv(65536):
            received += data
    except (ConnectionError, ssl.SSLError):
        pass
    head, _, rest = received.partition(b"\r\n\r\n")
    print(head.split(b" ")[1].decode(), len(rest))


def optimistic(port, head):
    """A request that hopes to be upgraded, and another one behind it, which must not be answered."""
    tls = connect(port, "http/1.1")
    tls.sendall(head.encode() + f"\r\nHost: {NAME}\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    received = b""
    try:
        while data := tls.recv(65536):
            received += data
    except (ConnectionError, ssl.SSLError):
        pass
    print(received.split(b" ")[1].decode(), received.count(b"HTTP/1.1 "), b"smuggled" in received,
          b"connection: close" in received.lower())


def connect_tunnel(port):
    optimistic(port, f"CONNECT {NAME}:443 HTTP/1.1")


def connect_udp(port):
    optimistic(port, "GET /.well-known/masque/udp/a/1/ HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: connect-udp")


def kept(port):
    """Keeps a connection open over what happens until a line comes, and uses it again."""
    tls = connect(port, "http/1.1")
    ask = f"GET /echo HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode()
    for line in ("first", "second"):
        tls.sendall(ask)
        head = b""
        while b"\r\n\r\n" not in head:
            head += tls.recv(65536)
        headers, _, content = head.partition(b"\r\n\r\n")
        length = int(next(line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1])
        while len(content) < length:
            content += tls.recv(65536)
        print(line, headers.split(b" ")[1].decode(), flush=True)
        if line == "first":
            sys.stdin.readline()


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]))
