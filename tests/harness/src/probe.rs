//! `ping` and `tracepath`: whether a packet arrives, and which size fits.

use std::{net::IpAddr, time::Duration};

use crate::{
    needs,
    place::Place,
    process::{run, text},
};

/// What `ping` said.
#[derive(Clone, Debug)]
pub struct Ping {
    /// Echo requests sent; those that the local kernel refused are not among them.
    pub sent: u32,
    /// Answers received.
    pub received: u32,
    /// All that it printed.
    pub text: String,
}

/// Pings `destination` from `place`, with more options.
///
/// # Panics
/// When `ping` prints no summary.
#[must_use]
#[track_caller]
pub fn ping(place: &Place, destination: IpAddr, options: &[&str]) -> Ping {
    let mut command = place.command(needs::tool("ping").expect("asked for"));
    // A lost packet is waited for 3 s.
    command.args(["-n", "-i", "0.05", "-W", "3"]).args(options).arg(destination.to_string());
    let output = run(&mut command, Duration::from_secs(60));
    let text = text(&output.stdout) + &text(&output.stderr);
    let summary = text.lines().find(|line| line.contains("packets transmitted"));
    let summary = summary.unwrap_or_else(|| panic!("{command:?}: {text}"));
    let number = |word: &str| {
        let part = summary.split(", ").find(|part| part.contains(word))?;
        part.split(' ').next()?.parse::<u32>().ok()
    };
    let (sent, received) = (number("transmitted").expect("a number"), number("received").expect("a number"));
    Ping { sent, received, text }
}

/// Pings five times and wants five answers, none of them twice.
///
/// # Panics
/// When one is missing.
#[track_caller]
pub fn reaches(place: &Place, destination: IpAddr, options: &[&str]) -> Ping {
    match try_to_reach(place, destination, options) {
        Ok(ping) => ping,
        Err(missing) => panic!("{missing}"),
    }
}

/// The same where one may be missing.
///
/// # Errors
/// What it printed, if one is.
///
/// # Panics
/// When one comes twice.
#[track_caller]
pub fn try_to_reach(place: &Place, destination: IpAddr, options: &[&str]) -> Result<Ping, String> {
    // With `-W` alone it would wait for the last answer no longer than the ones before took. With `-w` it goes on until five have
    // come. If they are late it has sent more by then, whose answers may come with them.
    let options = [&["-c", "5", "-w", "10"], options].concat();
    let ping = ping(place, destination, &options);
    assert!(!ping.text.contains("DUP!"), "{}", ping.text);
    let answered = (1..=5).all(|number| ping.text.contains(&format!("icmp_seq={number} ")));
    if answered && ping.received >= 5 {
        Ok(ping)
    } else {
        Err(format!("from {place:?} to {destination}: {}", ping.text))
    }
}

/// The path MTU to `destination` that `tracepath` finds, and all that it printed.
///
/// # Panics
/// When it does not reach the destination.
#[must_use]
#[track_caller]
pub fn tracepath(place: &Place, destination: IpAddr) -> (u16, String) {
    let family = if destination.is_ipv4() { "-4" } else { "-6" };
    let text = place.tell(&["tracepath", family, "-n", "-m", "8", &destination.to_string()]);
    let mut words = text.lines().find(|line| line.contains("Resume: pmtu")).unwrap_or_default().split(' ');
    let mtu = words.by_ref().find(|word| *word == "pmtu").and_then(|_| words.next()?.parse().ok());
    assert!(text.contains("reached"), "{destination} is not reached: {text}");
    (mtu.unwrap_or_else(|| panic!("no path MTU: {text}")), text)
}
