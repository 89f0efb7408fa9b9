//! The addresses of users: which are given to whom, and the way of the device's packets to them. Reading takes no lock.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use arc_swap::ArcSwap;
use base::panics::lock;
use config::Config;
use ip::{cut::Cut, view::IpView, vnet::VnetHeader};
use ipnet::IpNet;

use super::{
    device::{Device, Devices},
    link::{Link, Outcome},
};
use crate::account::Account;

/// The sessions of CONNECT-IP by their addresses.
#[derive(Default)]
pub struct Links {
    /// The number of addresses: packets cost nothing where it is 0.
    count: AtomicUsize,
    table: ArcSwap<HashMap<IpAddr, Arc<Link>>>,
    pool: Mutex<Pool>,
    devices: Arc<Devices>,
}

/// The addresses that may be given.
#[derive(Default)]
struct Pool {
    nets: Vec<Net>,
    /// Addresses of the device, and those that a user has for good.
    reserved: HashSet<IpAddr>,
}

/// A prefix of the pool, and where in it the search for a free address goes on: an address that was given back waits for its next turn.
struct Net {
    net: IpNet,
    next: u128,
}

impl Links {
    /// Follows a configuration. What is assigned stays, unless the pool has become another one.
    pub(crate) fn follow(&self, config: &Config) {
        let mut pool = lock(&self.pool);
        let has_device = config.tun.is_some();
        let nets: Vec<IpNet> = config.http.pool.iter().filter(|_| has_device).map(IpNet::trunc).collect();
        if !pool.nets.iter().map(|net| &net.net).eq(&nets) {
            pool.nets = nets.into_iter().map(|net| Net { net, next: 0 }).collect();
        }
        let own = config.tun.iter().flat_map(|tun| &tun.addresses).map(IpNet::addr);
        let fixed = config.users.iter().flat_map(|user| &user.addresses).copied();
        pool.reserved = own.chain(fixed).collect();
    }

    /// Packets of users may go to `device`, the part of the TUN device of the worker with this number.
    pub fn has_device(&self, worker: u8, device: Arc<dyn Device>) {
        self.devices.set(worker, device);
    }

    /// The TUN device, for those who are no worker; `None` if there is none.
    #[must_use]
    pub fn device(&self) -> Option<Arc<dyn Device>> {
        self.devices.any().then(|| Arc::clone(&self.devices) as Arc<dyn Device>)
    }

    /// Whether anybody can have an address.
    #[must_use]
    pub fn has_pool(&self) -> bool {
        !lock(&self.pool).nets.is_empty()
    }

    /// Gives `link` an address of each family for which `wants`: the one of `fixed`, which the session before loses, or one of the pool.
    /// False if it gets no address.
    pub(super) fn assign(&self, link: &Arc<Link>, fixed: &[IpAddr], wants: impl Fn(IpAddr) -> bool) -> bool {
        let mut pool = lock(&self.pool);
        let mut table = HashMap::clone(&self.table.load());
        let mut assigned = Vec::new();
        for family in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
            if !wants(family) {
                continue;
            }
            let own = fixed.iter().copied().find(|address| address.is_ipv4() == family.is_ipv4());
            let Some(address) = own.or_else(|| pool.free(family, &table)) else { continue };
            assigned.push(address);
            if let Some(before) = table.insert(address, Arc::clone(link)) {
                let replaced = pool.free(family, &table);
                let mut rest = before.assigned();
                rest.retain(|one| *one != address);
                if let Some(other) = replaced {
                    rest.push(other);
                    table.insert(other, Arc::clone(&before));
                }
                before.assign(rest);
            }
        }
        let some = !assigned.is_empty();
        if some {
            link.assign(assigned);
            self.publish(table);
        }
        some
    }

    /// Takes the addresses of `link` back.
    pub(super) fn release(&self, link: &Arc<Link>) {
        let _one_at_a_time = lock(&self.pool);
        let mut table = HashMap::clone(&self.table.load());
        table.retain(|_, holder| !Arc::ptr_eq(holder, link));
        link.assign(Vec::new());
        self.publish(table);
    }

    fn publish(&self, table: HashMap<IpAddr, Arc<Link>>) {
        let count = table.len();
        self.table.store(Arc::new(table));
        self.count.store(count, Ordering::Release);
    }

    /// The addresses of the user with `account`, in order.
    pub(crate) fn addresses_of(&self, account: &Arc<Account>) -> Vec<IpAddr> {
        if self.is_empty() {
            return Vec::new();
        }
        let table = self.table.load();
        let own = table.iter().filter(|(_, link)| ptr::eq(link.account().whole(), Arc::as_ptr(account)));
        let mut own: Vec<_> = own.map(|(address, _)| *address).collect();
        own.sort_unstable();
        own
    }

    /// How many addresses are assigned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Whether nobody has an address.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `address` is one of a user.
    #[inline]
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        !self.is_empty() && self.table.load().contains_key(&address)
    }

    /// Takes a packet or super-packet of the device if it goes to a user. `None`: it goes elsewhere, or makes no sense.
    #[inline]
    pub fn to_user(&self, packet: &mut [u8], view: &IpView, vnet: &VnetHeader) -> Option<Outcome> {
        if self.is_empty() {
            return None;
        }
        let link = self.table.load().get(&view.destination).cloned()?;
        match Cut::new(vnet, packet, view, false) {
            Ok(cut) => Some(link.to_user(&cut, view)),
            Err(_) => None,
        }
    }
}

impl Pool {
    /// An address of the family of `family` that nobody has.
    fn free(&mut self, family: IpAddr, table: &HashMap<IpAddr, Arc<Link>>) -> Option<IpAddr> {
        let Self { nets, reserved } = self;
        nets.iter_mut().filter(|net| net.net.addr().is_ipv4() == family.is_ipv4()).find_map(|net| {
            // One of so many is free, whichever are not: the first and the last are never given.
            let tries = (table.len() + reserved.len() + 3) as u128;
            (0..tries.min(net.size())).find_map(|_| {
                let address = net.address();
                let free =
                    net.is_host(address) && !reserved.contains(&address) && !table.contains_key(&address);
                free.then_some(address)
            })
        })
    }
}

impl Net {
    /// How many addresses there are; at least one.
    fn size(&self) -> u128 {
        let bits = u32::from(self.net.max_prefix_len() - self.net.prefix_len());
        1_u128.checked_shl(bits).unwrap_or(u128::MAX)
    }

    /// The next address.
    fn address(&mut self) -> IpAddr {
        let at = self.next;
        self.next = (at + 1) % self.size();
        match self.net.network() {
            IpAddr::V4(first) => {
                Ipv4Addr::from_bits(first.to_bits().wrapping_add(u32::try_from(at).unwrap_or(0))).into()
            }
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits().wrapping_add(at)).into(),
        }
    }

    /// Whether an address is one host's: not that of the network, of its routers (RFC 4291 §2.6.1) or of all (RFC 919).
    fn is_host(&self, address: IpAddr) -> bool {
        let is_link = self.net.prefix_len() + 1 < self.net.max_prefix_len();
        !is_link || address != self.net.network() && (address.is_ipv6() || address != self.net.broadcast())
    }
}
