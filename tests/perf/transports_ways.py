"""What `transports` compares, where, and one measurement of it.

A candidate is a transport of the bench's program (`transports_bench/`), or a proxy between two ends of its TCP or UDP. The sender
is on the left host, the receiver on the right one; proxies have a hop on each.
"""

import contextlib
import copy
import itertools
import json
import select
import subprocess
import time

import forwards_ways
import harness
import path_ways
from harness import Failed, until
from l3_ways import UNDERLAY, Host, cable, output

PACKAGE = harness.ROOT / "tests/perf/transports_bench"
TARGET = harness.ROOT / "target/transports"
BENCH = TARGET / "release/culvert-transports"

RUNS = itertools.count(1)

# Of the receiver, of the near hop, between the hops, and of Culvert's metrics at either end.
SERVER_PORT, NEAR_PORT, MIDDLE_PORT, METRICS_PORT = 6001, 7001, 8001, 9464


def with_cubic(host, *routes):
    """Has TCP of this host use Linux' own default on these routes and on loopback, whatever the machine's default is."""
    local = [f"local {prefix} dev lo table local proto kernel scope host src 127.0.0.1" for prefix in ("127.0.0.0/8", "127.0.0.1")]
    for route in (*routes, *local):
        host.run("ip", "route", "replace", *route.split(), "congctl", "cubic")


class Loopback:
    """One host as both, with loopback's own MTU of 65,536 bytes."""

    name = "loopback"

    def __init__(self, processes):
        self.processes = processes
        self.left = Host(processes, "loopback")
        self.right = copy.copy(self.left)
        self.right.name = "loopback-right"
        self.at = "127.0.0.1"
        with_cubic(self.left)

    def set(self, _condition):
        """There is nothing to change."""

    def account(self):
        return None


class Veth(Loopback):
    """Two hosts with a veth pair of 1,500 bytes between them."""

    name = "veth"

    def __init__(self, processes):
        self.processes = processes
        self.left, self.right = cable(processes)
        self.at = UNDERLAY[1]
        for host, address in zip((self.left, self.right), UNDERLAY, strict=True):
            with_cubic(host, f"192.0.2.0/24 dev veth0 proto kernel scope link src {address}")


class Relay(Loopback):
    """Two hosts with `path_relay` between them."""

    name = "relay"

    def __init__(self, processes):
        self.processes = processes
        self.path = path_ways.Path(processes)
        self.left, self.right = self.path.left, self.path.right
        self.at = path_ways.RIGHT
        for host, address in ((self.left, path_ways.LEFT), (self.right, path_ways.RIGHT)):
            with_cubic(host, f"default via {address[:-1]}2")

    def set(self, condition):
        self.path.set(condition)

    def account(self):
        return self.path.ask()


PLACES = {place.name: place for place in (Loopback, Veth, Relay)}


class Candidate:
    """A transport of the bench's program, without a hop."""

    def __init__(self, name, transport=None, datagrams=False, note=""):
        self.name, self.transport, self.datagrams, self.note = name, transport or name, datagrams, note
        self.hops = []

    def start(self, place):
        """Where the receiver listens, and where the sender goes."""
        at = f"{place.at}:{SERVER_PORT}"
        return at, at

    def stop(self, place):
        for hop in self.hops:
            place.processes.stop(hop)
        self.hops = []

    def check(self):
        for hop in self.hops:
            if hop.poll() is not None:
                raise Failed(f"{hop.name} has ended with {hop.returncode}")


class HaProxy(Candidate):
    """HAProxy, TLS 1.3 over TCP, HAProxy."""

    def start(self, place):
        folder = place.processes.path / f"haproxy-{place.name}"
        if not folder.exists():
            folder.mkdir()
            subject = ["-subj", "/CN=transports.test", "-days", "30", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
            output(["openssl", "req", "-x509", *subject, "-keyout", folder / "tls.pem.key", "-out", folder / "tls.pem"])
            settings = forwards_ways.HaProxy.SETTINGS.format(most=forwards_ways.most_connections())
            middle = f"{place.at}:{MIDDLE_PORT}"
            near = f"listen near\n  bind 127.0.0.1:{NEAR_PORT} backlog 4096\n  server far {middle} ssl verify none\n"
            tls = f"ssl crt {folder}/tls.pem ssl-min-ver TLSv1.3 ciphersuites TLS_AES_128_GCM_SHA256 backlog 4096"
            far = f"listen far\n  bind {middle} {tls}\n  server service 127.0.0.1:{SERVER_PORT}\n"
            (folder / "near.cfg").write_text(settings + near)
            (folder / "far.cfg").write_text(settings + far)
        for host, end, port in ((place.right, "far", MIDDLE_PORT), (place.left, "near", NEAR_PORT)):
            self.hops.append(host.start(f"haproxy-{end}", "haproxy", "-db", "-f", folder / f"{end}.cfg"))
            until(f"haproxy listens at {port}", lambda host=host, port=port: host.listens(port))
        return f"127.0.0.1:{SERVER_PORT}", f"127.0.0.1:{NEAR_PORT}"


class Culvert(Candidate):
    """An agent on each host, with the configuration's defaults; the left one dials."""

    PROGRAM = harness.CULVERT

    def start(self, place):
        folder = place.processes.path / f"{self.name}-{place.name}"
        if not folder.exists():
            self.configure(folder, place)
        hosts = {"right": place.right, "left": place.left}
        self.hops = [host.start(f"{self.name}-{end}", self.PROGRAM, "run", "--config", folder / f"{end}.toml") for end, host in hosts.items()]
        get = ["curl", "--silent", "--fail", "--max-time", 5, f"http://127.0.0.1:{METRICS_PORT}/metrics"]

        def up():
            self.check()
            with contextlib.suppress(Failed):
                return harness.Samples(place.left.run(*get)).total("culvert_lanes", state="up") >= 1
            return False

        try:
            until(f"{self.name}: lanes are up", up)
        except Failed as error:
            logs = "\n".join(host.log(f"{self.name}-{end}") for end, host in hosts.items())
            raise Failed(f"{error}\n{logs}") from None
        return f"127.0.0.1:{SERVER_PORT}", f"127.0.0.1:{NEAR_PORT}"

    def configure(self, folder, place):
        folder.mkdir()
        keys = {}
        for end in ("left", "right"):
            output([self.PROGRAM, "keygen", "--out", folder / f"{end}.key"])
            keys[end] = output([self.PROGRAM, "pubkey", folder / f"{end}.key"]).strip()

        def common(end):
            state = f'identity = {{ key_file = "{folder}/{end}.key", state_dir = "{folder}/{end}" }}\n'
            return f'{state}control = {{ socket = "" }}\nmetrics = {{ listen = "127.0.0.1:{METRICS_PORT + (end == "right")}" }}\n'

        quic = f'["{place.at}:{MIDDLE_PORT}"]'
        (folder / "right.toml").write_text(
            f'{common("right")}transport = {{ listen = {quic} }}\n'
            f'[[peer]]\nname = "left"\npublic_key = "{keys["left"]}"\nservices = ["load"]\n'
            f'[[service]]\nname = "load"\nupstream = "127.0.0.1:{SERVER_PORT}"\n'
        )
        kind = "udp" if self.datagrams else "tcp"
        (folder / "left.toml").write_text(
            f'{common("left")}[[peer]]\nname = "right"\npublic_key = "{keys["right"]}"\nendpoints = {quic}\n'
            f'[[{kind}]]\nlisten = "127.0.0.1:{NEAR_PORT}"\npeer = "right"\nservice = "load"\n'
        )


CANDIDATES = [
    Candidate("udp", datagrams=True, note="a socket of each sender; no cryptography"),
    Candidate("tcp", note="the kernel's, CUBIC; no cryptography"),
    Candidate("tls", note="rustls over TCP"),
    HaProxy("haproxy", "tcp", note="TCP, then HAProxy, TLS 1.3 over TCP, HAProxy, then TCP: two hops"),
    Candidate("quinn-stream", note="a stream of a connection each; CUBIC, windows of 16 MiB"),
    Candidate("quinn-datagram", datagrams=True, note="DATAGRAM frames of a connection each"),
    Candidate("kcp-tokio", note="mode turbo: nodelay 1, interval 4 ms, resend 1, no congestion control, windows of 1,024; no cryptography"),
    Candidate("kcp-sys", note="nodelay 1, interval 10 ms, resend 2, no congestion control, windows of 1,024: fixed by the crate; no cryptography"),
    Culvert("culvert-tcp", "tcp", note="TCP, then two agents with [[tcp]], then TCP: two hops"),
    Culvert("culvert-udp", "udp", datagrams=True, note="UDP, then two agents with [[udp]], then UDP: two hops"),
]


class Load:
    """What is sent in a run: messages at a cadence, as many as possible, or a file."""

    # How long a receiver is given for what is still on its way; nothing for so long, of datagrams or of streams, is the end.
    GRACE_SECONDS, SILENCE_SECONDS = 3, {True: 0.5, False: 1.5}

    def __init__(self, size, connections=1, rate=0, seconds=1.0, warm_up=0.2, file=None):
        self.size, self.connections, self.rate = size, connections, rate
        self.seconds, self.warm_up, self.file = seconds, warm_up, file

    def options(self):
        options = ["--size", self.size, "--connections", self.connections, "--seconds", self.seconds, "--warm-up", self.warm_up]
        return [*options, "--bytes", self.file] if self.file else [*options, "--rate", self.rate]

    def limit_seconds(self):
        # Connecting, and handing over late, are bounded by the program too.
        return self.seconds + self.warm_up + 5 * (1 + self.connections / 50) + 10


def measure(place, candidate, at, to, load):
    """One run: what was sent and what arrived, as the sender and the receiver say."""
    certificate = ["--certificate", place.processes.path / "certificate.der"]
    common = ["--transport", candidate.transport, *certificate]
    with contextlib.ExitStack() as ends:

        def start(host, name, *command):
            # A log of its own for each run, and panics without their stack.
            name = f"{host.name}-{name}-{next(RUNS)}"
            child = place.processes.start(name, [*host.enter, "env", "RUST_BACKTRACE=0", BENCH, *command], answers=True)
            ends.callback(place.processes.stop, child)
            return child

        def line(child, limit_seconds):
            if not select.select([child.stdout], [], [], limit_seconds)[0]:
                raise Failed(f"{child.name} said nothing within {limit_seconds:.0f} s")
            text = child.stdout.readline()
            if not text:
                child.wait(5)
                raise Failed(f"{child.name} has ended with {child.returncode}: {last_words(place.processes.log(child.name))}")
            return json.loads(text)

        server = start(place.right, f"{candidate.name}-receiver", "serve", *common, "--listen", at)
        line(server, 10)

        def ask():
            server.stdin.write("\n")
            server.stdin.flush()
            return line(server, 20)

        client = start(place.left, f"{candidate.name}-sender", "send", *common, "--to", to, *load.options())
        processes = [server, client, *candidate.hops]
        before = sum(map(harness.cpu_seconds, processes))
        sent = line(client, load.limit_seconds())
        spent = sum(map(harness.cpu_seconds, processes)) - before
        received = settle(ask, sent, load, candidate.datagrams)
        panics = [said for child in (server, client) if "panicked at" in (said := place.processes.log(child.name))]
    candidate.check()
    return values(candidate, load, sent, received, spent, panics)


def last_words(log):
    """A panic's message, or the last line."""
    lines = [text for text in log.splitlines() if text.strip()]
    for number, text in enumerate(lines):
        if "panicked at" in text:
            return " ".join(lines[number : number + 2])
    return lines[-1] if lines else "nothing said"


def settle(ask, sent, load, datagrams):
    """The receiver's account, once all that was sent is in it, or nothing more comes."""
    wanted = ("bytes", load.file) if load.file else ("counted", sent["sent"])
    account = ask()
    if not load.file and not load.rate and not datagrams:
        # What streams hold back when time is up is not lost.
        return account
    still = time.monotonic()
    end = still + (load.seconds if load.file else Load.GRACE_SECONDS)
    while account[wanted[0]] < wanted[1] and time.monotonic() < min(end, still + Load.SILENCE_SECONDS[datagrams]):
        time.sleep(0.05)
        last, account = account, ask()
        if account["messages"] != last["messages"]:
            still = time.monotonic()
    return account


def values(candidate, load, sent, received, spent, panics):
    """The figures of one run, or why there are none."""
    if panics:
        return {"cannot": f"crashes: {last_words(panics[0])}"}
    if sent["too_large"]:
        return {"cannot": "a message must fit a datagram, of 1,452 bytes at most with all headers of the transport"}
    if load.file:
        if received["bytes"] < load.file:
            return {"cannot": f"only {received['bytes']:,} of {load.file:,} bytes arrived"}
        return {"MB/s": received["bytes"] / received["seconds"] / 1e6, "seconds": received["seconds"]}
    found = {"sent": sent["sent"], "received": received["counted"], "connected": sent["connected"], "said": said(candidate, load, sent, received)}
    if load.rate or candidate.datagrams:
        # Of what a stream was given, the rest waits in its buffers.
        found["arrived %"] = 100 * received["counted"] / max(sent["planned"], sent["sent"], 1)
    if load.rate:
        found |= {"p50 µs": received["p50_us"], "p99 µs": received["p99_us"], "connect ms": sent["connect_ms"]}
    found |= {"Mbit/s": received["bytes_in_time"] * 8 / load.seconds / 1e6, "1/s": received["messages_in_time"] / load.seconds}
    found["CPU µs each"] = spent * 1e6 / received["messages"] if received["messages"] else None
    return found


def said(candidate, load, sent, received):
    """What went wrong on the way to figures."""
    texts = [f"{error} ({count} of {load.connections:,} connections)" for error, count in sent["errors"].items()]
    # One socket receives from all senders of UDP, and a proxy accepts before it reaches the receiver.
    if candidate.transport != "udp" and not isinstance(candidate, (HaProxy, Culvert)) and received["connections"] < sent["connected"]:
        texts.append(f"the receiver saw {received['connections']:,} of {sent['connected']:,} connections")
    return texts


def build():
    """Builds the bench's program: the candidates that could not be built, with the reason."""
    cargo = ["cargo", "build", "--release", "--quiet", "--locked", "--manifest-path", PACKAGE / "Cargo.toml", "--target-dir", TARGET]
    done = subprocess.run(cargo, cwd=PACKAGE, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return {}
    if "libclang" not in done.stderr:
        raise Failed(f"cargo build: {done.stderr[-2000:]}")
    subprocess.run([*cargo, "--no-default-features"], cwd=PACKAGE, check=True)
    return {"kcp-sys": "not built: libclang is missing (apt-get install libclang-dev)"}


def in_memory(size, seconds):
    """Nanoseconds of CPU of each protocol, without sockets: the program's answer."""
    done = subprocess.run([BENCH, "memory", "--size", str(size), "--seconds", str(seconds)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"in memory, {size} bytes: {last_words(done.stderr)}")
    return json.loads(done.stdout)

