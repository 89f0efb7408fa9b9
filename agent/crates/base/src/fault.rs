//! Panics on demand, for the tests of what a panic ends. Only a build with the feature `fault-injection` has them; it is never
//! shipped.
//!
//! `GET /fault/NAME` of the admin server arms a [`Fault`]; the code that reaches it next panics there.

crate::labelled! {
    /// A point of the code that can be made to panic.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Fault {
        /// An answer of the admin server is made.
        Admin => "admin",
        /// The metrics are rendered as text.
        Render => "render",
        /// A request of the control socket is answered.
        Control => "control",
        /// The list of peers is read, under its lock.
        Roster => "roster",
        /// A name is looked up on a resolver thread.
        Resolver => "resolver",
        /// A reload has read the file.
        Reload => "reload",
        /// A reload starts to change what runs.
        Follow => "follow",
        /// The tunnel's thread looks at the device and its routes.
        Tunnel => "tunnel",
        /// A worker begins to take a turn.
        Worker => "worker",
    }
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

    static ARMED: [AtomicBool; Fault::COUNT] = [const { AtomicBool::new(false) }; Fault::COUNT];

    /// Arms the fault of this name; false if there is none.
    pub fn arm(name: &str) -> bool {
        let fault = Fault::LABELS.iter().position(|label| *label == name);
        if let Some(fault) = fault {
            ARMED[fault].store(true, Ordering::SeqCst);
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
