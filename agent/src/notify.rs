//! The service manager's socket (`sd_notify(3)`), which takes datagrams of lines.

use std::{
    ffi::OsStr,
    fmt, io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

/// How long a manager that does not read may hold up the thread that tells it something.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The socket by which the service manager is told, with the address at which the manager listens.
#[derive(Debug)]
pub struct NotifySocket {
    /// Not connected: a manager that was restarted is found again under its address.
    socket: UnixDatagram,
    manager: SocketAddr,
}

impl NotifySocket {
    /// The socket at `address`, in the form of `$NOTIFY_SOCKET`: a path, or a name in the abstract namespace after `@`.
    ///
    /// # Errors
    /// `Unsupported` for an address of another kind, such as `vsock:`; the kernel's. Whether a program listens there is not
    /// asked.
    pub fn new(address: &OsStr) -> io::Result<Self> {
        let manager = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(address)?,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self { socket, manager })
    }

    /// Tells it `lines`, in one datagram.
    ///
    /// # Errors
    /// The kernel's: `NotFound` and `ConnectionRefused` where nobody listens, `WouldBlock` where nobody has read for a
    /// second.
    pub fn send(&self, lines: impl fmt::Display) -> io::Result<()> {
        self.socket.send_to_addr(lines.to_string().as_bytes(), &self.manager).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_abstract_names_are_reached() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let at_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("culvert-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let abstractly = UnixDatagram::bind_addr(&address).unwrap();
        for (manager, address) in [(at_path, path.as_os_str()), (abstractly, OsStr::new(&format!("@{name}")))]
        {
            manager.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            NotifySocket::new(address).unwrap().send("READY=1\nSTATUS=x").unwrap();
            let mut datagram = [0; 64];
            let length = manager.recv(&mut datagram).unwrap();
            assert_eq!(&datagram[..length], b"READY=1\nSTATUS=x", "{address:?}");
        }
    }

    #[test]
    fn nobody_there_is_an_error_and_other_addresses_are_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = NotifySocket::new(path.as_os_str()).unwrap();
        assert_eq!(socket.send("READY=1").unwrap_err().kind(), io::ErrorKind::NotFound);
        for address in ["", "vsock:2:1234", "notify"] {
            let error = NotifySocket::new(OsStr::new(address)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{address:?}");
        }
    }

    #[test]
    fn a_manager_that_was_restarted_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = NotifySocket::new(path.as_os_str()).unwrap();
        for _ in 0..2 {
            let manager = UnixDatagram::bind(&path).unwrap();
            socket.send("WATCHDOG=1").unwrap();
            let mut datagram = [0; 64];
            assert_eq!(manager.recv(&mut datagram).unwrap(), 10);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
