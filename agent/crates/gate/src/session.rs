//! A quinn-proto `Session` that leaves all but a few steps to another one.

use std::any::Any;

use quinn_proto::{
    ConnectionId, Side, TransportError,
    crypto::{ExportKeyingMaterialError, HeaderKey, KeyPair, Keys, PacketKey, Session},
    transport_parameters::TransportParameters,
};

/// The steps of a `Session` that a [`Hooked`] one may change.
pub(crate) trait Hook: Send + Sync + 'static {
    fn read_handshake(&mut self, inner: &mut dyn Session, buf: &[u8]) -> Result<bool, TransportError> {
        inner.read_handshake(buf)
    }

    fn write_handshake(&mut self, inner: &mut dyn Session, buf: &mut Vec<u8>) -> Option<Keys>;

    fn handshake_data(&self, inner: &dyn Session) -> Option<Box<dyn Any>> {
        inner.handshake_data()
    }
}

/// A session that asks its hook first; all else is the inner session's.
pub(crate) struct Hooked<H> {
    pub(crate) inner: Box<dyn Session>,
    pub(crate) hook: H,
}

impl<H: Hook> Session for Hooked<H> {
    fn read_handshake(&mut self, buf: &[u8]) -> Result<bool, TransportError> {
        self.hook.read_handshake(&mut *self.inner, buf)
    }

    fn write_handshake(&mut self, buf: &mut Vec<u8>) -> Option<Keys> {
        self.hook.write_handshake(&mut *self.inner, buf)
    }

    fn handshake_data(&self) -> Option<Box<dyn Any>> {
        self.hook.handshake_data(&*self.inner)
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
        self.inner.next_1rtt_keys()
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
