//! What moves between a WebSocket and a worker.

use std::{cell::RefCell, net::SocketAddr, sync::Arc};

use net::carrier::{Accepted, Exit};
use tokio::{io::DuplexStream, time::Instant};

use super::*;

const CLIENT: &str = "192.0.2.7:50000";

/// A stream of an exit that is served, and its far end. The line that answers go into is the carrier's own, which only a worker fills:
/// the far end plays it by pings.
async fn served(
    first: &[u8],
    patience: Patience,
    far: impl AsyncFnOnce(&mut DuplexStream),
) -> (Ended, Vec<Vec<u8>>) {
    let (near, mut other) = tokio::io::duplex(4_096);
    let exit = Exit::new(1, &Arc::default());
    let source: SocketAddr = CLIENT.parse().unwrap();
    let accepted: Accepted = exit.open(source, None);
    let packets = RefCell::new(Vec::new());
    let put = |packet: &[u8]| {
        packets.borrow_mut().push(packet.to_vec());
        true
    };
    let (ended, ()) =
        tokio::join!(run_with(patience, near, Role::Server, first, accepted.queue(), put), async {
            far(&mut other).await;
            drop(other);
        });
    (ended, packets.into_inner())
}

#[tokio::test]
async fn packets_come_out_in_order_those_with_the_head_first() {
    let key = Some([1, 2, 3, 4]);
    let mut first = Vec::new();
    websocket::put_packet(&mut first, b"one", key);
    let (ended, packets) = served(&first, PATIENCE, async |far: &mut DuplexStream| {
        let mut bytes = Vec::new();
        websocket::put_packet(&mut bytes, b"two", key);
        websocket::put_packet(&mut bytes, &[3; 1_452], key);
        websocket::put_close(&mut bytes, key);
        for piece in bytes.chunks(100) {
            far.write_all(piece).await.unwrap();
        }
    })
    .await;
    assert!(matches!(ended, Ended::Closed), "{ended}");
    assert_eq!(packets, [b"one".to_vec(), b"two".to_vec(), vec![3; 1_452]]);
}

#[tokio::test]
async fn a_question_is_answered_and_a_violation_ends_the_stream() {
    let (ended, _) = served(&[], PATIENCE, async |far: &mut DuplexStream| {
        // RFC 6455 §5.7: a masked ping with "Hello", and its answer without a mask.
        far.write_all(&[0x89, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58]).await.unwrap();
        let mut pong = [0; 7];
        far.read_exact(&mut pong).await.unwrap();
        assert_eq!(pong, *b"\x8a\x05Hello");
        far.write_all(&[0x82, 1, 0]).await.unwrap();
        assert_eq!(far.read(&mut pong).await.unwrap(), 0, "it is closed");
    })
    .await;
    assert!(matches!(ended, Ended::Violation(Violation::Mask)), "{ended}");
}

#[tokio::test]
async fn a_far_end_that_is_silent_is_asked_and_then_given_up() {
    let patience = Patience { ping: Duration::from_millis(50), silence: Duration::from_millis(180) };
    let since = Instant::now();
    let (ended, _) = served(&[], patience, async |far: &mut DuplexStream| {
        let mut asked = Vec::new();
        far.read_to_end(&mut asked).await.unwrap();
        let pings = asked.len() / 2;
        assert!((1..=3).contains(&pings) && asked == [0x89, 0].repeat(pings), "{asked:?}");
    })
    .await;
    assert!(matches!(ended, Ended::Silent), "{ended}");
    assert!(since.elapsed() >= patience.silence);
}

#[tokio::test]
async fn whoever_asks_without_end_and_reads_no_answer_is_not_read() {
    let (ended, _) = served(&[], PATIENCE, async |far: &mut DuplexStream| {
        let ping = [&[0x89, 0xfd, 0, 0, 0, 0][..], &[7; 125]].concat();
        let mut taken = 0;
        let asks = async {
            loop {
                far.write_all(&ping).await.unwrap();
                taken += 1;
            }
        };
        assert!(timeout(Duration::from_millis(300), asks).await.is_err());
        // What the two directions of the stream hold, and two reads.
        assert!(taken * ping.len() < 2 * 4_096 + 2 * MOST_READ, "{taken}");
    })
    .await;
    assert!(matches!(ended, Ended::Closed | Ended::Io(_)), "{ended}");
}
