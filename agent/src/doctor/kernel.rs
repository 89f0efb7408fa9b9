//! What the kernel and the CPU can do (pure).

use config::Config;

use super::{
    Check, Finding,
    facts::{Facts, Kernel, Tried},
};

/// `UDP_GRO` came with 5.0; `UDP_SEGMENT` with 4.18, `SO_MEMINFO` with 4.12, steering with 4.5.
const LEAST_VERSION: (u32, u32) = (5, 0);

pub(super) fn checks(facts: &Facts, config: Option<&Config>) -> Vec<Finding> {
    let kernel = &facts.kernel;
    let segmentation = tried(
        Check::UdpSegmentation,
        "UDP_SEGMENT",
        &kernel.segmentation,
        "each datagram is sent by itself, which costs several times the CPU",
        "a kernel from 4.18 on; in a container, a seccomp profile that allows the socket option UDP_SEGMENT",
    );
    vec![
        version(kernel),
        failing_segmentation(facts, segmentation).note_if(
            config.is_some_and(|config| !config.transport.gso),
            "transport.gso = \"off\": each datagram is sent by itself, which costs several times the CPU",
            "transport.gso = \"auto\"",
        ),
        receive_offload(kernel),
        steering(kernel, config),
        tried(
            Check::Timestamps,
            "SO_TIMESTAMPNS",
            &kernel.timestamps,
            "the time that datagrams wait in the kernel does not count against peer.queue.time",
            "a seccomp profile that allows the socket option SO_TIMESTAMPNS",
        ),
        cpu(kernel),
    ]
}

/// The loopback device of older kernels cuts messages itself, so only the option counts: what other interfaces receive is joined.
fn receive_offload(kernel: &Kernel) -> Finding {
    let found = tried(
        Check::UdpReceiveOffload,
        "UDP_GRO",
        &kernel.receive_offload,
        "each datagram comes in a buffer of its own, which costs several times the CPU",
        "a kernel from 5.0 on; in a container, a seccomp profile that allows the socket option UDP_GRO",
    );
    match (&kernel.receive_offload, kernel.takes_gro) {
        (Ok(false), true) => {
            Finding::ok(Check::UdpReceiveOffload, "UDP_GRO", "works, though not over this kernel's loopback")
        }
        (Ok(_) | Err(_), _) => found,
    }
}

/// What the daemon that runs has met: an interface without checksum offload takes no segments, which loopback does not show.
fn failing_segmentation(facts: &Facts, found: Finding) -> Finding {
    let peers = facts.daemon.status().into_iter().flat_map(|status| &status.peers);
    let failing = peers.filter(|peer| peer.lanes.iter().any(|lane| lane.gso == "failed"));
    let failing: Vec<&str> = failing.map(|peer| &*peer.name).collect();
    found.warning_if(
        !failing.is_empty(),
        format!(
            "the interface towards {} refuses it (EIO): each datagram is sent by itself, which costs several times the CPU",
            failing.join(", ")
        ),
        "ethtool -k shows tx-checksumming of the interface, ethtool -K DEV tx on switches it on; IPsec on the way out excludes it",
    )
}

/// Major and minor number of a kernel's release, as in "6.12.48+deb13-amd64".
pub(super) fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|character: char| !character.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn version(kernel: &Kernel) -> Finding {
    let version = numbers(&kernel.release);
    Finding::ok(Check::KernelVersion, "Linux", kernel.release.clone())
        .note_if(
            version.is_none(),
            "its version cannot be told",
            "what the agent uses of it is tried below: see there",
        )
        .warning_if(
            version < Some(LEAST_VERSION),
            "older than 5.0: datagrams are received one by one, or sent so, too",
            "a kernel from 5.0 on; from 6.2 on, UDP crosses the TUN device in super-packets, too",
        )
}

fn steering(kernel: &Kernel, config: Option<&Config>) -> Finding {
    const OPTION: &str = "SO_ATTACH_REUSEPORT_CBPF";
    if config.is_some_and(|config| config.worker_count() == 1) {
        return Finding::ok(Check::Steering, OPTION, "not needed by one worker");
    }
    tried(
        Check::Steering,
        OPTION,
        &kernel.steering,
        "the kernel does not give datagrams to their workers, which hand them over between threads",
        "a seccomp profile that allows the socket option SO_ATTACH_REUSEPORT_CBPF, or transport.workers = 1",
    )
}

fn cpu(kernel: &Kernel) -> Finding {
    let value = match (kernel.aes, kernel.vector_aes) {
        (false, _) => "no AES",
        (true, Some(true)) => "AES, VAES",
        (true, Some(false)) => "AES, no VAES",
        (true, None) => "AES",
    };
    Finding::ok(Check::CpuFeatures, "CPU", value).note_if(
        !kernel.aes,
        "packets are protected by ChaCha20-Poly1305, which costs more than AES-GCM with instructions for it",
        "in a virtual machine, the host's CPU type (QEMU: -cpu host)",
    )
}

/// An option that was tried: a warning if the kernel has it not, a note if that is not known.
fn tried(check: Check, option: &str, tried: &Tried, problem: &str, remedy: &str) -> Finding {
    match tried {
        Ok(true) => Finding::ok(check, option, "works"),
        Ok(false) => Finding::ok(check, option, "does not work").warning(problem, remedy),
        Err(error) => Finding::ok(check, option, "not tried").note(
            format!("it could not be tried: {error}"),
            "ip link set lo up, and a firewall that lets loopback pass",
        ),
    }
}
