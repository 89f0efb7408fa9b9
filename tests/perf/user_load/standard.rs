//! A peer in standard mode, which has no lanes: datagrams of local clients in DATAGRAM frames of the connection itself
//! (`docs/wire-format.md` §5), in flows to a service of the agent.

use std::{
    collections::HashMap,
    io::{self, BufRead},
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use data_encoding::BASE64URL_NOPAD;
use h3::varint;
use quinn::{ClientConfig, Connection, RecvStream};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    http, print,
    protobuf::{Envelope, Hello},
    quic::{self, Congestion},
    tls::Identity,
    tunnel::{self, Books},
    udp::Udp,
};

/// Contexts of payloads: of a known flow; one that opens a flow, without a datagram; the answer.
const KNOWN: u64 = 2;
const OPEN: u64 = 4;
const CONFIRMED: u64 = 5;

/// An opening that was lost is repeated.
const REPEAT_AFTER: Duration = Duration::from_millis(250);
const OPENINGS: usize = 20;

/// Ends with the connection.
pub(crate) async fn udp(
    to: SocketAddr,
    listen: SocketAddr,
    service: &str,
    flows: u64,
) -> anyhow::Result<Value> {
    let identity = Identity::new();
    print(&json!({ "key": BASE64URL_NOPAD.encode(&identity.public) }));
    let line = io::stdin().lock().lines().next().context("no key of the agent")??;
    let key = BASE64URL_NOPAD.decode(line.trim().as_bytes())?;
    let agent: [u8; 32] = key.try_into().ok().context("a key has 32 bytes")?;
    let mut config = ClientConfig::new(Arc::new(identity.client(agent)));
    config.transport_config(quic::transport(Congestion::Unlimited));
    let endpoint = http::endpoint(to)?;
    // The name of an IP address is not sent.
    let connection = endpoint.connect_with(config, to, "127.0.0.1")?.await?;
    let (mut sender, mut receiver) = connection.open_bi().await?;
    let hello = Hello { protocol_version: 1, instance: vec![9; 16], max_lanes: 0, services: Vec::new() };
    let (hello, mut message) = (hello.encode(), Vec::new());
    varint::put(&mut message, hello.len() as u64);
    message.extend(hello);
    sender.write_all(&message).await?;
    let number = service_number(&mut receiver, service).await?;
    let ingress = Rc::new(Udp::bind(listen).with_context(|| format!("listening at {listen}"))?);
    // The dialler's flows are even or odd by the order of the keys.
    let parity = u64::from(identity.public > agent);
    let flows: Vec<_> = (0..flows).map(|flow| flow * 2 + parity).collect();
    for flow in &flows {
        open(&connection, *flow, number).await?;
    }
    let heads: Vec<_> = flows.iter().map(|flow| numbers(&[KNOWN, *flow])).collect();
    let places: HashMap<u64, usize> = flows.into_iter().zip(0..).collect();
    let parted = move |frame: &Bytes| {
        let mut rest = &frame[..];
        let (KNOWN, flow) = (varint::take(&mut rest)?, varint::take(&mut rest)?) else { return None };
        Some((*places.get(&flow)?, frame.slice_ref(rest)))
    };
    let books = Arc::new(Books::default());
    tunnel::answer_questions(&books, &connection);
    tunnel::carry(ingress, connection, &heads, parted, books).await
}

fn numbers(list: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in list {
        varint::put(&mut bytes, *number);
    }
    bytes
}

/// Takes the agent's hello, and finds the service in it.
async fn service_number(receiver: &mut RecvStream, name: &str) -> anyhow::Result<u64> {
    let mut held = Vec::new();
    loop {
        let mut rest = &held[..];
        if let Some(length) = varint::take(&mut rest)
            && let Some(message) = rest.get(..usize::try_from(length)?)
        {
            let Some(Envelope::Hello(hello)) = Envelope::decode(message) else { bail!("no hello") };
            let service = hello.services.into_iter().find(|service| service.name == name);
            return Ok(service.context("no such service")?.number);
        }
        let chunk = receiver.read_chunk(usize::MAX, true).await?.context("it ended before its hello")?;
        held.extend_from_slice(&chunk.bytes);
    }
}

async fn open(connection: &Connection, flow: u64, service: u64) -> anyhow::Result<()> {
    for _ in 0..OPENINGS {
        connection.send_datagram(numbers(&[OPEN, flow, service]).into())?;
        while let Ok(answer) = timeout(REPEAT_AFTER, connection.read_datagram()).await {
            let answer = answer?;
            let mut rest = &answer[..];
            if let Some((context, of)) = varint::take(&mut rest).zip(varint::take(&mut rest))
                && of == flow
            {
                ensure!(context == CONFIRMED, "the flow is answered with context {context}");
                return Ok(());
            }
        }
    }
    bail!("no answer to a flow")
}
