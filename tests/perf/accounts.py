"""Where datagrams were lost, and what they cost: arithmetic on what was counted. No processes, no clock.

A datagram goes sender → entry's ingress → entry's relay → QUIC → exit's relay → exit's upstream socket → sink. Each
place is the difference of two counts of datagrams; the reasons that an agent gives stand beside.
"""

PLACES = ("ingress", "relay", "lane", "exit", "socket", "sink")


def ratio(part, whole):
    return part / whole if whole else None


def counted(name, number):
    return f"{name} {number:.0f}"


def probes(run):
    """Sent and returned: a bench's probes take the same way, and are not among what it says that it sent."""
    probe = run.get("round_trip_us") or {}
    returned = probe.get("samples") or 0
    return probe.get("sent", returned), returned


def direct(run):
    """Sender and sink only."""
    return {"places": {"sink": run["sent"] - run["received"]}}


def culvert(run, before, after):
    """Two agents; `before` and `after` are the answers of /metrics by end."""
    entry, exit_ = (after[name].since(before[name]) for name in ("entry", "exit"))
    probes_sent, probes_back = probes(run)
    into_entry = entry.total("culvert_socket_received_datagrams_total", socket="ingress")
    into_relay = entry.total("culvert_peer_datagrams_received_total", direction="uplink")
    sealed = entry.total("culvert_peer_datagrams_delivered_total", direction="uplink")
    opened = exit_.total("culvert_peer_datagrams_received_total", direction="downlink")
    delivered = exit_.total("culvert_peer_datagrams_delivered_total", direction="downlink")
    unsent = exit_.total("culvert_socket_send_failures_total", socket="upstream")
    at_exit = opened - delivered
    places = {
        "ingress": run["sent"] + probes_sent - into_entry,
        "relay": max(into_entry, into_relay) - sealed,
        "lane": sealed - opened,
        "exit": at_exit - min(unsent, at_exit),
        "socket": min(unsent, at_exit),
        "sink": delivered - probes_back - run["received"],
    }
    reasons = [
        counted(f"{end}: {reason}", number)
        for end, samples in (("entry", entry), ("exit", exit_))
        for reason, number in sorted(samples.by("culvert_datagrams_dropped_total", "reason").items())
        if number
    ]
    for end, samples in (("entry", entry), ("exit", exit_)):
        for name in ("kernel_drops", "would_block", "send_failures", "gso_fallbacks"):
            by_socket = samples.by(f"culvert_socket_{name}_total", "socket")
            reasons += [counted(f"{end} {use}: {name}", number) for use, number in sorted(by_socket.items()) if number]
    sent = {name: samples.total("culvert_lane_packets_sent_total") for name, samples in (("entry", entry), ("exit", exit_))}
    received = {name: samples.total("culvert_lane_packets_received_total") for name, samples in (("entry", entry), ("exit", exit_))}
    acks = {name: samples.total("culvert_lane_ack_packets_total", direction="uplink") for name, samples in (("entry", entry), ("exit", exit_))}
    frames = entry.total("culvert_lane_datagram_frames_total", direction="uplink")
    return {
        "places": places,
        "reasons": reasons,
        "packets_sent": sent,
        "packets_received": received,
        "acks_sent": acks,
        "frames_per_packet": ratio(frames, sent["entry"] - acks["entry"]),
        "occupancy": {
            "ingress": per_call(entry, "ingress"),
            "lane_out": segments(entry, "quic_dial"),
            "lane_in": per_call(exit_, "quic_listen"),
            "upstream": segments(exit_, "upstream"),
        },
        "process_cpu_seconds": sum(samples.total("culvert_process_cpu_seconds_total") for samples in (entry, exit_)),
    }


def per_call(samples, use):
    """Datagrams per call that received something."""
    calls = samples.total("culvert_socket_receive_calls_total", socket=use)
    return ratio(samples.total("culvert_socket_received_datagrams_total", socket=use), calls)


def segments(samples, use):
    """Datagrams per message: those of a GSO message, and 1 for each that went alone."""
    joined = samples.total("culvert_socket_gso_segments_total", socket=use)
    messages = samples.total("culvert_socket_gso_messages_total", socket=use)
    sent = samples.total("culvert_socket_sent_datagrams_total", socket=use)
    return ratio(sent, messages + max(sent - joined, 0))


def relay(run, before, after):
    """A pair of `quinn_relay`; without QUIC the lane is the second hop's queue."""

    def grown(end, group, name):
        return after[end].get(group, {}).get(name, 0) - before[end].get(group, {}).get(name, 0)

    probes_sent, probes_back = probes(run)
    into_entry = grown("entry", "sockets", "received_datagrams")
    out, unsent = grown("exit", "sockets", "sent_datagrams"), grown("exit", "sockets", "unsent_datagrams")
    quic = "quic" in after["entry"]
    sent = grown("entry", "quic", "sent_datagram_frames") if quic else grown("entry", "sockets", "sent_datagrams")
    received = grown("exit", "quic", "received_datagram_frames") if quic else out + unsent
    figures = {
        "places": {
            "ingress": run["sent"] + probes_sent - into_entry,
            "relay": into_entry - sent,
            "lane": sent - received,
            "exit": received - out - unsent,
            "socket": unsent,
            "sink": out - probes_back - run["received"],
        },
        "reasons": [
            counted(f"{end}: {name}", number)
            for end in ("entry", "exit")
            for name in ("refused_datagrams", "unsent_datagrams")
            if (number := grown(end, "sockets", name))
        ],
        "occupancy": {
            "ingress": ratio(into_entry, grown("entry", "sockets", "receive_calls")),
            "upstream": ratio(out + unsent, grown("exit", "sockets", "send_calls")),
        },
    }
    if quic:
        figures["packets_sent"] = {end: grown(end, "quic", "sent_udp_datagrams") for end in ("entry", "exit")}
        figures["packets_received"] = {end: grown(end, "quic", "received_udp_datagrams") for end in ("entry", "exit")}
        figures["acks_sent"] = {end: grown(end, "quic", "sent_ack_frames") for end in ("entry", "exit")}
        figures["frames_per_packet"] = ratio(sent, figures["packets_sent"]["entry"])
        figures["occupancy"]["lane_out"] = ratio(figures["packets_sent"]["entry"], grown("entry", "quic", "send_calls"))
    return figures


def account(kind, run, before, after):
    """All that is known about a run besides what the sender and the sink say."""
    if kind == "direct":
        return direct(run)
    return culvert(run, before, after) if kind == "culvert" else relay(run, before, after)


def with_costs(row, offered_bps, size, cpu_seconds):
    """Adds what is derived: the datagrams that should have been sent, the loss, CPU per gigabit that arrived."""
    received_gigabit = row["received"] * size * 8 / 1e9
    row["size"] = size
    row["offered"] = offered_bps and round(offered_bps * row["seconds"] / 8 / size)
    row["loss_percent"] = 100 * (1 - row["received"] / row["sent"]) if row["sent"] else None
    row["cpu_seconds"] = cpu_seconds
    row["cpu_seconds_per_gigabit"] = ratio(cpu_seconds, received_gigabit) if cpu_seconds is not None else None
    return row
