"""Two hosts with a bottleneck between them, and the ways of a TCP stream from the left one to the right one.

    left 192.0.2.1 -- west  router  east -- 198.51.100.1 right
                       path_relay

The three are network namespaces held by processes (l3_ways.Host). The relay's account of each run comes with the run.
"""

import json
import os
import select
import shutil
import subprocess

import harness
from harness import CULVERT, Failed, Samples, say, until
from l3_ways import Host, output

PATH_RELAY = harness.RELEASE / "examples/path_relay"
LEFT, RIGHT = "192.0.2.1", "198.51.100.1"
CULVERT_PORT, FORWARD_PORT, METRICS_PORT, IPERF3_PORT = 4433, 7001, 9464, 5201
FOREIGN_PORT = IPERF3_PORT + 1

# So many late packets void no run, however few there are.
MOST_LATE = 10

# A kernel's own streams must be able to fill 200 Mbit/s with 200 ms and half a second of buffer.
SOCKET_BYTES = 64 << 20


def before_others(priority):
    """What has a program go before all others of the machine, where that is allowed: else nothing."""
    command = ["chrt", "--rr", str(priority)]
    allowed = shutil.which("chrt") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return command if allowed else []


def attach(host, gateway, name, address):
    """Gives the host this address and, as its default route, a gateway with the interface `name`."""
    ends = (str(gateway.holder.pid), str(host.holder.pid))
    output(["ip", "link", "add", "name", name, "netns", ends[0], "type", "veth", "peer", "name", "lan", "netns", ends[1]])
    theirs = address[:-1] + "2"
    gateway.run("ip", "address", "add", f"{theirs}/24", "dev", name)
    gateway.run("ip", "link", "set", name, "up")
    host.run("ip", "address", "add", f"{address}/24", "dev", "lan")
    host.run("ip", "link", "set", "lan", "up")
    host.run("ip", "route", "add", "default", "via", theirs)
    for buffers in ("tcp_rmem", "tcp_wmem"):
        # The middle value is the one to begin with.
        host.run("sh", "-c", f"echo 4096 131072 {SOCKET_BYTES} > /proc/sys/net/ipv4/{buffers}")


def build(binary):
    """Builds the relay, and Culvert where that is the binary, unless CULVERT_PERF_BUILT says that they are there."""
    if os.environ.get("CULVERT_PERF_BUILT"):
        return
    say("building the release binaries")
    cargo = ["cargo", "build", "--release", "--quiet", "--package"]
    if binary == CULVERT:
        subprocess.run([*cargo, "culvert"], cwd=harness.ROOT, check=True)
    subprocess.run([*cargo, "culvert-tests", "--example", "path_relay"], cwd=harness.ROOT, check=True)


class Path:
    """The hosts and the relay; `set` makes the path another one."""

    def __init__(self, processes, realtime=False):
        self.processes = processes
        self.left, self.router, self.right = (Host(processes, name) for name in ("left", "router", "right"))
        attach(self.left, self.router, "west", LEFT)
        attach(self.right, self.router, "east", RIGHT)
        command = [*before_others(10), PATH_RELAY, "--left", "west", "--right", "east"]
        self.relay = processes.start("path_relay", [*self.router.enter, *command], answers=True)
        self.answer()
        if realtime:
            for host in (self.left, self.right):
                host.enter = [*host.enter, *before_others(5)]

    def answer(self):
        if not select.select([self.relay.stdout], [], [], 10)[0]:
            raise Failed("the relay does not answer")
        line = self.relay.stdout.readline()
        if not line:
            raise Failed(f"the relay has ended: {self.processes.log('path_relay')}")
        return json.loads(line)

    def ask(self, line=""):
        """The account, after what the line changes."""
        self.relay.stdin.write(f"{line}\n")
        self.relay.stdin.flush()
        return self.answer()

    def set(self, condition):
        """Has the path be this, in both directions; the return has as much queue."""
        settings = {"rate": "200Mbit", "queue": "80ms", "delay": "40ms", "jitter": "0ms", "loss": 0, "gilbert": "0/1", **condition}
        self.ask(",".join(f"{name}={value}" for name, value in settings.items()))

    def check(self):
        if self.relay.poll() is not None:
            raise Failed(f"the relay has ended with {self.relay.returncode}: {self.processes.log('path_relay')}")


def fates(before, after):
    """What became of the packets of one run, and why it is void, if it is."""
    run = {}
    for direction in ("there", "back"):
        counts = {key: value - before[direction][key] for key, value in after[direction].items() if isinstance(value, int)}
        # Not counts: the most so far.
        for key in ("most_queued_bytes", "latest_us", "held"):
            counts[key] = after[direction][key]
        run[direction] = counts
    late = [
        f"{counts['late']} late packets {direction}"
        for direction, counts in run.items()
        if counts["late"] > MOST_LATE and counts["late"] * 1000 > counts["passed"]
    ]
    # The relay's own words are of all runs so far: what has been said before is not of this one.
    said = [what for what in after["void"] if what not in before["void"] and "later than" not in what]
    return run, said + late


class Kernel:
    """The kernel's own TCP between the two hosts."""

    def __init__(self, path, congestion):
        self.path, self.congestion = path, congestion
        self.target, self.port, self.options = RIGHT, IPERF3_PORT, ["-C", congestion]
        self.version = f"Linux, {congestion}"

    def start(self):
        pass

    def stop(self):
        pass

    def state(self):
        return {}


class Culvert:
    """A TCP forward through two agents, made anew for each run; the left one dials."""

    target, port, options = "127.0.0.1", FORWARD_PORT, []

    def __init__(self, path, kind, program=CULVERT, congestion=None, rate=None):
        self.path, self.kind, self.program = path, kind, program
        self.version = output([program, "--version"]).strip()
        self.folder = path.processes.path / kind
        self.folder.mkdir()
        self.hosts = [path.left, path.right]
        self.daemons = []
        for host in self.hosts:
            output([program, "keygen", "--out", self.folder / f"{host.name}.key"])
        self.peer = "".join(
            f'{key} = "{value}"\n' for key, value in (("congestion", congestion), ("rate", rate)) if value is not None
        )
        for host in self.hosts:
            self.configure(host)

    def configure(self, host):
        other = next(other for other in self.hosts if other is not host)
        listens = host is self.path.right
        at = f'"{RIGHT}:{CULVERT_PORT}"'
        service = f'[[service]]\nname = "load"\nupstream = "127.0.0.1:{IPERF3_PORT}"\n'
        forward = f'[[tcp]]\nlisten = "127.0.0.1:{FORWARD_PORT}"\npeer = "right"\nservice = "load"\n'
        (self.folder / f"{host.name}.toml").write_text(f"""
identity = {{ key_file = "{self.folder}/{host.name}.key", state_dir = "{self.folder}/{host.name}" }}
control = {{ socket = "" }}
metrics = {{ listen = "127.0.0.1:{METRICS_PORT}" }}
{f"transport = {{ listen = [{at}] }}" if listens else ""}
{service if listens else forward}
[[peer]]
name = "{other.name}"
public_key = "{output([self.program, "pubkey", self.folder / f"{other.name}.key"]).strip()}"
{'services = ["load"]' if listens else f"endpoints = [{at}]"}
{self.peer}
""")

    def understood(self):
        """What the program says against its configuration, or nothing."""
        try:
            output([self.program, "check", "--config", self.folder / "left.toml"])
        except Failed as error:
            return str(error)
        return None

    def start(self):
        run = [self.program, "run", "--config"]
        self.daemons = [host.start(self.kind, *run, self.folder / f"{host.name}.toml") for host in reversed(self.hosts)]

        def connected():
            if any(daemon.poll() is not None for daemon in self.daemons):
                raise Failed(f"an agent has ended\n{self.logs()}")
            try:
                return all(samples.total("culvert_lanes", state="up") >= 1 for samples in self.state().values())
            except Failed:
                return False

        try:
            until("lanes are up", connected, 30)
        except Failed as error:
            raise Failed(f"{error}\n{self.logs()}") from None

    def stop(self):
        for daemon in self.daemons:
            self.path.processes.stop(daemon)
        self.daemons = []

    def logs(self):
        return "\n".join(host.log(self.kind) for host in self.hosts)

    def state(self):
        get = ["curl", "--silent", "--fail", "--max-time", 5, f"http://127.0.0.1:{METRICS_PORT}/metrics"]
        return {host.name: Samples(host.run(*get)) for host in self.hosts}


class Loads:
    """iperf3 from the left host to the right one."""

    # The client reports after its time; what is under way may be half a second of buffer away.
    GRACE_SECONDS = 30

    def __init__(self, path):
        self.path, self.servers, self.runs = path, {}, 0

    def server(self, port):
        server = self.servers.get(port)
        if server is None or server.poll() is not None:
            self.servers[port] = self.path.right.start(f"iperf3-{port}", "iperf3", "-s", "-p", port)
            until("iperf3 listens", lambda: self.path.right.listens(port))

    def forget_servers(self):
        """A server whose client vanished refuses the next one."""
        for server in self.servers.values():
            self.path.processes.stop(server)
        self.servers = {}

    def client(self, target, port, seconds, warm_up, *more):
        more = [*more, "-O", warm_up] if warm_up else more
        return [*self.path.left.enter, "iperf3", "-c", target, "-p", port, "-t", seconds, "-J", *more]

    def tcp(self, way, seconds, warm_up, streams=1, foreign=None):
        """What one run gives; with `foreign` a stream of the kernel runs beside it, with this congestion control."""
        before = self.path.ask()
        self.server(IPERF3_PORT)
        limit = seconds + warm_up + self.GRACE_SECONDS
        beside = None
        try:
            if foreign:
                self.server(FOREIGN_PORT)
                self.runs += 1
                beside = self.path.processes.start(
                    f"foreign-{self.runs}", self.client(RIGHT, FOREIGN_PORT, seconds, warm_up, "-C", foreign)
                )
            command = self.client(way.target, way.port, seconds, warm_up, "-P", streams, *way.options)
            values = mbit(self.path.processes.run(command, limit))
            if beside:
                until("the foreign stream ends", lambda: beside.poll() is not None, self.GRACE_SECONDS)
                log = (self.path.processes.path / f"{beside.name}.log").read_text()
                values |= {"beside": mbit(json.loads(log))["Mbit/s"]}
        except (Failed, ValueError) as error:
            self.forget_servers()
            raise Failed(str(error)) from None
        finally:
            if beside:
                self.path.processes.stop(beside)
        values["relay"], values["void"] = fates(before, self.path.ask())
        return values


def mbit(answer):
    """What the receiver got after the warm-up, of iperf3's answer."""
    end = answer.get("end", {})
    if "error" in answer or "sum_received" not in end:
        raise Failed(f"iperf3: {answer.get('error', 'no result')}")
    return {"Mbit/s": end["sum_received"]["bits_per_second"] / 1e6, "retransmits": end["sum_sent"].get("retransmits", 0)}


def share(values):
    """Which part of both streams together is the one that is measured."""
    together = values["Mbit/s"] + values["beside"]
    return values["Mbit/s"] / together if together else 0.0
