//! The status page in a real browser: what a reader sees in each state, with a thousand peers, with names made of markup, while
//! the agent goes away; and what axe-core says of it.
//!
//! ```text
//! cargo test -p culvert-tests --test page
//! CULVERT_WRITE_SCREENSHOTS=1 cargo test -p culvert-tests --test page   # writes docs/images/; reduce them to 256 colours before they are committed
//! ```

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon;

use std::{
    env, fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    sync::{Arc, atomic::Ordering},
};

use base::panics::lock;
use culvert_tests::{
    browser::{self, BROWSER, Browser},
    clock::{self, PATIENCE},
    needs, ports,
};
use daemon::{Peers, Server, connected, failed, thousand};
use engine::{
    health::Health,
    status::{AutoRateStatus, PeerStatus, RateStatus, RepairStatus},
};
use ops::control_socket::status::Refusal;

const TAB: &str = "\u{e004}";
const ENTER: &str = "\u{e007}";

/// A browser, and an agent whose page it shows.
struct Case {
    browser: Browser,
    axe: String,
    address: SocketAddr,
    peers: Arc<Peers>,
    server: Option<Server>,
}

impl Case {
    fn is(&self, peers: Vec<PeerStatus>) {
        *lock(&self.peers.list) = peers;
    }

    fn start(&mut self, token_file: &str) {
        self.start_with(token_file, Health::new(0, clock::now()));
    }

    fn start_with(&mut self, token_file: &str, health: Health) {
        self.server = None;
        self.server = Some(Server::start(self.address, &self.peers, token_file, health));
    }

    /// Opens the page, with this fragment.
    fn open(&self, fragment: &str) {
        self.browser.open(&format!("http://{}/{fragment}", self.address));
    }

    /// What the reader finds in the first column.
    fn names(&self) -> Vec<String> {
        let names = self
            .browser
            .run("return [...document.querySelectorAll('#peers tbody th')].map((cell) => cell.innerText)");
        serde_json::from_value(names).unwrap()
    }

    /// Neither the browser nor axe-core has anything to say against what is shown.
    #[track_caller]
    fn is_sound(&self, what: &str) {
        assert_eq!(self.browser.complaints(), Vec::<String>::new(), "{what}");
        self.is_accessible(what);
    }

    #[track_caller]
    fn is_accessible(&self, what: &str) {
        self.browser.run(&self.axe);
        let violations = self.browser.run_async(
            "axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] }).then(({ violations }) =>
                done(violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html.slice(0, 200)).join(' ')}`)));",
        );
        assert_eq!(violations, serde_json::json!([]), "{what}: {violations:#}");
    }

    /// Keeps a picture for the documents, if that was asked for.
    fn picture(&self, name: &str, width: u32, height: u32) {
        if env::var_os("CULVERT_WRITE_SCREENSHOTS").is_some() {
            self.browser.size(width, height);
            let png = data_encoding::BASE64.decode(self.browser.screenshot().as_bytes()).unwrap();
            fs::write(format!("{}/../docs/images/{name}.png", env!("CARGO_MANIFEST_DIR")), png).unwrap();
            self.browser.size(1280, 960);
        }
    }
}

/// One browser for all of it, because starting it takes longer than what it is to show.
#[test]
fn the_page_shows_an_agent_to_a_reader() {
    const TEST: &str = "status page";
    if !needs::met(TEST, BROWSER) {
        return;
    }
    let Some(axe) = browser::axe(TEST) else { return };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let mut case = Case { browser: Browser::new(), axe, address, peers: Arc::default(), server: None };
    case.start("");
    states_of_the_agent(&mut case);
    a_thousand_peers(&mut case);
    the_keyboard(&case);
    one_peer_in_full(&mut case);
    names_made_of_markup(&case);
    dark_and_narrow(&case);
    a_hidden_page_asks_for_nothing(&case);
    the_agent_goes_and_comes_back(&mut case);
    a_secret(&mut case);
}

fn states_of_the_agent(case: &mut Case) {
    let Case { browser, .. } = &*case;
    case.open("");
    browser.wait_for_text("#health", "there is no peer yet");
    browser.wait_for_text("#shown", "No peer");
    case.is(vec![PeerStatus { name: "laptop".into(), ..PeerStatus::default() }]);
    browser.wait_for_text("#health", "1 peer is not connected");
    browser.wait_for_text("#peers tbody", "waiting");
    case.is(vec![connected("laptop", "[2001:db8::7]:4433")]);
    browser.wait_for_text("#health", "every peer is connected");
    browser.wait_for_text("#peers tbody", "Mbit/s");
    case.is_sound("few peers");
    let health = &case.server.as_ref().unwrap().health;
    health.drain();
    browser.wait_for_text("#health", "The agent is draining");
    let long_ago = clock::now().checked_sub(2 * Health::STUCK_AFTER).unwrap();
    case.start_with("", Health::new(1, long_ago));
    case.browser.wait_for_text("#health", "Worker 0 makes no progress");
    case.start("");
}

fn a_thousand_peers(case: &mut Case) {
    case.is(thousand());
    // With ten minutes of these peers.
    case.start("");
    let Case { browser, .. } = &*case;
    case.open("");
    browser.wait_for_text("#shown", "1 to 25 of 1,000");
    let first = case.names();
    assert_eq!(first.len(), 25);
    assert_eq!(
        first[..6],
        ["depot", "harbour", "kiosk", "laptop", "spare", "site-0000"],
        "problems come first"
    );
    browser.wait_for_text("#peers tbody", "no answer");
    browser.wait_for("document.querySelector('#peers .trend path').getAttribute('d').length > 100");
    browser.wait_for("document.querySelectorAll('#graphs path.up')[0].getAttribute('d').length > 500");
    case.is_sound("a thousand peers");
    case.open("#sort=up&order=desc");
    browser.wait_for_text("#peers tbody", "Mbit/s");
    browser.wait_for("document.querySelector('#peers .trend path')");
    case.picture("page", 1130, 690);
    case.open("");
    browser.wait_for_text("#shown", "1 to 25 of 1,000");
    browser.click("#next");
    browser.wait_for_text("#shown", "26 to 50 of 1,000");
    browser.click("#peers th[data-key=up] button");
    browser.wait_for_text("#shown", "1 to 25 of 1,000");
    browser.wait_for("document.querySelector('th[data-key=up]').ariaSort === 'descending'");
    browser.wait_for("document.querySelector('#peers tbody th').innerText.startsWith('site-')");
    browser.click("#find");
    browser.keys("site-004");
    browser.wait_for_text("#shown", "1 to 10 of 10");
    // A bookmark shows the same again.
    let bookmark = browser.run("return location.hash");
    case.open(bookmark.as_str().unwrap());
    browser.wait_for_text("#shown", "1 to 10 of 10");
    assert!(case.names().iter().all(|name| name.starts_with("site-004")), "{:?}", case.names());
    case.open("");
    browser.wait_for_text("#which", "Show the failed peers");
    browser.click("#which a");
    browser.wait_for_text("#shown", "1 to 3 of 3");
    assert_eq!(case.names(), ["depot", "harbour", "kiosk"]);
}

/// From the top of the page to a peer and back, without a mouse.
fn the_keyboard(case: &Case) {
    let Case { browser, .. } = case;
    case.open("#sort=name");
    browser.wait_for_text("#shown", "of 1,000");
    let focused =
        || browser.run("return document.activeElement.innerText ?? ''").as_str().unwrap_or("").to_owned();
    browser.keys(TAB);
    assert_eq!(focused(), "Skip to the content");
    clock::until("the focus is on the first peer", PATIENCE, || {
        browser.keys(TAB);
        if focused() == "depot" { Ok(()) } else { Err(focused()) }
    });
    browser.keys(ENTER);
    browser.wait_for("document.activeElement.id === 'peer-name'");
    browser.wait_for_text("#peer-failure", "a firewall on the way drops UDP");
    browser.click("#back");
    browser.wait_for("document.activeElement.innerText === 'depot'");
    // The focus stays with its peer when the order changes.
    let flows = |flows: [usize; 3]| {
        let peers = ["a", "b", "c"].into_iter().zip(flows);
        case.is(peers
            .map(|(name, flows)| PeerStatus { flows, ..connected(name, "203.0.113.1:4433") })
            .collect());
    };
    flows([1, 2, 3]);
    case.open("#sort=flows");
    browser.wait_for("document.querySelectorAll('#peers tbody tr').length === 3");
    assert_eq!(case.names(), ["a", "b", "c"]);
    browser.run("document.querySelectorAll('#peers tbody a')[1].focus()");
    flows([3, 1, 2]);
    clock::until("the order has changed", PATIENCE, || {
        let names = case.names();
        if names == ["b", "c", "a"] { Ok(()) } else { Err(names.join(" ")) }
    });
    assert_eq!(focused(), "b");
}

fn one_peer_in_full(case: &mut Case) {
    let mut peers = thousand();
    let peer = peers.iter_mut().find(|peer| &*peer.name == "site-0007").unwrap();
    let auto = AutoRateStatus {
        phase: "steady".into(),
        capacity_bits_per_second: 50_000_000,
        ..AutoRateStatus::default()
    };
    peer.rate = Some(RateStatus { from: "measured".into(), auto: Some(auto), ..RateStatus::default() });
    peer.repair = Some(RepairStatus {
        state: "fec".into(),
        symbols: 1,
        missing: 40,
        recovered: 38,
        given_up: 2,
        ..RepairStatus::default()
    });
    case.is(peers);
    // With ten minutes of these peers.
    case.start("");
    let Case { browser, .. } = &*case;
    case.open("#peer=site-0007");
    browser.wait_for_text("#peer-facts", "culvert/0.1.0");
    browser.wait_for_text("#peer-facts", "in use: number 1 of 2");
    browser.wait_for_text("#peer-facts", "steady: carries 50.0 Mbit/s, queue 0 µs, loss 0 %");
    browser.wait_for_text("#peer-facts", "fec: 0 sent again, 1 repair symbol, – more bytes");
    browser.wait_for_text("#peer-facts", "38 of 40 missing ones, 2 given up");
    browser.wait_for_text("#peer-tables", "confirmed");
    for state in ["in use", "standby (metered)", "suspect (silent)"] {
        browser.wait_for_text("#peer-tables", state);
    }
    browser.wait_for("document.querySelector('#peer-graphs path.up').getAttribute('d').length > 500");
    case.picture("page-peer", 960, 800);
    browser.run("document.querySelectorAll('#more details').forEach((details) => { details.open = true })");
    browser.wait_for_text("#more", "47,000");
    case.is_sound("one peer");
    case.open("#peer=nobody");
    browser.wait_for_text("#peer-missing", "No peer is named nobody now.");
    case.is_sound("no such peer");
}

fn names_made_of_markup(case: &Case) {
    const MARKUP: &str =
        "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script>&lt;\u{202e}";
    let Case { browser, .. } = case;
    let mut peer = connected(MARKUP, "203.0.113.1:4433");
    peer.software = Some(MARKUP.into());
    peer.last_error = failed("x", MARKUP).last_error;
    peer.dropped = [("uplink".into(), [(MARKUP.into(), 3)].into())].into();
    case.is(vec![peer, failed("other", MARKUP)]);
    *lock(&case.peers.refusals) =
        vec![Refusal { reason: MARKUP.into(), source: MARKUP.into(), ..Refusal::default() }];
    case.open("");
    browser.wait_for_text("#peers tbody", "<img src=x");
    browser.wait_for_text("#peers tbody", "<script>");
    browser.wait_for_text("#more", "<img src=x onerror");
    browser.run("[...document.querySelectorAll('#peers tbody a')].find((link) => link.innerText.includes('<img')).click()");
    for place in ["#peer-name", "#peer-facts", "#peer-failure", "#peer-tables"] {
        browser.wait_for_text(place, "<img src=x onerror");
    }
    assert_eq!(
        browser.run("return [window.hacked ?? null, document.images.length, document.scripts.length]"),
        serde_json::json!([null, 0, 1])
    );
    // What the page's own rules forbid, the browser refuses as well.
    let refused = browser
        .run("try { document.body.innerHTML = '<b>'; return 'done' } catch (error) { return error.name }");
    assert_eq!(refused, "TypeError");
    let _of_the_attempt = browser.complaints();
    lock(&case.peers.refusals).clear();
}

fn dark_and_narrow(case: &Case) {
    let Case { browser, .. } = case;
    case.is(thousand());
    browser.colours("dark");
    case.open("");
    browser.wait_for_text("#shown", "of 1,000");
    case.is_sound("dark");
    browser.size(390, 844);
    case.open("");
    browser.wait_for_text("#shown", "of 1,000");
    assert_eq!(
        browser.run("return document.documentElement.scrollWidth"),
        390,
        "nothing stands out at the side"
    );
    case.is_sound("a phone");
    case.picture("page-phone", 390, 700);
    browser.size(390, 844);
    case.open("#peer=depot");
    browser.wait_for_text("#peer-failure", "no answer");
    assert_eq!(browser.run("return document.documentElement.scrollWidth"), 390);
    browser.colours("light");
    browser.size(1280, 960);
}

fn a_hidden_page_asks_for_nothing(case: &Case) {
    let Case { browser, peers, .. } = case;
    case.open("");
    browser.wait_for_text("#shown", "of 1,000");
    let show = |hidden: bool| {
        browser.run(&format!(
            "Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }});
             document.dispatchEvent(new Event('visibilitychange'))"
        ))
    };
    show(true);
    let asked = || browser.run("return performance.getEntriesByType('resource').length");
    let mut before = asked();
    // It notices with its next turn; from then on nothing is asked for in two seconds.
    clock::until("a hidden page is quiet", PATIENCE, || {
        std::thread::sleep(std::time::Duration::from_secs(2));
        let now = asked();
        if std::mem::replace(&mut before, now.clone()) == now { Ok(()) } else { Err(now) }
    });
    let quiet = peers.published.load(Ordering::Relaxed);
    show(false);
    clock::until("it asks again", PATIENCE, || {
        let now = peers.published.load(Ordering::Relaxed);
        if now > quiet + 1 { Ok(()) } else { Err(now) }
    });
}

fn the_agent_goes_and_comes_back(case: &mut Case) {
    case.open("");
    case.browser.wait_for_text("#shown", "of 1,000");
    case.server = None;
    case.browser.wait_for_text("[role=alert]", "The agent does not answer");
    case.browser.wait_for("document.title === 'Culvert: no answer'");
    assert_eq!(case.names().len(), 25, "what was known is still shown");
    case.is_accessible("no answer");
    case.is(vec![connected("new", "203.0.113.9:4433")]);
    case.start("");
    case.browser.wait_for_text("#peers tbody th", "new");
    case.browser.wait_for("document.querySelector('#alarm').hidden");
    case.browser.wait_for_text("#health", "every peer is connected");
}

fn a_secret(case: &mut Case) {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    fs::write(&token_file, "0123456789abcdef").unwrap();
    fs::set_permissions(&token_file, fs::Permissions::from_mode(0o600)).unwrap();
    case.start(token_file.to_str().unwrap());
    let Case { browser, .. } = &*case;
    case.open("");
    browser.wait_for("!document.querySelector('#secret').hidden && document.activeElement.id === 'token'");
    case.is_sound("asking for the secret");
    assert_eq!(browser.text("#peers"), "", "nothing is shown before");
    browser.keys("not the secret at all");
    browser.keys(ENTER);
    browser.wait_for_text("[role=alert]", "does not accept this secret");
    browser.keys("0123456789abcdef");
    browser.keys(ENTER);
    browser.wait_for_text("#peers tbody th", "new");
    browser.run("location.reload()");
    browser.wait_for_text("#peers tbody th", "new");
    assert_eq!(browser.run("return document.cookie"), "");
}
