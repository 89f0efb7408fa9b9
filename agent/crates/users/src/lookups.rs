//! The look-ups of users' names: how many there may be at a time, of one user and of all.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use config::MOST_USER_LOOKUPS;
use net::lookup;
use tokio::{sync::Semaphore, time::timeout};

use crate::account::Refusal;

/// How long a look-up may take.
const LOOKUP_WITHIN: Duration = Duration::from_secs(5);

/// Look-ups of one user: a quarter of all.
pub(crate) const MOST_OF_ONE: usize = MOST_USER_LOOKUPS / 4;

/// Addresses of an answer that are looked at.
const MOST_ADDRESSES: usize = 16;

type Resolve = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// The places of all users' look-ups.
pub(crate) struct Lookups {
    places: Arc<Semaphore>,
    resolve: Arc<Resolve>,
}

impl Default for Lookups {
    fn default() -> Self {
        Self::by(lookup::resolve)
    }
}

impl Lookups {
    /// Look-ups by `resolve`, which blocks.
    pub(crate) fn by(
        resolve: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self { places: Arc::new(Semaphore::new(MOST_USER_LOOKUPS)), resolve: Arc::new(resolve) }
    }

    /// The addresses of `name`, for a user who has the places `own`. One that takes too long keeps its places until the resolver has ended.
    pub(crate) async fn look_up(
        &self,
        own: &Arc<Semaphore>,
        name: &str,
        port: u16,
    ) -> Result<Vec<IpAddr>, Refusal> {
        let own = Arc::clone(own).try_acquire_owned().map_err(|_| Refusal::Lookups)?;
        let all = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Refusal::Lookups)?;
        let resolve = Arc::clone(&self.resolve);
        let looked_up =
            lookup::look_up(name.to_owned(), port, (own, all), move |host, port| resolve(host, port));
        let addresses = timeout(LOOKUP_WITHIN, looked_up).await.map_err(|_| Refusal::Resolve)?;
        let addresses = addresses.map_err(|_| Refusal::Resolve)?.into_iter();
        Ok(addresses.map(|address| address.ip()).take(MOST_ADDRESSES).collect())
    }
}
