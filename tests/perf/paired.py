"""The frame of `carrier`, `users`, `uplinks` and `records`: loads, the ways of each, rounds of them, and a table."""

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple

import harness
import path_ways
import report
from harness import Failed, median, say

# Of runs in the round that is thrown away.
WARM_UP_SECONDS = 1


class Load(NamedTuple):
    """What is measured: `once(bed, way, seconds)` returns values by name. `lines` are those of the table, with their titles."""

    title: str
    ways: tuple
    once: Callable
    lines: tuple
    # Whether a shorter run comes first that does not count.
    warm: bool = True
    # Of the rounds, at most so many.
    most_rounds: int = 1000
    # Whether it runs only if it is asked for.
    asked: bool = False


def arguments(doc, loads, rounds, seconds, more=()):
    """The options of all four, and those of `more`, files by option."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="that count; a short one comes before them")
    parser.add_argument("--seconds", type=int, default=seconds, help="of each run")
    parser.add_argument("--minutes", type=float, default=15, help="begin no run after this time")
    parser.add_argument("--only", action="append", choices=loads, help="only this load (may be repeated)")
    parser.add_argument("--culvert", metavar="FILE", help="a release program that is built; the examples are in `examples` beside it")
    parser.add_argument("--json", metavar="FILE", help="where the values of every round go")
    for option, meaning in dict(more).items():
        parser.add_argument(option, metavar="FILE", help=meaning)
    options = parser.parse_args()
    options.only = [name for name, load in loads.items() if name in (options.only or ()) or not (options.only or load.asked)]
    return options


def built(options, *examples):
    """Builds the program and these examples, unless --culvert says that they are there; returns the program."""
    if options.culvert:
        program = Path(options.culvert).resolve()
        path_ways.PATH_RELAY = program.parent / "examples/path_relay"
        return program
    harness.build(relay=False)
    for example in examples:
        harness.build_example(example)
    return harness.CULVERT


def example(program, name):
    return program.parent / "examples" / name


class Runs:
    """Every run so far."""

    def __init__(self, options, loads):
        self.options, self.loads, self.runs = options, loads, []

    def run_all(self, bed):
        end = time.monotonic() + self.options.minutes * 60
        for name in self.options.only:
            load = self.loads[name]
            for round_ in range(0 if load.warm else 1, min(self.options.rounds, load.most_rounds) + 1):
                # Another way begins in each round.
                first = round_ % len(load.ways)
                for way in load.ways[first:] + load.ways[:first]:
                    if time.monotonic() > end:
                        say("time is up")
                        return
                    self.run(bed, round_, name, way)

    def run(self, bed, round_, name, way):
        load = self.loads[name]
        try:
            values = load.once(bed, way, self.options.seconds if round_ else WARM_UP_SECONDS)
        except (Failed, ValueError, KeyError) as error:
            say(f"round {round_}: {load.title}: {way}: {type(error).__name__}: {error}")
            return
        say(f"round {round_}: {load.title}: {way}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
        if round_:
            self.runs.append({"round": round_, "load": name, "way": way, **values})

    def by_round(self, load, way, key):
        return {run["round"]: run[key] for run in self.runs if (run["load"], run["way"]) == (load, way) and key in run}

    def values(self, load, way, key):
        return list(self.by_round(load, way, key).values())

    def joined(self, load, key, way, other, join):
        """What `join` makes of the values of two ways in the same round."""
        one, two = self.by_round(load, way, key), self.by_round(load, other, key)
        return [join(one[round_], two[round_]) for round_ in sorted(one.keys() & two.keys())]

    def ratio(self, load, key, way, other):
        return self.joined(load, key, way, other, lambda a, b: a / b if b else float("inf"))

    def added(self, load, key, way, other):
        return self.joined(load, key, way, other, lambda a, b: a - b)

    def table(self):
        print(f"{self.options.seconds} s, median (lowest to highest)")
        for name in self.options.only:
            load = self.loads[name]
            print(f"\n{load.title:<42}" + "".join(f"{way:<26}" for way in load.ways).rstrip())
            for key, title in load.lines:
                cells = [cell(self.values(name, way, key)) for way in load.ways]
                print(f"  {title:<40}" + "".join(f"{text:<26}" for text in cells).rstrip())


def cell(values):
    """Median (lowest to highest)."""
    if not values:
        return "-"
    return f"{digits(median(values))} ({digits(min(values))} to {digits(max(values))})"


def digits(value):
    """Three significant ones, or all of an integer's."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(options, loads, made, figures):
    """Makes the bed with `made(processes)`, runs the loads, and prints the table and the rows of `figures(runs)`."""
    runs = Runs(options, loads)
    with harness.Processes() as processes:
        try:
            bed = made(processes)
            runs.run_all(bed)
        except Failed as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            say("interrupted: what there is")
    runs.table()
    rows = list(figures(runs))
    print()
    report.head()
    for row in rows:
        report.show(row)
    if options.json:
        answer = {"machine": harness.machine(), "rounds": options.rounds, "seconds": options.seconds, "runs": runs.runs, "figures": rows}
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(answer, out, indent=1)
    sys.exit(1 if report.missed(rows) else 0)


def keys(program, folder, *names):
    """Makes a key for each of these agents, NAME.key, and returns the public keys by name."""
    made = {}
    for name in names:
        subprocess.run([program, "keygen", "--out", folder / f"{name}.key"], check=True, capture_output=True)
        shown = subprocess.run([program, "pubkey", folder / f"{name}.key"], check=True, capture_output=True, text=True)
        made[name] = shown.stdout.strip()
    return made


def own(folder, name, metrics, control=False):
    """The lines of an agent about itself."""
    socket = f"{folder}/{name}.sock" if control else ""
    return (
        f'identity = {{ key_file = "{folder}/{name}.key", state_dir = "{folder}/{name}" }}\n'
        f'control = {{ socket = "{socket}" }}\n'
        f'metrics = {{ listen = "127.0.0.1:{metrics}" }}\n'
    )


def certificate(folder, names):
    """An authority and a certificate for these names, as in "DNS:gw.example.net,IP:192.0.2.2": ca.pem, cert.pem, key.pem; in
    both.pem the latter two."""
    (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = name\n[name]\n")

    def make(subject, certificate, key, *more):
        command = ["openssl", "req", "-x509", "-nodes", "-days", "60", "-config", "openssl.cnf", "-newkey", "ec"]
        command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={subject}", "-out", certificate, "-keyout", key, *more]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    make("authority", "ca.pem", "ca.key", "-addext", "basicConstraints=critical,CA:TRUE")
    extensions = ["-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE"]
    make("server", "cert.pem", "key.pem", *extensions, "-CA", "ca.pem", "-CAkey", "ca.key")
    (folder / "both.pem").write_text("".join((folder / name).read_text() for name in ("cert.pem", "key.pem")))


def cpu_seconds(child):
    """As `harness.cpu_seconds`, of the threads that are there, to the nanosecond."""
    tasks = Path(f"/proc/{child.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def quiet_port():
    """A port that is free for UDP and TCP on loopback, below those that the kernel gives to the sockets of flows."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, lowest)
        with contextlib.suppress(OSError), socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            return port


def scrape(host, port):
    """An agent's /metrics in this namespace."""
    return harness.Samples(host.run("curl", "--silent", "--fail", "--max-time", 5, f"http://127.0.0.1:{port}/metrics"))
