//! KCP's state machine, in Rust (of kcp-tokio) and in C (of kcp-sys). No cryptography.

use ::kcp_tokio::kcp_core::{KcpCoreConfig, KcpEngine, NodeDelayConfig};
use bytes::Bytes;

use super::{MOST_STEPS, Pair};
use crate::transport::{MAX_UDP_PAYLOAD, kcp_tokio::WINDOW};

/// Of the conversation.
const NUMBER: u32 = 1;

pub(super) struct Core {
    near: KcpEngine,
    far: KcpEngine,
}

impl Core {
    pub(super) fn new() -> Self {
        let config = KcpCoreConfig {
            mtu: MAX_UDP_PAYLOAD as u32,
            snd_wnd: WINDOW,
            rcv_wnd: WINDOW,
            nodelay: NodeDelayConfig::turbo(),
            stream_mode: true,
            ..KcpCoreConfig::default()
        };
        Self { near: KcpEngine::new(NUMBER, config.clone()), far: KcpEngine::new(NUMBER, config) }
    }
}

impl Pair for Core {
    fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()> {
        for _ in 0..count {
            self.near.send(Bytes::copy_from_slice(message))?;
        }
        let mut missing = message.len() * count;
        for _ in 0..MOST_STEPS {
            carry(&mut self.near, &mut self.far)?;
            while let Some(bytes) = self.far.recv()? {
                missing -= bytes.len();
            }
            carry(&mut self.far, &mut self.near)?;
            if missing == 0 {
                return Ok(());
            }
        }
        anyhow::bail!("{missing} bytes did not arrive")
    }
}

fn carry(from: &mut KcpEngine, to: &mut KcpEngine) -> anyhow::Result<()> {
    from.flush()?;
    for packet in from.drain_output() {
        to.input(packet)?;
    }
    Ok(())
}

#[cfg(feature = "kcp-sys")]
pub(super) use c::C;

#[cfg(feature = "kcp-sys")]
mod c {
    use std::{cell::RefCell, rc::Rc};

    use bytes::{Bytes, BytesMut};
    use kcp_sys::ffi_safe::{Kcp, KcpConfig};

    use super::{MAX_UDP_PAYLOAD, MOST_STEPS, NUMBER, Pair, WINDOW};

    pub(in crate::memory) struct C {
        near: End,
        far: End,
        buffer: BytesMut,
    }

    struct End {
        kcp: Box<Kcp>,
        output: Rc<RefCell<Vec<BytesMut>>>,
    }

    impl C {
        pub(in crate::memory) fn pair() -> anyhow::Result<Box<dyn Pair>> {
            Ok(Box::new(Self { near: End::new()?, far: End::new()?, buffer: BytesMut::new() }))
        }
    }

    impl End {
        fn new() -> anyhow::Result<Self> {
            let mut config = KcpConfig::new_turbo(NUMBER);
            config.mtu = Some(MAX_UDP_PAYLOAD as i32);
            (config.sndwnd, config.rcvwnd) = (Some(WINDOW as i32), Some(WINDOW as i32));
            let mut kcp = Kcp::new(config)?;
            let output = Rc::new(RefCell::new(Vec::new()));
            let packets = Rc::clone(&output);
            kcp.set_output_cb(Box::new(move |_, packet| {
                packets.borrow_mut().push(packet);
                Ok(())
            }));
            kcp.update();
            Ok(Self { kcp, output })
        }

        fn carry_to(&mut self, other: &mut Self) -> anyhow::Result<()> {
            self.kcp.update();
            self.kcp.flush();
            for packet in self.output.borrow_mut().drain(..) {
                other.kcp.handle_input(&packet)?;
            }
            Ok(())
        }
    }

    impl Pair for C {
        fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()> {
            for _ in 0..count {
                self.near.kcp.send(Bytes::copy_from_slice(message))?;
            }
            let mut missing = message.len() * count;
            for _ in 0..MOST_STEPS {
                self.near.carry_to(&mut self.far)?;
                while let Ok(size @ 1..) = usize::try_from(self.far.kcp.peeksize()) {
                    self.buffer.clear();
                    self.buffer.reserve(size);
                    self.far.kcp.recv(&mut self.buffer)?;
                    missing -= self.buffer.len();
                }
                self.far.carry_to(&mut self.near)?;
                if missing == 0 {
                    return Ok(());
                }
            }
            anyhow::bail!("{missing} bytes did not arrive")
        }
    }
}
