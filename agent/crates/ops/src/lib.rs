//! What an operator sees of a running agent, and how it is told to change.
//!
//! | what | module |
//! |---|---|
//! | the control socket: requests, answers, status as JSON and text | [`control_socket`] |
//! | how requests are carried out by the running daemon | [`operator`] |
//! | counters for Prometheus | [`metrics`] |
//! | the figures of the status page, and their last ten minutes | [`web`] |
//! | the sockets of the web server on TCP | [`web_server`] |
//! | the admin server at a reload | [`admin_server`] |
//! | captures, as qlog files | [`qlog`] |
//! | what `[records]` writes | [`records`] |
//! | a reload, from the file to the workers | [`reload`] |
//! | the state file, written by the daemon | `state_file` |
//! | logging | [`log`] |
//! | the limit on open files | [`descriptors`] |

pub mod admin_server;
pub mod control_socket;
pub mod descriptors;
pub mod log;
pub mod metrics;
pub mod operator;

pub mod qlog;
pub mod quotas;
pub mod records;
pub mod reload;
mod reload_error;
mod state_file;
pub mod web;
pub mod web_server;
