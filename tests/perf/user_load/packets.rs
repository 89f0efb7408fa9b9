//! Packets without a connection, at a rate.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::Context;
use bytes::BytesMut;
use clap::Args;
use culvert_tests::clock;
use quinn_proto::{Endpoint, EndpointConfig};
use quinn_udp::{Transmit, UdpSocketState};
use serde_json::{Value, json};

use crate::{
    Server,
    quic::{self, Congestion},
    udp,
};

/// How many first packets there are: each is of another connection, and comes again after so many others.
const INITIALS: usize = 4096;

/// In one message: the kernel takes 64 segments and 65,507 bytes.
const MOST_SEGMENTS: usize = 48;

/// Between looks at the clock.
const PACE: Duration = Duration::from_micros(200);

#[derive(Args)]
pub(crate) struct Flood {
    /// Packets a second.
    #[arg(long)]
    rate: f64,
    #[arg(long)]
    seconds: f64,
}

/// First packets with a whole ClientHello each, which asks for `server.name`.
pub(crate) fn initials(server: &Server, flood: &Flood) -> anyhow::Result<Value> {
    let config = quic::client_config(Congestion::Stock, &[b"h3"])?;
    let mut packets = Vec::new();
    let mut size = 0;
    for _ in 0..INITIALS {
        let mut endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, true, None);
        let now = clock::now();
        let (_, mut connection) = endpoint.connect(now, config.clone(), server.to, &server.name)?;
        let mut packet = Vec::new();
        size = connection.poll_transmit(now, 1, &mut packet).context("no first packet")?.size;
        packets.extend(packet);
    }
    anyhow::ensure!(packets.len() == INITIALS * size, "first packets of unlike sizes");
    send(server.to, &packets, size, flood)
}

pub(crate) fn plain(to: SocketAddr, size: usize, flood: &Flood) -> anyhow::Result<Value> {
    let packets = BytesMut::zeroed(MOST_SEGMENTS * size);
    send(to, &packets, size, flood)
}

/// Sends packets of one size, again and again.
fn send(to: SocketAddr, packets: &[u8], size: usize, flood: &Flood) -> anyhow::Result<Value> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket: UdpSocket = udp::bound(any.parse()?)?;
    let state = UdpSocketState::new((&socket).into())?;
    socket.set_nonblocking(false)?;
    let segments = MOST_SEGMENTS.min(65_507 / size);
    let mut messages = packets.chunks(segments * size).cycle();
    let begin = clock::now();
    let (mut sent, mut unsent) = (0_u64, 0_u64);
    loop {
        let elapsed = begin.elapsed().as_secs_f64();
        if elapsed >= flood.seconds {
            return Ok(json!({ "sent": sent, "unsent": unsent, "size": size, "seconds": elapsed }));
        }
        while ((sent + unsent) as f64) < elapsed * flood.rate {
            let contents = messages.next().context("nothing to send")?;
            let segment_size = (contents.len() > size).then_some(size);
            let transmit = Transmit { destination: to, ecn: None, contents, segment_size, src_ip: None };
            let taken = state.try_send((&socket).into(), &transmit).is_ok();
            *(if taken { &mut sent } else { &mut unsent }) += (contents.len() / size) as u64;
            if begin.elapsed().as_secs_f64() >= flood.seconds {
                break;
            }
        }
        thread::sleep(PACE);
    }
}
