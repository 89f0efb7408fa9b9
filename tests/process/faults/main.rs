//! What a panic ends, in a build with the release's panic strategy and without its optimisation: see docs/decisions/0011-panics.md.
//!
//! Only this build has the feature `fault-injection`, which lets `GET /fault/NAME` ask for a panic at a place.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    env, fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::Command,
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{self, Agent, culvert},
    client::Client,
    needs::{self, Need},
    pair::Plan,
    place::{Cable, Place},
    ports,
    process::{StopOnDrop, run, text},
    upstream::Echo,
};
use nix::sys::signal::Signal;

/// Builds everything once; a minute and a half of two processors.
const BUILD_LIMIT: Duration = Duration::from_secs(900);

/// How long a process may live on after a panic that is to end it.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Has all agents of this process be of the build with faults.
fn build() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(root).args(["build", "--quiet", "--package", "culvert", "--bin", "culvert"]);
        cargo.args(["--profile", "release-check", "--features", "fault-injection"]);
        // What cargo tells this test of its package; build scripts that look at it would run again.
        for (name, _) in env::vars_os() {
            if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_"]
                .iter()
                .any(|prefix| name.to_string_lossy().starts_with(prefix))
            {
                cargo.env_remove(name);
            }
        }
        let output = run(&mut cargo, BUILD_LIMIT);
        assert!(output.status.success(), "{}", text(&output.stderr));
        // target/<profile>/deps/<test>
        let test = env::current_exe().unwrap();
        agent::use_binary(test.ancestors().nth(3).unwrap().join("release-check/culvert"));
    });
}

fn arm(agent: &Agent, fault: &str) {
    let page = agent.get(&format!("/fault/{fault}")).unwrap();
    assert_eq!(page.status, 200, "there is no fault {fault}");
}

fn control(agent: &Agent, command: &str) -> String {
    let output = culvert(&[command, "--config", agent.config().to_str().unwrap()]);
    text(&output.stdout) + &text(&output.stderr)
}

/// The lines of its log about the panic of `fault`.
fn said(agent: &Agent, fault: &str) -> Vec<String> {
    let injected = format!("injected: {fault}");
    agent.log().lines().filter(|line| line.contains(&injected)).map(str::to_owned).collect()
}

#[test]
fn a_panic_beside_the_packet_path_ends_an_answer_and_no_tunnel() {
    if !needs::met("panics beside the packet path", needs::AGENTS) {
        return;
    }
    build();
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let talking = scope.spawn(|| {
            let mut client = Client::new(0, ingress);
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                client.converse(20);
                rounds += 1;
            }
            rounds
        });
        let agent = &mut pair.exit;
        let reload = |agent: &mut Agent| agent.process().signal("HUP");
        let fetch = |path: &'static str| {
            move |agent: &mut Agent| assert!(agent.get(path).is_err(), "{path} was answered")
        };
        let ask = |command: &'static str| {
            move |agent: &mut Agent| {
                let said = control(agent, command);
                assert!(said.contains("a panic"), "{said}");
            }
        };
        survives(agent, "Admin", "admin", 1, fetch("/healthz"));
        survives(agent, "Render", "admin", 2, fetch("/metrics"));
        survives(agent, "Control", "control", 1, ask("status"));
        survives(agent, "Reload", "control", 2, ask("reload"));
        survives(agent, "Reload", "reload", 1, reload);
        // What it did before it does again.
        assert!(control(agent, "status").contains("entry"));
        assert!(control(agent, "reload").contains("nothing"), "{}", control(agent, "reload"));
        stop.store(true, Ordering::Relaxed);
        assert!(talking.join().unwrap() > 0, "the flow had no datagram meanwhile");
    });
    let established = [("outcome", "established")];
    assert_eq!(
        pair.entry.samples().count("culvert_handshakes_total", &established),
        1,
        "the session was replaced"
    );
    assert_eq!(pair.exit.terminate().code(), Some(0));
}

#[test]
fn a_panic_in_a_lookup_is_a_lookup_that_failed() {
    if !needs::met("panic of the resolver", needs::AGENTS) {
        return;
    }
    build();
    let mut agent = Agent::new("dialler", &Place::Host);
    let other = Agent::new("other", &Place::Host);
    agent.configure(&format!(
        "[[peer]]\nname = \"other\"\npublic_key = \"{}\"\nendpoints = [\"localhost:{}\"]\nkeepalive = \"1s\"\n",
        other.key(),
        ports::free()
    ));
    agent.start();
    survives(&mut agent, "Resolver", "resolver", 1, |_| {});
    agent.wait_for_log(&["a panic, which is a defect"]);
    assert_eq!(agent.terminate().code(), Some(0));
}

/// Has `agent` panic at a place; the one panic is logged and counted, and the process goes on.
fn survives(agent: &mut Agent, fault: &str, part: &str, count: u64, reach: impl FnOnce(&mut Agent)) {
    let before = said(agent, fault).len();
    arm(agent, &fault.to_lowercase());
    reach(agent);
    agent.wait_for_count("culvert_panics_total", &[("part", part)], count);
    let said = said(agent, fault);
    assert_eq!(said.len(), before + 1, "{said:?}");
    let line = said.last().unwrap();
    assert!(line.contains(&format!("part=\"{part}\"")) && line.contains("the daemon goes on"), "{line}");
    assert_eq!(agent.process().ended(), None);
}

#[test]
fn a_panic_on_the_packet_path_or_under_its_locks_ends_the_process_at_once() {
    if !needs::met("panics on the packet path", needs::AGENTS) {
        return;
    }
    build();
    for (fault, reach) in [
        ("Worker", None),
        // The control socket's thread, with the list of peers locked.
        ("Roster", Some("status")),
        // The same thread, which has told the list of peers of a reload and not yet the workers.
        ("Follow", Some("reload")),
    ] {
        let mut agent = Agent::new("agent", &Place::Host);
        agent.configure(&format!("[transport]\nlisten = [\"{}\"]\n", ports::loopback()));
        agent.start();
        arm(&agent, &fault.to_lowercase());
        if let Some(command) = reach {
            let peer = format!(
                "\n[[peer]]\nname = \"new\"\npublic_key = \"{}\"\n",
                Agent::new("new", &Place::Host).key()
            );
            let text = fs::read_to_string(agent.config()).unwrap();
            fs::write(agent.config(), text + &peer).unwrap();
            control(&agent, command);
        }
        let status = agent.process().wait(AT_ONCE);
        assert_eq!(status.signal(), Some(Signal::SIGABRT as i32), "{fault}: {status:?}");
        let said = said(&agent, fault);
        assert!(matches!(&said[..], [line] if line.contains("the process ends")), "{said:?}");
    }
}

/// The value of a setting that the shipped unit has once.
#[track_caller]
fn of_unit(name: &str) -> &'static str {
    const UNIT: &str = include_str!("../../../deploy/systemd/culvert.service");
    let lines = UNIT.lines().filter_map(|line| line.split_once('='));
    let values: Vec<_> = lines.filter(|(key, _)| *key == name).map(|(_, value)| value.trim()).collect();
    let [value] = values[..] else { panic!("{name}: {values:?}") };
    value
}

/// Processor time of a process until now, all threads.
fn spent(pid: u32) -> Duration {
    // Linux has 100 ticks a second for programs, on every architecture that we build for.
    const TICK: Duration = Duration::from_millis(10);
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11..13].iter().map(|ticks| TICK * ticks.parse::<u32>().unwrap()).sum()
}

/// No systemd runs here: its part is what its manual says of the settings in the unit (systemd.service(5)), the rest is the process.
#[test]
fn systemd_starts_the_daemon_again_within_a_second_of_a_panic_and_for_ever() {
    const SECOND: Duration = Duration::from_secs(1);
    if !needs::met("restart after a panic", needs::AGENTS) {
        return;
    }
    build();
    // Of these, each covers the end by a signal that is not among the clean ones; SIGABRT is none of those.
    assert!(["on-failure", "on-abnormal", "on-abort", "always"].contains(&of_unit("Restart")));
    let prevented = of_unit("RestartPreventExitStatus").split_whitespace();
    assert!(prevented.clone().all(|status| status.parse::<u8>().is_ok()), "a signal: {prevented:?}");
    assert_eq!(of_unit("StartLimitIntervalSec"), "0", "it is never given up");
    let wait = Duration::from_millis(of_unit("RestartSec").strip_suffix("ms").unwrap().parse().unwrap());

    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    let mut client = Client::new(0, ingress);
    client.converse(3);
    let mut least = Duration::MAX;
    for _ in 0..3 {
        arm(&pair.exit, "worker");
        let status = pair.exit.process().wait(AT_ONCE);
        assert_eq!(
            (status.signal(), status.core_dumped()),
            (Some(Signal::SIGABRT as i32), false),
            "{status:?}"
        );
        // Ready when this returns. How long that takes on a busy machine says little; the work that it takes does, and the least
        // of three starts holds least of what others made it take.
        pair.exit.start();
        least = least.min(spent(pair.exit.process().pid()));
        client.reach();
        client.converse(20);
    }
    assert!(wait + least < SECOND, "after {wait:?} it computes for {least:?} before it is ready");
    assert_eq!(pair.exit.terminate().code(), Some(0));
}

#[test]
fn the_tunnels_thread_is_of_the_packet_path() {
    let needed = [needs::AGENTS, &[Need::Root, Need::Tun, Need::Tool("ip", "iproute2")]].concat();
    if !needs::met("panic of the tunnel's thread", &needed) {
        return;
    }
    build();
    let cable = Cable::new();
    let [place, _] = cable.places();
    let mut agent = Agent::new("agent", &place);
    agent.configure(
        "[transport]\nlisten = [\"127.0.0.1:4433\"]\n[tun]\nname = \"faulty\"\naddress = [\"10.9.0.1/24\"]\n",
    );
    agent.start();
    arm(&agent, "tunnel");
    let status = agent.process().wait(AT_ONCE);
    assert_eq!(status.signal(), Some(Signal::SIGABRT as i32), "{status:?}");
}
