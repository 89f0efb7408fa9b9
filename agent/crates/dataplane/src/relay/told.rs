//! Flows with a header of the PROXY protocol: before the datagrams of clients here, or before those that go to a service.
//!
//! ```text
//!   opened here:    a proxy's address and the client that its header names ──► flow
//!   accepted here:  flow ──► the header before each of its datagrams to the service
//! ```
//!
//! Flows without a header are not in these tables, and pay for none of them.

use std::collections::{BTreeMap, HashMap};

use base::sparse;
use wire::proxy::{self, ClientAddresses, Transport};

use crate::relay::flow::{Client, FlowId};

/// The flows of one peer at one worker that have headers.
#[derive(Debug, Default)]
pub struct ToldFlows {
    /// Keyed by addresses, which clients and proxies choose, so hashed with a secret.
    by_client: HashMap<(Client, ClientAddresses), FlowId>,
    opened: HashMap<FlowId, Told>,
    /// The flows opened here, in the order of their opening.
    oldest: BTreeMap<u64, FlowId>,
    /// The place in that order of the next flow.
    next: u64,
    /// What precedes the datagrams of a flow that the peer opened.
    headers: HashMap<FlowId, Box<[u8]>>,
}

/// What a proxy has told about a flow that was opened here.
#[derive(Clone, Copy, Debug)]
struct Told {
    client: ClientAddresses,
    /// Its place in the order of their opening.
    place: u64,
}

impl ToldFlows {
    /// The flow of the client that the proxy at `client` names.
    #[must_use]
    pub fn of_client(&self, client: Client, told: ClientAddresses) -> Option<FlowId> {
        self.by_client.get(&(client, told)).copied()
    }

    /// Whom a header has named as the client of a flow that was opened here.
    #[must_use]
    pub fn client(&self, id: FlowId) -> Option<ClientAddresses> {
        // Usually it is empty.
        if self.opened.is_empty() { None } else { self.opened.get(&id).map(|told| told.client) }
    }

    /// What precedes the datagrams of a flow on their way to its service.
    #[inline]
    #[must_use]
    pub fn header(&self, id: FlowId) -> Option<&[u8]> {
        if self.headers.is_empty() { None } else { self.headers.get(&id).map(|header| &**header) }
    }

    /// Has the datagrams of a flow preceded by a header that names its client; LOCAL, if none is known that may be told.
    pub fn announce(&mut self, id: FlowId, client: Option<ClientAddresses>) {
        let mut header = Vec::with_capacity(proxy::IPV6_HEADER);
        proxy::write(client.filter(ClientAddresses::names_a_host), Transport::Datagram, &mut header);
        self.headers.insert(id, header.into());
    }

    /// The flow that was opened first of those opened here.
    #[must_use]
    pub fn oldest(&self) -> Option<FlowId> {
        self.oldest.first_key_value().map(|(_, id)| *id)
    }

    /// Notes a flow that was opened for a client that the proxy at `client` names.
    pub(super) fn open(&mut self, id: FlowId, client: Client, told: ClientAddresses) {
        let place = self.next;
        self.next += 1;
        self.by_client.insert((client, told), id);
        self.opened.insert(id, Told { client: told, place });
        self.oldest.insert(place, id);
    }

    /// Forgets a flow that was opened here; returns whether it was one of these.
    pub(super) fn close(&mut self, id: FlowId, client: Client) -> bool {
        if self.opened.is_empty() {
            return false;
        }
        let Some(Told { client: told, place }) = self.opened.remove(&id) else { return false };
        self.by_client.remove(&(client, told));
        self.oldest.remove(&place);
        true
    }

    /// Forgets what precedes the datagrams of a flow.
    pub(super) fn silence(&mut self, id: FlowId) {
        if !self.headers.is_empty() {
            self.headers.remove(&id);
        }
    }

    /// Gives memory back if there were many more flows once.
    pub(super) fn shrink(&mut self) {
        sparse::shrink(&mut self.by_client);
        sparse::shrink(&mut self.opened);
        sparse::shrink(&mut self.headers);
    }
}
