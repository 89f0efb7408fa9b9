//! `culvert fleet`: on the host that has the address of a fleet, tells the kernel which exits are alive.
//!
//! | question | file |
//! |---|---|
//! | which exits get packets, and how nft is told | `maps.rs` |
//! | who asks the exits, and how often | this one |

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use base::clock::{Clock as _, SystemClock};
use clap::Args;

use self::maps::{Answer, Exit, State};
use super::Failure;
use crate::out;

mod maps;

/// The port at which an exit answers `/readyz`, unless the operator says otherwise.
const ADMIN_PORT: u16 = 9464;

/// Watch the exits of a fleet and tell nftables which are alive
///
/// Runs on the host that has the fleet's address and its ruleset (culvert-fleet.nft). Asks every exit for /readyz and rewrites the
/// maps of the ruleset in one transaction when an answer changes: exits that are alive get the packets of their peers, exits that
/// are ready get new peers. If no exit answers at all, the maps stay as they are.
#[derive(Debug, Args)]
pub(super) struct Fleet {
    /// An exit: its transport.server_id and its addresses, one of each family at most, and where it answers /readyz if
    /// that is not port 9464 of the first address
    #[arg(long = "exit", value_name = "ID=ADDRESS[,ADDRESS][,readyz=ADDRESS:PORT]", required = true, value_parser = exit)]
    exits: Vec<Exit>,
    /// The table of the ruleset
    #[arg(long, default_value = "culvert_fleet", value_parser = table)]
    table: String,
    /// Time between two questions to an exit, and the time that it has to answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 150, value_parser = clap::value_parser!(u64).range(20..=10_000))]
    interval: u64,
    /// Ask once, print the commands for nft, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Reads an exit as it is written on the command line.
fn exit(text: &str) -> Result<Exit, String> {
    let (id, rest) = text.split_once('=').ok_or("write ID=ADDRESS, as in 1=192.0.2.11")?;
    let id = id.parse().map_err(|_| format!("{id:?} is no server_id (remedy: 0 to 255)"))?;
    let (mut v4, mut v6, mut first, mut admin) = (None, None, None, None);
    for part in rest.split(',') {
        if let Some(readyz) = part.strip_prefix("readyz=") {
            let found = readyz.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
            admin = Some(found.ok_or_else(|| format!("{readyz:?} is no ADDRESS:PORT"))?);
            continue;
        }
        let address: IpAddr = part.parse().map_err(|_| format!("{part:?} is no IP address"))?;
        let taken = match address {
            IpAddr::V4(address) => v4.replace(address).is_some(),
            IpAddr::V6(address) => v6.replace(address).is_some(),
        };
        if taken {
            return Err(format!("{address} is a second address of its family (remedy: one of each)"));
        }
        first.get_or_insert(address);
    }
    let first = first.ok_or("an exit has an address, as in 1=192.0.2.11")?;
    let admin = admin.unwrap_or_else(|| SocketAddr::new(first, ADMIN_PORT));
    Ok(Exit { id, v4, v6, admin })
}

/// Reads the name of a table: a word of nft's, so that it is nothing else there.
fn table(text: &str) -> Result<String, String> {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if !text.is_empty() && text.bytes().all(word) && !text.as_bytes()[0].is_ascii_digit() {
        return Ok(text.to_owned());
    }
    Err("write letters, digits and _".to_owned())
}

impl Fleet {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let mut exits: Vec<(Exit, State)> =
            self.exits.iter().map(|exit| (exit.clone(), State::default())).collect();
        exits.sort_by_key(|(exit, _)| exit.id);
        if let Some(pair) = exits.windows(2).find(|pair| pair[0].0.id == pair[1].0.id) {
            let id = pair[0].0.id;
            return Err(Failure::Input(format!(
                "two exits have the server_id {id} (remedy: a transport.server_id of its own for each)"
            )));
        }
        let patience = Duration::from_millis(self.interval);
        if self.dry_run {
            for (exit, state) in &mut exits {
                *state = state.after(ask(exit.admin, patience));
            }
            return Ok(out::say(&maps::commands(&self.table, &exits).trim_end())?);
        }
        Ok(self.watch(exits, patience)?)
    }

    /// Asks the exits, each on a thread of its own, and follows their answers.
    fn watch(&self, mut exits: Vec<(Exit, State)>, patience: Duration) -> anyhow::Result<()> {
        let (sender, answers) = mpsc::sync_channel(exits.len());
        for (index, (exit, _)) in exits.iter().enumerate() {
            let (admin, sender) = (exit.admin, sender.clone());
            let ask = move || loop {
                let begun = SystemClock.now();
                if sender.send((index, ask(admin, patience))).is_err() {
                    return;
                }
                // One that does not answer is asked as often as others.
                thread::sleep(patience.saturating_sub(SystemClock.now().saturating_duration_since(begun)));
            };
            thread::Builder::new().name(format!("exit-{}", exit.id)).spawn(ask).context("no thread")?;
        }
        let mut heard = vec![false; exits.len()];
        // Whether the kernel has what is known now, and whether the operator knows that it could not be told.
        let (mut told, mut complained) = (false, false);
        loop {
            let (index, answer) = answers.recv().map_err(|_| anyhow!("nobody asks any more"))?;
            let (exit, state) = &mut exits[index];
            let (before, after) = (*state, state.after(answer));
            *state = after;
            if !heard[index] || (before.alive, before.takes) != (after.alive, after.takes) {
                out::complain(&format_args!(
                    "culvert fleet: exit {} ({}) {}",
                    exit.id,
                    exit.admin,
                    after.label()
                ));
                told = false;
            }
            heard[index] = true;
            let all_dead = exits.iter().all(|(_, state)| !state.alive);
            if told || all_dead || !heard.iter().all(|heard| *heard) {
                continue;
            }
            match apply(&maps::commands(&self.table, &exits)) {
                Ok(()) => (told, complained) = (true, false),
                Err(error) if complained => drop(error),
                Err(error) => {
                    out::complain(&format_args!("culvert fleet: {error:#}; trying again"));
                    complained = true;
                }
            }
        }
    }
}

/// Asks an agent whether it is ready, with `patience` for the connection and the answer together.
fn ask(admin: SocketAddr, patience: Duration) -> Answer {
    let request = format!("GET /readyz HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n");
    let end = SystemClock.now() + patience;
    let left = || match end.saturating_duration_since(SystemClock.now()) {
        Duration::ZERO => Err(io::Error::from(io::ErrorKind::TimedOut)),
        left => Ok(Some(left)),
    };
    let talk = || -> io::Result<[u8; 12]> {
        let mut stream = TcpStream::connect_timeout(&admin, patience)?;
        stream.set_write_timeout(left()?)?;
        stream.write_all(request.as_bytes())?;
        // HTTP/1.1 200
        let (mut status, mut filled) = ([0; 12], 0);
        while filled < status.len() {
            stream.set_read_timeout(left()?)?;
            match stream.read(&mut status[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => filled += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(status)
    };
    match talk() {
        Ok(status) if status.ends_with(b" 200") => Answer::Ready,
        Ok(status) if status.starts_with(b"HTTP/1.") => Answer::NotReady,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Answer::Refused,
        Ok(_) | Err(_) => Answer::Silent,
    }
}

/// Has nft carry out `commands`, all or none.
fn apply(commands: &str) -> anyhow::Result<()> {
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start nft (remedy: apt-get install nftables)")?;
    let written = nft.stdin.take().map(|mut stdin| stdin.write_all(commands.as_bytes()));
    let output = nft.wait_with_output().context("nft")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or("it says nothing").to_owned();
        bail!("nft refuses ({first}) (remedy: load culvert-fleet.nft; CAP_NET_ADMIN)");
    }
    written.transpose().context("nft")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv6Addr, TcpListener};

    use super::*;

    #[test]
    fn an_exit_has_a_number_and_an_address_of_each_family_at_most() {
        let first = exit("7=192.0.2.11,2001:db8::11").unwrap();
        assert_eq!(
            (first.id, first.v4, first.v6),
            (7, "192.0.2.11".parse().ok(), "2001:db8::11".parse().ok())
        );
        assert_eq!(first.admin, "192.0.2.11:9464".parse().unwrap());
        let second = exit("0=2001:db8::11,readyz=127.0.0.1:80").unwrap();
        assert_eq!((second.v4, second.admin), (None, "127.0.0.1:80".parse().unwrap()));
        let third = exit("255=::1").unwrap();
        assert_eq!(third.admin, SocketAddr::from((Ipv6Addr::LOCALHOST, 9464)));
        for (wrong, why) in [
            ("192.0.2.11", "ID=ADDRESS"),
            ("256=192.0.2.11", "0 to 255"),
            ("1=gw.example.net", "no IP address"),
            ("1=192.0.2.11,192.0.2.12", "one of each"),
            ("1=readyz=192.0.2.11:80", "has an address"),
            ("1=192.0.2.11,readyz=192.0.2.11", "ADDRESS:PORT"),
        ] {
            let error = exit(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_table_is_a_word() {
        assert_eq!(table("a_1"), Ok("a_1".to_owned()));
        for wrong in ["", "1a", "a b", "a;flush ruleset", "a\"b"] {
            assert!(table(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_answer_of_an_exit_has_its_meaning() {
        let patience = Duration::from_secs(30);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let admin = listener.local_addr().unwrap();
        for (said, expected) in [
            ("HTTP/1.1 200 OK\r\n\r\nready\n", Answer::Ready),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\ndraining\n", Answer::NotReady),
            ("SSH-2.0-OpenSSH_9.2\r\n", Answer::Silent),
            ("", Answer::Silent),
        ] {
            let answer = thread::scope(|scope| {
                let asked = scope.spawn(|| ask(admin, patience));
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    request.push(byte[0]);
                }
                stream.write_all(said.as_bytes()).unwrap();
                // All of the request is read: what was not would reset the connection, and with it what was said.
                drop(stream);
                asked.join().unwrap()
            });
            assert_eq!(answer, expected, "{said:?}");
        }
        drop(listener);
        assert_eq!(ask(admin, patience), Answer::Refused);
    }

    #[test]
    fn an_answer_that_comes_byte_by_byte_is_not_waited_for() {
        const PAUSE: Duration = Duration::from_millis(40);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let admin = listener.local_addr().unwrap();
        thread::scope(|scope| {
            // Each byte is in time, all of them are not.
            let asked = scope.spawn(|| ask(admin, PAUSE * 5));
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            for byte in b"HTTP/1.1 200 OK\r\n" {
                thread::sleep(PAUSE);
                // It may have hung up.
                stream.write_all(&[*byte]).ok();
            }
            assert_eq!(asked.join().unwrap(), Answer::Silent);
        });
    }
}
