//! The way of users' packets to the TUN device.

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::ArcSwap;
use bytes::Bytes;
use ip::view::IpView;

use crate::account::{Account, Dropped};

/// Takes packets of users for the TUN device.
pub trait Device: Send + Sync {
    /// Puts a packet of the user with `account`, where what becomes of it is counted.
    fn put(&self, packet: Bytes, account: &Arc<Account>);
}

/// The parts of the device, by the worker that each belongs to.
#[derive(Default)]
pub(super) struct Devices(ArcSwap<BTreeMap<u8, Arc<dyn Device>>>);

impl Devices {
    pub(super) fn set(&self, worker: u8, device: Arc<dyn Device>) {
        self.0.rcu(|parts| {
            let mut parts = BTreeMap::clone(parts);
            parts.insert(worker, Arc::clone(&device));
            parts
        });
    }

    pub(super) fn any(&self) -> bool {
        !self.0.load().is_empty()
    }
}

impl Device for Devices {
    /// Packets of one flow go to one part, so that they stay in order.
    fn put(&self, packet: Bytes, account: &Arc<Account>) {
        let parts = self.0.load();
        let hash = IpView::parse(&packet).map_or(0, |view| view.flow_hash());
        let place = (hash as usize).checked_rem(parts.len()).and_then(|at| parts.values().nth(at));
        match place {
            Some(part) => part.put(packet, account),
            None => account.dropped_from_user(Dropped::Ended, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use base::panics::lock;

    use super::*;

    #[derive(Default)]
    struct Part(Mutex<Vec<Bytes>>);

    impl Device for Part {
        fn put(&self, packet: Bytes, _account: &Arc<Account>) {
            lock(&self.0).push(packet);
        }
    }

    /// A packet of UDP from this port.
    fn packet(port: u8, count: u8) -> Bytes {
        let mut packet = vec![
            0x45, 0, 0, 29, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2, 0, port, 0, 7, 0, 9, 0, 0,
        ];
        packet.push(count);
        packet.into()
    }

    #[test]
    fn a_flow_stays_at_one_worker_and_all_workers_have_some() {
        let (devices, account) = (Devices::default(), Arc::new(Account::new(&"anna".into())));
        assert!(!devices.any());
        devices.put(packet(1, 0), &account);
        assert_eq!(account.figures().dropped_from[Dropped::Ended], 1);
        let parts: [Arc<Part>; 3] = Default::default();
        for (worker, part) in (0..).zip(&parts) {
            devices.set(worker, Arc::clone(part) as Arc<dyn Device>);
        }
        for count in 0..4 {
            (0..60).for_each(|port| devices.put(packet(port, count), &account));
        }
        let mut ports = Vec::new();
        for part in &parts {
            let packets = lock(&part.0);
            assert!(packets.len() >= 20, "{}", packets.len());
            let mut of_part: Vec<u8> = packets.iter().map(|packet| packet[21]).collect();
            let counts: Vec<_> = packets.iter().map(|packet| (packet[21], packet[28])).collect();
            assert!(counts.iter().all(|(port, count)| {
                let before = counts.iter().filter(|(one, _)| one == port).take_while(|(_, one)| one != count);
                before.count() == usize::from(*count)
            }));
            of_part.sort_unstable();
            of_part.dedup();
            ports.extend(of_part);
        }
        ports.sort_unstable();
        assert_eq!(ports, (0..60).collect::<Vec<u8>>(), "each flow is at one");
    }
}
