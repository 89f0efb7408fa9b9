"""What the TCP of clients goes through in `forwards`: two agents, two HAProxys with TLS between them, or nothing.

Clients and the near hop are on the left host, the far hop and the servers on the right one. Over loopback both are this machine.
"""

import resource
import subprocess
import tempfile
from pathlib import Path

import harness
from harness import Failed, until
from l3_ways import UNDERLAY, output

# The servers of the right host: what a forward of each way leads to.
SERVERS = {"iperf3": 5201, "http": 8080}
# Between the hops, and at the near one: a way's number is added.
MIDDLE, NEAR, METRICS = 20_000, 21_000, 22_000


class Loopback:
    """This machine as both hosts."""

    name = "here"
    enter = ()

    def __init__(self, processes):
        self.processes = processes

    def run(self, *command, limit_seconds=10):
        return output(command, limit_seconds)

    def start(self, name, *command):
        return self.processes.start(f"{self.name}-{name}", command)

    def log(self, name):
        return self.processes.log(f"{self.name}-{name}")

    def listens(self, port):
        return f":{port} " in output(["ss", "-Hltn"])


def loopback(processes):
    """One host twice, and the address of either."""
    here = Loopback(processes)
    return (here, here), ("127.0.0.1", "127.0.0.1")


class Way:
    """Forwards of the left host to the servers of the right one: `near` says at which port each begins."""

    def __init__(self, kind, number, hosts, addresses):
        self.kind, self.hosts, self.addresses, self.children = kind, hosts, addresses, []
        places = {server: place for place, server in enumerate(SERVERS)}
        self.middle = {server: MIDDLE + 10 * number + place for server, place in places.items()}
        self.near = {server: (addresses[0], NEAR + 10 * number + place) for server, place in places.items()}
        self.metrics = {end: METRICS + 10 * number + end for end in (0, 1)}

    def folder(self):
        return Path(tempfile.mkdtemp(dir=self.hosts[0].processes.path))

    def started(self, *children):
        self.children += children
        for _, port in self.near.values():
            try:
                until(f"{self.kind}: port {port} listens", lambda port=port: self.hosts[0].listens(port))
            except Failed as error:
                logs = "\n".join(self.hosts[0].processes.log(child.name) for child in children)
                raise Failed(f"{error}\n{logs}") from None

    def cpu_seconds(self):
        """Of the hops. What the kernel does in the name of others is not in it."""
        return sum(map(harness.cpu_seconds, self.children))

    def resident_bytes(self):
        return sum(map(harness.resident_bytes, self.children))

    def check(self):
        for child in self.children:
            if child.poll() is not None:
                raise Failed(f"{child.name} has ended with {child.returncode}")


class Direct(Way):
    """No hop at all."""

    def __init__(self, kind, number, hosts, addresses):
        super().__init__(kind, number, hosts, addresses)
        self.near = {server: (addresses[1], port) for server, port in SERVERS.items()}


def most_connections():
    """Those of one HAProxy: each takes two of the files that it may have."""
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 500, 40_000)


class HaProxy(Way):
    """HAProxy, TLS 1.3 over TCP, HAProxy: kept connections are not shared, so each forward has a TLS connection of its own."""

    SETTINGS = """
global
  maxconn {most}
  tune.bufsize 65536
defaults
  mode tcp
  timeout connect 5s
  timeout client 1h
  timeout server 1h
"""

    def __init__(self, kind, number, hosts, addresses):
        super().__init__(kind, number, hosts, addresses)
        folder = self.folder()
        subject = ["-subj", "/CN=culvert.test", "-days", "30", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        files = ["-keyout", folder / "tls.pem.key", "-out", folder / "tls.pem"]
        subprocess.run(["openssl", "req", "-x509", *subject, *map(str, files)], check=True, capture_output=True)
        near = far = self.SETTINGS.format(most=most_connections())
        for server, port in SERVERS.items():
            (here, listen), middle = self.near[server], f"{addresses[1]}:{self.middle[server]}"
            near += f"listen {server}\n  bind {here}:{listen} backlog 4096\n  server far {middle} ssl verify none\n"
            tls = f"ssl crt {folder}/tls.pem ssl-min-ver TLSv1.3 backlog 4096"
            far += f"listen {server}\n  bind {middle} {tls}\n  server service {addresses[1]}:{port}\n"
        for name, text in (("near", near), ("far", far)):
            (folder / f"{name}.cfg").write_text(text)
        ends = zip(reversed(hosts), ("far", "near"), strict=True)
        self.started(*[host.start(f"{kind}-{name}", "haproxy", "-db", "-f", folder / f"{name}.cfg") for host, name in ends])


class Culvert(Way):
    """An agent at each end."""

    def __init__(self, kind, number, hosts, addresses, program=harness.CULVERT, more="", left=""):
        super().__init__(kind, number, hosts, addresses)
        folder, keys = self.folder(), {}
        for name in ("left", "right"):
            subprocess.run([program, "keygen", "--out", folder / f"{name}.key"], check=True, capture_output=True)
            shown = subprocess.run([program, "pubkey", folder / f"{name}.key"], check=True, capture_output=True, text=True)
            keys[name] = shown.stdout.strip()
        quic = f"{addresses[1]}:{MIDDLE + 10 * number}"

        def common(end, name):
            state = f'identity = {{ key_file = "{folder}/{name}.key", state_dir = "{folder}/{name}" }}\ncontrol = {{ socket = "" }}\n'
            return f'{state}metrics = {{ listen = "127.0.0.1:{self.metrics[end]}" }}\n{more}\n'

        def names(servers):
            return ", ".join(f'"{server}"' for server in servers)

        services = "".join(f'[[service]]\nname = "{name}"\nupstream = "{addresses[1]}:{port}"\n' for name, port in SERVERS.items())
        peer = f'[[peer]]\nname = "left"\npublic_key = "{keys["left"]}"\nservices = [{names(SERVERS)}]\n'
        (folder / "right.toml").write_text(f'{common(1, "right")}[transport]\nlisten = ["{quic}"]\n{peer}{services}')
        ports = "".join(
            f'[[tcp]]\nlisten = "{here}:{port}"\npeer = "right"\nservice = "{server}"\n' for server, (here, port) in self.near.items()
        )
        peer = f'[[peer]]\nname = "right"\npublic_key = "{keys["right"]}"\nendpoints = ["{quic}"]\n'
        (folder / "left.toml").write_text(f"{common(0, 'left')}{left}{peer}{ports}")
        ends = zip(reversed(hosts), ("right", "left"), strict=True)
        self.started(*[host.start(f"{kind}-{name}", program, "run", "--config", folder / f"{name}.toml") for host, name in ends])
        until(f"{kind}: connected", lambda: self.scrape(0).total("culvert_peer_connected") == 1)

    def scrape(self, end):
        text = self.hosts[end].run("curl", "-s", f"http://127.0.0.1:{self.metrics[end]}/metrics")
        return harness.Samples(text)


def cabled(processes, mtu):
    """Two namespaces with a veth pair, as `l3` has them."""
    import l3_ways

    return tuple(l3_ways.cable(processes, mtu)), UNDERLAY
