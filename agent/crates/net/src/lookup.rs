//! Names that are looked up for requests, by the C library's resolver on tokio's threads for blocking work.
//!
//! `getaddrinfo` cannot be ended: who gives it up leaves a thread behind until the resolver has given up too, 10 s for each search domain
//! by default (resolv.conf(5)). So a place is kept by the thread, not by the task that waits for it.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
};

/// The addresses of `host` with `port`, by `resolve`; `place` is dropped when its thread is free again, also if nobody waits any more.
///
/// # Errors
/// The resolver's.
pub async fn look_up<P: Send + 'static>(
    host: String,
    port: u16,
    place: P,
    resolve: impl FnOnce(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> io::Result<Vec<SocketAddr>> {
    let thread = move || {
        let _until_it_has_ended = place;
        resolve(&host, port)
    };
    tokio::task::spawn_blocking(thread).await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Asks the C library.
///
/// # Errors
/// The resolver's.
pub fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    (host, port).to_socket_addrs().map(Iterator::collect)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        time::Duration,
    };

    use tokio::{sync::Semaphore, time::timeout};

    use super::*;

    #[tokio::test]
    async fn a_look_up_that_is_given_up_keeps_its_place_until_the_resolver_has_ended() {
        let places = Arc::new(Semaphore::new(1));
        let place = Arc::clone(&places).try_acquire_owned().unwrap();
        let (end, ended) = mpsc::sync_channel::<()>(0);
        let slow = look_up("slow.example".to_owned(), 1, place, move |_, _| {
            ended.recv().unwrap();
            Ok(Vec::new())
        });
        assert!(timeout(Duration::from_millis(20), slow).await.is_err(), "it is given up");
        assert_eq!(places.available_permits(), 0, "its thread is still busy");
        end.send(()).unwrap();
        let free = timeout(Duration::from_secs(10), places.acquire()).await.unwrap();
        assert!(free.is_ok());
    }
}
