//! A quinn-proto `Session` that watches the handshake and the 1-RTT keys of another one and leaves all else to it.

use std::{any::Any, sync::Arc};

use quinn_proto::{
    ConnectionId, Side, TransportError,
    crypto::{
        ExportKeyingMaterialError, HeaderKey, KeyPair, Keys, PacketKey, Session,
        rustls::HandshakeData as RustlsHandshakeData,
    },
    transport_parameters::TransportParameters,
};

use crate::{
    numbers::PacketNumbers,
    suite::{HandshakeData, HelloWatch},
};

/// A session whose handshake is watched for the ServerHello, and whose keys tell the numbers of packets.
pub(crate) struct Watched {
    pub(crate) inner: Box<dyn Session>,
    pub(crate) side: Side,
    pub(crate) watch: HelloWatch,
    /// Handshake bytes that the inner session gave already, and their keys: they are written next, once.
    pub(crate) written: Option<(Vec<u8>, Option<Keys>)>,
    /// True once the inner session has given its handshake keys: the next are those of 1-RTT packets.
    pub(crate) has_handshake_keys: bool,
    pub(crate) numbers: Arc<PacketNumbers>,
}

impl Watched {
    pub(crate) fn new(inner: Box<dyn Session>, side: Side) -> Self {
        let (watch, numbers) = (HelloWatch::default(), Arc::default());
        Self { inner, side, watch, written: None, has_handshake_keys: false, numbers }
    }

    fn watch_keys(&mut self, keys: Keys) -> Keys {
        if std::mem::replace(&mut self.has_handshake_keys, true) { self.numbers.watch(keys) } else { keys }
    }
}

impl Session for Watched {
    fn read_handshake(&mut self, buf: &[u8]) -> Result<bool, TransportError> {
        if self.side.is_client() {
            self.watch.observe(buf);
        }
        self.inner.read_handshake(buf)
    }

    fn write_handshake(&mut self, buf: &mut Vec<u8>) -> Option<Keys> {
        if let Some((written, keys)) = self.written.take() {
            buf.extend_from_slice(&written);
            return keys.map(|keys| self.watch_keys(keys));
        }
        let start = buf.len();
        let keys = self.inner.write_handshake(buf);
        if self.side.is_server() {
            self.watch.observe(&buf[start..]);
        }
        keys.map(|keys| self.watch_keys(keys))
    }

    fn handshake_data(&self) -> Option<Box<dyn Any>> {
        let inner = self.inner.handshake_data()?.downcast::<RustlsHandshakeData>().ok()?;
        let numbers = Arc::clone(&self.numbers);
        Some(Box::new(HandshakeData { choice: self.watch.choice(), protocol: inner.protocol, numbers }))
    }

    fn initial_keys(&self, dst_cid: &ConnectionId, side: Side) -> Keys {
        self.inner.initial_keys(dst_cid, side)
    }

    fn peer_identity(&self) -> Option<Box<dyn Any>> {
        self.inner.peer_identity()
    }

    fn early_crypto(&self) -> Option<(Box<dyn HeaderKey>, Box<dyn PacketKey>)> {
        self.inner.early_crypto()
    }

    fn early_data_accepted(&self) -> Option<bool> {
        self.inner.early_data_accepted()
    }

    fn is_handshaking(&self) -> bool {
        self.inner.is_handshaking()
    }

    fn transport_parameters(&self) -> Result<Option<TransportParameters>, TransportError> {
        self.inner.transport_parameters()
    }

    fn next_1rtt_keys(&mut self) -> Option<KeyPair<Box<dyn PacketKey>>> {
        self.inner.next_1rtt_keys().map(|keys| self.numbers.watch_packets(keys))
    }

    fn is_valid_retry(&self, orig_dst_cid: &ConnectionId, header: &[u8], payload: &[u8]) -> bool {
        self.inner.is_valid_retry(orig_dst_cid, header, payload)
    }

    fn export_keying_material(
        &self,
        output: &mut [u8],
        label: &[u8],
        context: &[u8],
    ) -> Result<(), ExportKeyingMaterialError> {
        self.inner.export_keying_material(output, label, context)
    }
}
