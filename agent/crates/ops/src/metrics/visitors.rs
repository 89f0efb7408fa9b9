//! What became of clients of the web server on TCP (`http.listen`), and of its certificate.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use base::counts::PerKind;

use crate::metrics::Samples;

base::labelled! {
    /// The version of HTTP that a request on TCP had: the label `version`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum HttpVersion {
        /// HTTP/1.1, and 1.0.
        Http1 => "http1",
        /// HTTP/2.
        Http2 => "http2",
    }
}

base::labelled! {
    /// What became of a request on TCP: the label `outcome`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TcpOutcome {
        /// Answered by the site, whatever it said.
        Site => "site",
        /// The site accepted a WebSocket.
        WebSocket => "websocket",
        /// A CONNECT or CONNECT-UDP with good credentials; what became of it is in the user's account.
        User => "user",
        /// A peer's token: it is a carrier from now on.
        Carrier => "carrier",
        /// The site could not be asked, or did not answer: 502.
        SiteDown => "site_down",
        /// The site broke off in the middle of the answer.
        BrokenOff => "broken_off",
        /// There is no site: 404.
        NoSite => "no_site",
        /// CONNECT or TRACE: 405.
        Method => "method",
        /// A head above 16 KiB: 431.
        TooLarge => "too_large",
        /// Too many requests are at the site, or wait for it, in all or from one prefix: 503.
        Busy => "busy",
        /// Given up by the client, or its content or its reading stood still.
        Cancelled => "cancelled",
        /// Not a request that names a host: 400.
        Malformed => "malformed",
    }
}

base::labelled! {
    /// Why a connection on TCP was not accepted, or was closed: the label `reason`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TcpRefused {
        /// All places are taken, each by a connection with an open request.
        Full => "full",
        /// One /24 or /56 has its share of the places.
        Source => "source",
        /// Closed for a newer one, because it had no open request.
        Replaced => "replaced",
        /// More TLS handshakes than may begin in a second.
        Hurry => "hurry",
        /// A trusted server sent a PROXY header that cannot be read.
        Header => "header",
        /// TLS failed.
        Handshake => "handshake",
        /// No TLS handshake, or no first request after it, within 10 s.
        Slow => "slow",
        /// The client took nothing of an answer for 30 s.
        SlowReader => "slow_reader",
        /// Streams reset in a row, or other frames that only cost.
        Flood => "flood",
        /// It broke a rule of HTTP.
        Violation => "violation",
    }
}

base::labelled! {
    /// What became of a pair of certificate and key whose files had changed: the label `outcome`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum CertificateRead {
        /// It is shown from now on.
        Renewed => "renewed",
        /// It cannot be used; the old one is shown.
        Kept => "kept",
    }
}

/// Counts of the web server on TCP; monotonic, but for what is open.
#[derive(Debug, Default)]
pub struct Visitors {
    open: AtomicUsize,
    of_users: AtomicUsize,
    accepted: AtomicU64,
    requests: PerKind<HttpVersion, PerKind<TcpOutcome, AtomicU64>>,
    refused: PerKind<TcpRefused, AtomicU64>,
    certificates: PerKind<CertificateRead, AtomicU64>,
    certificate_end: AtomicU64,
    carrier_discarded: Arc<AtomicU64>,
}

impl Visitors {
    /// A connection was accepted.
    pub fn opened(&self) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// A connection that was accepted is a user's from now on.
    pub fn is_a_users(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        self.of_users.fetch_add(1, Ordering::Relaxed);
    }

    /// A connection that was accepted has ended.
    pub fn closed(&self, is_a_users: bool) {
        let open = if is_a_users { &self.of_users } else { &self.open };
        open.fetch_sub(1, Ordering::Relaxed);
    }

    /// A request has come to its end.
    pub fn request(&self, version: HttpVersion, outcome: TcpOutcome) {
        self.requests[version][outcome].fetch_add(1, Ordering::Relaxed);
    }

    /// A connection was not accepted, or was closed.
    pub fn refuse(&self, reason: TcpRefused) {
        self.refused[reason].fetch_add(1, Ordering::Relaxed);
    }

    /// A changed certificate was read.
    pub fn certificate(&self, outcome: CertificateRead) {
        self.certificates[outcome].fetch_add(1, Ordering::Relaxed);
    }

    /// The certificate that is shown ends at this time, in seconds since 1970; 0: it has no certificate.
    pub fn set_certificate_end(&self, unix_seconds: u64) {
        self.certificate_end.store(unix_seconds, Ordering::Relaxed);
    }

    /// Packets that waited in a carrier when it ended.
    #[must_use]
    pub fn carrier_discarded(&self) -> &Arc<AtomicU64> {
        &self.carrier_discarded
    }

    /// Connections of visitors that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Connections that are open, those of users included.
    pub(super) fn all(&self) -> usize {
        self.open() + self.of_users.load(Ordering::Relaxed)
    }

    /// Requests with an outcome, of all versions.
    #[must_use]
    pub fn requests(&self, outcome: TcpOutcome) -> u64 {
        self.requests.iter().map(|(_, of)| of[outcome].load(Ordering::Relaxed)).sum()
    }

    /// Connections that were refused for a reason.
    #[must_use]
    pub fn refused(&self, reason: TcpRefused) -> u64 {
        self.refused[reason].load(Ordering::Relaxed)
    }

    /// Changed certificates that were read, with this outcome.
    #[must_use]
    pub fn certificates(&self, outcome: CertificateRead) -> u64 {
        self.certificates[outcome].load(Ordering::Relaxed)
    }

    pub(super) fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    pub(super) fn show_requests(&self, out: &mut Samples) {
        for (version, outcomes) in self.requests.iter() {
            let counts = outcomes.iter();
            out.each_of(
                version.label(),
                counts.map(|(it, count)| (it.label(), count.load(Ordering::Relaxed))),
            );
        }
    }

    pub(super) fn show_refused(&self, out: &mut Samples) {
        out.each(self.refused.iter().map(|(reason, count)| (reason.label(), count.load(Ordering::Relaxed))));
    }

    pub(super) fn show_certificates(&self, out: &mut Samples) {
        let counts = self.certificates.iter();
        out.each(counts.map(|(outcome, count)| (outcome.label(), count.load(Ordering::Relaxed))));
    }

    /// When the certificate that is shown ends, in seconds since 1970; `None`: it has no certificate.
    #[must_use]
    pub fn certificate_end(&self) -> Option<u64> {
        Some(self.certificate_end.load(Ordering::Relaxed)).filter(|end| *end > 0)
    }
}
