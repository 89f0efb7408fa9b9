//! Nothing: a package needs a target besides its tests, which are in `main.rs`.
