//! The hybrid key exchange of the agent's TLS against that of OpenSSL, over TCP.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, LazyLock},
    time::Duration,
};

use culvert_tests::{
    process::{run, text},
    venv,
};
use gate::hybrid::Hybrid;
use rustls::{
    ClientConnection, NamedGroup, ServerConnection, Stream,
    client::danger::ServerCertVerifier,
    crypto::{CryptoProvider, ring},
    version::TLS13,
};

use crate::tls::{AnyKey, Identity};

/// As the agent's TLS has it.
static HYBRID: LazyLock<Hybrid> = LazyLock::new(|| Hybrid {
    classical: ring::kx_group::X25519,
    random: ring::default_provider().secure_random,
});

const LIMIT: Duration = Duration::from_secs(30);

fn provider() -> Arc<CryptoProvider> {
    let groups: Vec<&'static dyn rustls::crypto::SupportedKxGroup> = vec![&*HYBRID];
    Arc::new(CryptoProvider { kx_groups: groups, ..ring::default_provider() })
}

fn openssl(python: &Path, arguments: &[&str]) -> Command {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/openssl_peer.py");
    let mut command = Command::new(python);
    command.arg(script).args(arguments);
    command
}

#[test]
fn openssl_dials_with_the_hybrid_group() {
    let Some(python) = venv::python("OpenSSL dials") else { return };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let server = std::thread::spawn(move || {
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth();
        let config = Identity::new().certify(config);
        let mut connection = ServerConnection::new(Arc::new(config)).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        let mut stream = Stream::new(&mut connection, &mut socket);
        let mut said = [0; 5];
        stream.read_exact(&mut said).unwrap();
        stream.write_all(&said).unwrap();
        stream.flush().unwrap();
        connection.negotiated_key_exchange_group().unwrap().name()
    });
    let output = run(&mut openssl(python, &["dial", &port]), LIMIT);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "X25519MLKEM768\n");
    assert_eq!(server.join().unwrap(), NamedGroup::X25519MLKEM768);
}

#[test]
fn openssl_is_dialled_with_the_hybrid_group() {
    let Some(python) = venv::python("OpenSSL is dialled") else { return };
    let mut child = openssl(python, &["listen"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port: u16 = lines.next().unwrap().unwrap().parse().unwrap();
    let verifier: Arc<dyn ServerCertVerifier> = Arc::new(AnyKey);
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let mut connection = ClientConnection::new(Arc::new(config), "openssl".try_into().unwrap()).unwrap();
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut stream = Stream::new(&mut connection, &mut socket);
    stream.write_all(b"hello").unwrap();
    let mut said = [0; 5];
    stream.read_exact(&mut said).unwrap();
    assert_eq!(said, *b"hello");
    assert_eq!(lines.next().unwrap().unwrap(), "X25519MLKEM768");
    assert_eq!(connection.negotiated_key_exchange_group().unwrap().name(), NamedGroup::X25519MLKEM768);
    assert!(child.wait().unwrap().success());
}
