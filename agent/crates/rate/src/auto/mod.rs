//! The control law of an automatic rate: pure. `automatic.rs` tells it what leaves and what the far end reports.
//!
//! | question | file |
//! |---|---|
//! | how fast to send with `rate = "auto"` | `law.rs` |
//! | is the link full, how fast is it, how long is its queue | `evidence.rs` |
//! | what the far end reported, over all lanes | `reports.rs` |
//! | the clocks' skew and the path's shortest delay | `skew.rs` |
//! | what left, and when | `sent.rs` |
//! | the rate beside others that fill the link | `cubic.rs` |

mod cubic;
mod evidence;
pub mod law;
#[cfg(test)]
mod law_tests;
#[cfg(test)]
mod link_model;
mod reports;
mod sent;
mod skew;

pub use law::{Bounds, Figures, Law, Phase};
pub use reports::{CONNECTIONS, Sample};
