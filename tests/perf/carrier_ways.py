"""Two agents whose packets go over TCP, and what stands beside or in front of them: see `carrier`."""

import sys
import tempfile
from pathlib import Path

import forwards_ways
import paired
from harness import Failed, until
from l3_loads import percentile

ECHOES = Path(__file__).resolve().with_name("echoes.py")
IPERF3_PORT, ECHO_PORT = 5201, 5007
# A way's number, times ten, is added.
PORTS, METRICS = 23_000, 24_000


def serve(hosts, at):
    """An echo and iperf3 on the right host."""
    hosts[1].start("echoes", sys.executable, "-B", ECHOES, "serve", "0.0.0.0", ECHO_PORT)
    hosts[1].start("iperf3", "iperf3", "-s", "-p", IPERF3_PORT)
    for port in (ECHO_PORT, IPERF3_PORT):
        until(f"a server listens at {at}:{port}", lambda port=port: hosts[1].listens(port))


class Ended(Exception):
    """An agent is no more: waiting is pointless."""


class Pair:
    """An agent on each host. The left one dials the right one at `at`: over UDP and TCP, or with `always` over TCP alone; with
    `front` HAProxy ends TLS before the right one's web server. Nothing runs before `start`."""

    def __init__(self, kind, hosts, program, number, at, always=True, front=False):
        self.kind, self.hosts, self.program, self.at, self.daemons = kind, hosts, program, at, []
        base = PORTS + 10 * number
        self.quic, self.web, self.udp, self.tcp, self.bulk = base, base + 1, base + 2, base + 3, base + 4
        self.metrics, self.device, self.front = METRICS + number, f"carried{number}", front
        self.inner = [f"10.9.{number}.{end}" for end in (1, 2)]
        self.folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=hosts[0].processes.path))
        known = paired.keys(program, self.folder, "left", "right")
        paired.certificate(self.folder, f"DNS:gw.example.net,IP:{at}")
        endpoints = ([] if always else [f"{at}:{self.quic}"]) + [f"https://{at}:{self.web}/"]
        inside = f"127.0.0.1:{self.web}"
        web = f'listen = ["{inside}"]\ntls = false\ntrusted = ["127.0.0.1/32"]' if front else f'listen = ["{at}:{self.web}"]'
        services = {"echo": ECHO_PORT, "bulk": IPERF3_PORT}
        names = ", ".join(f'"{name}"' for name in services)
        (self.folder / "right.toml").write_text(
            paired.own(self.folder, "right", self.metrics)
            + f'[transport]\nlisten = ["{at}:{self.quic}"]\n'
            + f'[http]\ncertificate_file = "{self.folder}/cert.pem"\nkey_file = "{self.folder}/key.pem"\nnames = ["gw.example.net"]\n{web}\n'
            + "".join(f'[[service]]\nname = "{name}"\nupstream = "127.0.0.1:{port}"\n' for name, port in services.items())
            + f'[tun]\nname = "{self.device}"\naddress = ["{self.inner[1]}/24"]\n'
            + f'[[peer]]\nname = "left"\npublic_key = "{known["left"]}"\nservices = [{names}]\nallowed_ips = ["{self.inner[0]}"]\n'
        )
        (self.folder / "left.toml").write_text(
            paired.own(self.folder, "left", self.metrics)
            + f'[tun]\nname = "{self.device}"\naddress = ["{self.inner[0]}/24"]\n'
            + f'[[peer]]\nname = "right"\npublic_key = "{known["right"]}"\nendpoints = {endpoints}\nca_file = "{self.folder}/ca.pem"\n'.replace("'", '"')
            + f'carrier = "{"always" if always else "fallback"}"\nallowed_ips = ["{self.inner[1]}"]\n'
            + "".join(
                f'[[{protocol}]]\nlisten = "127.0.0.1:{port}"\npeer = "right"\nservice = "{service}"\n'
                for protocol, port, service in (("udp", self.udp, "echo"), ("tcp", self.tcp, "echo"), ("tcp", self.bulk, "bulk"))
            )
        )

    def start(self, wait=True):
        if self.front:
            (self.folder / "front.cfg").write_text(
                "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n timeout tunnel 1h\n"
                f"frontend front\n bind {self.at}:{self.web} ssl crt {self.folder}/both.pem alpn http/1.1\n default_backend culvert\n"
                f"backend culvert\n option forwardfor\n server culvert 127.0.0.1:{self.web}\n"
            )
            self.daemons.append(self.hosts[1].start(f"{self.kind}-front", "haproxy", "-db", "-f", self.folder / "front.cfg"))
        for host, name in zip(reversed(self.hosts), ("right", "left"), strict=True):
            self.daemons.append(host.start(self.kind, self.program, "run", "--config", self.folder / f"{name}.toml"))
        if wait:
            self.until("connected, its lanes up", self.is_up)
        return self

    def is_up(self):
        return all(self.scrape(end).total("culvert_lanes", state="up") >= 1 for end in (0, 1))

    def until(self, what, ready, limit_seconds=20):
        def asked():
            if ended := [daemon.name for daemon in self.daemons if daemon.poll() is not None]:
                raise Ended(f"{ended[0]} has ended")
            try:
                return ready()
            except Failed:
                return False

        try:
            until(f"{self.kind}: {what}", asked, limit_seconds)
        except (Failed, Ended) as error:
            raise Failed(f"{error}\n" + "\n".join(f"{host.name}: {host.log(self.kind)}" for host in self.hosts)) from None

    def stop(self):
        for daemon in self.daemons:
            self.hosts[0].processes.stop(daemon)
        self.daemons = []

    def scrape(self, end):
        return paired.scrape(self.hosts[end], self.metrics)

    def is_over_tcp(self):
        """Of each end."""
        return [self.scrape(end).total("culvert_peer_over_tcp") == 1 for end in (0, 1)]


class HaProxy(forwards_ways.HaProxy):
    """The same hop as in `forwards`, to these servers."""

    def __init__(self, kind, number, hosts, addresses):
        self.servers = {"iperf3": IPERF3_PORT, "echo": ECHO_PORT}
        kept, forwards_ways.SERVERS = forwards_ways.SERVERS, self.servers
        try:
            super().__init__(kind, number, hosts, addresses)
        finally:
            forwards_ways.SERVERS = kept


class Asker:
    """One of `echoes.py ask`, in the background."""

    def __init__(self, host, name, protocol, address, port, ms, seconds):
        self.processes, self.name = host.processes, f"{host.name}-{name}"
        self.log = self.processes.path / f"{self.name}.log"
        self.log.unlink(missing_ok=True)
        self.child = host.start(name, sys.executable, "-B", ECHOES, "ask", protocol, address, port, ms, seconds)
        self.seconds = seconds

    def answers(self):
        """Pairs of when it was sent and when it came, and how many were sent; once it has ended."""
        until(f"{self.name} ends", lambda: self.child.poll() is not None, self.seconds + 10)
        self.processes.stop(self.child)
        lines = self.log.read_text().split("\n")
        pairs = [tuple(map(float, line.split())) for line in lines if line[:1].isdigit()]
        sent = next((int(line.split()[1]) for line in lines if line.startswith("sent ")), None)
        if sent is None:
            raise Failed(f"{self.name}: {self.log.read_text()[-300:]}")
        return pairs, sent


def first_after(pairs, moment):
    """How long after `moment` the first answer came to what was sent after it."""
    came = [came for sent, came in pairs if sent > moment]
    if not came:
        raise Failed("nothing went on")
    return min(came) - moment


def times(pairs, cold=10):
    """Microseconds, without the first ones."""
    found = [(came - sent) * 1e6 for sent, came in pairs[cold:]]
    if not found:
        raise Failed("nothing came back")
    return {"p50 µs": percentile(found, 0.5), "p99 µs": percentile(found, 0.99)}
