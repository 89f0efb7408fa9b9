//! What tests of several crates share; never part of the shipped binary.

pub mod fuzz;

pub mod scripts;

pub mod simulation;
