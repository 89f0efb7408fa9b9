//! The committed corpora, replayed and mutated. How many mutants each input has is such that a target takes some tenths of a second.

include!("../../../../../fuzz/replay.rs");

#[test]
fn every_target_is_replayed_by_an_ordinary_test() {
    const TARGETS: &str = include_str!("../../../../../fuzz/Cargo.toml");
    const TESTS: [&str; 2] = [include_str!("tests.rs"), include_str!("../../../../../quic-core/src/fuzz.rs")];
    let names = TARGETS.split("[[bin]]").skip(1).map(|bin| {
        let name = bin.lines().find_map(|line| line.strip_prefix("name = \"")).unwrap();
        name.trim_end_matches('"')
    });
    let names: Vec<&str> = names.collect();
    assert!(names.len() >= 30, "{names:?}");
    for name in names {
        let call = format!("replay(\"{name}\", ");
        let mutants = TESTS.iter().find_map(|tests| tests.split_once(&call)).map(|(_, rest)| {
            let digits = rest.split_once(',').unwrap().0;
            digits.parse::<u32>().unwrap()
        });
        assert!(mutants.is_some_and(|mutants| mutants > 0), "no test mutates the corpus of {name}");
    }
}

#[test]
fn the_corpus_of_control_messages() {
    replay("control_messages", 50, crate::fuzz::control_messages);
}

#[test]
fn the_corpus_of_proxy_headers() {
    replay("proxy_header", 50, crate::fuzz::proxy_header);
}

#[test]
fn the_corpus_of_payload_contexts() {
    replay("payload_context", 50, crate::fuzz::payload_context);
}

#[test]
fn the_corpus_of_configurations() {
    replay("config_text", 50, crate::fuzz::config_text);
}

#[test]
fn the_corpus_of_state_files() {
    replay("state_text", 50, crate::fuzz::state_text);
}

#[test]
fn the_corpus_of_reloads() {
    replay("reload_files", 50, crate::fuzz::reload_files);
}

#[test]
fn the_corpus_of_share_links() {
    replay("share_link", 50, crate::fuzz::share_link);
}

#[test]
fn the_corpus_of_key_files() {
    replay("key_file", 50, crate::fuzz::key_file);
}

#[test]
fn the_corpus_of_requests() {
    replay("socket_request", 50, crate::fuzz::socket_request);
}

#[test]
fn the_corpus_of_answers() {
    replay("socket_answer", 50, crate::fuzz::socket_answer);
}

#[test]
fn the_corpus_of_files_of_the_host() {
    replay("host_text", 50, crate::fuzz::host_text);
}

#[test]
fn the_corpus_of_journals() {
    replay("knock_journal", 50, crate::fuzz::knock_journal);
}

#[test]
fn the_corpus_of_ip_packets() {
    replay("ip_view", 50, crate::fuzz::ip_view);
}

#[test]
fn the_corpus_of_packets_that_are_too_large() {
    replay("ip_fragments", 50, crate::fuzz::ip_fragments);
}

#[test]
fn the_corpus_of_mapped_packets() {
    replay("ip_map", 50, crate::fuzz::ip_map);
}

#[test]
fn the_corpus_of_super_packets() {
    replay("ip_cut", 50, crate::fuzz::ip_cut);
}

#[test]
fn the_corpus_of_packets_from_peers() {
    replay("ip_merge", 50, crate::fuzz::ip_merge);
}

#[test]
fn the_corpus_of_super_packets_inside_of_tunnels() {
    replay("ip_tunnel_cut", 50, crate::fuzz::ip_tunnel_cut);
}

#[test]
fn the_corpus_of_packets_inside_of_tunnels() {
    replay("ip_tunnel_merge", 50, crate::fuzz::ip_tunnel_merge);
}

#[test]
fn the_corpus_of_pieces() {
    replay("reassembly", 50, crate::fuzz::reassembly);
}

#[test]
fn the_corpus_of_repaired_paths() {
    replay("repair_path", 50, crate::fuzz::repair_path);
}

#[test]
fn the_corpus_of_lying_repairs() {
    replay("repair_peer", 50, crate::fuzz::repair_peer);
}

#[test]
fn the_corpus_of_datagrams() {
    replay("classify", 50, crate::fuzz::classify);
}

#[test]
fn the_corpus_of_knocks() {
    replay("knock_open", 50, crate::fuzz::knock_open);
}

#[test]
fn the_corpus_of_initials() {
    replay("gate_initial", 50, crate::fuzz::gate_initial);
    replay("gate_parts", 8, crate::fuzz::gate_parts);
}

#[test]
fn the_corpus_of_tokens() {
    replay("retry_token", 50, crate::fuzz::retry_token);
}

#[test]
fn the_corpus_of_strangers() {
    replay("decoy_flows", 50, crate::fuzz::decoy_flows);
}

#[test]
fn the_corpus_of_server_hellos() {
    replay("server_hello", 50, crate::fuzz::server_hello);
}

#[test]
fn the_corpus_of_certificates() {
    replay("certificate", 50, crate::fuzz::certificate);
}

#[test]
fn the_corpus_of_http_connections() {
    replay("http_connection", 50, crate::fuzz::http_connection);
}

#[test]
fn the_corpus_of_http_fields() {
    replay("http_fields", 50, crate::fuzz::http_fields);
}

#[test]
fn the_corpus_of_ip_capsules() {
    replay("ip_capsules", 50, crate::fuzz::ip_capsules);
}

#[test]
fn the_corpus_of_http_capsules() {
    replay("http_capsules", 50, crate::fuzz::http_capsules);
}

#[test]
fn the_corpus_of_user_requests() {
    replay("user_request", 50, crate::fuzz::user_request);
}

#[test]
fn the_corpus_of_bench() {
    replay("bench_datagram", 50, crate::fuzz::bench_datagram);
}
