//! `[access]` and `[control]`: who may connect, what strangers meet, and where commands are taken.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use gate::knock::MAX_CLOCK_WINDOW;
use net::ports;

use crate::{
    Access, AccessMode, Knock, Service,
    checks::{Checks, Listener},
    defaults,
    field::Field,
    file, value,
};

/// The least `access.clock_window`: a client that hears no answer repeats one proof for 15 s, so that a smaller window
/// would refuse it for no fault of its clock.
const LEAST_WINDOW: Duration = Duration::from_secs(20);

impl Checks {
    /// Reads `[access]`; the listeners of the whole file are known by now.
    pub(super) fn access(&mut self, file: file::Access, services: &[Service], listens: bool) -> Access {
        let default = defaults::ACCESS;
        let modes = [("allowlist", AccessMode::Allowlist), ("open", AccessMode::Open)];
        let knocks = [("required", Knock::Required), ("off", Knock::Off)];
        let knock_span = file.knock.as_ref().map(|knock| knock.span.clone());
        let mode = self.choice("access.mode", file.mode, &modes).unwrap_or(default.mode);
        let knock = self.choice("access.knock", file.knock, &knocks).unwrap_or(default.knock);
        if mode == AccessMode::Open && knock == Knock::Off {
            let problem = "in open mode every QUIC client that finds the port would be let in";
            let remedy = "set access.knock = \"required\", or access.mode = \"allowlist\"";
            self.report.add("access.knock", knock_span, problem, remedy);
        }
        Access {
            mode,
            services: self.granted("access.services", file.services, services),
            clock_window: self.clock_window(file.clock_window),
            knock,
            decoy: self.decoy(file.decoy, knock, listens),
        }
    }

    fn clock_window(&mut self, field: Option<Field<String>>) -> Duration {
        let at = "access.clock_window";
        let Some(text) = self.take(at, field) else { return defaults::ACCESS.clock_window };
        let Some(window) = self.read(at, &text, value::duration) else {
            return defaults::ACCESS.clock_window;
        };
        if window < LEAST_WINDOW {
            let problem = format!("{:?} is too short: a client repeats one proof for 15 s", text.value);
            self.report.add(at, Some(text.span), problem, "write \"20s\" to \"10m\"");
        } else if window > MAX_CLOCK_WINDOW {
            let problem =
                format!("{:?} is too long: it is how long a recorded proof makes us work", text.value);
            self.report.add(at, Some(text.span), problem, "write \"20s\" to \"10m\"");
        }
        window
    }

    fn decoy(&mut self, field: Option<Field<String>>, knock: Knock, listens: bool) -> Option<SocketAddr> {
        let at = "access.decoy";
        let text = self.take(at, field)?;
        let address = self.read(at, &text, value::socket_address)?;
        let span = Some(text.span);
        if address.port() == 0 || address.ip().is_unspecified() {
            let remedy = "write where the decoy listens, as in \"127.0.0.1:8443\"";
            self.report.add(at, span, "cannot be sent to", remedy);
        } else if knock == Knock::Off {
            let problem = "without a knock nobody is a stranger, and no datagram would reach the decoy";
            let remedy = "set access.knock = \"required\", or remove the decoy";
            self.report.add(at, span, problem, remedy);
        } else if !listens {
            let problem = "this agent does not listen, so no stranger's datagram reaches it";
            self.report.add(at, span, problem, "add transport.listen, or remove the decoy");
        } else if let Some(own) = self.udp_listeners.iter().find(|own| reaches(address, own)) {
            let problem = format!("is our own {} ({})", own.at, own.address);
            self.report.add(at, span, problem, "write the address of another QUIC server");
        }
        Some(address)
    }

    /// Reads `[control]`: the path of the socket, or `None` for no socket.
    pub(super) fn control(&mut self, file: file::Control, base: &Path) -> Option<PathBuf> {
        let Some(socket) = self.take("control.socket", file.socket) else {
            return Some(PathBuf::from(defaults::CONTROL_SOCKET));
        };
        if socket.value.is_empty() {
            return None;
        }
        let path = base.join(&socket.value);
        // `sun_path` of unix(7) has 108 bytes, the last one zero; the socket is made under a name with ".new" appended.
        if path.as_os_str().len() > 103 || socket.value.contains('\0') {
            let problem = format!("{} is too long for a socket", path.display());
            self.report.add("control.socket", Some(socket.span), problem, "write at most 103 bytes");
        }
        Some(path)
    }
}

/// Whether what is sent to `address` arrives at our own `listener`. Which addresses a wildcard has is the kernel's to say.
fn reaches(address: SocketAddr, listener: &Listener) -> bool {
    let own = listener.address;
    let wildcard = own.ip().is_unspecified() && own.is_ipv4() == address.is_ipv4();
    own.port() == address.port()
        && (own.ip() == address.ip() || wildcard && (address.ip().is_loopback() || ports::is_own(address)))
}
