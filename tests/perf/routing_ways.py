"""Hosts with agents, or with wireguard-go, and a routing daemon on the tunnel: what mesh and exits have in common."""

import json
import shutil
import sys

import harness
from harness import Failed, until
from l3_ways import output

# Sends datagrams at a steady rate, and prints what came back, from whom last, and the longest time without an answer.
FLOW = """
import json, socket, sys, time
seconds, source, target, pause = float(sys.argv[1]), sys.argv[2], sys.argv[3], 1 / float(sys.argv[4])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((source, 0)); s.setblocking(False)
end = time.monotonic() + seconds; due = last = time.monotonic(); gap = 0; answered = sent = 0; by = ""
while (now := time.monotonic()) < end:
    if now >= due:
        due += pause; sent += 1
        try: s.sendto(b"x" * 100, (target, 7777))
        except OSError: pass
    try:
        while True:
            by = s.recv(2048).decode(); answered += 1; now = time.monotonic(); gap = max(gap, now - last); last = now
    except OSError: pass
    time.sleep(0.0002)
gap = max(gap, time.monotonic() - last)
print(json.dumps({"sent": sent, "answered": answered, "gap": gap, "by": by}))
"""

# Answers with its own name.
ECHO = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 7777))
while True:
    try: s.sendto(sys.argv[2].encode(), s.recvfrom(2048)[1])
    except OSError: pass
"""


def need(*programs):
    """Says which Debian package has a program that is missing."""
    for program, package in programs:
        if not shutil.which(program):
            raise Failed(f"{program} is missing (remedy: apt-get install {package})")


def bridge(host, name, address):
    """A bridge at a router, which has the first address of everybody on it."""
    host.run("ip", "link", "add", name, "type", "bridge", "forward_delay", 0)
    host.run("ip", "address", "add", address, "dev", name)
    host.run("ip", "link", "set", name, "up")


def plug(host, router, name, address, gateway=None):
    """Connects a host's interface `wan` with a router's bridge."""
    port = f"{name[:4]}-{host.name}"
    ends = (str(router.holder.pid), str(host.holder.pid))
    output(["ip", "link", "add", "name", port, "netns", ends[0], "type", "veth", "peer", "name", "wan", "netns", ends[1]])
    router.run("ip", "link", "set", port, "master", name, "up")
    host.run("ip", "address", "add", f"{address}/24", "dev", "wan")
    host.run("ip", "link", "set", "wan", "up")
    if gateway:
        host.run("ip", "route", "add", "default", "via", gateway)


class Bird:
    """BIRD on a host, with this configuration."""

    def __init__(self, host, text):
        self.host, self.text, folder = host, text, host.processes.path
        self.file, self.control = folder / f"{host.name}.bird.conf", f"/run/bird-{host.name}.ctl"
        self.file.write_text(text)
        self.process = host.start("bird", "bird", "-f", "-c", self.file, "-s", self.control)

    def tell(self, *words):
        return self.host.run("birdc", "-s", self.control, *words, limit_seconds=30)

    def announce(self, prefixes):
        """These besides its network."""
        more = "".join(f" route {prefix} blackhole;" for prefix in prefixes)
        self.file.write_text(self.text.replace(" blackhole; }", f" blackhole;{more} }}", 1))
        self.tell("configure")

    def sessions(self):
        """Of each BGP session, since when it has its state, and the state."""
        rows = [line.split() for line in self.tell("show", "protocols").splitlines() if " BGP " in line]
        return {row[0]: (row[4], row[-1]) for row in rows}

    def neighbours_watched(self):
        """How many BFD sessions are up."""
        return sum(line.split()[2:3] == ["Up"] for line in self.tell("show", "bfd", "sessions").splitlines())


class Agent:
    """An agent on a host; `text` is its configuration beside the key and the control socket."""

    def __init__(self, host, binary, text):
        self.host, self.binary, self.file = host, binary, host.processes.path / f"{host.name}.toml"
        folder = host.processes.path
        self.file.write_text(
            f'identity = {{ key_file = "{folder}/{host.name}.key", state_dir = "{folder}/{host.name}.state" }}\n'
            f'control.socket = "{folder}/{host.name}.control"\n{text}')

    def start(self):
        self.process = self.host.start("culvert", self.binary, "run", "--config", self.file)

    def status(self, *words):
        return json.loads(self.host.run(self.binary, "status", "--json", *words, "--config", self.file))["status"]

    def carriers(self, address):
        """The peers that carry the longest prefix with this address."""
        routes = self.status("--routes", address).get("routes", [])
        return [peer["name"] for peer in (routes[0]["peers"] if routes else []) if peer["state"] == "carries"]


def keys(processes, binary, names):
    """Makes a key for each; returns the public ones."""
    made = {name: output([binary, "keygen", "--out", processes.path / f"{name}.key"]).strip() for name in names}
    return made


def kill(processes, *children):
    """As a host that loses power does: without a word to anybody."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()
        processes.children.remove(child)


def flow(host, seconds, source, target, rate=1_000):
    """Starts a flow; returns what waits for its end and has its figures."""
    child = host.processes.start(
        f"{host.name}-flow", [*host.enter, sys.executable, "-c", FLOW, seconds, source, target, rate], answers=True)

    def finish():
        said = child.stdout.read()
        host.processes.stop(child)
        if not said:
            raise Failed(f"the flow has ended: {host.log('flow')}")
        return json.loads(said)

    return finish


def echo(host, address):
    return host.start("echo", sys.executable, "-c", ECHO, address, host.name)


def wait(what, look, limit_seconds=60):
    """Waits until `look` says so; returns the seconds that it took."""
    begin = harness.time.monotonic()
    until(what, look, limit_seconds)
    return harness.time.monotonic() - begin
