"""Users of the web server on TCP, on h2 and ssl, and by libcurl (curl_cffi). CREDENTIALS are name:password, or "-": none.

    user_client.py connect PORT VERSION CREDENTIALS AUTHORITY BYTES    sends so many bytes to an echo and ends; prints the status, and how
                                                                       many came back before the end
    user_client.py reset PORT VERSION CREDENTIALS AUTHORITY            opens a connection and resets it
    user_client.py broken PORT VERSION CREDENTIALS AUTHORITY           opens a connection, which the target breaks off; prints how it ended
    user_client.py udp PORT VERSION CREDENTIALS HOST TARGET COUNT      COUNT datagrams, one after the other, to an echo; prints the status
                                                                       and how many came back
    user_client.py burst PORT VERSION CREDENTIALS HOST TARGET COUNT    COUNT datagrams of 1,000 bytes at once
    user_client.py answers PORT VERSION CREDENTIALS                    what CONNECT, extended CONNECT and upgrades are answered
    user_client.py early PORT VERSION CREDENTIALS AUTHORITY            a CONNECT over HTTP/1.1 with bytes behind it; prints the status, and
                                                                       how many bytes came back
    user_client.py many PORT VERSION CREDENTIALS AUTHORITY COUNT       so many tunnels one after the other; prints how many echoed
    user_client.py paused PORT VERSION CREDENTIALS AUTHORITY           reads nothing for 35 s; prints whether all is there afterwards
    user_client.py hold PORT VERSION CREDENTIALS AUTHORITY COUNT       opens so many tunnels and keeps them until its input ends
    user_client.py curl PORT VERSION CREDENTIALS URL                   asks for URL by libcurl with the agent as its proxy
    user_client.py capsules PORT VERSION CREDENTIALS HOST TARGET       capsules of 2^62 bytes, of unknown kinds and in pieces around a good
                                                                       one; prints what came back

VERSION is 1 or 2, of HTTP. It ends with status 0, or with a traceback.
"""

import base64
import io
import socket
import ssl
import struct
import sys
import time

import h2.config
import h2.connection
import h2.events
import h2.settings

from visitor import NAME, connect as connect_tls

PATIENCE = 30
UDP = "/.well-known/masque/udp/{}/{}/"
IP = "/.well-known/masque/ip/{}/{}/"


def fields(credentials, name="proxy-authorization"):
    if credentials == "-":
        return []
    return [(name, "Basic " + base64.b64encode(credentials.encode()).decode())]


class Closed(Exception):
    pass


class Http1:
    """A tunnel over HTTP/1.1."""

    def __init__(self, port, behind=b"", host="127.0.0.1"):
        self.tls, self.behind, self.buffer = connect_tls(port, "http/1.1", ragged=False, host=host), behind, b""

    def open(self, first_line, lines):
        head = [first_line] + [f"{name}: {value}" for name, value in lines] + [f"Host: {NAME}", "", ""]
        self.tls.sendall("\r\n".join(head).encode() + self.behind)
        while b"\r\n\r\n" not in self.buffer:
            data = self.tls.recv(65536)
            assert data, self.buffer
            self.buffer += data
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        self.head = head.decode().lower().split("\r\n")
        return self.head[0].split(" ")[1]

    def connect(self, authority, lines):
        return self.open(f"CONNECT {authority} HTTP/1.1", lines)

    def udp(self, host, target, lines):
        return self.upgrade("connect-udp", UDP.format(host, target), lines)

    def packets(self, path, lines):
        return self.upgrade("connect-ip", path, lines)

    def upgrade(self, protocol, path, lines):
        more = [("Connection", "Upgrade"), ("Upgrade", protocol), ("Capsule-Protocol", "?1")]
        status = self.open(f"GET {path} HTTP/1.1", more + lines)
        if status == "101":
            assert f"upgrade: {protocol}" in self.head and "capsule-protocol: ?1" in self.head, self.head
        return status

    def send(self, data):
        self.tls.sendall(data)

    def receive(self):
        """What came; empty at the end."""
        if self.buffer:
            data, self.buffer = self.buffer, b""
            return data
        try:
            return self.tls.recv(65536)
        except ssl.SSLZeroReturnError:
            return b""
        except (ConnectionError, ssl.SSLEOFError) as error:
            # Without close_notify it is no end.
            raise Closed("reset") from error

    def end(self):
        # close_notify of this direction alone, which ssl cannot send without waiting for the other's.
        self.tls = Half(self.tls)

    def reset(self):
        self.tls.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.tls.close()


class Half:
    """A TLS connection that sends nothing more."""

    def __init__(self, tls):
        tls.setblocking(False)
        try:
            tls.unwrap()
        except (OSError, ValueError):
            pass
        self.tls = tls

    def recv(self, most):
        self.tls.settimeout(PATIENCE)
        return self.tls.recv(most)


class Http2:
    """A tunnel on a stream of HTTP/2."""

    def __init__(self, port, host="127.0.0.1"):
        self.tls = connect_tls(port, "h2", ragged=False, host=host)
        self.tls.settimeout(PATIENCE)
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.http.initiate_connection()
        self.flush()
        self.stream, self.events = -1, []
        while not self.http.remote_settings.get(h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL):
            self.read()

    def flush(self):
        self.tls.sendall(self.http.data_to_send())

    def read(self):
        data = self.tls.recv(65536)
        if not data:
            raise Closed("closed")
        for event in self.http.receive_data(data):
            if getattr(event, "stream_id", None) in (self.stream, None, 0):
                self.events.append(event)
        self.flush()

    def next(self):
        while not self.events:
            self.read()
        return self.events.pop(0)

    def open(self, head):
        self.stream += 2
        self.events = []
        self.http.send_headers(self.stream, head)
        self.flush()
        while True:
            event = self.next()
            if isinstance(event, h2.events.ResponseReceived):
                self.head = dict(event.headers)
                return self.head[b":status"].decode()
            if isinstance(event, h2.events.StreamReset):
                raise Closed(f"reset {int(event.error_code)}")

    def connect(self, authority, lines):
        return self.open([(":method", "CONNECT"), (":authority", authority)] + lines)

    def extended(self, protocol, path, lines):
        return self.open([(":method", "CONNECT"), (":protocol", protocol), (":scheme", "https"), (":authority", NAME),
                          (":path", path)] + lines)

    def udp(self, host, target, lines):
        return self.capsules("connect-udp", UDP.format(host, target), lines)

    def packets(self, path, lines):
        return self.capsules("connect-ip", path, lines)

    def capsules(self, protocol, path, lines):
        status = self.extended(protocol, path, [("capsule-protocol", "?1")] + lines)
        if status == "200":
            assert self.head[b"capsule-protocol"] == b"?1", self.head
        return status

    def send(self, data):
        while data:
            room = min(self.http.local_flow_control_window(self.stream), self.http.max_outbound_frame_size)
            if not room:
                self.read()
                continue
            self.http.send_data(self.stream, data[:room])
            data = data[room:]
            self.flush()

    def receive(self):
        while True:
            event = self.next()
            if isinstance(event, h2.events.DataReceived):
                self.http.acknowledge_received_data(event.flow_controlled_length, self.stream)
                self.flush()
                if event.data:
                    return event.data
            elif isinstance(event, h2.events.StreamEnded):
                return b""
            elif isinstance(event, h2.events.StreamReset):
                raise Closed(f"reset {int(event.error_code)}")

    def end(self):
        self.http.end_stream(self.stream)
        self.flush()

    def reset(self):
        self.http.reset_stream(self.stream, 8)
        self.flush()
        # The connection lives until the other end has seen it.
        self.http.ping(b"12345678")
        self.flush()
        while not isinstance(self.next(), h2.events.PingAckReceived):
            pass


def tunnel(port, version):
    return Http1(port) if version == "1" else Http2(port)


def connect(port, version, credentials, authority, count):
    client, left, back = tunnel(port, version), int(count), 0
    status = client.connect(authority, fields(credentials))
    if status != "200":
        print(status, 0)
        return
    assert not any(name in (b"content-length", b"transfer-encoding") for name in getattr(client, "head", {})), client.head
    while left:
        piece = b"x" * min(left, 10000)
        client.send(piece)
        left -= len(piece)
        missing = len(piece)
        while missing:
            data = client.receive()
            assert data
            missing -= len(data)
            back += len(data)
    client.end()
    while data := client.receive():
        back += len(data)
    print(status, back)


def reset(port, version, credentials, authority):
    client = tunnel(port, version)
    assert client.connect(authority, fields(credentials, "authorization")) == "200"
    client.send(b"a")
    assert client.receive() == b"a"
    client.reset()
    print("reset")


def broken(port, version, credentials, authority):
    client = tunnel(port, version)
    assert client.connect(authority, fields(credentials)) == "200"
    client.send(b"!")
    try:
        print(f"ended {client.receive()}")
    except Closed as how:
        print(how)


def varint(value):
    for bits, size in ((6, 1), (14, 2), (30, 4), (62, 8)):
        if value < 1 << bits:
            return (value | {1: 0, 2: 1, 4: 2, 8: 3}[size] << size * 8 - 2).to_bytes(size, "big")


def capsule(kind, value):
    return varint(kind) + varint(len(value)) + value


class Capsules:
    """What comes in DATAGRAM capsules."""

    def __init__(self, client):
        self.client, self.buffer = client, b""

    def integer(self, at):
        self.fill(at + 1)
        size = 1 << (self.buffer[at] >> 6)
        self.fill(at + size)
        return int.from_bytes(self.buffer[at:at + size], "big") & (1 << size * 8 - 2) - 1, at + size

    def fill(self, count):
        while len(self.buffer) < count:
            data = self.client.receive()
            if not data:
                raise Closed("ended")
            self.buffer += data

    def next(self):
        kind, at = self.integer(0)
        length, at = self.integer(at)
        self.fill(at + length)
        value, self.buffer = self.buffer[at:at + length], self.buffer[at + length:]
        assert kind == 0 and value[:1] == b"\0", (kind, value)
        return value[1:]


def udp(port, version, credentials, host, target, count):
    client = tunnel(port, version)
    status = client.udp(host, target, fields(credentials))
    back = 0
    if status in ("101", "200"):
        capsules = Capsules(client)
        for number in range(int(count)):
            payload = number.to_bytes(4, "big") * (1 + number * 7 % 350)
            client.send(capsule(0, b"\0" + payload))
            assert capsules.next() == payload
            back += 1
        client.end()
    print(status, back)


def capsules(port, version, credentials, host, target):
    client = tunnel(port, version)
    assert client.udp(host, target, fields(credentials)) in ("101", "200")
    came = Capsules(client)
    # Unknown kinds, an unknown context, a datagram without a context, and one that is cut into bytes.
    client.send(capsule(0x29, b"grease" * 1000) + capsule(0, b"\x05other") + capsule(0, b"") + capsule(1, b"address"))
    for byte in capsule(0, b"\0first"):
        client.send(bytes([byte]))
    assert came.next() == b"first"
    # Longer than any datagram.
    client.send(capsule(0, b"\0" + b"x" * 70000) + capsule(0, b"\0second"))
    assert came.next() == b"second"
    # 4 EiB, of which some MiB come.
    client.send(varint(0) + b"\xff" * 8)
    for _ in range(400):
        client.send(b"y" * 16384)
    client.reset()
    print("first second")


def burst(port, version, credentials, host, target, count):
    client = tunnel(port, version)
    assert client.udp(host, target, fields(credentials)) in ("101", "200")
    client.send(capsule(0, b"\0" + b"x" * 1000) * int(count))
    time.sleep(1)
    client.end()
    print("sent", count)


def answers(port, version, credentials):
    lines, said = fields(credentials), []
    if version == "1":
        for authority in ("web:80", "127.0.0.1:1", "nothing"):
            client = Http1(port)
            said.append(client.connect(authority, lines))
            assert said[-1] == "200" or "connection: close" in client.head, client.head
        said.append(Http1(port).udp("echo", 7, lines))
        said.append(Http1(port).packets(IP.format("*", "*"), lines))
    else:
        client = Http2(port)
        for authority in ("web:80", "127.0.0.1:1", "nothing"):
            said.append(client.connect(authority, lines))
        for protocol, path in (("connect-udp", UDP.format("echo", 7)), ("connect-udp", "/x"), ("connect-ip", "/"),
                               ("connect-ip", IP.format("*", "*")), ("x", "/")):
            said.append(client.extended(protocol, path, lines))
    print(*said)


def early(port, version, credentials, authority):
    client = Http1(port, behind=b"early")
    status, back = client.connect(authority, fields(credentials)), 0
    try:
        while data := client.receive():
            back += len(data)
    except Closed:
        pass
    print(status, back)


def many(port, version, credentials, authority, count):
    client, done = tunnel(port, version), 0
    for number in range(int(count)):
        if version == "1" and number:
            client = tunnel(port, version)
        assert client.connect(authority, fields(credentials)) == "200"
        client.send(b"a")
        assert client.receive() == b"a"
        client.end()
        assert client.receive() == b""
        done += 1
    print(done)


def paused(port, version, credentials, authority):
    client = tunnel(port, version)
    assert client.connect(authority, fields(credentials)) == "200"
    client.send(b"GET /zeros/30000000 HTTP/1.0\r\n\r\n")
    time.sleep(35)
    received = 0
    while data := client.receive():
        received += len(data)
    print(received > 30000000)


def hold(port, version, credentials, authority, count):
    """Tunnels that stay open, and silent, until the input ends: over HTTP/2 all on one connection."""
    first = tunnel(port, version)
    clients = [first]
    for number in range(int(count)):
        if version == "1" and number:
            # There are bounds on handshakes.
            time.sleep(0.005)
            clients.append(tunnel(port, version))
        assert clients[-1].connect(authority, fields(credentials)) == "200", number
    sys.stdin.read()


def curl(port, version, credentials, url):
    from curl_cffi import Curl, CurlInfo, CurlOpt

    content, handle = io.BytesIO(), Curl()
    handle.setopt(CurlOpt.URL, url.encode())
    handle.setopt(CurlOpt.PROXY, f"https://{NAME}:{port}".encode())
    # CURLPROXY_HTTPS, CURLPROXY_HTTPS2
    handle.setopt(CurlOpt.PROXYTYPE, {"1": 2, "2": 3}[version])
    handle.setopt(CurlOpt.HTTPPROXYTUNNEL, 1)
    handle.setopt(CurlOpt.PROXYUSERPWD, credentials.encode())
    handle.setopt(CurlOpt.PROXY_SSL_VERIFYPEER, 0)
    handle.setopt(CurlOpt.RESOLVE, [f"{NAME}:{port}:127.0.0.1".encode()])
    handle.setopt(CurlOpt.NOPROXY, b"")
    handle.setopt(CurlOpt.TIMEOUT, PATIENCE)
    handle.setopt(CurlOpt.WRITEDATA, content)
    handle.perform()
    print(handle.getinfo(CurlInfo.RESPONSE_CODE), len(content.getvalue()))


if __name__ == "__main__":
    verb, port, *rest = sys.argv[1:]
    globals()[verb](int(port), *rest)
