//! Panics on demand, for the tests of what a panic ends. Only a build with the feature `fault-injection` has them; it is never
//! shipped.
//!
//! `GET /fault/NAME` of the admin server arms a [`Fault`]; the next time that its place is reached, it panics there.

/// A place that can be made to panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An answer of the admin server is made.
    Admin,
    /// The metrics are rendered.
    Render,
    /// A request of the control socket is answered.
    Control,
    /// The list of peers is read, under its lock.
    Roster,
    /// A name is looked up.
    Resolver,
    /// A reload has read the file.
    Reload,
    /// A reload has begun to change what runs.
    Follow,
    /// The tunnel's thread looks at the device and its routes.
    Tunnel,
    /// A worker takes a turn.
    Worker,
}

/// Panics here if `fault` is armed.
#[cfg(not(feature = "fault-injection"))]
#[inline]
pub const fn point(_fault: Fault) {}

#[cfg(feature = "fault-injection")]
pub use injected::{arm, point};

#[cfg(feature = "fault-injection")]
mod injected {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::Fault;

    const ALL: [(&str, Fault); 9] = [
        ("admin", Fault::Admin),
        ("render", Fault::Render),
        ("control", Fault::Control),
        ("roster", Fault::Roster),
        ("resolver", Fault::Resolver),
        ("reload", Fault::Reload),
        ("follow", Fault::Follow),
        ("tunnel", Fault::Tunnel),
        ("worker", Fault::Worker),
    ];

    static ARMED: [AtomicBool; ALL.len()] = [const { AtomicBool::new(false) }; ALL.len()];

    /// Arms the fault of this name; false if there is none.
    pub fn arm(name: &str) -> bool {
        let fault = ALL.iter().find(|(known, _)| *known == name);
        if let Some((_, fault)) = fault {
            ARMED[*fault as usize].store(true, Ordering::SeqCst);
        }
        fault.is_some()
    }

    /// Panics here if `fault` is armed, and disarms it.
    pub fn point(fault: Fault) {
        let armed = &ARMED[fault as usize];
        if armed.load(Ordering::Relaxed) && armed.swap(false, Ordering::SeqCst) {
            panic!("injected: {fault:?}");
        }
    }
}
