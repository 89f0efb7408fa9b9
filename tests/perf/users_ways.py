"""An exit with users and peers on loopback, and one with a device between two namespaces: see `users`."""

import json
import os
import select
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import harness
import l3_ways
import paired
from harness import Failed, Samples, until

NAME, OTHER_NAME = "gw.example.net", "www.example.com"
INNER, PEER, POOL = "10.9.0.1", "10.9.0.2", "10.9.1.0/24"
# Of another proxy, and what its client gets. The device's MTU is below what a DATAGRAM frame holds over Ethernet.
PROXY, PROXIED, PROXY_MTU = "10.9.2.1", "10.9.2.2", 1400
QUIC_PORT, METRICS_PORT = 4433, 9464


def user(program, folder, config, *more, enter=()):
    """Lets a user in, and returns its credentials."""
    command = [*enter, program, "user", "add", "anna", "--json", "--config", config, *more]
    said = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
    return f"anna:{json.loads(said)['password']}"


def web(folder, more=""):
    return f'[http]\ncertificate_file = "{folder}/cert.pem"\nkey_file = "{folder}/key.pem"\nnames = ["{NAME}"]\n{more}\n'


class Tunnel:
    """`user_load udp`, `peer` or `ip`, which answers questions."""

    def __init__(self, processes, name, command):
        self.processes, self.name = processes, name
        self.child = processes.start(name, command, answers=True)
        self.said, self.held = {}, b""

    def wait_for(self, member):
        """Reads until it has said this, and returns it."""
        while member not in self.said:
            self.said |= self.line()
        return self.said[member]

    def settle(self):
        """Until path MTU discovery has come to its end."""
        return harness.settled(lambda: self.ask()["largest_datagram"])

    def line(self):
        # Lines that come at once must not wait in a buffer that `select` does not see.
        while b"\n" not in self.held:
            if not select.select([self.child.stdout], [], [], 20)[0]:
                raise Failed(f"{self.name} does not answer")
            more = os.read(self.child.stdout.fileno(), 65536)
            if not more:
                raise Failed(f"{self.name} has ended: {self.processes.log(self.name)}")
            self.held += more
        line, _, self.held = self.held.partition(b"\n")
        return json.loads(line)

    def tell(self, line):
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()

    def ask(self):
        self.tell("")
        return self.line()


class Site:
    """An exit and a peer that dials it, on loopback. The peer's ports `entry` and `probe` lead to `sink` and `probe_sink`; so does
    `users`, through CONNECT-UDP. Without `named`, the exit has no [http]; `own` has lines of the agents by their
    names. With `standard` the exit asks for no knock, and the port of that name leads to `sink` through a peer in standard mode."""

    def __init__(self, processes, program, load, named=True, own=None, idle="5m", standard=False):
        self.processes, self.program, self.load = processes, program, load
        self.quic, self.entry, self.sink, self.probe, self.probe_sink, self.users = (paired.quiet_port() for _ in range(6))
        self.metrics = {"exit": paired.quiet_port(), "entry": paired.quiet_port()}
        self.folder = Path(tempfile.mkdtemp(prefix="site-", dir=processes.path))
        known = paired.keys(program, self.folder, "exit", "entry")
        paired.certificate(self.folder, f"DNS:{NAME},IP:127.0.0.1")
        at, more = "127.0.0.1:{}".format, (own or {}).get("exit", "")
        if standard:
            self.standard = paired.quiet_port()
            command = [load, "peer", "--to", at(self.quic), "--listen", at(self.standard), "--service", "load"]
            self.peer = Tunnel(processes, f"{self.folder.name}-standard", command)
            key = self.peer.wait_for("key")
            more += f'[access]\nknock = "off"\n[[peer]]\nname = "standard"\npublic_key = "{key}"\nservices = ["load"]\n'
        (self.folder / "exit.toml").write_text(
            paired.own(self.folder, "exit", self.metrics["exit"], control=True)
            + f'[transport]\nlisten = ["{at(self.quic)}"]\n'
            + (web(self.folder) if named else "") + more
            + f'[[peer]]\nname = "entry"\npublic_key = "{known["entry"]}"\nservices = ["load", "probe"]\n'
            + f'[[service]]\nname = "load"\nupstream = "{at(self.sink)}"\noversize = "fragment"\nidle = "{idle}"\n'
            + f'[[service]]\nname = "probe"\nupstream = "{at(self.probe_sink)}"\n'
        )
        (self.folder / "entry.toml").write_text(
            paired.own(self.folder, "entry", self.metrics["entry"]) + (own or {}).get("entry", "")
            + f'[[peer]]\nname = "exit"\npublic_key = "{known["exit"]}"\nendpoints = ["{at(self.quic)}"]\n'
            + f'[[udp]]\nlisten = "{at(self.entry)}"\npeer = "exit"\nservice = "load"\n'
            + f'[[udp]]\nlisten = "{at(self.probe)}"\npeer = "exit"\nservice = "probe"\n'
        )
        self.agents = {
            name: processes.start(f"{self.folder.name}-{name}", [program, "run", "--config", self.folder / f"{name}.toml"])
            for name in ("exit", "entry")
        }
        try:
            until("lanes are up", lambda: self.scrape("entry").total("culvert_lanes", state="up") >= 1)
        except Failed as error:
            raise Failed(f"{error}\n" + "\n".join(processes.log(f"{self.folder.name}-{name}") for name in self.agents)) from None
        self.tunnel = self.credentials = None
        if standard:
            self.peer.tell(known["exit"])
            self.peer.wait_for("ready")
            self.peer.settle()
        if named:
            self.credentials = user(program, self.folder, self.folder / "exit.toml", "--service", "load")

    def server(self, name=NAME):
        return ["--to", f"127.0.0.1:{self.quic}", "--name", name]

    def open_tunnel(self):
        if not self.tunnel:
            place = ["--listen", f"127.0.0.1:{self.users}", "--target", f"load:{self.sink}"]
            self.tunnel = Tunnel(self.processes, "tunnel", [self.load, "udp", *self.server(), "--credentials", self.credentials, *place])
            self.tunnel.wait_for("ready")
            self.tunnel.settle()
        return self.tunnel

    def scrape(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[name]}/metrics", timeout=5) as answer:
            return Samples(answer.read().decode())

    def cpu_seconds(self, name="exit"):
        return paired.cpu_seconds(self.agents[name])

    def bench(self, entry, sink, size, rate, seconds, *more):
        """A command of `culvert bench`."""
        way = ["--to", f"127.0.0.1:{entry}", "--sink", f"127.0.0.1:{sink}"]
        return [self.program, "bench", *way, "--size", size, "--rate", rate, "--seconds", seconds, "--warmup", 0, "--json", *more]

    def client(self, *command, limit_seconds):
        return self.processes.run([self.load, *command], limit_seconds)


class Discard:
    """A port at which nobody reads: the kernel drops what it has no room for."""

    def __init__(self):
        self.socket = socket.socket(type=socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]


class Devices:
    """A user and a peer on the left host, and their exit on the right one; beside them the same client with a proxy on connect-ip-go,
    if there is one. iperf3 is at the far ends' inner addresses."""

    def __init__(self, processes, program, load, proxy=None):
        self.processes, self.load, self.hosts = processes, load, l3_ways.cable(processes)
        self.folder = Path(tempfile.mkdtemp(prefix="devices-", dir=processes.path))
        known = paired.keys(program, self.folder, "exit", "entry")
        at = f"{l3_ways.UNDERLAY[1]}:{QUIC_PORT}"
        paired.certificate(self.folder, f"DNS:{NAME},IP:{l3_ways.UNDERLAY[1]}")
        (self.folder / "exit.toml").write_text(
            paired.own(self.folder, "exit", METRICS_PORT, control=True)
            + f'[transport]\nlisten = ["{at}"]\n' + web(self.folder, f'pool = ["{POOL}"]')
            + f'[tun]\nname = "exit0"\naddress = ["{INNER}/24"]\n'
            + f'[[service]]\nname = "lan"\nupstream = "any"\nallow = ["{INNER}/32"]\n'
            + f'[[peer]]\nname = "entry"\npublic_key = "{known["entry"]}"\nallowed_ips = ["{PEER}"]\n'
        )
        # The user has the same target: the source says which way is meant.
        (self.folder / "entry.toml").write_text(
            paired.own(self.folder, "entry", METRICS_PORT)
            + f'[tun]\nname = "peer0"\naddress = ["{PEER}/32"]\nroutes = false\n'
            + f'[[peer]]\nname = "exit"\npublic_key = "{known["exit"]}"\nendpoints = ["{at}"]\nallowed_ips = ["{INNER}"]\n'
        )
        left, right = self.hosts
        far = right.start("exit", program, "run", "--config", self.folder / "exit.toml")
        entry = left.start("entry", program, "run", "--config", self.folder / "entry.toml")
        self.far, self.near, self.source, self.target = {}, {}, {}, {}

        def connected():
            try:
                return paired.scrape(left, METRICS_PORT).total("culvert_lanes", state="up") >= 1
            except Failed:
                return False

        try:
            until("the peer is connected", connected)
            credentials = user(program, self.folder, self.folder / "exit.toml", "--network", f"{INNER}/32", enter=right.enter)
        except (Failed, subprocess.CalledProcessError) as error:
            raise Failed(f"{error}\n{right.log('exit')}\n{left.log('entry')}") from None
        self.add("peer", far, entry, "peer0", PEER, INNER)
        self.add_client("user", far, at, credentials, INNER)
        if proxy:
            self.add_proxy(proxy)
        right.start("iperf3", "iperf3", "-s", "-p", 5201)
        until("iperf3 listens", lambda: right.listens(5201))

    def add_proxy(self, proxy):
        right, at = self.hosts[1], f"{l3_ways.UNDERLAY[1]}:{QUIC_PORT + 1}"
        files = ["-certificate", self.folder / "cert.pem", "-key", self.folder / "key.pem"]
        inside = ["-device", "proxy0", "-address", f"{PROXIED}/32", "-route", f"{PROXY}/32"]
        far = right.start("proxy", proxy, "-listen", at, "-name", NAME, *files, *inside)
        until("the proxy has a device", lambda: "proxy0" in right.run("ip", "-brief", "link"))
        right.run("ip", "address", "add", f"{PROXY}/32", "dev", "proxy0")
        right.run("ip", "link", "set", "proxy0", "mtu", PROXY_MTU, "up")
        right.run("ip", "route", "add", f"{PROXIED}/32", "dev", "proxy0")
        self.add_client("connect-ip-go", far, at, "nobody:checks", PROXY, "--path", "/ip")

    def add_client(self, way, far, at, credentials, target, *more):
        left, device = self.hosts[0], f"user{len(self.source)}"
        command = [*left.enter, self.load, "ip", "--to", at, "--name", NAME, "--credentials", credentials, "--device", device, *more]
        tunnel = Tunnel(self.processes, f"client-{way}", command)
        source = tunnel.wait_for("address")
        # Two seconds after its start a session takes what fits a frame. The head of a datagram has two bytes.
        time.sleep(2.5)
        largest = tunnel.settle() - 2
        left.run("ip", "address", "add", f"{source}/32", "dev", device)
        left.run("ip", "link", "set", device, "mtu", largest, "up")
        self.add(way, far, tunnel.child, device, source, target)

    def add(self, way, far, near, device, source, target):
        """Packets from this source reach the target by this device."""
        table = 100 + len(self.source)
        self.hosts[0].run("ip", "rule", "add", "from", source, "table", table)
        self.hosts[0].run("ip", "route", "add", f"{target}/32", "dev", device, "table", table)
        self.far[way], self.near[way], self.source[way], self.target[way] = far, near, source, target
