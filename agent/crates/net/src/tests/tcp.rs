use std::{io::ErrorKind, net::SocketAddr};

use crate::{
    Net, Ready, TcpListener, TcpStream, Token,
    memory::MemoryFabric,
    tests::{V4, V6, kernel, wait},
};

const LISTENER: Token = Token(1);
const CLIENT: Token = Token(2);
const SERVER: Token = Token(3);

async fn connect(
    net: &mut dyn Net,
    ready: &Ready,
    ip: std::net::IpAddr,
) -> (Box<dyn TcpStream>, Box<dyn TcpStream>) {
    let mut listener = net.tcp_listen(SocketAddr::new(ip, 0), LISTENER).unwrap();
    assert!(matches!(listener.accept(SERVER), Err(error) if error.kind() == ErrorKind::WouldBlock));
    let mut client = net.tcp_connect(listener.local_addr(), CLIENT).unwrap();
    connected(&mut *client, ready).await.unwrap();
    let (server, remote) = accepted(&mut *listener, ready).await;
    assert_eq!(remote.ip(), ip);
    (client, server)
}

/// Waits for the outcome of the client's connection attempt.
async fn connected(client: &mut dyn TcpStream, ready: &Ready) -> Result<(), ErrorKind> {
    loop {
        match client.connected() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(ready, CLIENT).await,
            outcome => return outcome.map_err(|error| error.kind()),
        }
    }
}

/// Waits for the server's connection.
async fn accepted(listener: &mut dyn TcpListener, ready: &Ready) -> (Box<dyn TcpStream>, SocketAddr) {
    loop {
        match listener.accept(SERVER) {
            Ok(accepted) => return accepted,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        wait(ready, LISTENER).await;
    }
}

/// Reads until the end of the stream, or the error that ends it: what came, and how it ended.
async fn read_all(
    stream: &mut dyn TcpStream,
    ready: &Ready,
    token: Token,
) -> (Vec<u8>, Result<(), ErrorKind>) {
    let mut all = Vec::new();
    let mut buffer = [0; 8_192];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return (all, Ok(())),
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(ready, token).await,
            Err(error) => return (all, Err(error.kind())),
        }
    }
}

/// Writes until the connection takes no more; returns what it took.
fn fill(stream: &mut dyn TcpStream) -> usize {
    let mut total = 0;
    loop {
        match stream.write(&[0x5a; 65_536]) {
            Ok(count) => total += count,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                return total;
            }
        }
    }
}

/// Echo, half close, a full direction that empties again, a reset: the same of both networks.
async fn behaves(net: &mut dyn Net, ready: &Ready, ip: std::net::IpAddr) {
    let (mut client, mut server) = connect(net, ready, ip).await;
    assert_eq!(client.write(b"question").unwrap(), 8);
    client.shutdown_write().unwrap();
    assert_eq!(read_all(&mut *server, ready, SERVER).await, (b"question".to_vec(), Ok(())));
    assert_eq!(server.write(b"answer").unwrap(), 6);
    drop(server);
    assert_eq!(read_all(&mut *client, ready, CLIENT).await, (b"answer".to_vec(), Ok(())));

    let (mut client, mut server) = connect(net, ready, ip).await;
    let sent = fill(&mut *client);
    let mut drained = 0;
    let mut buffer = vec![0; 65_536];
    while drained < sent {
        match server.read(&mut buffer) {
            Ok(count) => drained += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(ready, SERVER).await,
            Err(error) => panic!("{error}"),
        }
    }
    // Its token may have come already, while the server's was waited for.
    while fill(&mut *client) == 0 {
        wait(ready, CLIENT).await;
    }

    let (mut client, mut server) = connect(net, ready, ip).await;
    client.abort();
    drop(client);
    assert_eq!(read_all(&mut *server, ready, SERVER).await.1, Err(ErrorKind::ConnectionReset));
}

/// A connection that is neither read nor written, although it could be, is reset.
async fn a_failure_is_noticed(net: &mut dyn Net, ready: &Ready) {
    let (mut client, mut server) = connect(net, ready, V4).await;
    assert_eq!(client.write(b"first ").unwrap(), 6);
    let mut buffer = [0; 6];
    while server.read(&mut buffer).is_err() {
        wait(ready, SERVER).await;
    }
    // More waits, and nobody asks for it.
    assert_eq!(client.write(b"last words").unwrap(), 10);
    while server.read(&mut buffer).is_err() {
        wait(ready, SERVER).await;
    }
    ready.drain(&mut Vec::new());
    assert!(!server.has_failed());
    while client.unacknowledged().unwrap() > 0 {
        tokio::task::yield_now().await;
    }
    client.abort();
    wait(ready, SERVER).await;
    assert!(server.has_failed());
    assert_eq!(server.read(&mut buffer).unwrap(), 4, "what came before the reset is there still");
    assert_eq!(server.read(&mut buffer).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// A connect to a port where nobody listens.
async fn is_refused(net: &mut dyn Net, ready: &Ready) {
    let address = net.tcp_listen(SocketAddr::new(V4, 0), LISTENER).unwrap().local_addr();
    let mut client = net.tcp_connect(address, CLIENT).unwrap();
    assert_eq!(connected(&mut *client, ready).await, Err(ErrorKind::ConnectionRefused));
}

async fn resolves(net: &mut dyn Net, ready: &Ready) {
    for (literal, ip) in [("127.0.0.1", V4), ("::1", V6), ("[::1]", V6)] {
        net.resolve(literal, 53, CLIENT);
        assert_eq!(net.resolved(CLIENT).unwrap().unwrap(), [SocketAddr::new(ip, 53)]);
        wait(ready, CLIENT).await;
        assert!(net.resolved(CLIENT).is_none(), "an answer is given once");
    }
    net.resolve("localhost", 80, CLIENT);
    wait(ready, CLIENT).await;
    let addresses = net.resolved(CLIENT).unwrap().unwrap();
    assert!(addresses.contains(&SocketAddr::new(V4, 80)), "{addresses:?}");
}

#[tokio::test]
async fn kernel_connections_behave() {
    let (mut net, ready, _) = kernel();
    behaves(&mut net, &ready, V4).await;
    behaves(&mut net, &ready, V6).await;
}

#[tokio::test]
async fn memory_connections_behave() {
    let ready = Ready::default();
    let mut net = MemoryFabric::default().host(&[], ready.clone());
    behaves(&mut net, &ready, V4).await;
    behaves(&mut net, &ready, V6).await;
}

#[tokio::test]
async fn the_kernel_reports_a_reset_that_nobody_waits_for() {
    let (mut net, ready, _) = kernel();
    a_failure_is_noticed(&mut net, &ready).await;
}

#[tokio::test]
async fn memory_reports_a_reset_that_nobody_waits_for() {
    let ready = Ready::default();
    a_failure_is_noticed(&mut MemoryFabric::default().host(&[], ready.clone()), &ready).await;
}

#[tokio::test]
async fn what_came_before_a_reset_is_read_although_nobody_had_noticed_the_connection() {
    for ends in [false, true] {
        let (mut net, ready, _) = kernel();
        let listener = std::net::TcpListener::bind((V4, 0)).unwrap();
        let mut client = net.tcp_connect(listener.local_addr().unwrap(), CLIENT).unwrap();
        let (mut service, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut service, b"no").unwrap();
        if ends {
            service.shutdown(std::net::Shutdown::Write).unwrap();
        }
        socket2::SockRef::from(&service).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(service);
        connected(&mut *client, &ready).await.unwrap();
        assert!(client.has_failed());
        let end = if ends { Ok(()) } else { Err(ErrorKind::ConnectionReset) };
        assert_eq!(read_all(&mut *client, &ready, CLIENT).await, (b"no".to_vec(), end));
        assert!(ends == client.has_failed(), "told once");
    }
}

#[tokio::test]
async fn a_kernel_connect_is_refused() {
    let (mut net, ready, _) = kernel();
    is_refused(&mut net, &ready).await;
}

#[tokio::test]
async fn a_memory_connect_is_refused() {
    let ready = Ready::default();
    is_refused(&mut MemoryFabric::default().host(&[], ready.clone()), &ready).await;
}

#[tokio::test]
async fn the_kernel_resolves() {
    let (mut net, ready, _) = kernel();
    resolves(&mut net, &ready).await;
}

#[tokio::test]
async fn memory_resolves() {
    let ready = Ready::default();
    let fabric = MemoryFabric::default();
    fabric.add_name("localhost", &[V4, V6]);
    let mut net = fabric.host(&[], ready.clone());
    resolves(&mut net, &ready).await;
    net.resolve("unknown.example", 1, SERVER);
    assert_eq!(net.resolved(SERVER).unwrap().unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn two_listeners_do_not_share_an_address() {
    let (mut kernel, _ready, _) = kernel();
    let mut memory = MemoryFabric::default().host(&[], Ready::default());
    for net in [&mut kernel as &mut dyn Net, &mut memory] {
        let first = net.tcp_listen(SocketAddr::new(V4, 0), LISTENER).unwrap();
        let second = net.tcp_listen(first.local_addr(), SERVER);
        assert!(matches!(second, Err(error) if error.kind() == ErrorKind::AddrInUse));
    }
}

#[tokio::test]
async fn an_urgent_byte_stops_no_reader() {
    let (mut net, ready, _) = kernel();
    let mut listener = net.tcp_listen(SocketAddr::new(V4, 0), LISTENER).unwrap();
    let mut client = std::net::TcpStream::connect(listener.local_addr()).unwrap();
    let (mut server, _) = accepted(&mut *listener, &ready).await;
    // All of it is there before it is read, so that nothing comes later that would wake the reader.
    for _ in 0..3 {
        std::io::Write::write_all(&mut client, b"before").unwrap();
        socket2::SockRef::from(&client).send_out_of_band(b"!").unwrap();
        std::io::Write::write_all(&mut client, b"after").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let mut received = Vec::new();
        while received.len() < 11 {
            let mut buffer = [0; 100];
            match server.read(&mut buffer) {
                Ok(count) => received.extend_from_slice(&buffer[..count]),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    wait(&ready, SERVER).await;
                }
            }
        }
        assert_eq!(received, b"beforeafter");
    }
}
