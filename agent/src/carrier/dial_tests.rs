//! What is asked of proxies and web servers, and what their answers mean.

use super::*;

/// The key in RFC 6455 §1.3.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";

/// What `asks` sends to a far end that answers `answer`, and what it makes of that.
async fn exchange<T>(
    answer: &str,
    asks: impl AsyncFnOnce(&mut tokio::io::DuplexStream) -> Result<T, DialError>,
) -> (String, Result<T, DialError>) {
    let (mut near, mut far) = tokio::io::duplex(4_096);
    let answers = async {
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            assert!(far.read_buf(&mut asked).await.unwrap() > 0);
        }
        let asked = String::from_utf8(asked).unwrap();
        let key = asked.lines().find_map(|line| line.strip_prefix("Sec-WebSocket-Key: ")).unwrap_or_default();
        let answer = answer.replace("ACCEPT", &exit::accept(key.as_bytes()));
        far.write_all(answer.as_bytes()).await.unwrap();
        drop(far);
        asked
    };
    tokio::join!(answers, asks(&mut near))
}

#[tokio::test]
async fn a_websocket_is_asked_for_as_browsers_do() {
    let good = "HTTP/1.1 101 Switching Protocols\r\nupgrade: WebSocket\r\nconnection: upgrade\r\n\
                Sec-WebSocket-Accept: ACCEPT\r\n\r\nfirst";
    let (asked, first) =
        exchange(good, async |stream: &mut _| upgraded(stream, "/token", "gw.example.net", KEY).await).await;
    assert_eq!(first.unwrap(), b"first");
    assert!(asked.starts_with("GET /token HTTP/1.1\r\nHost: gw.example.net\r\n"), "{asked}");
    for line in ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"] {
        assert!(asked.lines().any(|asked| asked == line), "{asked}");
    }
}

#[tokio::test]
async fn another_answer_opens_no_stream() {
    let upgrade = "upgrade: websocket\r\nsec-websocket-accept: ACCEPT\r\n\r\n";
    for (answer, said) in [
        ("HTTP/1.1 404 Not Found\r\n\r\n".to_owned(), "the web server answers 404, and opens no carrier"),
        (format!("HTTP/1.1 200 OK\r\n{upgrade}"), "the web server answers 200, and opens no carrier"),
        (format!("HTTP/2 101 x\r\n{upgrade}"), "the answer is not one of HTTP/1.1"),
        (format!("SSH-2.0\r\n{upgrade}"), "the answer is not one of HTTP/1.1"),
        (
            "HTTP/1.1 101 x\r\nupgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n".to_owned(),
            "the answer is not one of HTTP/1.1",
        ),
        (
            "HTTP/1.1 101 x\r\nsec-websocket-accept: ACCEPT\r\n\r\n".to_owned(),
            "the answer is not one of HTTP/1.1",
        ),
        ("HTTP/1.1 101".to_owned(), "the connection has failed: unexpected end of file"),
        ("x".repeat(MOST_HEAD_BYTES + 1_000), "the answer is not one of HTTP/1.1"),
    ] {
        let asks = async |stream: &mut _| upgraded(stream, "/token", "gw.example.net", KEY).await;
        let (_, outcome) = exchange(&answer, asks).await;
        let error = outcome.unwrap_err();
        assert_eq!(error.to_string(), said, "{answer:.60}");
        assert!(!error.remedy().is_empty());
    }
}

/// RFC 6455 §1.3.
#[test]
fn the_answer_to_a_key_is_that_of_the_rfc() {
    assert_eq!(exit::accept(KEY.as_bytes()), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
}

#[test]
fn families_have_their_turns() {
    let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
    let of = |texts: &[&str]| in_turn(addresses(texts));
    assert_eq!(
        of(&["[::1]:1", "[::2]:1", "[::3]:1", "192.0.2.1:1"]),
        addresses(&["[::1]:1", "192.0.2.1:1", "[::2]:1", "[::3]:1"])
    );
    assert_eq!(of(&["192.0.2.1:1", "[::1]:1"]), addresses(&["192.0.2.1:1", "[::1]:1"]));
    assert!(of(&[]).is_empty());
    assert_eq!((authority("::1", 443), authority("gw", 8_443)), ("[::1]".to_owned(), "gw:8443".to_owned()));
}

#[tokio::test]
async fn the_first_address_that_answers_is_taken() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // The name has both families, and only one of them is listened at.
    let stream = connect("localhost", port, 0).await.unwrap();
    assert_eq!(stream.peer_addr().unwrap(), listener.local_addr().unwrap());
    drop(listener);
    let error = connect("127.0.0.1", port, 0).await.unwrap_err();
    assert!(matches!(error, DialError::Connect { .. }), "{error}");
    let unknown = connect("no-such-name.invalid", port, 0).await.unwrap_err();
    assert!(matches!(unknown, DialError::Name { .. }), "{unknown}");
}

#[tokio::test]
async fn a_proxy_is_asked_for_the_host_with_its_password() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let proxy = Proxy::of_url(&format!("http://Aladdin:open%20sesame@{at}")).unwrap();
    for (answer, status) in
        [("200 Connection established", None), ("407 No", Some(407)), ("403 No", Some(403))]
    {
        let serves = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                assert!(stream.read_buf(&mut asked).await.unwrap() > 0);
            }
            let answer =
                format!("HTTP/1.1 {answer}\r\nServer: box\r\nLocation: http://portal/\x1b[2J\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8(asked).unwrap()
        };
        let (asked, outcome) = tokio::join!(serves, through(&proxy, "2001:db8::1", 443, 0));
        assert_eq!(
            asked,
            "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\
             Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\n"
        );
        match (outcome, status) {
            (Ok(_), None) => {}
            (Err(error @ DialError::Proxy { .. }), Some(status)) => {
                // Nothing in it writes to a terminal.
                let said = format!("the proxy {} answers {status} (location: http://portal/[2J)", proxy.at);
                assert_eq!(error.to_string(), said);
            }
            (outcome, _) => panic!("{answer}: {outcome:?}"),
        }
    }
}
