//! The harness of the tests that need real processes, real tools or the kernel.
//!
//! | question | file |
//! |---|---|
//! | two agents with services between them | [`pair`] |
//! | one agent: its key, its file, its life, its log | [`agent`] |
//! | what it says at /metrics, /healthz, /readyz | [`http`], `scrape.py` |
//! | the status page, in a browser | [`browser`] |
//! | on which host it runs, what it cannot reach | [`place`], [`firewall`] |
//! | iperf3 and what became of each datagram | [`iperf`] |
//! | upstreams that answer | [`upstream`], [`tcp_echo`] |
//! | gateways, hosts behind them, a tunnel between them | [`sites`], `links.rs` |
//! | whether a packet arrives, and which size fits | [`probe`] |
//! | a stream of bytes, compared at its end | [`transfer`] |
//! | a path that delays, loses, damages and reorders, and a NAT that forgets | [`impairment`] |
//! | where each of those datagrams went | [`ledger`] |
//! | two exits with the same network behind them, and a flow through the better one | [`exits`] |
//! | exits behind one address, with a balancer before them | [`fleet`] |
//! | two hosts with a bottleneck between them: rate, queue, delay, loss, ECN | [`path`] |
//! | the same with real netem, fq_codel and cake | [`qdiscs`] |
//! | numbered datagrams there and back while things happen | [`stream`] |
//! | two sites with an impairment between them, and what can happen to them | [`stage`] |
//! | names whose addresses change | [`names`] |
//! | what crosses the cable | [`tap`], [`capture`] |
//! | what an agent sent, and sending it again | [`relay`] |
//! | a decoy that remembers, and answers so that it can be checked | [`decoy`] |
//! | clients that send numbered datagrams | [`client`] |
//! | free ports, waiting, child processes, random bytes | [`ports`], [`clock`], [`process`], [`random`] |
//! | what a test needs of the machine | [`needs`], [`venv`] |
//!
//! A harness function panics when it cannot do what the test asked for, with the line of the test where that helps.
//! Every process and every network namespace belongs to a guard that ends it.

pub mod agent;
pub mod browser;
pub mod capture;
pub mod client;
pub mod clock;
pub mod decoy;
pub mod exits;
pub mod firewall;
pub mod fleet;
pub mod http;
pub mod impairment;
pub mod iperf;
pub mod ledger;
mod links;
pub mod names;
pub mod needs;
pub mod pair;
pub mod path;
pub mod place;
pub mod ports;
pub mod probe;
pub mod process;
pub mod qdiscs;
pub mod random;
pub mod relay;
pub mod sites;
pub mod stage;
pub mod stream;
pub mod tap;
pub mod tcp_echo;
pub mod transfer;
pub mod upstream;
pub mod venv;
