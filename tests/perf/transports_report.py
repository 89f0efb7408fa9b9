"""What `transports` found: tables in Markdown, plots as SVG, and the page of the documentation that has both."""

import drawing
from harness import ROOT, median

# The plots, and the page of tables that shows them.
DOCS = ROOT / "docs/performance"
PAGE = ROOT / "docs/measured/transports.md"

COLOURS = {
    "udp": "#8a8f98",
    "tcp": "#4d525b",
    "tls": "#b08a3c",
    "haproxy": "#7a5bb0",
    "quinn-stream": "#c2543d",
    "quinn-datagram": "#e39a8b",
    "kcp-tokio": "#3f8f5b",
    "kcp-sys": "#93c47d",
    "culvert-tcp": "#1f6fb2",
    "culvert-udp": "#6fb1e3",
}

# Those that only the mode in memory has.
LANE, KCP_CORE = "culvert-lane", "kcp-core"
COLOURS |= {LANE: "#6fb1e3", KCP_CORE: "#3f8f5b"}

# By suite: what its rows are, and each table: its title, which loads have it (the first that there is), and which value.
RATE = ("flood", "datagrams")
SUITES = {
    "sizes": (
        "By message size",
        "One connection over veth with an MTU of 1,500 bytes. Delay and arrival at a cadence of 1,000 messages a second (256 of 64 KiB), throughput with as many as the transport takes.",
        [
            ("One-way delay, median, µs", ("cadence",), "p50 µs"),
            ("One-way delay, 99th percentile, µs", ("cadence",), "p99 µs"),
            ("Arrived at the cadence, %", ("cadence",), "arrived %"),
            ("Throughput, Mbit/s received", RATE, "Mbit/s"),
            ("Arrived at full speed, %", RATE, "arrived %"),
            ("CPU of all processes at full speed, µs a message", RATE, "CPU µs each"),
        ],
    ),
    "connections": (
        "By connections",
        "Over veth. A thousand messages of 100 bytes a second over all connections together; throughput with messages of 1 KiB on all of them at once.",
        [
            ("One-way delay, median, µs", ("cadence",), "p50 µs"),
            ("One-way delay, 99th percentile, µs", ("cadence",), "p99 µs"),
            ("Arrived at the cadence, %", ("cadence",), "arrived %"),
            ("Throughput, Mbit/s received", RATE, "Mbit/s"),
            ("Until all connections were up, ms", ("cadence",), "connect ms"),
        ],
    ),
    "conditions": (
        "By condition of the path",
        "Through the impairment relay at 200 Mbit/s with 80 ms of buffer; times are round-trip times. Delay at KCP's own cadence of 50 messages of 100 bytes a second, on ten connections. Throughput of one connection with messages of 1 KiB; datagrams are offered at 147 Mbit/s, and streams send what they can.",
        [
            ("One-way delay, median, µs", ("cadence",), "p50 µs"),
            ("One-way delay, 99th percentile, µs", ("cadence",), "p99 µs"),
            ("Arrived at the cadence, %", ("cadence",), "arrived %"),
            ("Throughput, Mbit/s received", RATE, "Mbit/s"),
            ("Datagrams that arrived, %", ("datagrams",), "arrived %"),
        ],
    ),
    "files": (
        "A file",
        "From the first byte handed over to the last byte received, on a connection that is up, over veth or where the row says through the relay. Megabytes a second.",
        [("MB/s", ("file",), "MB/s")],
    ),
    "loopback": (
        "Over loopback",
        "The same as by message size, with loopback's MTU of 65,536 bytes: the kernel's TCP, and with it TLS and HAProxy, use segments of that size; UDP payloads still have 1,452 bytes at most.",
        [
            ("One-way delay, median, µs", ("cadence",), "p50 µs"),
            ("One-way delay, 99th percentile, µs", ("cadence",), "p99 µs"),
            ("Throughput, Mbit/s received", RATE, "Mbit/s"),
        ],
    ),
    "memory": (
        "The protocol alone, in memory",
        "Both ends in one thread, without sockets: CPU time of a message from handing it over to having it, acknowledgements included.",
        [("CPU, ns a message", ("memory",), "ns each"), ("CPU, ns a byte", ("memory",), "ns a byte")],
    ),
}

# What of it is drawn: the file, the title, the suite, the loads, the value, and the floor of a logarithmic axis.
PLOTS = [
    ("transports-delay", "One-way delay of a message, µs", ("sizes", "connections", "conditions"), ("cadence",), ("p50 µs", "p99 µs"), 10),
    ("transports-throughput", "Throughput, Mbit/s received", ("sizes", "connections", "conditions"), RATE, ("Mbit/s",), 1),
    ("transports-files", "A file, megabytes a second", ("files",), ("file",), ("MB/s",), 0.1),
    ("transports-memory", "The protocol alone: CPU, ns a message", ("memory",), ("memory",), ("ns each",), 10),
]


def digits(value):
    """Three significant ones, or all of an integer's."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cell(values):
    """Median (lowest to highest), once if they are the same."""
    low, middle, high = (digits(value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def ordered(runs, key):
    """The values of this key, in the order in which they came first."""
    return list(dict.fromkeys(run[key] for run in runs))


def by_colour(runs):
    names = ordered(runs, "candidate")
    return [name for name in COLOURS if name in names] + [name for name in names if name not in COLOURS]


def found(runs, suite, row, candidate, loads, key):
    """The values of all rounds, and why rounds have none."""
    numbers, reasons = [], []
    for run in runs:
        if (run["suite"], run["row"], run["candidate"]) != (suite, row, candidate):
            continue
        values = next((run["loads"][load] for load in loads if load in run["loads"]), run["loads"].get("failed"))
        if values is None:
            continue
        if values.get(key) is not None:
            numbers.append(values[key])
        elif "cannot" in values:
            reasons.append(values["cannot"])
    return numbers, reasons


def table(runs, suite, title, loads, key, notes):
    """A line for each candidate, a column for each row of the suite; why cells are empty goes to `notes`."""
    mine = [run for run in runs if run["suite"] == suite]
    rows = ordered(mine, "row")
    lines = [f"| {title} | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for candidate in by_colour(mine):
        cells = []
        for row in rows:
            numbers, reasons = found(mine, suite, row, candidate, loads, key)
            for reason in reasons:
                notes.setdefault((candidate, reason), []).append(row)
            cells.append(cell(numbers) if numbers else "–")
        if set(cells) != {"–"}:
            lines.append(f"| {candidate} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(runs, suite):
    """The tables of a suite, and under them what they do not say."""
    title, text, specs = SUITES[suite]
    notes = {}
    for run in runs:
        for load, values in run["loads"].items():
            for reason in values.get("said", []) if run["suite"] == suite else []:
                notes.setdefault((run["candidate"], f"{load}: {reason}"), []).append(run["row"])
    parts = [f"## {title}", text]
    parts += [table(runs, suite, name, loads, key, notes) for name, loads, key in specs]
    if notes:
        said = [f"* {candidate}, {', '.join(dict.fromkeys(rows))}: {reason}" for (candidate, reason), rows in notes.items()]
        parts.append("What the tables do not say:\n\n" + "\n".join(said))
    return "\n\n".join(parts)


def about(answer):
    """How, when and on what."""
    machine = answer["machine"]
    where = f"{machine['cores']} cores, {machine['cpu']}, Linux {machine['kernel']}; Culvert {machine['commit']}"
    how = f"{answer['rounds']} rounds and a short one before them, runs of {answer['seconds']:g} s ({answer['path_seconds']:g} s through the relay)"
    if answer["setting"] == "quick":
        how = "one round"
    # The bench itself is some two of it.
    busy = f" The machine was busy: its load average was up to {answer['load']:.0f}, so the figures are not to be relied on." if answer["load"] > 5 else ""
    return f"{answer['date']}: {where}; {how}.{busy}"


def markdown(answer):
    """All tables that there are values for."""
    runs = answer["runs"]
    have = ordered(runs, "suite")
    candidates = "\n".join(f"| {name} | {note} |" for name, note in answer["notes"].items())
    parts = [about(answer), "| candidate | what it is |\n|---|---|\n" + candidates]
    return "\n\n".join(parts + [section(runs, suite) for suite in SUITES if suite in have])


def page(answer):
    """The page of the documentation, written by the command and by nobody else."""
    head = (
        "# Measured: transports of messages\n\n"
        f"Written by `tests/perf/transports{option(answer)} --docs`; how to read them is in "
        "[a page of its own](messages.md). Each cell is the median of the rounds (lowest to highest)."
    )
    plots = "\n\n".join(f"![{title}](../performance/{name}.svg)" for name, title, suites, *_ in PLOTS if set(suites) & {run["suite"] for run in answer["runs"]})
    return f"{head}\n\n{markdown(answer)}\n\n## Plots\n\n{plots}\n"


def option(answer):
    return "" if answer["setting"] == "full" else f" --{answer['setting']}"


def plots(answer, folder):
    """Writes the SVG files and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, title, suites, loads, keys, floor in PLOTS:
        panels = []
        for suite in suites:
            runs = [run for run in answer["runs"] if run["suite"] == suite]
            rows = ordered(runs, "row")
            for key in keys:
                series = lines(runs, suite, rows, loads, key)
                if series:
                    panels.append((panel_name(suite, key, keys), rows, series))
        if panels:
            drawn = {candidate for *_, series in panels for candidate in series}
            legend = [(candidate, colour) for candidate, colour in COLOURS.items() if candidate in drawn]
            path = folder / f"{name}.svg"
            path.write_text(drawing.chart(title, about(answer), panels, legend, floor))
            written.append(path)
    return written


def panel_name(suite, key, keys):
    title = SUITES[suite][0]
    return f"{title}, {key.removesuffix(' µs')}" if len(keys) > 1 else title


def lines(runs, suite, rows, loads, key):
    """A series for each candidate: dashed, what has no cryptography."""
    series = {}
    for candidate in by_colour(runs):
        points = {}
        for row in rows:
            numbers, _ = found(runs, suite, row, candidate, loads, key)
            if numbers:
                points[row] = numbers
        if points:
            plain = candidate in ("udp", "tcp", KCP_CORE) or candidate.startswith("kcp")
            series[candidate] = (COLOURS.get(candidate, "#000000"), plain, points)
    return series
