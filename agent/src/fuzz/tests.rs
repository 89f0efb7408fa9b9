//! The committed corpora, replayed.

use std::path::Path;

/// Runs `target` on each file of its corpus. The file that fails is the last one named.
fn replay(name: &str, target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "a corpus of {} files", files.len());
    for file in files {
        println!("{}", file.display());
        target(&std::fs::read(&file).unwrap());
    }
}

#[test]
fn the_corpus_of_control_messages() {
    replay("control_messages", super::control_messages);
}

#[test]
fn the_corpus_of_payload_contexts() {
    replay("payload_context", super::payload_context);
}

#[test]
fn the_corpus_of_configurations() {
    replay("config_text", super::config_text);
}

#[test]
fn the_corpus_of_state_files() {
    replay("state_text", super::state_text);
}

#[test]
fn the_corpus_of_reloads() {
    replay("reload_files", super::reload_files);
}

#[test]
fn the_corpus_of_share_links() {
    replay("share_link", super::share_link);
}

#[test]
fn the_corpus_of_key_files() {
    replay("key_file", super::key_file);
}

#[test]
fn the_corpus_of_requests() {
    replay("socket_request", super::socket_request);
}

#[test]
fn the_corpus_of_answers() {
    replay("socket_answer", super::socket_answer);
}

#[test]
fn the_corpus_of_files_of_the_host() {
    replay("host_text", super::host_text);
}

#[test]
fn the_corpus_of_journals() {
    replay("knock_journal", super::knock_journal);
}

#[test]
fn the_corpus_of_ip_packets() {
    replay("ip_view", super::ip_view);
}

#[test]
fn the_corpus_of_packets_that_are_too_large() {
    replay("ip_fragments", super::ip_fragments);
}

#[test]
fn the_corpus_of_super_packets() {
    replay("ip_cut", super::ip_cut);
}

#[test]
fn the_corpus_of_packets_from_peers() {
    replay("ip_merge", super::ip_merge);
}

#[test]
fn the_corpus_of_pieces() {
    replay("reassembly", super::reassembly);
}

#[test]
fn the_corpus_of_datagrams() {
    replay("classify", super::classify);
}

#[test]
fn the_corpus_of_knocks() {
    replay("knock_open", super::knock_open);
}

#[test]
fn the_corpus_of_initials() {
    replay("gate_initial", super::gate_initial);
}

#[test]
fn the_corpus_of_tokens() {
    replay("retry_token", super::retry_token);
}

#[test]
fn the_corpus_of_strangers() {
    replay("decoy_flows", super::decoy_flows);
}

#[test]
fn the_corpus_of_server_hellos() {
    replay("server_hello", super::server_hello);
}

#[test]
fn the_corpus_of_certificates() {
    replay("certificate", super::certificate);
}

#[test]
fn the_corpus_of_bench() {
    replay("bench_datagram", super::bench_datagram);
}
