//! The TUN device as the control plane sees it: what the workers find out about the paths becomes MTUs and kernel routes.

use std::{
    collections::BTreeMap,
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    config::{self, Config, InnerMtu, MaxPacket},
    control::tls::DEFAULT_MAX_PACKET,
    io::{
        netlink::{LinkChange, Netlink},
        tun::{TunDevice, TunPort},
    },
    peer::PeerId,
};

/// Bytes of a lane's packet around an inner packet: short header with 8-byte connection ID and 4-byte packet number (13),
/// DATAGRAM frame type (1), context (1), AEAD tag (16).
pub const INNER_OVERHEAD: u16 = 31;

/// The least MTU that the device is given: below it the kernel takes the device's IPv6 addresses away (RFC 8200 §5).
pub const LEAST_MTU: u16 = 1_280;

/// Packets that wait in the device; the 500 that are usual are short of a burst at our rates.
const QUEUE_PACKETS: u32 = 1_000;

/// Where workers write what fits into a packet to each peer; the tunnel's thread reads it.
#[derive(Debug, Default)]
pub struct Board {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The largest inner packet of each connected peer, in bytes.
    mtus: BTreeMap<PeerId, u16>,
    changed: bool,
}

impl Board {
    /// The largest inner packet to `peer` is `mtu` bytes from now on; `None` once it is not connected.
    pub fn set_mtu(&self, peer: PeerId, mtu: Option<u16>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match mtu {
            Some(mtu) => state.mtus.insert(peer, mtu),
            None => state.mtus.remove(&peer),
        };
        state.changed |= before != mtu;
    }
}

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// The device cannot be made.
    #[error("cannot make the TUN device {name}: {error}")]
    Device {
        /// `tun.name`.
        name: Arc<str>,
        /// The kernel's reason.
        error: io::Error,
    },
}

/// The device, as long as this exists or a worker has a queue of it.
pub struct Tunnel {
    board: Arc<Board>,
}

impl Tunnel {
    /// Makes the device of the configuration and brings it up; also gives each worker its share.
    ///
    /// # Errors
    /// See [`TunnelError`]. What was done until then is undone.
    pub fn open(
        config: &Config,
        tun: &config::Tun,
        workers: u8,
    ) -> Result<(Self, Vec<TunPort>), TunnelError> {
        let failed = |error| TunnelError::Device { name: Arc::clone(&tun.name), error };
        let mut netlink = Netlink::open().map_err(failed)?;
        let device = TunDevice::open(&tun.name, workers, tun.offload).map_err(failed)?;
        set_quiet(&tun.name);
        let change =
            LinkChange { up: true, mtu: Some(start_mtu(config, tun)), queue_packets: Some(QUEUE_PACKETS) };
        netlink.set_link(device.index, change).map_err(failed)?;
        for address in &tun.addresses {
            netlink.add_address(device.index, *address).map_err(failed)?;
        }
        Ok((Self { board: Arc::default() }, device.ports))
    }

    /// Where workers say what fits.
    #[must_use]
    pub fn board(&self) -> Arc<Board> {
        Arc::clone(&self.board)
    }
}

/// The device's MTU while nothing is known of any path.
fn start_mtu(config: &Config, tun: &config::Tun) -> u16 {
    let packet = match config.transport.max_packet {
        MaxPacket::Auto => DEFAULT_MAX_PACKET,
        MaxPacket::Bytes(bytes) => bytes,
    };
    let mtu = match tun.mtu {
        InnerMtu::Auto => packet.saturating_sub(INNER_OVERHEAD),
        InnerMtu::Bytes(bytes) => bytes,
    };
    mtu.max(LEAST_MTU)
}

/// Has the kernel say nothing of its own into the device: no redirects, which name the next hop of a link that has none,
/// and no link-local address, which asks for routers. What the device does not let us set is worth a warning only.
fn set_quiet(name: &str) {
    for (folder, key, value) in [("ipv4", "send_redirects", "0"), ("ipv6", "addr_gen_mode", "1")] {
        let path = PathBuf::from(format!("/proc/sys/net/{folder}/conf/{name}/{key}"));
        match fs::write(&path, value) {
            Ok(()) => {}
            // No IPv6 in this kernel.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(
                path = %path.display(),
                %error,
                "a setting of the TUN device stays as it is (remedy: write {value} to it)"
            ),
        }
    }
}
