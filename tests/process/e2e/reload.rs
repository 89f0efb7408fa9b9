//! A reload of running agents: what changed is in effect, and a flow beside it loses nothing.

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, binary, culvert, keygen},
    client::{Client, numbers_of},
    clock::{self, PATIENCE},
    pair::{Pair, Plan},
    place::Place,
    ports,
    process::{run, text},
    upstream::Echo,
};
use socket2::SockRef;

/// How long a rate must have been without loss, before and after.
const SPAN: Duration = Duration::from_secs(10);

/// Datagrams per second that are tried, the highest first.
const RATES: [u32; 4] = [20_000, 8_000, 2_000, 500];

/// Datagrams on their way at once, at most: every buffer on the way holds as many, however long a machine stands still.
const WINDOW: usize = 300;

/// Sends at `rate` for `span`, or as fast as [`WINDOW`] lets it, while `meanwhile` happens, and waits for what is under way; how many
/// of how many came back.
fn send(client: &mut Client, rate: u32, span: Duration, meanwhile: impl FnOnce() + Send) -> (usize, usize) {
    const TICK: Duration = Duration::from_millis(2);
    let first = client.newest().map_or(0, |newest| newest + 1);
    client.socket().set_nonblocking(true).unwrap();
    let (mut sent, mut returned) = (0, BTreeSet::new());
    thread::scope(|scope| {
        scope.spawn(meanwhile);
        let start = clock::now();
        while clock::now() < start + span {
            let due = (clock::now() - start).as_millis() as usize * rate as usize / 1000;
            while sent < due.min(returned.len() + WINDOW) {
                client.send();
                sent += 1;
            }
            receive(client, first, &mut returned);
            thread::sleep(TICK);
        }
    });
    let end = clock::now() + PATIENCE;
    while returned.len() < sent && clock::now() < end {
        thread::sleep(TICK);
        receive(client, first, &mut returned);
    }
    (returned.len(), sent)
}

/// Takes the numbers from `first` on that have come back.
fn receive(client: &Client, first: u32, returned: &mut BTreeSet<u32>) {
    let mut buffer = [0; 100];
    while let Ok(length) = client.socket().recv(&mut buffer) {
        let numbers = numbers_of(&buffer[..length]);
        let (_, number) = numbers.unwrap_or_else(|| panic!("it got {:02x?}", &buffer[..length]));
        if number >= first {
            returned.insert(number);
        }
    }
}

/// Adds `sections` to an agent's configuration, and the second value in place of the first.
fn change(agent: &Agent, from: &str, to: &str, sections: &str) {
    let text = fs::read_to_string(agent.config()).unwrap();
    assert!(text.contains(from), "{from} in {text}");
    fs::write(agent.config(), text.replace(from, to) + sections).unwrap();
}

fn reload(agent: &Agent) -> String {
    let output = culvert(&["reload", "--config", agent.config().to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_flow_at_a_rate_that_was_lossless_stays_so_through_reloads() {
    let (echo, other) = (Echo::new(), Echo::new());
    let listen: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let listen_other: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let plan = Plan::default().service("echo", echo.address, "").forward("echo", listen);
    let Pair { mut entry, exit, .. } = plan.workers([2, 2]).start();
    let mut client = Client::new(1, listen);
    client.reach();
    SockRef::from(client.socket()).set_recv_buffer_size(4 << 20).unwrap();
    let lossless = RATES.into_iter().find(|rate| {
        let (returned, sent) = send(&mut client, *rate, SPAN, || ());
        returned == sent
    });
    let rate = lossless.expect("at 500 datagrams per second nothing is lost for 10 s");
    println!("nothing is lost for 10 s at {rate} datagrams per second");
    let (returned, sent) = send(&mut client, rate, SPAN + Duration::from_secs(1), || {
        thread::sleep(Duration::from_millis(500));
        // A service more, which the entry may use, another upstream, other limits, another peer.
        change(
            &exit,
            "services = [\"echo\"]",
            "services = [\"echo\", \"other\"]\nkeepalive = \"19s\"",
            &format!(
                "[limits]\nflows = 50000\n[[service]]\nname = \"other\"\nupstream = \"{}\"\n\
                 [[peer]]\nname = \"late\"\npublic_key = \"{}\"\n",
                other.address,
                keygen(&exit.folder().join("late.key")),
            ),
        );
        reload(&exit);
        change(
            &entry,
            "log.level = \"debug\"",
            "log.level = \"info\"",
            &format!(
                "[[udp]]\nlisten = \"{listen_other}\"\npeer = \"exit\"\nservice = \"other\"\n\
                 [[tcp]]\nlisten = \"{listen_other}\"\npeer = \"exit\"\nservice = \"other\"\n"
            ),
        );
        entry.process().signal("HUP");
    });
    assert_eq!(returned, sent, "at {rate} datagrams per second");
    let numbers: Vec<u32> = echo.arrivals().iter().map(|arrival| arrival.number).collect();
    assert!(numbers.is_sorted_by(|one, next| one < next), "in order");
    let sources: Vec<SocketAddr> = echo.arrivals().iter().map(|arrival| arrival.source).collect();
    assert!(
        sources.windows(2).all(|pair| pair[0] == pair[1]),
        "one flow, through the same socket at the exit"
    );
    // What was reloaded works.
    Client::new(2, listen_other).reach();
}

#[test]
fn without_a_socket_the_unit_reloads_by_signal() {
    let mut agent = Agent::new("agent", &Place::Host);
    let listen = format!("[transport]\nlisten = [\"127.0.0.1:{}\"]\n", ports::free());
    agent.configure(&listen);
    change(&agent, "control.socket = \"control\"", "control.socket = \"\"", "");
    agent.start();
    let pid = agent.process().pid().to_string();
    let reload = |agent: &Agent| {
        let mut command = Command::new(binary());
        command.args(["reload", "--main-pid", &pid, "--config"]).arg(agent.config());
        run(&mut command, Duration::from_secs(20))
    };
    change(&agent, "log.level = \"debug\"", "log.level = \"info\"", "[limits]\nflows = 77\n");
    let output = reload(&agent);
    assert!(output.status.success() && text(&output.stderr).contains("SIGHUP"), "{output:?}");
    agent.wait_for_count("culvert_limit", &[("limit", "flows")], 77);
    // With a file that cannot even be read the daemon is told, too: it says so and goes on.
    change(&agent, "flows = 77", "flows = \n x = [", "");
    assert_eq!(reload(&agent).status.code(), Some(2));
    agent.wait_for_count("culvert_reloads_total", &[("outcome", "refused")], 1);
    agent.wait_for_log(&["ERROR", "nothing was changed"]);
    agent.wait_for_count("culvert_limit", &[("limit", "flows")], 77);
}
