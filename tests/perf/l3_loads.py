"""The loads between the two hosts, and what they say: a dictionary of figures by name for each run."""

import json
import math
import re
import time

import harness
from harness import Failed, until

PORT = 5201
# The client reports after its time; a server that does not answer is given so long.
GRACE_SECONDS = 20
PING_INTERVAL_SECONDS = 0.005
IDLE_PINGS = 300
# Of those: what a first packet finds cold is not in the figures.
COLD_PINGS = 10
# What comes so seldom finds everything asleep.
SLOW_INTERVAL_SECONDS, SLOW_PINGS, SLOW_COLD_PINGS = 0.2, 200, 5


def percentile(values, share):
    """The smallest value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def pings(text, cold=0):
    """Microseconds, and which share was lost, of what `ping` prints; the first `cold` packets are left out."""
    times = [float(ms) * 1e3 for number, ms in re.findall(r"icmp_seq=(\d+) .*time=([0-9.]+) ms", text) if int(number) > cold]
    sent = re.search(r"(\d+) packets transmitted", text)
    if not times or not sent:
        raise Failed(f"ping: no answer: {text.strip()[-200:]}")
    lost = 100 * (1 - len(times) / (int(sent.group(1)) - cold))
    return {"p50 µs": percentile(times, 0.5), "p99 µs": percentile(times, 0.99), "max µs": max(times), "lost %": lost}


def tcp(answer):
    """What the receivers got, of iperf3's answer; both directions of --bidir together."""
    end = answer.get("end", {})
    if "error" in answer or "sum_received" not in end:
        raise Failed(f"iperf3: {answer.get('error', 'no result')}")
    received = end["sum_received"]["bits_per_second"] / 1e9
    values = {"Gbit/s": received, "retransmits": end["sum_sent"].get("retransmits", 0)}
    if back := end.get("sum_received_bidir_reverse"):
        values |= {"there": received, "back": back["bits_per_second"] / 1e9}
        values["Gbit/s"] = values["there"] + values["back"]
    return values


def udp(answer):
    run = harness.Iperf3.read(answer)
    return {
        "Gbit/s": run["received_bps"] / 1e9,
        "sent Gbit/s": run["sent_bps"] / 1e9,
        "kpps": run["received"] / run["seconds"] / 1e3,
        "sent kpps": run["sent"] / run["seconds"] / 1e3,
        "lost %": 100 * (1 - run["received"] / max(run["sent"], 1)),
    }


class Loads:
    """iperf3 and ping on the left host, and iperf3's server on the right one."""

    def __init__(self, processes, hosts):
        self.processes = processes
        self.left, self.right = hosts
        self.server, self.beside = None, 0

    def iperf3(self, way, seconds, *more):
        """A client's command; the server is there."""
        if self.server is None or self.server.poll() is not None:
            self.server = self.right.start("iperf3", "iperf3", "-s", "-p", PORT)
            until("iperf3 listens", lambda: self.right.listens(PORT))
        return [*self.left.enter, "iperf3", "-c", way.target, "-p", PORT, "-t", seconds, "-J", *more]

    def forget_server(self):
        """A server whose client vanished refuses the next one."""
        if self.server is not None:
            self.processes.stop(self.server)
            self.server = None

    def with_iperf3(self, read, way, seconds, *more):
        command = self.iperf3(way, seconds, *more)
        cpu, began = way.cpu_seconds(), time.monotonic()
        try:
            values = read(self.processes.run(command, seconds + GRACE_SECONDS))
        except Failed:
            self.forget_server()
            raise
        if way.daemons:
            used = way.cpu_seconds() - cpu
            # How many cores the daemons kept busy while the client ran, its connecting and reporting included.
            values["cores"] = used / (time.monotonic() - began)
            if values["Gbit/s"]:
                values["CPU s/Gbit"] = used / (values["Gbit/s"] * seconds)
        return values

    def tcp(self, way, seconds, *more):
        return self.with_iperf3(tcp, way, seconds, *more)

    def udp(self, way, seconds, size, rate):
        return self.with_iperf3(udp, way, seconds, "-u", "-l", size, "-b", rate, "-w", "4M")

    def ping(self, way, count, cold=0, interval=PING_INTERVAL_SECONDS):
        # It waits a second for late answers.
        limit = count * interval * 4 + GRACE_SECONDS
        command = [*self.left.enter, "ping", "-n", "-i", interval, "-c", count, "-W", 1, way.target]
        return pings(self.processes.output(command, limit)[0], cold)

    def ping_idle(self, way):
        return self.ping(way, IDLE_PINGS + COLD_PINGS, COLD_PINGS)

    def ping_slow(self, way):
        return self.ping(way, SLOW_PINGS, SLOW_COLD_PINGS, SLOW_INTERVAL_SECONDS)

    def ping_under_load(self, way, seconds):
        """Pings beside one TCP stream that has had a second to grow, and that outlasts them."""
        self.beside += 1
        name = f"beside-{self.beside}"
        client = self.processes.start(name, self.iperf3(way, seconds + 2))
        try:
            time.sleep(1)
            values = self.ping(way, int(seconds / PING_INTERVAL_SECONDS))
            harness.until("iperf3 ends", lambda: client.poll() is not None, GRACE_SECONDS)
            beside = tcp(json.loads((self.processes.path / f"{name}.log").read_text()))
        except (Failed, ValueError) as error:
            self.forget_server()
            raise Failed(str(error)) from None
        finally:
            self.processes.stop(client)
        return values | {"Gbit/s": beside["Gbit/s"]}
