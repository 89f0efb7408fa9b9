"""Checks the arithmetic of this folder on canned answers: no processes, no network."""

import importlib.util
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import accounts
import carrier_ways
import harness
import l3_loads
import modem_ways
import paired
import path_ways
import report
import transports_report
import transports_ways

ENTRY = """
# HELP culvert_lanes Lanes by state.
culvert_lanes{state="up"} 1
culvert_socket_received_datagrams_total{socket="ingress"} 950
culvert_socket_received_datagrams_total{socket="quic_dial"} 7
culvert_socket_receive_calls_total{socket="ingress"} 95
culvert_socket_kernel_drops_total{socket="ingress"} 50
culvert_socket_sent_datagrams_total{socket="quic_dial"} 930
culvert_socket_gso_messages_total{socket="quic_dial"} 23
culvert_socket_gso_segments_total{socket="quic_dial"} 920
culvert_peer_datagrams_received_total{direction="uplink",peer="exit"} 950
culvert_peer_datagrams_received_total{direction="downlink",peer="exit"} 3
culvert_peer_datagrams_delivered_total{direction="uplink",peer="exit"} 920
culvert_datagrams_dropped_total{direction="uplink",reason="queue_full"} 30
culvert_datagrams_dropped_total{direction="uplink",reason="too_large"} 0
culvert_lane_packets_sent_total{peer="exit"} 465
culvert_lane_packets_received_total{peer="exit"} 7
culvert_lane_ack_packets_total{direction="uplink"} 5
culvert_lane_datagram_frames_total{direction="uplink"} 920
culvert_process_cpu_seconds_total 1.5
"""

EXIT = """
culvert_socket_received_datagrams_total{socket="quic_listen"} 465
culvert_socket_receive_calls_total{socket="quic_listen"} 15
culvert_peer_datagrams_received_total{direction="downlink",peer="entry"} 900
culvert_peer_datagrams_delivered_total{direction="downlink",peer="entry"} 890
culvert_socket_send_failures_total{socket="upstream"} 4
culvert_socket_sent_datagrams_total{socket="upstream"} 890
culvert_lane_packets_sent_total{peer="entry"} 7
culvert_lane_packets_received_total{peer="entry"} 455
culvert_lane_ack_packets_total{direction="uplink"} 7
culvert_process_cpu_seconds_total 2.5
"""


def metrics():
    samples = harness.Samples('a{x="1",y="p \\" q"} 3\na{x="2",y="r"} 4.5\nb 1e3\n# TYPE a counter\n')
    assert samples.total("a") == 7.5
    assert samples.total("a", x="2") == 4.5
    assert samples.total("b") == 1000
    assert samples.by("a", "x") == {"1": 3, "2": 4.5}
    earlier = harness.Samples('a{x="1",y="p \\" q"} 1\n')
    assert samples.since(earlier).total("a") == 6.5


def losses():
    empty = {"entry": harness.Samples(""), "exit": harness.Samples("")}
    after = {"entry": harness.Samples(ENTRY), "exit": harness.Samples(EXIT)}
    run = {"sent": 1000, "received": 880, "seconds": 1}
    figures = accounts.culvert(run, empty, after)
    assert figures["places"] == {"ingress": 50, "relay": 30, "lane": 20, "exit": 6, "socket": 4, "sink": 10}, figures
    assert sum(figures["places"].values()) == run["sent"] - run["received"]
    assert figures["reasons"][0] == "entry: queue_full 30", figures
    assert figures["frames_per_packet"] == 2
    assert figures["occupancy"] == {"ingress": 10, "lane_out": 930 / 33, "lane_in": 31, "upstream": 1}, figures
    assert figures["process_cpu_seconds"] == 4
    # A bench's probes were counted by the agents only.
    probed = accounts.culvert(run | {"sent": 990, "received": 870, "round_trip_us": {"samples": 10}}, empty, after)
    assert probed["places"] == figures["places"]
    row = accounts.with_costs(dict(run), 10e6, 1250, 0.5)
    assert row["offered"] == 1000
    assert abs(row["loss_percent"] - 12) < 1e-9
    assert abs(row["cpu_seconds_per_gigabit"] - 0.5 / (880 * 1e4 / 1e9)) < 1e-9


def relays():
    empty = {"sockets": {}, "quic": {}}
    after = {
        "entry": {
            "sockets": {"received_datagrams": 990, "receive_calls": 99, "refused_datagrams": 5},
            "quic": {"sent_datagram_frames": 980, "sent_udp_datagrams": 980, "send_calls": 98},
        },
        "exit": {
            "sockets": {"sent_datagrams": 940, "unsent_datagrams": 10, "send_calls": 95},
            "quic": {"received_datagram_frames": 960, "sent_ack_frames": 9},
        },
    }
    run = {"sent": 1000, "received": 930}
    figures = accounts.relay(run, {"entry": empty, "exit": empty}, after)
    assert figures["places"] == {"ingress": 10, "relay": 10, "lane": 20, "exit": 10, "socket": 10, "sink": 10}, figures
    assert figures["reasons"] == ["entry: refused_datagrams 5", "exit: unsent_datagrams 10"], figures
    plain = {end: {"sockets": state["sockets"]} for end, state in after.items()}
    figures = accounts.relay(run, {"entry": {"sockets": {}}, "exit": {"sockets": {}}}, plain)
    assert sum(figures["places"].values()) == 70, figures


def loads():
    sums = {"bytes": 1150000, "packets": 1000, "seconds": 2.0}
    run = harness.Iperf3.read({"end": {"sum_sent": sums, "sum_received": {"packets": 990, "lost_packets": 40}}})
    assert (run["sent"], run["received"]) == (1000, 950)
    assert run["received_bps"] == 950 * 1150 * 8 / 2
    for answer in ({"error": "unable to connect"}, {"end": {}}):
        try:
            harness.Iperf3.read(answer)
        except harness.Failed:
            continue
        raise AssertionError(answer)
    run = {"sent_datagrams": 100, "received_datagrams": 99, "lost": 1, "seconds": 1, "sent_bps": 8, "received_bps": 7, "received_pps": 99}
    for answer in (run, {"runs": [run]}, {"best": run, "steps": []}):
        assert harness.Bench.read(answer)["received"] == 99
    assert [harness.rate_bps(rate) for rate in ("1.5G", "800M", "max")] == [1.5e9, 8e8, None]
    assert [harness.median(values) for values in ([3, 1, 2], [1, 2], [])] == [2, 1.5, None]


def tunnels():
    answers = "".join(f"64 bytes from 10.9.2.2: icmp_seq={number} ttl=64 time=0.{number:03} ms\n" for number in range(1, 111) if number != 50)
    figures = l3_loads.pings(f"{answers}\n111 packets transmitted, 109 received, 1.8% packet loss, time 5ms\n", 10)
    assert (figures["p50 µs"], figures["p99 µs"], figures["max µs"]) == (61, 110, 110), figures
    assert abs(figures["lost %"] - 100 * 2 / 101) < 1e-9, figures
    assert [l3_loads.percentile(range(1, 101), share) for share in (0, 0.5, 0.99, 1)] == [1, 50, 99, 100]
    way = {"sum_sent": {"retransmits": 7}, "sum_received": {"bits_per_second": 3e9}}
    assert l3_loads.tcp({"end": way}) == {"Gbit/s": 3, "retransmits": 7}
    both = l3_loads.tcp({"end": way | {"sum_received_bidir_reverse": {"bits_per_second": 2e9}}})
    assert (both["Gbit/s"], both["there"], both["back"]) == (5, 3, 2), both
    sums = {"bytes": 1150000, "packets": 1000, "seconds": 2.0}
    figures = l3_loads.udp({"end": {"sum_sent": sums, "sum_received": {"packets": 990, "lost_packets": 40}}})
    assert abs(figures["lost %"] - 5) < 1e-9, figures
    assert (figures["kpps"], figures["sent kpps"]) == (0.475, 0.5), figures
    for read, answer in ((l3_loads.tcp, {"error": "no route"}), (l3_loads.pings, "9 packets transmitted, 0 received")):
        try:
            read(answer)
        except harness.Failed:
            continue
        raise AssertionError(answer)


def paths():
    zero = {"came": 0, "passed": 0, "late": 0, "most_queued_bytes": 9, "latest_us": 7, "held": 3}
    before = {"there": zero, "back": zero, "void": ["1 packets dropped by the backlog of a CPU"]}
    after = {
        "there": zero | {"came": 20000, "passed": 19000, "late": 11},
        "back": zero | {"came": 5000, "passed": 5000, "late": 11, "held": 1},
        "void": ["2 packets dropped by the backlog of a CPU", "back: 11 packets later than 5ms"],
    }
    run, void = path_ways.fates(before, after)
    assert (run["there"]["came"], run["back"]["held"], run["back"]["latest_us"]) == (20000, 1, 7), run
    # One in a thousand, and no fewer than ten.
    assert void == ["2 packets dropped by the backlog of a CPU", "11 late packets back"], void
    assert path_ways.fates(after, after)[1] == []
    received = {"end": {"sum_sent": {"retransmits": 4}, "sum_received": {"bits_per_second": 150e6}}}
    assert path_ways.mbit(received) == {"Mbit/s": 150, "retransmits": 4}
    assert path_ways.share({"Mbit/s": 150, "beside": 50}) == 0.75


def modems():
    assert [modem_ways.jain(rates) for rates in ([3, 3, 3], [5, 0, 0, 0, 0], [0, 0])] == [1, 0.2, 0]
    streams = [{"receiver": {"bits_per_second": rate}} for rate in (4e6, 6e6)]
    assert modem_ways.flows({"end": {"streams": streams}}) == [4, 6]
    udp = {"bytes": 1150000, "packets": 1000, "seconds": 2.0}
    udp = {"streams": [{"udp": {}}], "sum_sent": udp, "sum_received": {"packets": 990, "lost_packets": 40}}
    assert modem_ways.flows({"end": udp}) == [4.37]
    said = "".join(f"[{at}] 64 bytes from 10.2.0.1: icmp_seq=1 ttl=61 time={ms} ms\n" for at, ms in ((100.35, 250), (100.5, 20)))
    pings = modem_ways.replies(f"PING 10.2.0.1 56(84) bytes of data.\n{said}", 100)
    assert [(round(at, 3), ms) for at, ms in pings] == [(0.1, 250), (0.48, 20)], pings
    counts = [{"seconds": 7 + at, "there": {"passed_bytes": there}, "back": {"passed_bytes": 0}} for at, there in ((0, 0), (0.2, 125000), (0.4, 250000))]
    points = modem_ways.series([(0, 50, counts[0]), (0.2, 10, counts[1]), (0.4, 10, counts[2])], pings)
    assert [(point["s"], point["link"], round(point["up"], 6), point["ping ms"]) for point in points] == [(0, 50, 5, 250), (0.2, 10, 5, None)], points


def transports():
    udp = transports_ways.Candidate("udp", datagrams=True)
    tcp = transports_ways.Candidate("tcp")
    sent = {"sent": 90, "planned": 100, "connected": 1, "errors": {}, "too_large": False, "largest": None, "connect_ms": 1.5}
    received = {"counted": 80, "messages": 160, "bytes": 16000, "seconds": 4.0, "messages_in_time": 50, "bytes_in_time": 5000}
    received |= {"p50_us": 7.0, "p99_us": 9.0, "connections": 0}
    cadence = transports_ways.Load(100, rate=50, seconds=2)
    values = transports_ways.values(tcp, cadence, sent, received, 0.016, [])
    assert (values["arrived %"], values["p99 µs"], values["Mbit/s"], values["CPU µs each"]) == (80, 9, 0.02, 100), values
    assert values["said"] == ["the receiver saw 0 of 1 connections"], values
    # What a stream holds back is not lost; what a socket took and nobody got is.
    flood = transports_ways.Load(100)
    assert "arrived %" not in transports_ways.values(tcp, flood, sent, received, 1, [])
    assert transports_ways.values(udp, flood, sent, received, 1, [])["arrived %"] == 80
    assert transports_ways.values(tcp, transports_ways.Load(1, file=16000), sent, received, 1, [])["MB/s"] == 0.004
    for load, changed in ((transports_ways.Load(1, file=16001), {}), (flood, {"too_large": True, "largest": 1452})):
        assert "cannot" in transports_ways.values(udp, load, sent | changed, received, 1, [])
    log = "\nthread 'main' panicked at src/main.rs:1:1:\nall is lost\nnote: no\n"
    assert transports_ways.values(tcp, cadence, sent, received, 1, [log])["cannot"].endswith("all is lost")
    runs = [
        {"round": round_, "suite": "files", "row": "1 MiB", "candidate": "tcp", "loads": {"file": {"MB/s": rate}}}
        for round_, rate in ((1, 10.0), (2, 30.0), (3, 20.0))
    ]
    runs.append({"round": 1, "suite": "files", "row": "1 GiB", "candidate": "tcp", "loads": {"failed": {"cannot": "it ended"}}})
    text = transports_report.section(runs, "files")
    assert "| tcp | 20 (10 to 30) | – |" in text and "* tcp, 1 GiB: it ended" in text, text


def command(name):
    """A command of this folder as a module."""
    spec = importlib.util.spec_from_loader(f"command_{name}", SourceFileLoader(f"command_{name}", str(Path(__file__).with_name(name))))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_rounds(load, kind, *values):
    return [{"round": round_, "load": load, "kind": kind, "values": each} for round_, each in enumerate(values, 1)]


def repairs():
    lossy, repair = command("lossy"), command("repair")
    runs = in_rounds("udp-5", "culvert", {"bytes each": 1000}, {"bytes each": 1100}, {"bytes each": 1000})
    runs += in_rounds("udp-5", "culvert-60ms", {"bytes each": 1100, "lost %": 0.03}, {"bytes each": 1210, "lost %": 0.01})
    extra = lossy.of_runs(runs, "udp-5", "culvert-60ms", "extra %")
    assert [round(percent, 6) for percent in extra] == [10, 10], extra
    assert lossy.of_runs(runs, "udp-5", "culvert", "extra %") == []
    rows = list(report.bounded(lambda *what: lossy.of_runs(runs, *what), lossy.AT_MOST, lossy.AT_LEAST))
    assert [row["verdict"] for row in rows] == ["ok", "ok"], rows
    full = in_rounds("full-1", "culvert", {"Mbit/s": 180, "ping p99 ms": 120}) + in_rounds("full-1", "culvert-hold", {"Mbit/s": 135, "ping p99 ms": 150})
    assert lossy.of_runs(full, "full-1", "culvert-hold", "Mbit/s of culvert %") == [75]
    assert lossy.of_runs(full, "full-1", "culvert-hold", "p99 of culvert %") == [125]
    rows = list(report.bounded(lambda *what: lossy.of_runs(full, *what), lossy.AT_MOST, lossy.AT_LEAST))
    assert [row["verdict"] for row in rows] == ["MISSED", "MISSED"], rows
    for bounds in (lossy.AT_MOST, lossy.AT_LEAST):
        assert all(kind in lossy.LOADS[load][2] and key in lossy.LINES for load, kind, key in bounds), bounds
    runs = in_rounds("udp", "off", {"Gbit/s": 0.5, "outer bytes each": 1.1}) + in_rounds("udp", "asap", {"Gbit/s": 0.49, "outer bytes each": 1.111})
    assert [round(repair.of_runs(runs, "udp", "asap", key)[0], 6) for key in ("of off %", "outer %")] == [98, 1]
    before = {"left": harness.Samples('culvert_lane_sent_bytes_total{lane="0"} 100\n')}
    grown = 'culvert_lane_sent_bytes_total{lane="0"} 1112\nculvert_lane_packets_sent_total{peer="right"} 1\n'
    grown += 'culvert_peer_bytes_delivered_total{direction="uplink",peer="right"} 800\nculvert_repair_extra_bytes_total{peer="right"} 40\n'
    assert repair.costs({"left": harness.Samples(grown)}, before) == {"outer bytes each": 1.3, "extra %": 4}


def plots():
    """Goodput over loss, and rate and delay over a stepping link: a line for each way that took part."""
    lossy, modem = command("lossy"), command("modem")
    about = {"cores": 2, "kernel": "6.18", "commit": "0"}

    class Bench(SimpleNamespace):
        def values(self, *what):
            return lossy.of_runs(self.runs, *what)

    options = SimpleNamespace(loads=["tcp-0", "tcp-1"], kinds=["wireguard-go", "culvert-hold"], rate=200, rtt=80)
    runs = [run for load in options.loads for kind in options.kinds for run in in_rounds(load, kind, {"Mbit/s": 100}, {"Mbit/s": 120})]
    drawn = lossy.chart(Bench(options=options, runs=runs), about)
    assert all(text in drawn for text in ("wireguard-go", "culvert-hold", "200 Mbit/s, RTT 80 ms")), drawn
    assert drawn.count("<polyline") == 2 and drawn.count("<circle") == 4, drawn
    options = SimpleNamespace(load=["cubic"], kind=["wireguard-go", "culvert-auto"], step_seconds=10, rates=[50, 10, 30], queue="500ms", rtt=20)
    points = [{"s": second, "link": link, "up": link * 0.9, "ping ms": 30} for second, link in ((0, 50), (10, 10), (20, 30))]
    runs = [{"load": "cubic", "kind": kind, "series": points} for kind in options.kind]
    drawn = modem.chart(SimpleNamespace(options=options, runs=runs), about)
    # Rate of both ways and of the link; delay of both ways.
    assert drawn.count("<polyline") == 5 and "30 s" in drawn, drawn


def pairs():
    load = paired.Load("a load", ("one", "other"), None, (("value", "value"),))
    runs = paired.Runs(SimpleNamespace(), {"load": load})
    for round_, one, other in ((1, 10, 5), (2, 30, 10), (3, 8, None)):
        runs.runs += [{"round": round_, "load": "load", "way": "one", "value": one}]
        runs.runs += [{"round": round_, "load": "load", "way": "other", "value": other}] if other else []
    # Of rounds that have both.
    assert runs.ratio("load", "value", "one", "other") == [2, 3]
    assert runs.added("load", "value", "one", "other") == [5, 20]
    assert runs.values("load", "one", "value") == [10, 30, 8]
    assert paired.cell([10, 30, 8]) == "10 (8 to 30)" and paired.cell([]) == "-"
    # What was sent before the moment does not count, even if it came after it.
    assert carrier_ways.first_after([(0.9, 1.5), (1.2, 3), (1.4, 2.5)], 1) == 1.5
    times = carrier_ways.times([(0, 9), (1, 1.25), (2, 2.5)], cold=1)
    assert times == {"p50 µs": 250_000, "p99 µs": 500_000}, times


def outside():
    """The bench of transports is neither in the workspace nor in its lock."""
    package = tomllib.loads((transports_ways.PACKAGE / "Cargo.toml").read_text())
    root = tomllib.loads((harness.ROOT / "Cargo.toml").read_text())["workspace"]
    members = [(harness.ROOT / member).resolve() for member in root["members"]]
    assert "workspace" in package and transports_ways.PACKAGE not in members
    locked = {entry["name"] for entry in tomllib.loads((harness.ROOT / "Cargo.lock").read_text())["package"]}
    assert not {name for name in locked if name.startswith("kcp") or name == package["package"]["name"]}, locked


def main(matrix):
    for check in (metrics, losses, relays, loads, tunnels, paths, modems, repairs, plots, transports, pairs, outside):
        check()
    rows = [
        accounts.with_costs(
            {"kind": "culvert", "tool": "bench", "payload": "1000", "rate": rate, "planned_seconds": 3}
            | {"sent": 1000, "received": 1000 - lost, "seconds": 1, "received_bps": 7e6, "places": {}},
            8e6, 1000, 0.1,
        )
        for rate, lost in (("8M", 10), ("8M", 30), ("8M", 20), ("max", 0))
    ]
    (_, first, count), (_, second, _) = matrix.summary(rows)
    assert (len(first), count, len(second)) == (3, 3, 1)
    values = dict(zip((name for name, _ in matrix.COLUMNS), matrix.line(first), strict=True))
    assert (values["loss %"], values["(from"], values["to)"]) == ("2.0000", "1.0000", "3.0000"), values
    print("the arithmetic of tests/perf holds")
