"""Two sites behind their agents and a slow modem between these, the ways of the sites' packets, and what a load says.

    site-left 10.1.0.1 -- left 192.0.2.1 -- west  router  east -- 198.51.100.1 right -- 10.2.0.1 site-right
                                                path_relay

The loads run on the sites, so that an agent's host only forwards; the bottleneck is in the router.
"""

import re

import harness
import l3_ways
from harness import Failed, median
from l3_ways import Host
from path_ways import LEFT, RIGHT, Path, attach, before_others

SITES = ("10.1.0.1", "10.2.0.1")
NETWORKS = ("10.1.0.0/24", "10.2.0.0/24")

PING_INTERVAL_SECONDS = 0.02
# Width of a point of the time series.
SAMPLE_SECONDS = 0.2


class Bed(Path):
    """The path, and a site behind each of its hosts."""

    def __init__(self, processes, realtime):
        super().__init__(processes)
        self.hosts = (self.left, self.right)
        self.sites = tuple(Host(processes, f"site-{host.name}") for host in self.hosts)
        for host, site, address, network in zip(self.hosts, self.sites, SITES, NETWORKS, strict=True):
            attach(site, host, "site", address)
            host.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            self.router.run("ip", "route", "add", network, "via", LEFT if host is self.left else RIGHT)
        if realtime:
            for host in (*self.hosts, *self.sites):
                host.enter = [*host.enter, *before_others(5)]


class BetweenSites:
    """A tunnel that carries what the sites send each other; without it these packets cross the router as they are."""

    underlay = (LEFT, RIGHT)
    behind = tuple((network,) for network in NETWORKS)

    def wait(self):
        super().wait()
        for host, network in zip(self.hosts, reversed(NETWORKS), strict=True):
            host.run("ip", "route", "replace", network, "dev", self.device)


class WireGuardGo(BetweenSites, l3_ways.WireGuardGo): ...


class Culvert(BetweenSites, l3_ways.Culvert): ...


def drops(way, before):
    """Packets that Culvert dropped since `before`, by end and reason."""
    family = "culvert_datagrams_dropped_total"
    by_end = {end: samples.since(before[end]).by(family, "reason") for end, samples in way.state().items()}
    return {end: {reason: count for reason, count in reasons.items() if count} for end, reasons in by_end.items()}


def jain(rates):
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 0.0


def flows(answer):
    """What the receiver of each flow got in Mbit/s, of iperf3's answer; UDP has one flow."""
    if "error" in answer or "end" not in answer:
        raise Failed(f"iperf3: {answer.get('error', 'no result')}")
    if "udp" in answer["end"]["streams"][0]:
        return [harness.Iperf3.read(answer)["received_bps"] / 1e6]
    return [stream["receiver"]["bits_per_second"] / 1e6 for stream in answer["end"]["streams"]]


def replies(text, begin):
    """Seconds from `begin` to each request, and milliseconds to its reply, of what `ping -D` prints."""
    found = re.findall(r"^\[([0-9.]+)\] .*icmp_seq=\d+ .*time=([0-9.]+) ms", text, re.MULTILINE)
    return [(float(at) - float(ms) / 1e3 - begin, float(ms)) for at, ms in found]


def series(accounts, pings):
    """Points of a run from the relay's accounts, each (second, rate of the link in Mbit/s, account), and the pings' replies."""
    points = []
    for (begin, link, before), (end, _, after) in zip(accounts, accounts[1:], strict=False):
        times = [ms for at, ms in pings if begin <= at < end]
        point = {"s": round(begin, 3), "link": link, "ping ms": median(times), "ping max ms": max(times, default=None)}
        for name, direction in (("up", "there"), ("down", "back")):
            point[name] = carried(before, after, direction)
        points.append(point)
    return points


def carried(before, after, direction):
    """Mbit/s of IP packets that left the bottleneck between two of the relay's accounts."""
    grown = after[direction]["passed_bytes"] - before[direction]["passed_bytes"]
    return grown * 8 / 1e6 / (after["seconds"] - before["seconds"])
