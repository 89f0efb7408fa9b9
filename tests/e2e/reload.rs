//! A reload of running agents: what changed is in effect, and a flow beside it loses nothing.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, binary, culvert, keygen},
    client::Client,
    clock,
    pair::{Pair, Plan},
    place::Place,
    ports,
    process::{run, text},
    upstream::Echo,
};

/// How long a rate must have been without loss, before and after.
const SPAN: Duration = Duration::from_secs(10);

/// Datagrams per second that are tried, the highest first.
const RATES: [u32; 4] = [20_000, 8_000, 2_000, 500];

/// Sends at `rate` for `span`, lets `meanwhile` happen, and waits for what is under way; how many of how many arrived.
fn send(
    client: &mut Client,
    rate: u32,
    span: Duration,
    echo: &Echo,
    meanwhile: impl FnOnce() + Send,
) -> (usize, usize) {
    const TICK: Duration = Duration::from_millis(2);
    let before = echo.arrivals().len();
    let ticks = u32::try_from(span.as_millis() / TICK.as_millis()).unwrap();
    thread::scope(|scope| {
        scope.spawn(meanwhile);
        let start = clock::now();
        for tick in 0..ticks {
            for _ in 0..rate * 2 / 1000 {
                client.send();
            }
            thread::sleep((TICK * (tick + 1)).saturating_sub(clock::now() - start));
        }
    });
    let sent = (ticks * (rate * 2 / 1000)) as usize;
    // What has not come two seconds after the last one is lost.
    let end = clock::now() + Duration::from_secs(2);
    while echo.arrivals().len() < before + sent && clock::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    (echo.arrivals().len() - before, sent)
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
    let lossless = RATES.into_iter().find(|rate| {
        let (arrived, sent) = send(&mut client, *rate, SPAN, &echo, || ());
        arrived == sent
    });
    let rate = lossless.expect("at 500 datagrams per second nothing is lost for 10 s");
    println!("nothing is lost for 10 s at {rate} datagrams per second");
    let (arrived, sent) = send(&mut client, rate, SPAN + Duration::from_secs(1), &echo, || {
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
    assert_eq!(arrived, sent, "at {rate} datagrams per second");
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
