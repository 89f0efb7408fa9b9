//! The system calls that no safe crate offers: batches of datagrams, and the socket options that go with them.
#![expect(
    unsafe_code,
    reason = "recvmmsg, sendmmsg, control messages and raw socket options have no safe wrapper"
)]

use std::{
    io,
    marker::PhantomData,
    mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
    time::Duration,
};

use libc::{c_int, c_uint, cmsghdr, iovec, mmsghdr, msghdr, sockaddr_in, sockaddr_in6, socklen_t};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    batch::{Meta, ReceiveBatch},
    keepalive::TCP_INFO_WORDS,
};

/// Room for the control messages of one datagram; see the assertions below.
const CONTROL_BYTES: usize = 128;

const _: () = {
    // SAFETY: CMSG_SPACE only computes.
    let (int, pktinfo, stamp) = unsafe {
        (
            libc::CMSG_SPACE(4) as usize,
            libc::CMSG_SPACE(size_of::<libc::in6_pktinfo>() as c_uint) as usize,
            libc::CMSG_SPACE(size_of::<libc::timespec>() as c_uint) as usize,
        )
    };
    assert!(pktinfo + stamp + 2 * int <= CONTROL_BYTES, "PKTINFO, time, traffic class, GRO or GSO size");
};

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// A socket address as the kernel wants it, without the 100 bytes that `sockaddr_storage` has for other families.
#[derive(Clone, Copy)]
#[repr(C)]
union Name {
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

impl Name {
    const ZERO: Self = Self {
        v6: sockaddr_in6 {
            sin6_family: 0,
            sin6_port: 0,
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
            sin6_scope_id: 0,
        },
    };

    fn new(address: SocketAddr) -> (Self, socklen_t) {
        // The longer variant first, so that no byte of the union is uninitialised.
        let mut name = Self::ZERO;
        match address {
            SocketAddr::V4(v4) => {
                name.v4 = sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                (name, size_of::<sockaddr_in>() as socklen_t)
            }
            SocketAddr::V6(v6) => {
                name.v6 = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                (name, size_of::<sockaddr_in6>() as socklen_t)
            }
        }
    }

    fn address(&self, len: socklen_t) -> Option<SocketAddr> {
        // SAFETY: a `Name` begins as `ZERO`, so all of it is initialised, every bit pattern is a valid field, and both
        // variants begin with the family.
        let (family, v4, v6) = unsafe { (c_int::from(self.v4.sin_family), self.v4, self.v6) };
        match family {
            libc::AF_INET if len as usize >= size_of::<sockaddr_in>() => {
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port))))
            }
            libc::AF_INET6 if len as usize >= size_of::<sockaddr_in6>() => {
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddr::V6(SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id)))
            }
            _ => None,
        }
    }
}

// The kernel's headers have lengths of 64 bits. musl's have 32 bits and padding, zero here because headers and control buffers
// begin as zeros, which is the same where the low half comes first. So the batch calls are made by their numbers: musl's own
// `sendmmsg` sends one message at a time.
#[cfg(not(target_endian = "little"))]
compile_error!("Culvert runs on little-endian machines only (remedy: build for x86_64 or aarch64)");

/// The arrays that the batch calls point into; one per worker, since a worker is in one call at a time.
#[derive(Default)]
pub(super) struct Scratch {
    headers: Vec<mmsghdr>,
    vectors: Vec<iovec>,
    names: Vec<Name>,
    controls: Vec<Control>,
    slots: Vec<Slot>,
}

/// One header of an [`Outgoing`] call.
#[derive(Clone)]
struct Slot {
    vectors: Range<usize>,
    name_len: socklen_t,
    control_len: usize,
    segments: u16,
    bytes: usize,
}

impl Scratch {
    /// An empty call for the kernel to send.
    pub(super) fn outgoing<'b>(&mut self) -> Outgoing<'_, 'b> {
        self.vectors.clear();
        self.names.clear();
        self.controls.clear();
        self.slots.clear();
        Outgoing { scratch: self, bytes: PhantomData }
    }

    fn headers(&mut self, count: usize) {
        // SAFETY: an mmsghdr is integers and pointers, for which zero is valid.
        self.headers.resize_with(count, || unsafe { mem::zeroed() });
    }
}

/// The result of one `recvmmsg` call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Received {
    /// Buffers that the kernel filled; fewer than the slots means that nothing was left.
    pub(super) buffers: usize,
    /// Buffers that were refused: truncated, or from no Internet address.
    pub(super) refused: usize,
}

/// Fills `batch` (cleared first) with what waits at `socket`. Buffers get the age `held`, or if that is `None`, the one
/// of the kernel's timestamp (see [`set_timestamps`]).
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    batch: &mut ReceiveBatch,
    scratch: &mut Scratch,
    held: Option<Duration>,
) -> io::Result<Received> {
    batch.clear();
    let slots = batch.slots();
    scratch.headers(slots);
    scratch.controls.resize(slots, Control([0; CONTROL_BYTES]));
    scratch.names.resize(slots, Name::ZERO);
    scratch.vectors.clear();
    scratch
        .vectors
        .extend(batch.rooms().map(|room| iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }));
    let vectors = scratch.vectors.as_mut_ptr();
    let names = scratch.names.as_mut_ptr();
    let controls = scratch.controls.as_mut_ptr();
    for (index, header) in scratch.headers.iter_mut().enumerate() {
        let header = &mut header.msg_hdr;
        header.msg_name = names.wrapping_add(index).cast();
        header.msg_namelen = size_of::<Name>() as socklen_t;
        header.msg_iov = vectors.wrapping_add(index);
        header.msg_iovlen = 1;
        header.msg_control = controls.wrapping_add(index).cast();
        header.msg_controllen = CONTROL_BYTES as _;
        header.msg_flags = 0;
    }
    let count = loop {
        // SAFETY: each of the `slots` headers points to its own name, vector and control of the scratch arrays, which
        // have that many elements and are not touched until the call returns; each vector points to its own room of
        // the batch, which is exclusively borrowed.
        let count = unsafe {
            libc::syscall(
                libc::SYS_recvmmsg,
                socket.as_raw_fd(),
                scratch.headers.as_mut_ptr(),
                slots as c_uint,
                libc::MSG_DONTWAIT,
                ptr::null_mut::<libc::timespec>(),
            )
        };
        match usize::try_from(count) {
            Ok(count) => break count,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    };
    let now = held.is_none().then(realtime);
    let held = held.unwrap_or_default();
    let mut refused = 0;
    for (slot, (header, name)) in scratch.headers.iter().zip(&scratch.names).take(count).enumerate() {
        match meta(header, name, held, now) {
            Some(meta) => batch.accept(slot, meta),
            None => refused += 1,
        }
    }
    Ok(Received { buffers: count, refused })
}

/// The metadata of the buffer of `header`; none if the buffer or its metadata was truncated. Its age is `held`, or if it is
/// stamped and `now` is known, the one at that time.
fn meta(header: &mmsghdr, name: &Name, held: Duration, now: Option<libc::timespec>) -> Option<Meta> {
    let len = header.msg_len as usize;
    let header = &header.msg_hdr;
    if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return None;
    }
    let source = name.address(header.msg_namelen)?;
    let mut meta = Meta { len, segment: len, source, local: None, ecn: 0, age: held };
    // SAFETY: `msg_control` and `msg_controllen` are those of the scratch array as the kernel left them.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !message.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a complete header within the control buffer.
        let (level, kind) = unsafe { ((*message).cmsg_level, (*message).cmsg_type) };
        // SAFETY: as above; the types are those of udp(7), ip(7) and ipv6(7).
        unsafe {
            match (level, kind) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    let segment = data::<c_int>(message).and_then(|size| usize::try_from(size).ok());
                    meta.segment = segment.filter(|size| *size > 0).unwrap_or(len);
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    // The local address that routing chose, which for a broadcast is not the header's.
                    meta.local = data::<libc::in_pktinfo>(message)
                        .map(|info| IpAddr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()));
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    meta.local =
                        data::<libc::in6_pktinfo>(message).map(|info| IpAddr::from(info.ipi6_addr.s6_addr));
                }
                (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => {
                    let then = data::<libc::timespec>(message);
                    meta.age = now.zip(then).map_or(held, |(now, then)| age(now, then));
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => {
                    meta.ecn = data::<u8>(message).unwrap_or(0) & 0b11;
                }
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    meta.ecn = (data::<c_int>(message).unwrap_or(0) & 0b11) as u8;
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    Some(meta)
}

/// Bytes of a page of memory.
pub(super) fn page_bytes() -> usize {
    // SAFETY: it takes a number and returns one.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(0).max(4096)
}

/// The bytes that were freed and that the C library keeps, of all its arenas, modulo 2^32; `None` if it does not say.
pub(super) fn freed_bytes() -> Option<u32> {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it reads what the library counts, under the library's own locks. `mallinfo2` has wider fields, from glibc 2.33 on.
        let counts = unsafe { libc::mallinfo() };
        Some(counts.fordblks.cast_unsigned())
    }
    #[cfg(not(target_env = "gnu"))]
    None
}

/// Has the C library give back what is free at the end of an arena beyond so many bytes.
pub(super) fn keep_at_end(bytes: i32) {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes two numbers.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, bytes)
    };
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
}

/// Has the C library give free pages back to the kernel, where it can do that.
pub(super) fn give_back_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it touches free memory only, under the library's own locks.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Gives whole pages of `bytes` back to the kernel: they read as zeros from then on.
pub(super) fn give_back(bytes: &mut [u8]) {
    let page = page_bytes();
    let start = bytes.as_ptr().align_offset(page).min(bytes.len());
    let len = (bytes.len() - start) / page * page;
    if len > 0 {
        // SAFETY: the pages are within `bytes`, which is borrowed for writing, is anonymous memory of the allocator, and holds any
        // values. On failure they stay as they are.
        unsafe { libc::madvise(bytes[start..].as_mut_ptr().cast(), len, libc::MADV_DONTNEED) };
    }
}

/// The system's time, by which the kernel stamps what it receives.
fn realtime() -> libc::timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, to which the pointer leads. It fails for unknown clocks only.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    now
}

/// From `then` to `now`, as far as it can be believed: the clock may have been set in between.
fn age(now: libc::timespec, then: libc::timespec) -> Duration {
    const LONGEST: Duration = Duration::from_secs(10);
    let seconds = now.tv_sec.saturating_sub(then.tv_sec);
    let nanos = seconds.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec - then.tv_nsec);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)).min(LONGEST)
}

/// The content of a control message, if it is large enough for a `T`.
///
/// # Safety
/// `message` points to a header within a control buffer that the kernel wrote, and any bytes are a valid `T`.
unsafe fn data<T: Copy>(message: *const cmsghdr) -> Option<T> {
    // SAFETY: the caller vouches for the header; its length covers what the kernel wrote behind it.
    unsafe {
        let complete = (*message).cmsg_len >= libc::CMSG_LEN(size_of::<T>() as c_uint) as _;
        complete.then(|| ptr::read_unaligned(libc::CMSG_DATA(message).cast::<T>()))
    }
}

/// The metadata of an outgoing buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Envelope {
    /// The destination; none on a connected socket.
    pub(super) destination: Option<SocketAddr>,
    /// The local address to send from.
    pub(super) source: Option<IpAddr>,
    /// The traffic class, DSCP and ECN.
    pub(super) tos: u8,
}

/// One `sendmmsg` call in the making; what it sends lives for `'b`.
pub(super) struct Outgoing<'s, 'b> {
    scratch: &'s mut Scratch,
    bytes: PhantomData<&'b [u8]>,
}

impl<'b> Outgoing<'_, 'b> {
    /// Headers of one call: past this the call's cost no longer shows.
    const MAX_HEADERS: usize = 64;

    /// Pieces of all headers of one call; one header alone may have 64.
    const MAX_PIECES: usize = 1_024;

    /// Whether another header still has room.
    pub(super) fn has_room(&self) -> bool {
        self.scratch.slots.len() < Self::MAX_HEADERS && self.scratch.vectors.len() < Self::MAX_PIECES
    }

    /// Adds a buffer of `segments` datagrams of `segment` bytes each, gathered from `pieces`.
    pub(super) fn push(
        &mut self,
        envelope: &Envelope,
        segment: usize,
        segments: u16,
        pieces: impl Iterator<Item = &'b [u8]>,
    ) {
        let scratch = &mut *self.scratch;
        let first = scratch.vectors.len();
        let mut bytes = 0;
        scratch.vectors.extend(pieces.map(|piece| {
            bytes += piece.len();
            iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() }
        }));
        let (name, name_len) = match envelope.destination {
            Some(destination) => Name::new(destination),
            None => (Name::ZERO, 0),
        };
        scratch.names.push(name);
        let mut control = Control([0; CONTROL_BYTES]);
        let control_len = outgoing_control(&mut control, envelope, segment, segments);
        scratch.controls.push(control);
        let vectors = first..scratch.vectors.len();
        scratch.slots.push(Slot { vectors, name_len, control_len, segments, bytes });
    }

    /// Segments and bytes of header `index`.
    pub(super) fn header(&self, index: usize) -> (u16, usize) {
        let slot = &self.scratch.slots[index];
        (slot.segments, slot.bytes)
    }

    /// The number of headers that were added.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.scratch.slots.len()
    }

    /// Keeps the first `count` headers, as a kernel that fails at the next one does.
    #[cfg(test)]
    pub(super) fn truncate(&mut self, count: usize) {
        self.scratch.slots.truncate(count);
    }

    /// Sends the headers in order, up to the first that fails: how many were sent, or why not even the first was.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let count = self.scratch.slots.len();
        self.scratch.headers(count);
        let scratch = &mut *self.scratch;
        let vectors = scratch.vectors.as_mut_ptr();
        let names = scratch.names.as_mut_ptr();
        let controls = scratch.controls.as_mut_ptr();
        for (index, (header, slot)) in scratch.headers.iter_mut().zip(&scratch.slots).enumerate() {
            let header: &mut msghdr = &mut header.msg_hdr;
            let name = names.wrapping_add(index).cast();
            header.msg_name = if slot.name_len == 0 { ptr::null_mut() } else { name };
            header.msg_namelen = slot.name_len;
            header.msg_iov = vectors.wrapping_add(slot.vectors.start);
            header.msg_iovlen = slot.vectors.len() as _;
            let control = controls.wrapping_add(index).cast();
            header.msg_control = if slot.control_len == 0 { ptr::null_mut() } else { control };
            header.msg_controllen = slot.control_len as _;
            header.msg_flags = 0;
        }
        // SAFETY: each of the `count` headers points into the scratch arrays at indices that `push` filled, and the
        // vectors to slices that live for 'b, which this borrow does not outlive; the kernel only reads them.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_sendmmsg,
                socket.as_raw_fd(),
                scratch.headers.as_mut_ptr(),
                count as c_uint,
                libc::MSG_DONTWAIT,
            )
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// Writes the control messages of an outgoing buffer; returns their length.
fn outgoing_control(control: &mut Control, envelope: &Envelope, segment: usize, segments: u16) -> usize {
    let mut len = 0;
    match envelope.source {
        Some(IpAddr::V4(source)) => {
            let info = libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(source.octets()) },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            len = append(control, len, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
        }
        Some(IpAddr::V6(source)) => {
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr: source.octets() },
                // A link-local source takes its interface from the destination's scope.
                ipi6_ifindex: 0,
            };
            len = append(control, len, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
        None => {}
    }
    if envelope.tos != 0 {
        let tos = c_int::from(envelope.tos);
        let v6 = match (envelope.destination, envelope.source) {
            (Some(destination), _) => destination.is_ipv6(),
            (None, Some(source)) => source.is_ipv6(),
            (None, None) => false,
        };
        len = if v6 {
            append(control, len, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, tos)
        } else {
            append(control, len, libc::IPPROTO_IP, libc::IP_TOS, tos)
        };
    }
    if segments > 1 {
        // A segment fits a message, which is shorter than 65,508 bytes.
        len = append(control, len, libc::SOL_UDP, libc::UDP_SEGMENT, segment as u16);
    }
    len
}

/// Writes a control message at `offset`; returns where the next one goes.
fn append<T: Copy>(control: &mut Control, offset: usize, level: c_int, kind: c_int, value: T) -> usize {
    // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
    let (space, len) =
        unsafe { (libc::CMSG_SPACE(size_of::<T>() as c_uint), libc::CMSG_LEN(size_of::<T>() as c_uint)) };
    let end = offset + space as usize;
    assert!(end <= CONTROL_BYTES, "the control buffer has room for every message at once");
    let message = control.0[offset..end].as_mut_ptr().cast::<cmsghdr>();
    // SAFETY: `offset` is a sum of CMSG_SPACEs, so it is as aligned as the buffer, which has a header's alignment; the
    // slice above proves that header and value lie within the buffer.
    unsafe {
        (*message).cmsg_len = len as _;
        (*message).cmsg_level = level;
        (*message).cmsg_type = kind;
        ptr::write_unaligned(libc::CMSG_DATA(message).cast::<T>(), value);
    }
    end
}

/// Registers `source`, the owner of a descriptor or a share of one, with the current runtime.
pub(super) fn watch<T: AsFd + AsRawFd>(source: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: the registration owns `source`, whose descriptor is open until it is dropped (I/O safety of `AsFd`), and nothing
    // replaces it: only shared references are handed out.
    unsafe { AsyncFd::register_with_interest(source, interest) }.map_err(Into::into)
}

/// Writes `pieces` as one packet of a TUN device.
pub(super) fn write_gathered<'b>(
    device: BorrowedFd<'_>,
    scratch: &mut Scratch,
    pieces: impl Iterator<Item = &'b [u8]>,
) -> io::Result<usize> {
    let vectors = &mut scratch.vectors;
    vectors.clear();
    vectors.extend(
        pieces.map(|piece| iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() }),
    );
    let count = c_int::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the vectors point to `count` slices that live for 'b, which this call does not outlive; the kernel only
    // reads them.
    let written = unsafe { libc::writev(device.as_raw_fd(), vectors.as_ptr(), count) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Whether the kernel knows `UDP_SEGMENT`; leaves the socket as it was.
pub(super) fn probe_gso(socket: BorrowedFd<'_>) -> bool {
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
}

/// Cuts every message of a socket into datagrams of `bytes`.
pub(super) fn set_segment(socket: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, bytes)
}

/// Lets `program` choose the socket of the group that `socket` is in; the kernel's hash chooses when it cannot.
pub(super) fn attach_steering(socket: BorrowedFd<'_>, program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The kernel reads `len` instructions of `program`, which outlives the call; it writes to neither.
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    set_value(socket, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, &program)
}

/// Asks for datagrams joined by `UDP_GRO`.
pub(super) fn set_gro(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Whether datagrams come joined by `UDP_GRO`.
pub(super) fn gro(socket: BorrowedFd<'_>) -> io::Result<bool> {
    get(socket, libc::SOL_UDP, libc::UDP_GRO).map(|[joined]| joined != 0)
}

/// Whether each buffer comes with the time at which the kernel got it. From the first time on it stamps what comes in
/// for as long as the socket lives, whether it tells or not.
pub(super) fn set_timestamps(socket: BorrowedFd<'_>, told: bool) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, told.into())
}

/// Never fragments, and sends up to the interface's MTU whatever an ICMP message said: QUIC probes for itself.
pub(super) fn set_mtu_probe(socket: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    let of_v4 = [libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE];
    set_of_family(socket, v6, of_v4, [libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE])
}

/// Asks for the local address of each datagram.
pub(super) fn set_pktinfo(socket: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    set_of_family(socket, v6, [libc::IP_PKTINFO, 1], [libc::IPV6_RECVPKTINFO, 1])
}

/// Asks for the traffic class of each datagram.
pub(super) fn set_receive_ecn(socket: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    set_of_family(socket, v6, [libc::IP_RECVTOS, 1], [libc::IPV6_RECVTCLASS, 1])
}

/// Sets the receive buffer beyond `net.core.rmem_max`; needs `CAP_NET_ADMIN`.
pub(super) fn force_receive_buffer(socket: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes)
}

/// Sets the send buffer beyond `net.core.wmem_max`; needs `CAP_NET_ADMIN`.
pub(super) fn force_send_buffer(socket: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes)
}

/// Bounds the bytes that wait in the kernel and were not sent: with more, the socket takes nothing and does not poll as writable.
pub(super) fn bound_unsent(socket: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes)
}

/// The bytes that this TCP socket took and the far end has not acknowledged.
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: c_int = 0;
    // SAFETY: TIOCOUTQ, by its other name SIOCOUTQ, writes an int, and nothing after the call (tcp(7)).
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(usize::try_from(bytes).unwrap_or(0)) }
}

/// The bytes of the kernel's memory that wait in this socket's receive buffer, and the buffers that the kernel dropped at it
/// since it was opened, a count that wraps at 2^32.
pub(super) fn receive_queue(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    /// The words of a `SK_MEMINFO_VARS` reply (linux/sock_diag.h).
    const WORDS: usize = libc::SK_MEMINFO_DROPS as usize + 1;
    let words: [u32; WORDS] = get(socket, libc::SOL_SOCKET, libc::SO_MEMINFO)?;
    Ok((words[libc::SK_MEMINFO_RMEM_ALLOC as usize], words[libc::SK_MEMINFO_DROPS as usize]))
}

/// What the kernel says of a TCP connection: the first words of a `struct tcp_info`; those that it does not know are 0.
pub(super) fn tcp_info(socket: BorrowedFd<'_>) -> io::Result<[u32; TCP_INFO_WORDS]> {
    get(socket, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// Asks the scheduler for time slices of `nanos` for the calling thread; says whether its policy is one that has them.
pub(super) fn set_time_slice(nanos: u64) -> io::Result<bool> {
    let size = size_of::<libc::sched_attr>() as c_uint;
    // SAFETY: the structure holds integers only, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes, which is the structure's size.
    if unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(false);
    }
    attributes.sched_runtime = nanos;
    // SAFETY: the kernel reads as many bytes as the structure says that it has, which it has said itself above.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if result == 0 { Ok(true) } else { Err(io::Error::last_os_error()) }
}

/// Has a netlink socket list only what is asked for, and refuse what it does not understand of a question.
pub(super) fn set_filtered_dumps(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 1)
}

/// Has a netlink socket be told of what `group` is about.
pub(super) fn join_netlink_group(socket: BorrowedFd<'_>, group: u32) -> io::Result<()> {
    set(socket, libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, group.cast_signed())
}

/// The largest packet that the kernel sends on the path of a connected socket, in bytes of IP.
pub(super) fn path_mtu(socket: BorrowedFd<'_>, v6: bool) -> io::Result<u32> {
    let (level, name) =
        if v6 { (libc::IPPROTO_IPV6, libc::IPV6_MTU) } else { (libc::IPPROTO_IP, libc::IP_MTU) };
    get(socket, level, name).map(|[mtu]| mtu)
}

/// Whether the system's clock is synchronised, and by how much the kernel says that it may be off at most; changes nothing.
pub(super) fn clock_state() -> io::Result<(bool, Duration)> {
    // SAFETY: the structure holds integers only, for which zero is a value; without modes nothing is set.
    let mut state: libc::timex = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes one timex, to which the pointer leads.
    if unsafe { libc::adjtimex(&raw mut state) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let most = Duration::from_micros(u64::try_from(state.maxerror).unwrap_or(0));
    Ok((state.status & libc::STA_UNSYNC == 0, most))
}

/// The features that devices of the TUN driver `driver` may have, as `IFF_` flags.
pub(super) fn tun_features(driver: BorrowedFd<'_>) -> io::Result<c_int> {
    let mut flags: c_uint = 0;
    // SAFETY: the kernel writes one unsigned int, to which the pointer leads.
    let result = unsafe { libc::ioctl(driver.as_raw_fd(), libc::TUNGETFEATURES, &raw mut flags) };
    if result == 0 { Ok(flags.cast_signed()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the bytes of the virtio header of a TUN device, for all of its queues.
pub(super) fn set_vnet_header(device: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    // SAFETY: the kernel reads one int, to which the pointer leads.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets what a TUN device hands over as one, as `TUN_F_` flags, for all of its queues.
pub(super) fn set_tun_offload(device: BorrowedFd<'_>, flags: c_uint) -> io::Result<()> {
    // SAFETY: the flags are the argument itself; no memory is passed.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets a UDP socket of IPv6 receive datagrams without a checksum (RFC 6936).
pub(super) fn accept_no_checksum(socket: BorrowedFd<'_>) -> io::Result<()> {
    /// As in linux/udp.h.
    const UDP_NO_CHECK6_RX: c_int = 102;
    set(socket, libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)
}

/// The answer of ethtool about an interface, for one of its commands that ask for a single number.
pub(super) fn ethtool_value(socket: BorrowedFd<'_>, interface: &str, command: u32) -> io::Result<u32> {
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    /// The ioctl number, as in linux/sockios.h.
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    let mut value = Value { command, data: 0 };
    // SAFETY: the structure holds integers and pointers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // The last byte of the name stays 0.
    let room = &mut request.ifr_name[..libc::IFNAMSIZ - 1];
    if interface.len() > room.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in room.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the kernel reads the request and the command, and for a command that asks writes one number behind it; both
    // live until the call returns.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if result == 0 { Ok(value.data) } else { Err(io::Error::last_os_error()) }
}

/// Sets an option that has another name for each family: name and value of both.
fn set_of_family(socket: BorrowedFd<'_>, v6: bool, of_v4: [c_int; 2], of_v6: [c_int; 2]) -> io::Result<()> {
    let (level, [name, value]) = if v6 { (libc::IPPROTO_IPV6, of_v6) } else { (libc::IPPROTO_IP, of_v4) };
    set(socket, level, name, value)
}

fn set(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    set_value(socket, level, name, &value)
}

fn set_value<T>(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let (pointer, len) = (ptr::from_ref(value).cast(), size_of::<T>() as socklen_t);
    // SAFETY: the kernel reads `len` bytes from `value`, which is its size.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, pointer, len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An option that is one or several words; those that the kernel does not write are 0.
fn get<const WORDS: usize>(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<[u32; WORDS]> {
    let mut words = [0; WORDS];
    let mut len = size_of_val(&words) as socklen_t;
    let pointer = words.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes, which is the array's size.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, pointer, &raw mut len) };
    if result == 0 { Ok(words) } else { Err(io::Error::last_os_error()) }
}

/// The index of the interface with this name.
pub(crate) fn interface_index(name: &str) -> io::Result<u32> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: the name ends with a zero byte, and outlives the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_never_negative_and_never_absurd() {
        let at = |tv_sec, tv_nsec| libc::timespec { tv_sec, tv_nsec };
        assert_eq!(age(at(5, 100), at(4, 999_999_900)), Duration::from_nanos(200));
        assert_eq!(age(at(5, 0), at(5, 1)), Duration::ZERO, "the clock was set back");
        assert_eq!(age(at(i64::MAX, 0), at(-1, 0)), Duration::from_secs(10), "the clock was set");
    }

    #[test]
    fn a_name_keeps_address_port_and_scope() {
        for text in ["127.0.0.5:4433", "[2001:db8::1]:53", "[fe80::1%7]:9"] {
            let address: SocketAddr = text.parse().unwrap();
            let (name, len) = Name::new(address);
            assert_eq!(name.address(len), Some(address));
            assert_eq!(name.address(len - 1), None, "a cut name is refused");
        }
        assert_eq!(Name::ZERO.address(size_of::<Name>() as socklen_t), None);
    }
}
