//! What `deploy/prometheus`, `deploy/grafana` and the documents say of metrics, against the registry and against a real
//! Prometheus that scrapes two agents; and the links of the documents.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod documents;
mod expressions;
mod files;
mod links;
mod server;
mod words;
