"""Two hosts, the ways between them that are compared, and who runs them.

The hosts are network namespaces without a name, held by a process each, so that nothing of them stays behind however this
program ends. They have a mount namespace of their own too, because /sys shows the devices of whoever mounted it, and
because wireguard-go's control socket has a fixed place in /run.
"""

import ipaddress
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import harness
from harness import CULVERT, Failed, Samples, until

UNDERLAY = ("192.0.2.1", "192.0.2.2")
# By the order of the tunnels: all of them are up at once, and all but one are idle.
INNER = "10.9.{}.{}"
# Inside of a VXLAN inside of them.
VXLAN = "10.78.{}.{}"

CULVERT_PORT, WIREGUARD_PORT, METRICS_PORT = 4433, 51820, 9464
BARE_PORT = 7100
# Of the same size as Culvert's over IPv4: 28 bytes below it, and as much as a packet of Culvert has of its own.
BARE_OVERHEAD = 28 + 36
BARE_RELAY = harness.ROOT / "target/release/examples/bare_relay"

# In /proc/net/tcp.
TCP_LISTEN = "0A"


def output(command, limit_seconds=10):
    """What a short command prints."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from None
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Host:
    """A network namespace."""

    def __init__(self, processes, name):
        self.processes, self.name = processes, name
        hold = "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && exec sleep infinity"
        guard = ["setpriv", "--pdeathsig", "KILL", "--"]
        self.holder = processes.start(name, [*guard, "unshare", "--net", "--mount", "--", "sh", "-c", hold])
        self.enter = [*guard, "nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--"]
        until(f"the namespace {name} is there", lambda: Path(f"/proc/{self.holder.pid}/comm").read_text() == "sleep\n")
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command, limit_seconds=10):
        """What a short command that runs here prints."""
        return output([*self.enter, *command], limit_seconds)

    def start(self, name, *command):
        """A process that runs here until it is stopped, or this program ends."""
        return self.processes.start(f"{self.name}-{name}", [*self.enter, *command])

    def log(self, name):
        return self.processes.log(f"{self.name}-{name}")

    def listens(self, port):
        """Whether a TCP socket listens at this port."""
        sockets = "".join(Path(f"/proc/{self.holder.pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
        columns = [line.split() for line in sockets.splitlines()]
        return any(local.endswith(f":{port:04X}") for _, local, _, state, *_ in columns if state == TCP_LISTEN)

    def mtu(self, device):
        return json.loads(self.run("ip", "-json", "link", "show", "dev", device))[0]["mtu"]


def cable(processes, mtu=1500):
    """The two hosts, with a veth pair between them as the kernel makes it, with every offload, and this MTU."""
    hosts = [Host(processes, name) for name in ("left", "right")]
    ends = [str(host.holder.pid) for host in hosts]
    output(["ip", "link", "add", "veth0", "netns", ends[0], "type", "veth", "peer", "name", "veth0", "netns", ends[1]])
    for host, address in zip(hosts, UNDERLAY, strict=True):
        host.run("ip", "address", "add", f"{address}/24", "dev", "veth0")
        host.run("ip", "link", "set", "veth0", "mtu", mtu, "up")
    return hosts


class Way:
    """How packets of the left host reach the right one, which has the address `target` there."""

    device = "veth0"
    version = ""
    # Of the left end and of the right one: its address for the tunnel's packets, and the networks behind it.
    underlay = UNDERLAY
    behind = ((), ())

    def __init__(self, kind, hosts, number=None):
        self.kind, self.hosts, self.number = kind, hosts, number
        self.target = self.underlay[1] if number is None else self.inner(1)
        self.daemons = []

    def inner(self, end):
        return INNER.format(self.number, end + 1)

    def sources(self, end):
        """The prefixes that an end may send from."""
        return [f"{self.inner(end)}/32", *self.behind[end]]

    def state(self):
        """The answers of /metrics, for a way that has them."""
        return {}

    def check(self):
        """Says so if a daemon has ended."""
        for host, daemon in zip(self.hosts, self.daemons, strict=False):
            if daemon.poll() is not None:
                raise Failed(f"{daemon.name} has ended with {daemon.returncode}\n{host.log(self.kind)}")

    def cpu_seconds(self):
        """Of the daemons at both ends. What the kernel does in the name of others (softirqs, the senders) is not in it."""
        return sum(map(harness.cpu_seconds, self.daemons))

    def wait(self):
        """Until packets cross; waiting for a daemon that has ended is pointless."""

        def answers():
            self.check()
            try:
                self.hosts[0].run("ping", "-q", "-c", 1, "-W", 1, self.target)
            except Failed:
                return False
            return True

        try:
            until(f"{self.kind}: packets cross", answers)
        except Failed as error:
            logs = "\n".join(f"{host.name}: {host.log(self.kind)}" for host in self.hosts if self.daemons)
            raise Failed(f"{error}\n{logs}") from None


class Direct(Way):
    """No tunnel at all."""


class WireGuardGo(Way):
    """wireguard-go at both ends, as it is by default or with another MTU. Only the left one knows where the other is."""

    def __init__(self, kind, hosts, number, program, mtu=None):
        super().__init__(kind, hosts, number)
        self.version, self.device, self.port = wireguard_go_version(program), f"wg{number}", WIREGUARD_PORT + number
        folder = hosts[0].processes.path
        keys = [folder / f"{host.name}-{self.device}.key" for host in hosts]
        for host, key in zip(hosts, keys, strict=True):
            # Readable by its owner, like `wg` wants it.
            with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as out:
                out.write(output(["wg", "genkey"]))
            self.daemons.append(host.start(kind, "env", "LOG_LEVEL=error", program, "-f", self.device))
        for end, host in enumerate(hosts):
            public = output(["sh", "-c", f"wg pubkey < {keys[1 - end]}"]).strip()
            until(f"{kind} answers", lambda host=host: self.answers(host))
            me = ["wg", "set", self.device, "private-key", keys[end], "listen-port", self.port]
            endpoint = [] if end else ["endpoint", self.endpoint()]
            host.run(*me, "peer", public, *endpoint, "allowed-ips", ",".join(self.sources(1 - end)))
            host.run("ip", "address", "add", f"{self.inner(end)}/24", "dev", self.device)
            host.run("ip", "link", "set", self.device, *(["mtu", mtu] if mtu else []), "up")
        self.wait()

    def endpoint(self):
        """The address to which the left end sends its packets."""
        return f"{self.underlay[1]}:{self.port}"

    def answers(self, host):
        self.check()
        try:
            host.run("wg", "show", self.device)
        except Failed:
            return False
        return True


class Bare(Way):
    """tests/perf/bare_relay.rs at both ends: a cipher or none, and nothing else that a tunnel needs. Its MTU is Culvert's."""

    def __init__(self, kind, hosts, number, cipher, mtu=1500):
        super().__init__(kind, hosts, number)
        self.device, self.version = f"bare{number}", cipher
        at = [f"{address}:{BARE_PORT + number}" for address in self.underlay]
        for end, host in enumerate(hosts):
            ends = ["--listen", at[end], "--peer", at[1 - end], "--cipher", cipher]
            self.daemons.append(host.start(kind, BARE_RELAY, "--device", self.device, *ends))
        for end, host in enumerate(hosts):
            until(f"{kind} has a device", lambda host=host: self.has_device(host))
            host.run("ip", "address", "add", f"{self.inner(end)}/24", "dev", self.device)
            host.run("ip", "link", "set", self.device, "mtu", mtu - BARE_OVERHEAD, "up")
        self.wait()

    def has_device(self, host):
        self.check()
        try:
            host.run("ip", "link", "show", self.device)
        except Failed:
            return False
        return True


class Agents:
    """An agent of Culvert at both ends; the left one dials. `own` and `peer` are lines of the left and the right
    configuration, beside the defaults: on the agent itself, and about its peer."""

    def __init__(self, kind, hosts, number, underlay, program, own, peer=("", ""), largest="auto"):
        self.hosts, self.daemons, self.metrics, port = hosts, [], METRICS_PORT + number, CULVERT_PORT + number
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=hosts[0].processes.path))
        for host in hosts:
            output([program, "keygen", "--out", folder / f"{host.name}.key"])
        for end, host in enumerate(hosts):
            other = hosts[1 - end].name
            at = f'"{underlay[1]}:{port}"'
            (folder / f"{host.name}.toml").write_text(f"""
identity = {{ key_file = "{folder}/{host.name}.key", state_dir = "{folder}/{host.name}" }}
control = {{ socket = "" }}
metrics = {{ listen = "127.0.0.1:{self.metrics}" }}
[transport]
max_packet = {json.dumps(largest)}
{f"listen = [{at}]" if end else ""}
{own[end]}
[[peer]]
name = "{other}"
public_key = "{output([program, "pubkey", folder / f"{other}.key"]).strip()}"
{"" if end else f"endpoints = [{at}]"}
{peer[end]}
""")
            self.daemons.append(host.start(kind, program, "run", "--config", folder / f"{host.name}.toml"))

    def settle(self):
        """A lane takes part once it is validated, and a packet's size is what path MTU discovery has found by then."""
        families = ("culvert_lanes", "culvert_lane_packet_bytes")
        harness.settled(lambda: [samples.total(name) for samples in self.state().values() for name in families])

    def state(self):
        get = ["curl", "--silent", "--fail", "--max-time", 5, f"http://127.0.0.1:{self.metrics}/metrics"]
        return {host.name: Samples(host.run(*get)) for host in self.hosts}


class Culvert(Way):
    """An agent at both ends, with the configuration's defaults and these lines about the peer. With `routes`, so many routes of
    the kernel at each end lead to the peer, which they choose, beside those of its address. `largest` is `transport.max_packet`."""

    def __init__(self, kind, hosts, number, program=CULVERT, peer=(), routes=None, largest="auto"):
        super().__init__(kind, hosts, number)
        self.version, self.device = output([program, "--version"]).strip(), f"culvert{number}"
        own = [f'[tun]\nname = "{self.device}"\naddress = ["{self.inner(end)}/24"]' for end in (0, 1)]
        about = ["\n".join([f"allowed_ips = {json.dumps(self.sources(1 - end))}", *peer]) for end in (0, 1)]
        if routes is not None:
            own = [f'{lines}\nrouting = "kernel"' for lines in own]
            about = [f'{lines}\naddress = ["{self.inner(1 - end)}"]' for end, lines in enumerate(about)]
        self.agents = Agents(kind, hosts, number, self.underlay, program, own, about, largest)
        self.daemons = self.agents.daemons
        self.wait()
        if routes:
            self.add_routes(routes)
        self.agents.settle()

    def add_routes(self, count):
        """Of 198.18.0.0/15, each of 16 addresses, in a table that only the agent reads: routes of two ways may be the same."""
        for end, host in enumerate(self.hosts):
            via, batch = self.inner(1 - end), Path(host.processes.path) / f"{host.name}-{self.device}.routes"
            first = int(ipaddress.ip_address("198.18.0.0"))
            networks = (f"{ipaddress.ip_address(first + 16 * number)}/28" for number in range(count))
            batch.write_text("".join(f"route add {network} via {via} dev {self.device} table {1000 + self.number}\n" for network in networks))
            host.run("ip", "-batch", batch)

        def followed():
            return all(samples.total("culvert_tun_prefixes") >= count for samples in self.state().values())

        until(f"{self.kind}: the agents follow the routes", followed)

    def state(self):
        return self.agents.state()


class Vxlan(Culvert):
    """A VXLAN device at both ends of Culvert, with outer checksums or without."""

    def __init__(self, kind, hosts, number, sums):
        super().__init__(kind, hosts, number)
        below, self.device = self.device, f"vxlan{number}"
        sums = "udpcsum" if sums else "noudpcsum"
        for end, host in enumerate(hosts):
            ends = ["local", self.inner(end), "remote", self.inner(1 - end)]
            host.run("ip", "link", "add", self.device, "type", "vxlan", "id", number + 1, *ends, "dstport", 4789, sums, "dev", below)
            host.run("ip", "address", "add", f"{VXLAN.format(number, end + 1)}/24", "dev", self.device)
            host.run("ip", "link", "set", self.device, "up")
        self.target = VXLAN.format(number, 2)
        self.wait()


class WireGuardInCulvert(WireGuardGo):
    """wireguard-go whose packets a UDP service of Culvert carries. Its daemons are the agents: what those cost is compared."""

    def __init__(self, kind, hosts, number, program, mtu, culvert=CULVERT):
        port = WIREGUARD_PORT + number
        self.agents = Agents(
            kind + "-agent", hosts, number, self.underlay, culvert,
            [
                f'[[udp]]\nlisten = "127.0.0.1:{port + 100}"\npeer = "right"\nservice = "wireguard"',
                f'[[service]]\nname = "wireguard"\nupstream = "127.0.0.1:{port}"\noversize = "fragment"',
            ],
            ("", 'services = ["wireguard"]'),
        )
        super().__init__(kind, hosts, number, program, mtu)
        self.version = output([culvert, "--version"]).strip() + ", " + self.version
        self.agents.settle()

    def endpoint(self):
        return f"127.0.0.1:{self.port + 100}"

    def check(self):
        super().check()
        for host, agent in zip(self.hosts, self.agents.daemons, strict=True):
            if agent.poll() is not None:
                raise Failed(f"{agent.name} has ended with {agent.returncode}\n{host.log(self.kind + '-agent')}")

    def cpu_seconds(self):
        return sum(map(harness.cpu_seconds, self.agents.daemons))

    def state(self):
        return self.agents.state()


def wireguard_go():
    """The program: in PATH, or where `go install` puts it."""
    gopath = Path(os.environ.get("GOPATH") or Path.home() / "go")
    for name in ("wireguard-go", str(gopath / "bin/wireguard-go"), str(gopath / "bin/wireguard")):
        if found := shutil.which(name):
            return found
    return None


def wireguard_go_version(program):
    """The module's version, which only Go's own tool reads; what the program says of itself is not kept up to date."""
    said = output([program, "--version"]).splitlines()[0]
    if shutil.which("go"):
        for line in output(["go", "version", "-m", program]).splitlines():
            if line.startswith("\tmod\t"):
                return f"{said} ({line.split()[2]})"
    return said
