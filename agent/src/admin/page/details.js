// One peer in full, and the tables about the agent as a whole.

import { Graph, Table, age, bits, bytes, count, dash, make, or, plural, set, share, terms, wait } from "./view.js";

const $ = (id) => document.getElementById(id);

const ACCOUNT = [["Account"], ["Received", "number"], ["Delivered", "number"], ["Queued", "number"], ["Dropped", "number"], ["Bytes", "number"]];

function account(name, side) {
  const sums = [side.received, side.delivered, side.queued, side.dropped].map(count);
  const label = side.balances ? name : `${name}: does not balance, which is a defect of culvert`;
  return [[label, side.balances ? "" : "bad"], ...sums, bytes(side.delivered_bytes)];
}

// The counts of a map, the largest first.
function counts(map) {
  return Object.entries(map).sort(([, a], [, b]) => b - a).map(([name, number]) => [name, count(number)]);
}

function drops(dropped) {
  return Object.entries(dropped).flatMap(([way, reasons]) => counts(reasons).map(([reason, number]) => [reason, way, number]));
}

const LIMITS = {
  peers: "peers", open_peers: "open-mode peers", flows: "flows", flows_per_peer: "flows of one peer",
  queue_bytes: "bytes that wait in queues", repair_bytes: "bytes kept or held for repair", tcp_streams_per_peer: "TCP streams of one peer", tcp_streams: "TCP streams",
  stream_bytes: "bytes of TCP windows", handshakes: "handshakes under way", used_tokens: "used knocks",
  decoy_flows: "flows to the decoy", descriptors: "open files",
};

function limits(limits) {
  return Object.entries(limits).map(([name, { used, limit }]) => {
    const part = limit > 0 ? used / limit : 0;
    const style = part >= 0.95 ? "bad" : part >= 0.8 ? "warn" : "";
    const size = name.endsWith("bytes") ? bytes : count;
    return [LIMITS[name] ?? name, size(used), size(limit), [share(part), style]];
  });
}

function sockets(sockets) {
  return sockets.filter((one) => one.open > 0 || one.received_datagrams > 0).map((one) => [
    one.role.replace("_", " "), count(one.open), count(one.received_datagrams), count(one.sent_datagrams),
    count(one.would_block), count(one.send_failures), [count(one.kernel_drops), one.kernel_drops > 0 ? "warn" : ""],
  ]);
}

function tun(tun) {
  if (!tun) return [];
  const state = tun.up ? "up" : tun.up === false ? "down" : "gone";
  const rows = [["uplink (read)", tun.uplink], ["downlink (written)", tun.downlink]].map(([way, side]) => [
    `${tun.name} ${way}`, [state, tun.up ? "" : "bad"], or(tun.mtu), count(side.packets), or(side.bytes_per_second, bits),
    count(side.errors), or(side.kernel_drops, count),
  ]);
  return rows;
}

export class AgentTables {
  constructor(node) {
    this.accounts = new Table("Accounts of all peers", ACCOUNT, true);
    this.refused = new Table("Refused", [["Source"], ["Ago", "number"], ["Times", "number"], ["Reason", "text"], ["Key", "text"]], true);
    this.limits = new Table("Limits in use", [["Limit"], ["Used", "number"], ["Of", "number"], ["Share", "number"]], false);
    this.tun = new Table("TUN device", [["Device"], ["State"], ["MTU", "number"], ["Packets", "number"], ["Rate", "number"], ["Errors", "number"], ["Kernel drops", "number"]], false);
    this.tunDrops = new Table("Packets of the TUN device that went to no peer", [["Reason"], ["Packets", "number"], ["Meaning", "text"]], false);
    this.sockets = new Table("Sockets", [["Sockets"], ["Open", "number"], ["Received", "number"], ["Sent", "number"], ["Blocked", "number"], ["Failed", "number"], ["Kernel drops", "number"]], false);
    this.handshakes = new Table("Handshakes by outcome", [["Outcome"], ["Count", "number"]], false);
    this.gate = new Table("Steps of the gate", [["Step"], ["Datagrams", "number"], ["Meaning", "text"]], false);
    this.tables = [this.accounts, this.refused, this.limits, this.tun, this.tunDrops, this.sockets, this.handshakes, this.gate];
    node.append(...this.tables.map((table) => table.node));
  }

  fill(status) {
    const { totals } = status;
    this.accounts.fill([account("uplink", totals.uplink), account("downlink", totals.downlink)]);
    this.refused.fill(status.refusals.map((one) => [one.source, age(one.age_seconds), count(one.count), one.reason, or(one.public_key)]));
    this.limits.fill(limits(status.limits));
    this.tun.fill(tun(status.tun));
    this.tun.node.hidden = this.tunDrops.node.hidden = !status.tun;
    const tunDrops = status.tun ? counts(status.tun.dropped) : [];
    this.tunDrops.fill(tunDrops.map(([reason, number]) => [reason, number, status.tun.meanings[reason] || ""]));
    this.sockets.fill(sockets(status.sockets));
    this.handshakes.fill(counts(status.handshakes));
    const steps = counts(status.gate).filter(([, number]) => number !== "0");
    this.gate.fill(steps.map(([step, number]) => [step, number, status.meanings[step] || ""]));
  }
}

// How many preshared keys there are for the peer, and which of them is in use; never the keys.
function presharedKey({ preshared_keys: all, preshared_key_in_use: place }) {
  if (all === 0) return "none";
  if (place === null) return "not in use";
  return all === 1 ? "in use" : `in use: number ${place} of ${all}`;
}

// What an automatic rate knows of the path.
function measured({ capacity_bits_per_second: capacity, queue_delay_seconds: queue, path_loss_share: lost, phase }) {
  return `${phase}: carries ${or(capacity, (size) => bits(size / 8))}, queue ${wait(queue)}, loss ${share(lost)}`;
}

// What we repair of what we send, and what was repaired of what came.
function repairs(repair) {
  const again = `${count(repair.retransmitted)} sent again, ${plural(repair.symbols, "repair symbol")}, ${share(repair.overhead)} more bytes`;
  const mended = `${count(repair.came_again + repair.recovered)} of ${count(repair.missing)} missing ones, ${count(repair.given_up)} given up`;
  const later = `${wait(repair.added_delay_p50_seconds)} median, ${wait(repair.added_delay_p99_seconds)} p99`;
  return [["Repair of what we send", `${repair.state}: ${again}`], ["Repair of what comes", `${mended}, delay ${later}`]];
}

function facts(peer) {
  const rates = peer.rates ?? {};
  const { queue, rate, repair, streams, tcp, lane_packets: packets } = peer;
  const speed = (size, number) => (size === undefined ? dash : `${bits(size)}, ${count(Math.round(number))}/s`);
  const size = rate && (rate.from === "no_queue" ? "none" : bits(rate.bits_per_second / 8));
  const limit = rate && `${size} (${rate.from}), wait ${wait(rate.delay_p50_seconds)} median, ${wait(rate.delay_p99_seconds)} p99`;
  const congestion = streams && `${streams.congestion}, ${plural(streams.connections, "connection")}, window ${bytes(streams.window_bytes)}`;
  const { contested, send_error: refused } = peer;
  return [
    ["State", peer.state, peer.state === "connected" ? "good" : "warn"],
    ...(contested ? [["Two agents use its key", contested.addresses.join(" and "), "bad"]] : []),
    ...(refused && refused.age_seconds < 60 ? [["Not sent", `${age(refused.age_seconds)} ago: ${refused.reason}; ${refused.remedy}`, "bad"]] : []),
    ["Since", age(peer.since_seconds)],
    ["From", { config: "the configuration", state: "culvert peer add", open: "open mode" }[peer.origin] ?? peer.origin],
    ["Address", or(peer.address)],
    ["Software", or(peer.software)],
    ["Preshared key", presharedKey(peer)],
    ["Datagrams by", or(peer.mode)],
    ["Key exchange", or(peer.key_exchange)],
    ["Up", speed(rates.uplink_bytes_per_second, rates.uplink_datagrams_per_second)],
    ["Down", speed(rates.downlink_bytes_per_second, rates.downlink_datagrams_per_second)],
    ["RTT", wait(peer.rtt_seconds)],
    ["Loss, last second · in all", `${share(packets.lost_share_last_second)} · ${share(packets.lost_share)}`],
    ["Lane packets sent · received", `${count(packets.sent)} · ${count(packets.received)}`],
    ["Queue", queue.datagrams === 0 ? "empty" : `${plural(queue.datagrams, "datagram")}, ${bytes(queue.bytes)}, the oldest for ${wait(queue.age_seconds)}`],
    ["Rate limit", limit ?? dash],
    ...(rate?.auto ? [["Measured path", measured(rate.auto)]] : []),
    ...(rate ? [["Marked for congestion (ECN)", plural(rate.marked, "packet")]] : []),
    ...(repair ? repairs(repair) : []),
    ["Lanes up", count(peer.lanes_up)],
    ["Flows", count(peer.flows)],
    ["TCP streams", tcp.stalled > 0 ? `${count(peer.tcp_streams)}, ${count(tcp.stalled)} stalled` : count(peer.tcp_streams)],
    ["TCP up · down", `${or(rates.tcp_uplink_bytes_per_second, bits)} · ${or(rates.tcp_downlink_bytes_per_second, bits)}`],
    ["TCP carried up · down", `${bytes(tcp.uplink_bytes)} · ${bytes(tcp.downlink_bytes)}`],
    ["Congestion control", congestion ?? dash],
    ["Inner MTU", or(peer.inner_mtu, (mtu) => `${mtu} B`)],
    ["Largest UDP payload", or(peer.largest_datagram, (size) => `${size} B`)],
  ];
}

function lane(lane) {
  const rates = lane.rates ?? {};
  const rate = (size) => (size === undefined ? dash : bits(size));
  return [
    String(lane.index), [lane.state, lane.state === "up" ? "good" : "warn"], rate(rates.sent_bytes_per_second),
    rate(rates.received_bytes_per_second), count(lane.lost_packets - lane.spuriously_lost_packets), count(lane.in_flight_packets), wait(lane.rtt_seconds),
    `${lane.packet_bytes}${lane.mtu_search ? " …" : ""}`, `${lane.key_updates}${lane.key_update_under_way ? " …" : ""}`,
    count(lane.flows), or(lane.heard_seconds, (heard) => `${wait(heard)} ago`), or(lane.remote_address), String(lane.worker),
  ];
}

const LINE_STATES = { "in-use": "good", standby: "", held: "warn", suspect: "bad", down: "bad" };

function line(line) {
  const state = line.state.replace("-", " ") + (line.cause ? ` (${line.cause})` : "");
  return [
    line.name, [state, LINE_STATES[line.state] ?? ""], count(line.lanes_up), bits(line.sent_bytes_per_second), bits(line.received_bytes_per_second),
    bytes(line.sent_bytes), bytes(line.received_bytes), count(line.lost_packets), wait(line.rtt_seconds), or(line.packet_bytes, String),
    count(line.suspicions),
  ];
}

function flow(flow) {
  const on = flow.on_lane !== null && flow.lane !== null && flow.on_lane !== flow.lane;
  return [
    String(flow.number), flow.service, flow.opened_by === "here" ? "us" : "the peer", or(flow.local_address), flow.standing,
    on ? `${flow.on_lane}, for ${flow.lane}` : or(flow.lane ?? flow.on_lane), wait(flow.silent_seconds), age(flow.idle_seconds),
  ];
}

const NOT_READ = { here: "here", peer: "at the peer", both: "at both ends" };

function forward(one) {
  return [
    one.id, one.service, one.opened_by === "here" ? "us" : "the peer", or(one.local_address), one.state.replace("_", " "),
    age(one.age_seconds), bytes(one.uplink_bytes), bytes(one.downlink_bytes),
    [or(one.stalled_seconds, age), one.stalled_seconds === null ? "" : "warn"], or(one.stopped, (end) => NOT_READ[end] ?? end), String(one.worker),
  ];
}

function services(services) {
  const sorted = [...services].sort((a, b) => (a.service < b.service ? -1 : 1));
  return sorted.map((one) => [one.service, count(one.open), bytes(one.uplink_bytes), bytes(one.downlink_bytes)]);
}

export class PeerView {
  constructor() {
    this.graphs = {
      rate: new Graph("Throughput", [["up", "up"], ["down", "down"]], bits, 1000),
      loss: new Graph("Loss of lane packets", [["lost", "lost"]], share, 0.01),
    };
    $("peer-graphs").append(this.graphs.rate.node, this.graphs.loss.node);
    this.accounts = new Table("Accounts", ACCOUNT);
    this.drops = new Table("Drops by reason", [["Reason"], ["Direction"], ["Datagrams", "number"], ["Meaning", "text"]]);
    this.lines = new Table("Lines", [["Line"], ["State"], ["Lanes", "number"], ["Up", "number"], ["Down", "number"], ["Sent", "number"], ["Received", "number"], ["Lost", "number"], ["RTT", "number"], ["Packet", "number"], ["Suspected", "number"]]);
    this.lanes = new Table("Lanes", [["Lane"], ["State"], ["Sent", "number"], ["Received", "number"], ["Lost", "number"], ["Unacked", "number"], ["RTT", "number"], ["Packet", "number"], ["Key updates", "number"], ["Flows", "number"], ["Heard", "number"], ["Address"], ["Worker", "number"]]);
    this.streams = new Table("Stream connections", [["Number"], ["State"], ["Worker", "number"], ["Dialled by"], ["Forwards", "number"]]);
    this.flows = new Table("Latest flows", [["Flow"], ["Service"], ["Opened by"], ["Local address"], ["State"], ["Lane"], ["Silent", "number"], ["Ends after", "number"]]);
    this.services = new Table("TCP forwards by service", [["Service"], ["Open", "number"], ["Up", "number"], ["Down", "number"]]);
    this.forwards = new Table("TCP forwards, stalled ones first", [["Forward"], ["Service"], ["Opened by"], ["Local address"], ["State"], ["Age", "number"], ["Up", "number"], ["Down", "number"], ["Stalled", "number"], ["Not read"], ["Worker", "number"]]);
    const tables = [this.accounts, this.drops, this.lines, this.lanes, this.streams, this.services, this.forwards, this.flows];
    $("peer-tables").append(...tables.map((table) => table.node));
  }

  // Another peer is asked for; nothing is known of it yet.
  begin(name) {
    set($("peer-name"), name);
    $("peer-body").hidden = true;
    $("peer-missing").hidden = true;
    $("peer-name").focus();
  }

  missing(name) {
    set($("peer-missing"), `No peer is named ${name} now.`);
    $("peer-missing").hidden = false;
    $("peer-body").hidden = true;
  }

  show(peer, meanings) {
    $("peer-missing").hidden = true;
    $("peer-body").hidden = false;
    this.failure(peer.last_error, peer.state === "connected");
    terms($("peer-facts"), facts(peer));
    this.accounts.fill([account("uplink", peer.uplink), account("downlink", peer.downlink)]);
    this.drops.fill(drops(peer.dropped).map(([reason, way, number]) => [reason, way, number, meanings[reason] || ""]));
    this.lines.node.hidden = peer.lines.length === 0;
    this.lines.fill(peer.lines.map(line));
    this.lanes.fill(peer.lanes.map(lane));
    this.streams.fill(peer.stream_connections.map((one) => [
      String(one.number), one.state, String(one.worker), one.dialled_by === "here" ? "us" : "the peer", count(one.forwards),
    ]));
    this.services.fill(services(peer.tcp.services));
    this.forwards.fill(peer.forwards.map(forward));
    this.flows.fill(peer.recent_flows.map(flow));
  }

  failure(error, connected) {
    $("peer-failure").hidden = !error;
    if (!error) return;
    const [, reason, causes] = $("peer-failure").children;
    set(reason, `${age(error.age_seconds)} ago: ${error.reason}${connected ? " (it is connected again)" : ""}`);
    const texts = error.likely_causes;
    if (causes.children.length !== texts.length) causes.replaceChildren(...texts.map(() => make("li")));
    texts.forEach((text, index) => set(causes.children[index], text));
  }
}
