//! Headers of the PROXY protocol: taken off the datagrams of proxies, and put before those that go to a service.

use std::{fmt, net::SocketAddr, ops::Range};

use base::ids::{IngressId, LocalId, PeerId};
use config::Limits;
use ipnet::IpNet;
use net::{ReceiveBatch, batch::Meta};
use wire::proxy::{self, ClientAddresses, Header, ProxyError, Transport};

use crate::{
    datapath::{
        downlink::{Downlink, LocalTarget, Outside},
        pieces::MOST_JOINED,
        uplink::Uplink,
    },
    peer::PeerTable,
    relay::{Client, DropReason, FlowId, Origin},
};

/// A port of `[[udp]]` that expects a header before each datagram.
#[derive(Clone, Copy, Debug)]
pub struct ProxyPort<'a> {
    pub socket: LocalId,
    pub ingress: IngressId,
    /// Where the proxies are whose headers are believed.
    pub accept: &'a [IpNet],
}

/// Why a datagram that came to such a port was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unproxied {
    /// No proxy is where it comes from.
    Source,
    /// It ends before its header does.
    Cut,
    Header(ProxyError),
}

impl fmt::Display for Unproxied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source => f.write_str("it comes from none of the prefixes in udp.accept_proxy"),
            Self::Cut => f.write_str("its PROXY header is cut off"),
            Self::Header(error) => error.fmt(f),
        }
    }
}

impl Uplink<'_> {
    /// Takes datagrams of proxies, which came to a local port. Flows that they open are added to `new_flows`. Returns why the first of
    /// those without a good header was dropped, and where it came from.
    pub fn proxied(
        &mut self,
        batch: &ReceiveBatch,
        port: ProxyPort<'_>,
        limits: &Limits,
        new_flows: &mut Vec<FlowId>,
    ) -> Option<(SocketAddr, Unproxied)> {
        let mut first = None;
        for slot in 0..batch.len() {
            let (meta, data) = (batch.meta(slot), batch.buffer(slot));
            let ip = meta.source.ip().to_canonical();
            let is_trusted = port.accept.iter().any(|prefix| prefix.contains(&ip));
            for range in meta.segments() {
                let datagram = &data[range];
                let header = if is_trusted { header_of(datagram) } else { Err(Unproxied::Source) };
                match header {
                    Ok(header) => self.proxied_datagram(port, meta, header, datagram, limits, new_flows),
                    Err(why) => {
                        self.relay.uplink.receive(1, datagram.len() as u64);
                        self.relay.uplink.drop(DropReason::NoProxyHeader, 1);
                        first.get_or_insert((meta.source, why));
                    }
                }
            }
        }
        first
    }

    /// Takes a datagram behind its header. One that names nobody is the proxy's own.
    fn proxied_datagram(
        &mut self,
        ProxyPort { socket, ingress, .. }: ProxyPort<'_>,
        meta: &Meta,
        Header { client: told, length }: Header,
        datagram: &[u8],
        limits: &Limits,
        new_flows: &mut Vec<FlowId>,
    ) {
        let client = Client { socket, address: meta.source, local: meta.local };
        let flows = &self.relay.flows;
        let known = match told {
            Some(told) => flows.told.of_client(client, told),
            None => flows.of_client(&client),
        };
        let payload = &datagram[length..];
        let flow = match known {
            Some(flow) => Ok(flow),
            None => self.open(client, told, ingress, limits).inspect(|flow| new_flows.push(*flow)),
        };
        match flow {
            Ok(flow) => {
                let meta = Meta { len: payload.len(), segment: payload.len().max(1), ..*meta };
                self.carry(flow, payload, &meta);
            }
            Err(reason) => {
                self.relay.uplink.receive(1, payload.len() as u64);
                self.relay.uplink.drop(reason, 1);
            }
        }
    }

    /// Whose flow it is, if its service wants to know.
    pub(super) fn client_of(&self, id: FlowId, origin: &Origin) -> Option<ClientAddresses> {
        let Origin::Ingress { client, ingress } = *origin else { return None };
        let services = &self.relay.services;
        services.of(ingress).filter(|service| service.client)?;
        self.relay.flows.told.client(id).or_else(|| {
            let listen = services.listen(ingress)?;
            let asked = SocketAddr::new(client.local.unwrap_or_else(|| listen.ip()), listen.port());
            ClientAddresses::new(client.address, asked)
        })
    }
}

/// The header at the beginning of a datagram, which holds all of it.
fn header_of(datagram: &[u8]) -> Result<Header, Unproxied> {
    proxy::read(datagram, Transport::Datagram).map_err(Unproxied::Header)?.ok_or(Unproxied::Cut)
}

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Lists a payload of a flow to a service for delivery, behind the flow's header: a copy of both, beside the received buffers.
    pub(super) fn list_proxied(
        &mut self,
        batch: &mut ReceiveBatch,
        peer: PeerId,
        id: FlowId,
        target: &LocalTarget,
        slot: usize,
        payload: Range<usize>,
    ) {
        if batch.joined_bytes() + proxy::IPV6_HEADER + payload.len() > MOST_JOINED {
            self.locals.flush(batch);
            batch.forget_joined();
        }
        let Some(state) = self.peers.data_mut(peer) else { return };
        let header = state.relay.flows.told.header(id).unwrap_or_default();
        let (buffer, joined) = batch.buffer_and_joined(slot);
        let start = joined.len();
        joined.extend_from_slice(header);
        joined.extend_from_slice(&buffer[payload]);
        let whole = start..joined.len();
        self.list(peer, target, ReceiveBatch::JOINED, whole);
    }
}
