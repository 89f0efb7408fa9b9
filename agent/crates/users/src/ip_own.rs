//! The addresses of this host, which users reach only where they are named one by one.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use base::panics::lock;
use ipnet::IpNet;
use net::netlink::{Netlink, RouteChanges};
use tokio::time::Instant;

/// For how long this host's addresses are taken for what they were.
const OWN_FOR: Duration = Duration::from_secs(1);

/// What the kernel delivers to this host itself, as it was a second ago at most.
#[derive(Default)]
pub(crate) struct Own(Mutex<Option<Known>>);

struct Known {
    at: Instant,
    own: Arc<[IpNet]>,
    /// Word of changes, without which all is listed anew each time; `None` where there is no such word.
    changes: Option<RouteChanges>,
}

impl Own {
    /// The same list as before unless another one has come; `None` if the kernel cannot be asked.
    pub(super) fn get(&self) -> Option<Arc<[IpNet]>> {
        let now = Instant::now();
        let mut known = lock(&self.0);
        if let Some(known) = &mut *known {
            if now.saturating_duration_since(known.at) < OWN_FOR {
                return Some(Arc::clone(&known.own));
            }
            match known.changes.as_mut().map(RouteChanges::came) {
                Some(Ok(false)) => {
                    known.at = now;
                    return Some(Arc::clone(&known.own));
                }
                Some(Ok(true)) | None => {}
                Some(Err(_)) => known.changes = None,
            }
        }
        // Word of changes begins before the list does, so that none is missed.
        let changes = known.as_mut().and_then(|known| known.changes.take());
        let changes = changes.or_else(|| Netlink::open().and_then(Netlink::follow).ok());
        let mut listed = Netlink::open().and_then(|mut netlink| netlink.local_prefixes()).ok()?;
        listed.sort_unstable();
        listed.dedup();
        let same = known.as_ref().map(|known| &known.own).filter(|own| own[..] == listed[..]);
        let own = same.map_or_else(|| listed.into(), Arc::clone);
        *known = Some(Known { at: now, own: Arc::clone(&own), changes });
        Some(own)
    }

    /// Takes `own` for this host's addresses for a day.
    #[cfg(test)]
    pub(crate) fn set(&self, own: &[IpNet]) {
        let at = Instant::now() + Duration::from_secs(86_400);
        *lock(&self.0) = Some(Known { at, own: own.into(), changes: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_the_same_one_until_it_is_another() {
        let own = Own::default();
        let first = own.get().unwrap();
        assert!(first.iter().any(|prefix| prefix.contains(&std::net::IpAddr::from([127, 0, 0, 1]))));
        assert!(Arc::ptr_eq(&first, &own.get().unwrap()));
        let later = |own: &Own| {
            if let Some(known) = &mut *lock(&own.0) {
                known.at -= 2 * OWN_FOR;
            }
        };
        // A list that is as long as before, and one that the kernel did not give.
        later(&own);
        assert!(Arc::ptr_eq(&first, &own.get().unwrap()) || *first != *own.get().unwrap());
        if let Some(known) = &mut *lock(&own.0) {
            known.own = Arc::new(["192.0.2.1/32".parse::<IpNet>().unwrap()]);
            known.changes = None;
        }
        assert_eq!(own.get().unwrap().len(), 1, "it is young");
        later(&own);
        assert_eq!(own.get().unwrap()[..], first[..]);
    }
}
