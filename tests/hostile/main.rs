//! A hostile peer at a real agent.

mod peer;
