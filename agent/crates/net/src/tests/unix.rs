use std::{
    io::{ErrorKind, Read as _, Write as _},
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
};

use crate::{Net, TcpStream, Token, tests::kernel};

const CLIENT: Token = Token(2);

/// Reads until something comes, or the end, or an error.
async fn read(
    stream: &mut dyn TcpStream,
    ready: &crate::Ready,
    buffer: &mut [u8],
) -> Result<usize, ErrorKind> {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => super::wait(ready, CLIENT).await,
            outcome => return outcome.map_err(|error| error.kind()),
        }
    }
}

/// Writes all of it.
async fn write(stream: &mut dyn TcpStream, ready: &crate::Ready, bytes: &[u8]) {
    loop {
        match stream.write(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => super::wait(ready, CLIENT).await,
            outcome => return assert_eq!(outcome.unwrap(), bytes.len()),
        }
    }
}

#[tokio::test]
async fn a_socket_of_this_host_carries_bytes_half_closes_and_ends() {
    let (mut net, ready, _) = kernel();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut stream = net.unix_connect(&path, CLIENT).unwrap();
    stream.connected().unwrap();
    let (mut service, _) = listener.accept().unwrap();
    write(&mut *stream, &ready, b"hello").await;
    assert!(stream.unacknowledged().unwrap() > 0, "the service has not read it");
    let mut buffer = [0; 16];
    assert_eq!(service.read(&mut buffer).unwrap(), 5);
    assert_eq!(stream.unacknowledged().unwrap(), 0);
    service.write_all(b"answer").unwrap();
    assert_eq!(read(&mut *stream, &ready, &mut buffer).await, Ok(6));
    // One direction ends, the other goes on.
    stream.shutdown_write().unwrap();
    assert_eq!(service.read(&mut buffer).unwrap(), 0);
    service.write_all(b"last").unwrap();
    assert_eq!(read(&mut *stream, &ready, &mut buffer).await, Ok(4));
    assert!(!stream.has_failed());
    drop(service);
    assert_eq!(read(&mut *stream, &ready, &mut buffer).await, Ok(0));
    // A service that closes with bytes unread resets the connection, which is told though nobody reads.
    let mut stream = net.unix_connect(&path, CLIENT).unwrap();
    let (service, _) = listener.accept().unwrap();
    write(&mut *stream, &ready, b"unread").await;
    drop(service);
    while !stream.has_failed() {
        super::wait(&ready, CLIENT).await;
    }
    assert_eq!(read(&mut *stream, &ready, &mut buffer).await, Err(ErrorKind::ConnectionReset));
    // An abort of ours is an end to the service, and an error once it writes.
    let mut stream = net.unix_connect(&path, CLIENT).unwrap();
    let (mut service, _) = listener.accept().unwrap();
    stream.abort();
    assert!(stream.read(&mut buffer).is_err());
    assert_eq!(service.read(&mut buffer).unwrap(), 0);
    assert_eq!(service.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[tokio::test]
async fn what_is_wrong_with_a_socket_of_this_host_is_said_in_words() {
    let (mut net, _ready, _) = kernel();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut words = |name: &str| {
        let error = net.unix_connect(&at(name), CLIENT).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "the service's, whatever the kernel calls it");
        error.to_string()
    };
    assert!(words("missing").contains("no such socket"));
    drop(UnixListener::bind(at("dead")).unwrap());
    assert!(words("dead").contains("nobody listens"));
    std::fs::write(at("file"), "").unwrap();
    assert!(words("file").contains("nobody listens"), "{}", words("file"));
    let _datagrams = std::os::unix::net::UnixDatagram::bind(at("datagrams")).unwrap();
    assert!(words("datagrams").contains("not a stream socket"));
    // A queue that is full: nobody accepts.
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    socket.bind(&socket2::SockAddr::unix(at("full")).unwrap()).unwrap();
    socket.listen(0).unwrap();
    let mut kept = Vec::new();
    let full = (0..64).find_map(|_| match net.unix_connect(&at("full"), CLIENT) {
        Ok(stream) => {
            kept.push(stream);
            None
        }
        Err(error) => Some(error.to_string()),
    });
    assert!(full.unwrap().contains("as fast as they come"));
    let _listener = UnixListener::bind(at("closed")).unwrap();
    std::fs::set_permissions(at("closed"), std::fs::Permissions::from_mode(0o000)).unwrap();
    // Root may write everywhere.
    if let Err(error) = net.unix_connect(&at("closed"), CLIENT) {
        assert!(error.to_string().contains("may not write"), "{error}");
    }
}
