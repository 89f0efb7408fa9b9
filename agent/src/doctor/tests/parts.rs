//! Parts of the host, to be changed by the cases.

use gate::identity::PublicKey;

use super::*;

/// The daemon runs, and `dropped` of the packets `received` from the exit were dropped because of their source.
pub(super) fn spoof(facts: &mut Facts, received: u64, dropped: u64) {
    run(facts);
    let exit = exit(facts);
    exit.downlink.account.received = received;
    if dropped > 0 {
        let counts = [("spoofed".into(), dropped), ("expired".into(), received - dropped)];
        exit.dropped.insert("downlink".into(), counts.into_iter().collect());
    }
}

/// Our own inner address.
pub(super) const INNER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));

/// The link-local address of the spoke.
pub(super) fn link_local() -> IpAddr {
    let key: PublicKey = OTHER_KEY.parse().unwrap();
    key.link_local().into()
}

pub(super) fn exit(facts: &mut Facts) -> &mut PeerStatus {
    &mut status(facts).peers[0]
}

/// The daemon runs, and the round trip to the exit has grown by `wait` seconds beside `up` and `down` bytes a second.
pub(super) fn bloat(facts: &mut Facts, wait: f64, up: f64, down: f64) {
    run(facts);
    let exit = exit(facts);
    exit.rtt_seconds = exit.rtt_min_seconds.map(|least| least + wait);
    exit.rates = Some(PeerRates {
        uplink_bytes_per_second: up,
        downlink_bytes_per_second: down,
        ..PeerRates::default()
    });
}

/// The daemon runs, and `lost` of the packets `sent` to the exit are lost.
pub(super) fn lose(facts: &mut Facts, sent: u64, lost: u64) {
    run(facts);
    exit(facts).lane_packets = LanePackets { sent, lost, ..LanePackets::default() };
}

pub(super) fn full(facts: &Facts) -> Buffers {
    facts.limits.buffers.unwrap()
}

pub(super) fn exact(facts: &Facts) -> ClockState {
    facts.clock.state.unwrap()
}

pub(super) fn table(facts: &mut Facts) -> &mut Conntrack {
    facts.network.conntrack.as_mut().unwrap()
}

/// The daemon runs on a kernel that cuts packets inside of tunnels, and takes them joined over these of IPv4 and IPv6.
pub(super) fn joins(facts: &mut Facts, [ipv4, ipv6]: [bool; 2]) {
    let tun = status(facts).tun.get_or_insert_default();
    (tun.tunnels_cut, tun.tunnels_joined_ipv4, tun.tunnels_joined_ipv6) = (true, ipv4, ipv6);
}

pub(super) fn features(facts: &mut Facts) -> &mut TunFeatures {
    facts.tun.driver.as_mut().unwrap().as_mut().unwrap()
}

pub(super) fn unit(facts: &mut Facts) -> &mut Unit {
    facts.service.unit.as_mut().unwrap()
}

pub(super) fn deny_key(facts: &mut Facts) {
    facts.files.key_denied = true;
    facts.file.problems = vec![problem("identity.key_file")];
}

pub(super) fn deny_tun(facts: &mut Facts) {
    facts.tun.denied = true;
    facts.tun.driver = Some(Err("permission denied".to_owned()));
}

pub(super) fn no_answer() -> Answer {
    Answer::Failed { reason: "no answer".to_owned(), causes: "is it running?".to_owned() }
}

/// Two lines over which the exit answers, as the edit `LINES` has them.
pub(super) fn two_lines(facts: &mut Facts) {
    let address = addresses(facts)[0].clone();
    let line = |name: &str, way: &str| Line {
        name: name.to_owned(),
        way: way.to_owned(),
        end: LineEnd::There { interface: "eth0".to_owned(), up: true, addresses: vec![OURS] },
        peers: vec![LinePeer { place: 0, peer: "exit".to_owned(), addresses: vec![address.clone()] }],
    };
    facts.lines = vec![line("dsl", "interface eth0"), line("lte", "source 192.0.2.77")];
}

/// The daemon runs, and these are the states of the two lines.
pub(super) fn lines_of_daemon(facts: &mut Facts, states: [LineState; 2]) {
    two_lines(facts);
    run(facts);
    let lines = ["dsl", "lte"].into_iter().zip(states).zip(0..).map(|((name, state), number)| LineStatus {
        name: name.into(),
        number,
        state,
        ..LineStatus::default()
    });
    status(facts).peers[0].lines = lines.collect();
}

pub(super) fn way_of_line(facts: &mut Facts, line: usize) -> &mut Address {
    &mut facts.lines[line].peers[0].addresses[0]
}
