"""What the commands of this folder share: the processes under test, the load, and what both say.

Everything is on loopback. Each process is started here, bounded in time, and ended by its id.
"""

import contextlib
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "target/release"
CULVERT = RELEASE / "culvert"
QUINN_RELAY = RELEASE / "examples/quinn_relay"

# A lane's packet has 13 bytes of header and 16 of tag; a datagram in it a frame type, a context and a flow's number
# (two bytes from flow 64 on). See docs/wire-format.md, "Lanes" and "Payloads".
LANE_OVERHEAD_BYTES = 13 + 16 + 1 + 1 + 2

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A process did not do what it was asked; the text says which and what."""


def say(text=""):
    print(text, file=sys.stderr, flush=True)


def build(relay=True):
    """Builds the release binaries, the quinn relay only if asked, unless CULVERT_PERF_BUILT says that they are there."""
    if os.environ.get("CULVERT_PERF_BUILT"):
        return
    say("building the release binaries")
    cargo = ["cargo", "build", "--release", "--quiet"]
    subprocess.run([*cargo, "--package", "culvert"], cwd=ROOT, check=True)
    if relay:
        build_example("quinn_relay")


def build_example(name):
    """Builds an example of the tests, for release, unless CULVERT_PERF_BUILT says that it is there."""
    if not os.environ.get("CULVERT_PERF_BUILT"):
        subprocess.run(["cargo", "build", "--release", "--quiet", "--package", "culvert-tests", "--example", name], cwd=ROOT, check=True)


def built_bench(package, name):
    """Builds a bench and returns its path. Unlike the agent it is always asked of cargo, which knows its name."""
    cargo = ["cargo", "bench", "--quiet", "--package", package, "--bench", name, "--no-run", "--message-format", "json"]
    made = subprocess.run(cargo, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    messages = [json.loads(line) for line in made.splitlines()]
    return next(message["executable"] for message in messages if message.get("target", {}).get("kind") == ["bench"])


def check_machine():
    """Ends the program, with the remedy, where the load could not be made."""
    for limit in ("rmem_max", "wmem_max"):
        if int(Path(f"/proc/sys/net/core/{limit}").read_text()) < 4 << 20:
            sys.exit(f"`iperf3 -w 4M` needs more: sysctl -w net.core.{limit}=4194304")
    try:
        subprocess.run(["iperf3", "--version"], capture_output=True, check=True)
    except FileNotFoundError:
        sys.exit("iperf3 is missing: apt-get install iperf3")


def check_tools(**packages):
    """Ends the program, with the remedy, without root or one of these tools, each given with its package."""
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    for tool, package in packages.items():
        if not shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
            sys.exit(f"{tool} is missing: apt-get install {package}")


def machine():
    """What a reader has to know to compare figures."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    iperf3 = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "iperf3": iperf3.stdout.split()[1],
        "commit": commit.stdout.strip(),
    }


def rate_bps(text):
    """Bits per second of "1.5G", "800M"; None of "max"."""
    if text in ("max", "unlimited"):
        return None
    number, unit = re.fullmatch(r"([0-9.]+)([kMG]?)", text).groups()
    return float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if not ordered:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Samples:
    """One answer of /metrics."""

    LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
    LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self, text):
        self.values = {}
        for line in text.splitlines():
            match = self.LINE.match(line)
            if match and not line.startswith("#"):
                name, labels, value = match.groups()
                self.values[name, frozenset(self.LABEL.findall(labels or ""))] = float(value)

    def total(self, name, **labels):
        """The sum over all samples of the family that have these labels; 0 if there is none."""
        wanted = set(labels.items())
        return sum(value for (family, have), value in self.values.items() if family == name and wanted <= have)

    def by(self, name, label, **labels):
        """The sums by the value of one label."""
        wanted, sums = set(labels.items()), {}
        for (family, have), value in self.values.items():
            if family == name and wanted <= have:
                key = dict(have).get(label, "")
                sums[key] = sums.get(key, 0) + value
        return sums

    def since(self, before):
        """What was counted since another answer of the same agent."""
        grown = Samples("")
        grown.values = {key: value - before.values.get(key, 0) for key, value in self.values.items()}
        return grown


class Processes:
    """Children, their folder, and their end."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="culvert-perf-")
        self.path = Path(self.folder.name)
        self.children = []

    def __enter__(self):
        # Else a terminated command would leave its children behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        return self

    def __exit__(self, *_):
        for child in list(self.children):
            self.stop(child)
        self.folder.cleanup()

    def start(self, name, command, answers=False):
        """Starts a child; with `answers` its standard input and output are pipes."""
        with open(self.path / f"{name}.log", "ab") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if answers else {"stdin": subprocess.DEVNULL, "stdout": log}
            child = subprocess.Popen([str(part) for part in command], stderr=log, cwd=self.path, text=True, **pipes)
        child.name = name
        self.children.append(child)
        return child

    def stop(self, child):
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()
        self.children.remove(child)

    def log(self, name):
        return (self.path / f"{name}.log").read_text(errors="replace")[-2000:]

    def run(self, command, limit_seconds):
        """Runs to the end and returns the JSON that it printed."""
        out, err = self.output(command, limit_seconds)
        try:
            return json.loads(out)
        except ValueError:
            raise Failed(f"{' '.join(str(part) for part in command)}: {(err or out).strip()[-500:]}") from None

    def output(self, command, limit_seconds):
        """Runs to the end, however that is, and returns what it printed to its output and as errors."""
        child = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            return child.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{command[0]} did not end within {limit_seconds:.0f} s") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()


def free_port():
    """A port that is free for UDP and TCP now."""
    while True:
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError):
                udp.bind(tcp.getsockname())
                return tcp.getsockname()[1]


def until(what, ready, limit_seconds=20):
    """Polls `ready` until it returns something true, and returns that."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if found := ready():
                return found
        time.sleep(0.05)
    raise Failed(f"within {limit_seconds} s not: {what}")


def cpu_seconds(child):
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def resident_bytes(child):
    # Exact: VmRSS lags behind by some pages per CPU.
    rollup = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
    return int(re.search(r"Rss:\s+(\d+) kB", rollup).group(1)) * 1024


def udp_counters():
    """The kernel's UDP counters, of all programs."""
    names, values = (line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Udp:"))
    return dict(zip(names, map(int, values), strict=True))


class Direct:
    """No relay at all."""

    kind = "direct"

    def __init__(self, upstream):
        self.entry = upstream
        self.children = []

    def state(self):
        return {}

    def largest_payload(self):
        return None


class Culvert:
    """Two agents: clients send to `entry`, the service is at `upstream`; `probe` leads to `probe_sink`, beside a load.

    With `other`, `probe` is a port of a third agent, a peer of its own at the same port of the exit.
    """

    kind = "culvert"

    def __init__(self, processes, upstream, workers=None, other=False):
        self.entry, self.quic, self.probe, self.probe_sink = free_port(), free_port(), free_port(), free_port()
        dialling = ("entry", "other") if other else ("entry",)
        self.metrics = {name: free_port() for name in (*dialling, "exit")}
        folder = Path(tempfile.mkdtemp(dir=processes.path))
        keys = {}
        for name in self.metrics:
            subprocess.run([CULVERT, "keygen", "--out", folder / f"{name}.key"], check=True, capture_output=True)
            shown = subprocess.run([CULVERT, "pubkey", folder / f"{name}.key"], check=True, capture_output=True, text=True)
            keys[name] = shown.stdout.strip()
        transport = f"workers = {workers}" if workers else ""
        lanes = f"lanes = {workers}" if workers else ""
        (folder / "exit.toml").write_text(f"""
identity = {{ key_file = "{folder}/exit.key", state_dir = "{folder}/exit" }}
control = {{ socket = "" }}
metrics = {{ listen = "127.0.0.1:{self.metrics["exit"]}" }}
[transport]
listen = ["127.0.0.1:{self.quic}"]
{transport}
""" + "".join(f"""
[[peer]]
name = "{name}"
public_key = "{keys[name]}"
services = ["load", "probe"]
{lanes}
""" for name in dialling) + f"""
[[service]]
name = "load"
upstream = "127.0.0.1:{upstream}"
oversize = "fragment"
[[service]]
name = "probe"
upstream = "127.0.0.1:{self.probe_sink}"
""")
        load = f"""
[[udp]]
listen = "127.0.0.1:{self.entry}"
peer = "exit"
service = "load"
[[tcp]]
listen = "127.0.0.1:{self.entry}"
peer = "exit"
service = "load"
"""
        probe = f"""
[[udp]]
listen = "127.0.0.1:{self.probe}"
peer = "exit"
service = "probe"
"""
        for name in dialling:
            forwards = (load if name == "entry" else "") + (probe if name == dialling[-1] else "")
            (folder / f"{name}.toml").write_text(f"""
identity = {{ key_file = "{folder}/{name}.key", state_dir = "{folder}/{name}" }}
control = {{ socket = "" }}
metrics = {{ listen = "127.0.0.1:{self.metrics[name]}" }}
[transport]
{transport}
[[peer]]
name = "exit"
public_key = "{keys["exit"]}"
endpoints = ["127.0.0.1:{self.quic}"]
{lanes}
{forwards}""")
        log = f"culvert-{self.entry}"
        run = [CULVERT, "run", "--config"]
        self.agents = {name: processes.start(log, [*run, folder / f"{name}.toml"]) for name in ("exit", *dialling)}
        self.children = list(self.agents.values())
        try:
            for name in dialling:
                until("lanes are up", lambda name=name: self.scrape(name).total("culvert_lanes", state="up") >= (workers or 1))
        except Failed as error:
            raise Failed(f"{error}\n{processes.log(log)}") from None

    def scrape(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[name]}/metrics", timeout=5) as answer:
            return Samples(answer.read().decode())

    def state(self):
        return {name: self.scrape(name) for name in self.metrics}

    def largest_payload(self):
        """Once path MTU discovery has come to its end: the same answer for a second."""

        def packet_bytes():
            return self.scrape("entry").total("culvert_lane_packet_bytes")

        return int(settled(packet_bytes)) - LANE_OVERHEAD_BYTES


def settled(value, limit_seconds=15):
    """The value, once it has not changed for a second."""
    end, last, since = time.monotonic() + limit_seconds, value(), time.monotonic()
    while time.monotonic() < min(since + 1, end):
        time.sleep(0.1)
        if (now := value()) != last:
            last, since = now, time.monotonic()
    return last


class Relay:
    """A pair of `quinn_relay`: kind "quinn", or "plain" for two hops without QUIC."""

    def __init__(self, processes, upstream, kind="quinn", congestion="unlimited"):
        self.kind, self.entry, middle = kind, free_port(), free_port()
        at = "127.0.0.1:{}".format
        if kind == "quinn":
            ends = [
                ["exit", "--listen", at(middle), "--upstream", at(upstream), "--congestion", congestion],
                ["entry", "--listen", at(self.entry), "--peer", at(middle), "--congestion", congestion],
            ]
        else:
            ends = [
                ["plain", "--listen", at(middle), "--upstream", at(upstream)],
                ["plain", "--listen", at(self.entry), "--upstream", at(middle)],
            ]
        self.children = [processes.start(f"{kind}-{end[0]}", [QUINN_RELAY, *end], answers=True) for end in ends]
        if kind == "quinn":
            until("the quinn relay is connected", lambda: "quic" in self.state()["entry"])
        forward_tcp(self.entry, upstream)

    def state(self):
        answers = {}
        for name, child in zip(("exit", "entry"), self.children, strict=True):
            child.stdin.write("\n")
            child.stdin.flush()
            if not select.select([child.stdout], [], [], 10)[0]:
                raise Failed(f"the {self.kind} relay's {name} does not answer")
            line = child.stdout.readline()
            if not line:
                raise Failed(f"the {self.kind} relay's {name} has ended")
            answers[name] = json.loads(line)
        return answers

    def largest_payload(self):
        if self.kind == "plain":
            return None
        return settled(lambda: self.state()["entry"]["quic"]["largest_payload"])


def forward_tcp(listen, to):
    """iperf3's control connection, for relays that only know UDP: ends with the program."""
    listener = socket.create_server(("127.0.0.1", listen))

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve():
        while True:
            client, _ = listener.accept()
            try:
                upstream = socket.create_connection(("127.0.0.1", to))
            except OSError:
                client.close()
                continue
            for pair in ((client, upstream), (upstream, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


class Iperf3:
    """The server, and runs of the client against any relay in front of it."""

    def __init__(self, processes, port):
        self.processes, self.port = processes, port
        self.server = None

    def start(self):
        self.server = self.processes.start("iperf3", ["iperf3", "-s", "-p", self.port])

        def listens():
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True

        until("iperf3 listens", listens)
        time.sleep(0.2)

    def run(self, entry, size, rate, seconds, window=True):
        """What it sent and what its server received; see `run_json`."""
        if self.server is None or self.server.poll() is not None:
            self.start()
        bits = rate_bps(rate)
        command = ["iperf3", "-c", "127.0.0.1", "-p", entry, "-u", "-b", int(bits or 0), "-l", size, "-t", seconds, "-J"]
        if window:
            command += ["-w", "4M"]
        try:
            return self.read(self.processes.run(command, seconds + 25))
        except Failed:
            # A server whose client vanished refuses the next one.
            self.processes.stop(self.server)
            self.server = None
            raise

    @staticmethod
    def read(answer):
        end = answer.get("end", {})
        if "error" in answer or "sum_sent" not in end:
            raise Failed(f"iperf3: {answer.get('error', 'no result')}")
        sent, arrived = end["sum_sent"], end["sum_received"]
        received = arrived["packets"] - arrived["lost_packets"]
        # The bytes of the sender are those of its datagrams; both ends took the same time.
        size = sent["bytes"] / max(sent["packets"], 1)
        return {
            "sent": sent["packets"],
            "received": received,
            "seconds": sent["seconds"],
            "sent_bps": sent["packets"] * size * 8 / sent["seconds"],
            "received_bps": received * size * 8 / sent["seconds"],
        }


class Bench:
    """Runs of `culvert bench`."""

    def __init__(self, processes, port):
        self.processes, self.port = processes, port

    def run(self, relay, size, rate, seconds, *more, probe=False):
        """What it sent and what its sink received; with `probe` past a load, on a way of its own."""
        if relay.kind == "direct":
            way = ["--direct"]
        else:
            entry, sink = (relay.probe, relay.probe_sink) if probe else (relay.entry, self.port)
            way = ["--to", f"127.0.0.1:{entry}", "--sink", f"127.0.0.1:{sink}"]
        # Without a warm-up all that was sent is in the count, as the agents count it.
        load = ["--size", size, "--rate", rate, "--seconds", seconds, "--warmup", 0]
        steps = 12 if "--search" in more else 1
        command = [CULVERT, "bench", *way, *load, "--json", *more]
        return self.read(self.processes.run(command, steps * (seconds + 3) + 25))

    @staticmethod
    def read(answer):
        run = answer.get("best", answer.get("runs", [answer])[0])
        if run is None or "sent_datagrams" not in run:
            raise Failed(f"culvert bench: {json.dumps(answer)[:300]}")
        return {
            "sent": run["sent_datagrams"],
            # Each once, however often it came.
            "received": run["sent_datagrams"] - run["lost"],
            "seconds": run["seconds"],
            "sent_bps": run["sent_bps"],
            "received_bps": run["received_bps"],
            "received_pps": run["received_pps"],
            "sender_blocked": run.get("sender_blocked", 0),
            "sender_errors": run.get("sender_errors", 0),
            "sink_kernel_drops": run.get("receiver_kernel_drops", 0),
            "reordered": run.get("reordered", 0),
            "latency_us": run.get("latency_us"),
            "round_trip_us": run.get("round_trip_us"),
        }
