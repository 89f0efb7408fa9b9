//! TLS 1.3 by rustls.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    sync::Arc,
};

use rustls::{ClientConnection, ConnectionCommon, ServerConnection, SideData, pki_types::ServerName};

use super::{MOST_STEPS, Pair};
use crate::certificate;

pub(super) struct Tls {
    client: ClientConnection,
    server: ServerConnection,
    records: Vec<u8>,
    plaintext: Vec<u8>,
}

impl Tls {
    pub(super) fn pair() -> anyhow::Result<Box<dyn Pair>> {
        let (der, server) = certificate::generate()?;
        let name = ServerName::try_from(certificate::NAME)?;
        let client = ClientConnection::new(Arc::new(certificate::client(der)?), name)?;
        let server = ServerConnection::new(Arc::new(server))?;
        let mut pair = Self { client, server, records: Vec::new(), plaintext: vec![0; 64 << 10] };
        pair.client.set_buffer_limit(None);
        for _ in 0..MOST_STEPS {
            carry(&mut pair.client, &mut pair.server, &mut pair.records, &mut pair.plaintext)?;
            carry(&mut pair.server, &mut pair.client, &mut pair.records, &mut pair.plaintext)?;
            if !pair.client.is_handshaking() && !pair.server.is_handshaking() {
                return Ok(Box::new(pair));
            }
        }
        anyhow::bail!("the handshake does not end")
    }
}

impl Pair for Tls {
    fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()> {
        for _ in 0..count {
            self.client.writer().write_all(message)?;
        }
        let received = carry(&mut self.client, &mut self.server, &mut self.records, &mut self.plaintext)?;
        anyhow::ensure!(received == message.len() * count, "{received} bytes arrived");
        Ok(())
    }
}

/// Moves all records from one end to the other, and returns how many bytes of plaintext that has read.
fn carry<A: SideData, B: SideData>(
    from: &mut ConnectionCommon<A>,
    to: &mut ConnectionCommon<B>,
    records: &mut Vec<u8>,
    plaintext: &mut [u8],
) -> anyhow::Result<usize> {
    records.clear();
    while from.wants_write() {
        from.write_tls(records)?;
    }
    let (mut unread, mut received) = (records.as_slice(), 0);
    while !unread.is_empty() {
        to.read_tls(&mut unread)?;
        to.process_new_packets()?;
        loop {
            match to.reader().read(plaintext) {
                Ok(0) => break,
                Ok(len) => received += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(received)
}
