//! The web server (`[http]`): its ports, its certificate, the site behind it (pure but for [`ask`]).

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use config::Config;
use gate::identity::Endpoint;

use super::{Check, Finding, facts::Facts};

/// The port that browsers ask.
const HTTPS: u16 = 443;

/// The days that a certificate should still be valid for: certbot renews 30 days before the end.
const FEW_DAYS: u64 = 14;

/// How long the site may take to accept a connection, and to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Checks the web server, if there is one.
pub(super) fn checks(facts: &Facts, config: &Config) -> Vec<Finding> {
    let http = &config.http;
    let findings = [
        (!http.listen.is_empty() || !http.names.is_empty()).then(|| ports(config)),
        facts.web.certificate_days.map(|days| certificate(days, &http.names)),
        facts.web.site.as_ref().zip(http.site.as_ref()).map(|(answer, site)| self::site(answer, site)),
    ];
    findings.into_iter().flatten().collect()
}

fn ports(config: &Config) -> Finding {
    let (http, quic) = (&config.http, &config.transport.listen);
    let ports = |list: &[SocketAddr]| list.iter().map(SocketAddr::port).collect::<Vec<_>>();
    let (tcp, udp) = (ports(&http.listen), ports(quic));
    let is_public = http.listen.iter().any(|address| !address.ip().to_canonical().is_loopback());
    let named = !http.names.is_empty() && !udp.is_empty();
    let value = match udp.first().filter(|_| named) {
        Some(_) if tcp.is_empty() => "HTTP/3 alone".to_owned(),
        Some(port) => format!("Alt-Svc: h3=\":{port}\""),
        None => "without Alt-Svc".to_owned(),
    };
    if tcp.is_empty() {
        return Finding::ok(Check::WebServer, "http.names", value);
    }
    Finding::ok(Check::WebServer, "http.listen", value)
        .note_if(
            http.tls && !named,
            "visitors on TCP do not learn of HTTP/3: there is no transport.listen, or no http.names",
            "http.names = [\"gw.example.net\"]",
        )
        .warning_if(
            http.tls && named && !udp.iter().any(|port| tcp.contains(port)),
            "several clients take one port for TCP and UDP, and do not find one of the two",
            "the same port in http.listen and transport.listen",
        )
        .note_if(
            http.tls && is_public && !tcp.contains(&HTTPS),
            "browsers ask port 443, unless the address names another one",
            "http.listen = [\"0.0.0.0:443\", \"[::]:443\"], and transport.listen likewise",
        )
}

fn certificate(days: u64, names: &[String]) -> Finding {
    let of = if names.is_empty() { "http.certificate_file".to_owned() } else { names.join(", ") };
    Finding::ok(Check::WebCertificate, of, format!("{days} days left"))
        .error_if(days == 0, "it has ended, or ends today: clients refuse it", "certbot renew")
        .warning_if(
            days < FEW_DAYS,
            "it was not renewed in time",
            "certbot renew; its deploy hook is in docs/operations.md",
        )
}

fn site(answer: &Result<u16, String>, site: &Endpoint) -> Finding {
    let subject = format!("http.site http://{site}");
    match answer {
        Ok(status) => Finding::ok(Check::WebSite, subject, format!("answers, {status} to HEAD /")),
        Err(error) => Finding::ok(Check::WebSite, subject, error.clone())
            .warning("every visitor gets 502", "start the web server there, or correct http.site"),
    }
}

/// Asks the site for `/`: the status of its answer, or why it does not answer.
pub(super) fn ask(site: &Endpoint) -> Result<u16, String> {
    let asked = || -> io::Result<u16> {
        let address = (&*site.host, site.port).to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        write!(stream, "HEAD / HTTP/1.1\r\nHost: {site}\r\nConnection: close\r\n\r\n")?;
        // "HTTP/1.1 200"
        let mut line = [0; 12];
        stream.read_exact(&mut line)?;
        let digits = line.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..));
        let status = digits.and_then(|digits| str::from_utf8(digits).ok()?.parse().ok());
        status.ok_or_else(|| io::ErrorKind::InvalidData.into())
    };
    asked().map_err(|error| format!("does not answer: {error}"))
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    #[test]
    fn the_status_of_the_site_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let site: Endpoint = listener.local_addr().unwrap().to_string().parse().unwrap();
        for (answer, status) in
            [("HTTP/1.1 204 No Content\r\n\r\n", Some(204)), ("SSH-2.0-OpenSSH_9.2\r\n", None)]
        {
            let asked = thread::spawn({
                let site = site.clone();
                move || ask(&site)
            });
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            assert_eq!(asked.join().unwrap().ok(), status, "{answer}");
        }
        drop(listener);
        assert!(ask(&site).unwrap_err().contains("does not answer"));
    }
}
