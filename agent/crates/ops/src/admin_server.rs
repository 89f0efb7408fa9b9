//! The admin server, as a reload has it. It is served by the binary.

use std::{
    io,
    net::{SocketAddr, TcpListener},
};

use config::Admin;
use engine::worker::remedy;

/// The server of `/metrics`, of health and of the status page: `[metrics]`.
pub trait AdminServer: Send + Sync {
    /// The socket that `config` names, if it names one: the open one if its address is the same, else a new one.
    ///
    /// # Errors
    /// It cannot be opened.
    fn open(&self, config: &Admin) -> Result<Option<TcpListener>, AdminListenFailed>;

    /// Serves `config` on this socket from now on, and nothing if there is none. Without a change, all stays as it is.
    fn follow(&self, config: &Admin, socket: Option<TcpListener>);
}

/// The socket of the admin server cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum AdminListenFailed {
    /// The kernel refuses it.
    #[error("cannot listen on {address} (metrics.listen): {error}{}", remedy(.error))]
    Kernel { address: SocketAddr, error: io::Error },
    /// Two addresses that overlap cannot be listened at together.
    #[error(
        "cannot listen on {address} (metrics.listen) while {old} is served (remedy: choose another port; or take metrics.listen out, \
         reload, put it back and reload again)"
    )]
    Own { address: SocketAddr, old: SocketAddr },
}
