//! `culvert status`

use std::{
    env,
    io::{IsTerminal as _, stdout},
};

use clap::{Args, value_parser};
use ops::control_socket::{
    protocol::{Answer, Request, VERSION},
    status::{self as shown, Kind, Page, RoutesScope, Scope, Show},
};
use serde_json::json;

use super::{
    Failure,
    reach::{Reach, unexpected},
};
use crate::out::{self, Reader};

/// Show what the running daemon is doing: its peers, their lanes and traffic, what was dropped, who was refused and why
#[derive(Clone, Debug, Args)]
pub(super) struct Status {
    /// Show this peer in full, with its lanes, latest flows and TCP forwards: those first that have been stalled for longest
    #[arg(value_name = "PEER")]
    peer: Option<String>,
    #[command(flatten)]
    reach: Reach,
    /// Show one lane in full: keys, packet numbers, acknowledgements, path
    #[arg(long, value_name = "PEER/INDEX", value_parser = named_lane, conflicts_with = "peer")]
    lane: Option<NamedLane>,
    /// Show which peer carries which inner prefix, or which one an address leads to
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "all", value_parser = asked_routes, conflicts_with_all = ["peer", "lane", "lanes"])]
    routes: Option<RoutesScope>,
    /// Show who talks to whom inside of the tunnel: the pairs of addresses with the most bytes a second, as far as [records] counts them
    #[arg(long, conflicts_with_all = ["peer", "lane", "lanes", "routes"])]
    talkers: bool,
    /// List the lanes of all peers, also if there are many
    #[arg(long)]
    lanes: bool,
    /// Show it again every so many seconds, until Ctrl-C; on a terminal the busiest peers come first
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = value_parser!(u16).range(1..=3_600))]
    pub(super) watch: Option<u16>,
    /// One JSON object, as docs/status.md describes it, of one peer with all of its TCP forwards; with --watch one per line
    #[arg(long)]
    json: bool,
}

/// A lane as an operator names it: "exit/0".
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedLane {
    peer: String,
    index: u8,
}

/// Why a text names no lane.
const NOT_A_LANE: &str = "write the peer's name, a slash and the lane's index, as in exit/0";

fn named_lane(text: &str) -> Result<NamedLane, &'static str> {
    let (peer, index) = text.rsplit_once('/').filter(|(peer, _)| !peer.is_empty()).ok_or(NOT_A_LANE)?;
    Ok(NamedLane { peer: peer.to_owned(), index: index.parse().map_err(|_| NOT_A_LANE)? })
}

/// All prefixes, or that of an address.
fn asked_routes(text: &str) -> Result<RoutesScope, String> {
    if text == "all" {
        return Ok(RoutesScope::default());
    }
    let address = text.parse().map_err(|_| format!("{text:?} is no address: write one as in 10.1.2.3"))?;
    Ok(RoutesScope { address: Some(address) })
}

impl Status {
    /// Whether it is drawn on a screen when it is watched.
    pub(super) fn is_drawn(&self) -> bool {
        !self.json && stdout().is_terminal()
    }

    /// Asks the daemon for the status, of one peer or lane where the options name it.
    pub(super) fn ask(&self) -> Result<shown::Status, Failure> {
        let scope = match &self.lane {
            Some(lane) => Scope { peer: Some(lane.peer.clone()), lane: Some(lane.index), ..Scope::default() },
            None => {
                let all_forwards = self.json && self.peer.is_some();
                let (peer, routes, talkers) = (self.peer.clone(), self.routes, self.talkers);
                Scope { peer, routes, all_forwards, talkers, ..Scope::default() }
            }
        };
        let meant_routes = self.peer.as_deref() == Some("routes");
        let answer = self.reach.ask_running(&Request::Status(scope)).map_err(|failure| {
            if let Failure::Input(error) = &failure
                && meant_routes
            {
                return Failure::Input(format!("{error}; the routes are shown by culvert status --routes"));
            }
            failure
        })?;
        let Answer::Status { status } = answer else { return Err(unexpected()) };
        Ok(*status)
    }

    /// Lays out the page of the lane, of the peer or of the whole agent, as the options ask.
    pub(super) fn page(&self, status: &shown::Status) -> Page {
        match (&self.lane, &self.peer) {
            (Some(_), _) => status.lane_page(),
            (None, Some(_)) => status.peer_page(),
            (None, None) if self.routes.is_some() => status.routes_page(),
            (None, None) if self.talkers => status.talkers_page(),
            (None, None) => status.to_page(Show { lanes: self.lanes }),
        }
    }

    /// Prints it, from top to bottom.
    pub(super) fn print(&self, status: &shown::Status) -> Result<Reader, Failure> {
        if self.json {
            let answer = json!({ "version": VERSION, "status": status });
            return Ok(out::print(format_args!("{answer}\n"))?);
        }
        let page = self.page(status);
        let text = if stdout().is_terminal() { styled(&page, "\n") } else { page.to_text() };
        Ok(out::print(format_args!("{}\n", text.trim_end()))?)
    }
}

/// The lines of a page, heads of tables in bold, for a terminal.
pub(super) fn styled(page: &Page, end_of_line: &str) -> String {
    // https://no-color.org
    let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let mut text = String::new();
    for (kind, line) in page.lines() {
        let style = match kind {
            Kind::Plain => None,
            Kind::Heading => Some("\x1b[1m"),
            Kind::Alarm => Some("\x1b[1;31m"),
        };
        match style.filter(|_| !plain) {
            Some(style) => text.extend([style, line, "\x1b[0m", end_of_line]),
            None => text.extend([line, end_of_line]),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_named_by_its_peer_and_its_index() {
        let lane = |peer: &str, index| Ok(NamedLane { peer: peer.to_owned(), index });
        assert_eq!(named_lane("exit/0"), lane("exit", 0));
        assert_eq!(named_lane("a/b/63"), lane("a/b", 63));
        for text in ["", "exit", "exit/", "/0", "exit/x", "exit/256", "exit/-1"] {
            assert_eq!(named_lane(text), Err(NOT_A_LANE), "{text}");
        }
    }
}
