//! What happens as long as a session is open: addresses and routes are told, and follow the configuration; the client's requests for
//! addresses are answered; the path is looked at.

use std::{net::IpAddr, sync::Arc, time::Duration};

use base::token_bucket::{Allowance, Pace};
use h3::{
    addresses::{self, Address},
    capsule::{ADDRESS_ASSIGN, ADDRESS_REQUEST, ROUTE_ADVERTISEMENT},
};
use ipnet::IpNet;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    link::Link,
    links::Links,
    ranges::Ranges,
    scope::{Scope, Wanted},
};
use crate::{Access, Grant, account::Refusal};

/// How often a session looks at the clock, at this host's addresses and at its path.
const TICK: Duration = Duration::from_secs(1);

/// How long a path is measured before what does not fit it is too large.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// Entries of a capsule of a client.
const MOST_ENTRIES: usize = 256;

/// Capsules of a client that are not datagrams.
const CAPSULES: Pace = Pace { per_second: 4, at_once: 64 };

/// An open session of CONNECT-IP. Its addresses are given back when it is dropped.
pub struct IpSession {
    access: watch::Receiver<Arc<Access>>,
    grant: Grant,
    link: Arc<Link>,
    scope: Scope,
    /// The addresses of the name that was asked for.
    named: Vec<IpNet>,
    /// The fixed addresses that it was opened with.
    fixed: Vec<IpAddr>,
    reach: Ranges,
    /// What `reach` follows from: it is made anew where one of them is another one.
    made_of: Option<(Arc<Access>, Arc<[IpNet]>)>,
    /// What the client was told to have, with the number of the request that each answers.
    told: Vec<Address>,
    capsules: Allowance,
    settles_at: Instant,
    next_look: Instant,
}

/// What a session has to say.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Capsules for the client.
    Send(Vec<u8>),
    /// It is over, for this reason unless the user may not go on.
    End(Option<Refusal>),
}

impl Grant {
    /// Opens a session of CONNECT-IP for the packets of `link`, and gives the first capsules for the client.
    ///
    /// # Errors
    ///
    /// Why not; it is not counted yet.
    pub async fn open_ip(&self, scope: Scope, link: &Arc<Link>) -> Result<(IpSession, Vec<u8>), Refusal> {
        // Nothing is held while a name is looked up.
        let access = Arc::clone(&self.access.borrow());
        if !self.links().has_pool() {
            return Err(Refusal::Protocol);
        }
        let named = match &scope.target {
            Wanted::All | Wanted::Prefix(_) => Vec::new(),
            Wanted::Name(_) if access.networks.is_empty() => return Err(Refusal::Network),
            Wanted::Name(name) => {
                let found = self.look_up(name, 0).await?;
                found.into_iter().map(|address| IpNet::from(address.to_canonical())).collect()
            }
        };
        let now = Instant::now();
        let mut session = IpSession {
            access: self.access.clone(),
            grant: self.clone(),
            link: Arc::clone(link),
            scope,
            named,
            fixed: access.addresses.clone(),
            reach: Ranges::default(),
            made_of: None,
            told: Vec::new(),
            capsules: Allowance::new(CAPSULES, now.into_std()),
            settles_at: now + SETTLED_AFTER,
            next_look: now + TICK,
        };
        session.access.mark_unchanged();
        session.reach = session.new_reach(&access).ok_or(Refusal::Unreachable)?;
        if session.reach.is_empty() {
            let wanted = session.wanted(&access);
            return Err(if wanted.is_empty() { Refusal::Network } else { Refusal::Address });
        }
        link.set_reach(&session.reach);
        if !self.links().assign(link, &session.fixed, |family| session.reach.has_family(family)) {
            return Err(Refusal::Addresses);
        }
        let mut out = Vec::new();
        session.tell_addresses(Vec::new(), &mut out);
        addresses::put_routes(&mut out, &link.routes());
        Ok((session, out))
    }

    fn links(&self) -> &Links {
        &self.together.links
    }
}

impl Drop for IpSession {
    fn drop(&mut self) {
        self.grant.links().release(&self.link);
    }
}

impl IpSession {
    /// Waits until there is something to say. `unix_seconds` reads the clock. It may be dropped and called again.
    pub async fn next(&mut self, unix_seconds: impl Fn() -> u64) -> Next {
        loop {
            tokio::select! {
                () = self.link.changed.notified() => {}
                changed = self.access.changed() => if changed.is_err() {
                    return Next::End(None);
                },
                () = sleep_until(self.next_look) => self.next_look = Instant::now() + TICK,
            }
            match self.look(unix_seconds()) {
                Ok(out) if out.is_empty() => {}
                Ok(out) => return Next::Send(out),
                Err(end) => return Next::End(end),
            }
        }
    }

    /// Looks at all that may have changed: what the client is to be told.
    ///
    /// # Errors
    ///
    /// The session is over, perhaps for a reason of its own.
    fn look(&mut self, unix_seconds: u64) -> Result<Vec<u8>, Option<Refusal>> {
        let access = Arc::clone(&self.access.borrow_and_update());
        if access.is_over(unix_seconds) || !access.takes(&self.grant.proof) || access.addresses != self.fixed
        {
            return Err(None);
        }
        let now = Instant::now();
        if now >= self.settles_at && !self.link.settle() {
            return Err(Some(Refusal::PathTooSmall));
        }
        let mut out = Vec::new();
        self.read_capsules(now, &mut out)?;
        if let Some(reach) = self.new_reach(&access).filter(|reach| *reach != self.reach) {
            if reach.is_empty() {
                return Err(None);
            }
            self.link.set_reach(&reach);
            self.reach = reach;
            addresses::put_routes(&mut out, &self.link.routes());
        }
        let assigned = self.link.assigned();
        if assigned.is_empty() {
            return Err(Some(Refusal::Addresses));
        }
        if !self.told.iter().map(|told| &told.address).eq(&assigned) {
            self.tell_addresses(Vec::new(), &mut out);
        }
        Ok(out)
    }

    fn read_capsules(&mut self, now: Instant, out: &mut Vec<u8>) -> Result<(), Option<Refusal>> {
        let capsules = self.link.take_capsules();
        let count = u32::try_from(capsules.waiting.len()).unwrap_or(u32::MAX);
        if capsules.flooded || count > 0 && !self.capsules.take(count, now.into_std()) {
            return Err(Some(Refusal::Capsules));
        }
        for (kind, value) in capsules.waiting {
            let read = match kind {
                ADDRESS_REQUEST => addresses::requested(&value, MOST_ENTRIES)
                    .map(|requests| self.tell_addresses(requests, out)),
                // What a client has behind it is not reached through it.
                ADDRESS_ASSIGN => addresses::assigned(&value, MOST_ENTRIES).map(drop),
                ROUTE_ADVERTISEMENT => addresses::routes(&value, MOST_ENTRIES).map(drop),
                _ => Ok(()),
            };
            read.map_err(|_| Some(Refusal::Capsules))?;
        }
        Ok(())
    }

    /// Tells the client all its addresses, as an answer to `requests`: one of each family is answered with an address, the others with
    /// none (RFC 9484 §4.7.2).
    fn tell_addresses(&mut self, requests: Vec<Address>, out: &mut Vec<u8>) {
        let mut requests = requests;
        let told = self.link.assigned().into_iter().map(|address| {
            let same = |family: IpAddr| family.is_ipv4() == address.is_ipv4();
            let asked = requests.iter().position(|asked| same(asked.address));
            let before = self.told.iter().find(|told| told.address == address).map_or(0, |told| told.request);
            let request = asked.map_or(before, |at| requests.remove(at).request);
            Address { request, address, prefix_len: IpNet::from(address).prefix_len() }
        });
        self.told = told.collect();
        let refused = requests.into_iter().map(|Address { request, address, .. }| {
            let none = IpNet::from(address);
            let unspecified = match address {
                IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            };
            Address { request, address: unspecified, prefix_len: none.max_prefix_len() }
        });
        let all: Vec<Address> = self.told.iter().copied().chain(refused).collect();
        addresses::put_assigned(out, &all);
    }

    /// What the user may reach of what was asked for. `None`: nothing has changed since this was asked last, or the kernel cannot be asked
    /// which addresses are its own, and all stays as it was.
    fn new_reach(&mut self, access: &Arc<Access>) -> Option<Ranges> {
        let own = self.grant.together.own.get()?;
        let is_same =
            |made: &(Arc<Access>, Arc<[IpNet]>)| Arc::ptr_eq(&made.0, access) && Arc::ptr_eq(&made.1, &own);
        if self.made_of.as_ref().is_some_and(is_same) {
            return None;
        }
        let mut reach = access.policy.packets_reach(&access.networks, &own);
        reach.keep(&self.wanted(access));
        self.made_of = Some((Arc::clone(access), own));
        Some(reach)
    }

    /// What was asked for, as far as it is in the user's networks.
    fn wanted(&self, access: &Access) -> Ranges {
        let whole = access.networks.iter().filter(|network| network.port.is_none());
        let mut wanted = Ranges::of(whole.map(|network| &network.net));
        match &self.scope.target {
            Wanted::All => {}
            Wanted::Prefix(net) => wanted.keep(&Ranges::of([net])),
            Wanted::Name(_) => wanted.keep(&Ranges::of(&self.named)),
        }
        wanted
    }
}
