"""A host with two lines to another one, and the ways of its packets: see `uplinks`.

              10.21.0.1 -- west  router  east -- 10.31.0.1
    left                  300 Mbit/s, 10 ms                 right, 203.0.113.1
              10.22.0.1 -- west  router  east -- 10.32.0.1
                          80 Mbit/s, 30 ms

All are network namespaces held by processes (l3_ways.Host), with a path_relay in each router. The left host prefers the first line.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import l3_ways
import paired
import path_ways
from harness import Failed, until
from l3_ways import Host, output

FAR = "203.0.113.1"
PORT, METRICS, IPERF3_PORT, ECHO_PORT = 4433, 9464, 5201, 5007
# Of forwards, to the two.
BULK_PORT, FLOW_PORT = 7001, 7002


class Rate(NamedTuple):
    """What a line has: one way of its delay, and its rate."""

    mbit: int
    delay: str
    queue: str = "50ms"


LINES = (Rate(300, "5ms"), Rate(80, "15ms"))
WHOLE_MBIT = sum(line.mbit for line in LINES)


class Line(path_ways.Path):
    """One of the lines, between the two hosts, with its relay."""

    def __init__(self, processes, number, left, right, rate):
        self.processes, self.number, self.rate = processes, number, rate
        self.router = Host(processes, f"router{number}")
        for host, name, network in ((left, "west", 21), (right, "east", 31)):
            ends = (str(self.router.holder.pid), str(host.holder.pid))
            inner, address = f"line{number}", f"10.{network + number}.0"
            output(["ip", "link", "add", "name", name, "netns", ends[0], "type", "veth", "peer", "name", inner, "netns", ends[1]])
            self.router.run("ip", "address", "add", f"{address}.2/24", "dev", name)
            self.router.run("ip", "link", "set", name, "up")
            host.run("ip", "address", "add", f"{address}.1/24", "dev", inner)
            host.run("ip", "link", "set", inner, "up")
        self.source = f"10.{21 + number}.0.1"
        # Each line has a default route of its own, as DHCP makes them, and what has its address goes by it.
        via = ["default", "via", f"10.{21 + number}.0.2", "dev", f"line{number}"]
        left.run("ip", "route", "add", *via, "metric", 100 + number)
        left.run("ip", "route", "add", *via, "table", 100 + number)
        left.run("ip", "rule", "add", "from", self.source, "table", 100 + number)
        right.run("ip", "route", "add", f"10.{21 + number}.0.0/24", "via", f"10.{31 + number}.0.2")
        self.router.run("ip", "route", "add", f"{FAR}/32", "via", f"10.{31 + number}.0.1")
        command = [*path_ways.before_others(10), path_ways.PATH_RELAY, "--left", "west", "--right", "east"]
        self.relay = processes.start(f"path_relay{number}", [*self.router.enter, *command], answers=True)
        self.answer()
        self.has(0)

    def has(self, loss):
        """Whether the line drops everything (1) or nothing (0)."""
        rate = self.rate
        self.set({"rate": f"{rate.mbit}Mbit", "delay": rate.delay, "queue": rate.queue, "loss": loss})


class Lines:
    """The two hosts and the lines between them."""

    def __init__(self, processes):
        self.processes = processes
        self.left, self.right = (Host(processes, name) for name in ("left", "right"))
        self.hosts = (self.left, self.right)
        self.right.run("ip", "address", "add", f"{FAR}/32", "dev", "lo")
        for host in self.hosts:
            for buffers in ("tcp_rmem", "tcp_wmem"):
                host.run("sh", "-c", f"echo 4096 131072 {path_ways.SOCKET_BYTES} > /proc/sys/net/ipv4/{buffers}")
            host.run("sh", "-c", "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter")
        self.lines = [Line(processes, number, self.left, self.right, rate) for number, rate in enumerate(LINES)]
        for number, line in enumerate(self.lines):
            self.left.run("ip", "mptcp", "endpoint", "add", line.source, "dev", f"line{number}", "subflow")
        for host in self.hosts:
            host.run("ip", "mptcp", "limits", "set", "subflow", 4, "add_addr_accepted", 4)

    def account(self):
        return [line.ask() for line in self.lines]

    def void(self, before):
        """Why what has been measured since then is worth nothing, if it is."""
        return [what for line, then in zip(self.lines, before, strict=True) for what in path_ways.fates(then, line.ask())[1]]


class Culvert:
    """An agent at each end: with both lines, or with the better one alone."""

    def __init__(self, kind, number, lines, program, both):
        self.kind, self.lines, self.device = kind, lines, f"culvert{number}"
        self.metrics, quic = METRICS + number, f"{FAR}:{PORT + number}"
        self.bulk, self.flow = (("127.0.0.1", port + 10 * number) for port in (BULK_PORT, FLOW_PORT))
        self.target = f"10.9.{number}.2"
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=lines.processes.path))
        known = paired.keys(program, folder, "left", "right")
        uplinks = "".join(
            f'[[transport.uplink]]\nname = "line{line}"\ninterface = "line{line}"\nrate = "{rate.mbit}Mbit"\n' for line, rate in enumerate(LINES)
        )
        services = {"bulk": IPERF3_PORT, "flow": ECHO_PORT}
        (folder / "right.toml").write_text(
            paired.own(folder, "right", self.metrics)
            + f'[transport]\nlisten = ["{quic}"]\n[tun]\nname = "{self.device}"\naddress = ["{self.target}/24"]\n'
            + f'[[peer]]\nname = "left"\npublic_key = "{known["left"]}"\nservices = ["bulk", "flow"]\nallowed_ips = ["10.9.{number}.1"]\n'
            + "".join(f'[[service]]\nname = "{name}"\nupstream = "127.0.0.1:{port}"\n' for name, port in services.items())
        )
        (folder / "left.toml").write_text(
            paired.own(folder, "left", self.metrics)
            + f'[tun]\nname = "{self.device}"\naddress = ["10.9.{number}.1/24"]\n'
            + f'[[peer]]\nname = "right"\npublic_key = "{known["right"]}"\nendpoints = ["{quic}"]\nallowed_ips = ["{self.target}"]\n'
            + f'[[tcp]]\nlisten = "127.0.0.1:{self.bulk[1]}"\npeer = "right"\nservice = "bulk"\n'
            + f'[[udp]]\nlisten = "127.0.0.1:{self.flow[1]}"\npeer = "right"\nservice = "flow"\n'
            + (uplinks if both else "")
        )
        self.daemons = [
            host.start(kind, program, "run", "--config", folder / f"{name}.toml") for host, name in zip(lines.hosts, ("left", "right"), strict=True)
        ]

        def is_up():
            if any(daemon.poll() is not None for daemon in self.daemons):
                return False
            try:
                samples = paired.scrape(lines.left, self.metrics)
            except Failed:
                return False
            wanted, up = (samples.total(name) for name in ("culvert_peer_lanes_wanted", "culvert_peer_lanes"))
            return wanted >= (2 if both else 1) and up == wanted

        try:
            until(f"{kind}: its lanes are up", is_up)
        except Failed as error:
            raise Failed(f"{error}\n" + "\n".join(host.log(kind) for host in lines.hosts)) from None

    enter = ()


class Mptcp:
    """The kernel's MPTCP between the hosts, on sockets that mptcpize makes: no tunnel."""

    target, enter = FAR, ("mptcpize", "run")


class WireGuardGo(l3_ways.WireGuardGo):
    """On the better line alone."""

    underlay = ("10.21.0.1", FAR)
    enter = ()
