//! `[http]`: the files of its certificate, and what an operator is told of them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use gate::identity::Identity;

use crate::{
    Config,
    reload::{self, Effect},
    reload_tests::parse,
};

/// A folder with an identity, in which configurations are read.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
        Self(folder)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// Writes the certificate `file`.pem for these names, which ends in `year`, and its key.
    fn certificate(&self, file: &str, names: &[&str], year: i32) {
        let key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = rcgen::CertificateParams::new(names).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        fs::write(
            self.path(&format!("{file}.pem")),
            pem("CERTIFICATE", params.self_signed(&key).unwrap().der()),
        )
        .unwrap();
        fs::write(self.path(&format!("{file}.key")), pem("PRIVATE KEY", &key.serialize_der())).unwrap();
    }

    /// What is said of a configuration with these lines of `[http]`: an error, or notes.
    fn load(&self, http: &str) -> Result<(Config, String), String> {
        let text = format!(
            "identity = {{ key_file = \"id.key\", state_dir = \"\" }}\ncontrol.socket = \"\"\n\
             transport.listen = [\"127.0.0.1:4433\"]\n[http]\n{http}"
        );
        let file = self.path("agent.toml");
        fs::write(&file, text).map_err(|error| error.to_string())?;
        let (config, _) = Config::load(Path::new(&file)).map_err(|error| error.to_string())?;
        let notes: Vec<String> = config.notes.iter().map(ToString::to_string).collect();
        Ok((config, notes.join("\n")))
    }
}

fn lines(certificate: &str, key: &str, names: &str) -> String {
    format!("certificate_file = \"{certificate}\"\nkey_file = \"{key}\"\nnames = [{names}]\n")
}

#[test]
fn a_certificate_is_read_with_its_key_and_has_to_cover_the_names() {
    let folder = Folder::new();
    folder.certificate("a", &["gw.example.net", "*.example.org"], 2099);
    folder.certificate("b", &["gw.example.net"], 2099);
    let names = "\"gw.example.net\", \"www.example.org\"";
    let (config, notes) = folder.load(&lines("a.pem", "a.key", names)).unwrap();
    assert_eq!(config.web_names(), ["gw.example.net", "www.example.org"]);
    assert!(!notes.contains("http") && !notes.contains("certificate"), "{notes}");
    for (certificate, key, names, said) in [
        ("b.pem", "b.key", names, "\"www.example.org\" is not among the names of the certificate"),
        ("a.pem", "b.key", names, "is not that of the certificate"),
        ("c.pem", "a.key", names, "http.certificate_file"),
        ("a.pem", "c.key", names, "http.key_file"),
        ("a.key", "a.key", names, "has no certificate in PEM form"),
        ("a.pem", "a.pem", names, "has no private key in PEM form"),
        ("a.pem", "a.key", "\"gw.example.net:443\"", "is not the name of a host"),
    ] {
        let error = folder.load(&lines(certificate, key, names)).unwrap_err();
        assert!(error.contains(said), "{said}: {error}");
    }
    let error = folder.load("site = \"https://a:1\"").unwrap_err();
    assert!(error.contains("http.site") && error.contains("http://127.0.0.1:8080"), "{error}");
}

#[test]
fn an_operator_is_told_what_is_missing_and_what_ends() {
    let folder = Folder::new();
    folder.certificate("old", &["gw.example.net"], 2001);
    let (_, notes) = folder.load(&lines("old.pem", "old.key", "\"gw.example.net\"")).unwrap();
    assert!(notes.contains("the certificate has ended, or ends today"), "{notes}");
    let (config, notes) = folder.load("names = [\"gw.example.net\"]").unwrap();
    assert!(notes.contains("there is no http.certificate_file, so nobody meets a web server"), "{notes}");
    assert_eq!(config.web_names(), &[] as &[String]);
    let (_, notes) = folder.load("certificate_file = \"old.pem\"\nkey_file = \"old.key\"").unwrap();
    assert!(notes.contains("there is no http.names"), "{notes}");
}

#[test]
fn the_web_server_on_tcp_needs_a_certificate_or_a_server_in_front() {
    let folder = Folder::new();
    folder.certificate("a", &["gw.example.net"], 2099);
    let pair = "certificate_file = \"a.pem\"\nkey_file = \"a.key\"\n";
    let named = lines("a.pem", "a.key", "\"gw.example.net\"");
    let error = folder.load("listen = [\"127.0.0.1:4433\"]").unwrap_err();
    assert!(error.contains("there is no http.certificate_file, which TLS needs"), "{error}");
    for (lines, said) in [
        // Every name is served on TCP, so none has to be written.
        (format!("{pair}listen = [\"127.0.0.1:4433\"]"), ""),
        (format!("{named}listen = [\"127.0.0.1:4433\", \"127.0.0.1:80\"]"), ""),
        (format!("{named}listen = [\"127.0.0.1:443\"]"), "HTTP/3 is at UDP port 4433"),
        ("listen = [\"127.0.0.1:80\"]\ntls = false".to_owned(), ""),
        ("listen = [\"192.0.2.1:80\"]\ntls = false".to_owned(), "answered without encryption"),
        ("listen = [\"192.0.2.1:80\"]\ntls = false\ntrusted = [\"192.0.2.2/32\"]".to_owned(), ""),
        (format!("{pair}listen = [\"127.0.0.1:4433\"]\ntrusted = [\"0.0.0.0/0\"]"), "everybody may say"),
        ("trusted = [\"192.0.2.2/32\"]".to_owned(), "http.trusted: has no effect without http.listen"),
    ] {
        let (_, notes) = folder.load(&lines).unwrap();
        let of_http: Vec<&str> = notes.lines().filter(|note| note.contains("http.")).collect();
        let fits = if said.is_empty() { of_http.is_empty() } else { of_http.join(" ").contains(said) };
        assert!(fits, "{lines}: {notes}");
    }
}

#[test]
fn a_reload_takes_a_renewed_certificate() {
    let folder = Folder::new();
    let http = lines("a.pem", "a.key", "\"gw.example.net\"");
    folder.certificate("a", &["gw.example.net"], 2098);
    let (running, _) = folder.load(&http).unwrap();
    let (same, _) = folder.load(&http).unwrap();
    assert_eq!(reload::plan(&running, same), reload::Plan::default());
    folder.certificate("a", &["gw.example.net"], 2099);
    let (renewed, _) = folder.load(&http).unwrap();
    let plan = reload::plan(&running, renewed.clone());
    assert_eq!(plan.config.map(|config| config.certificate), Some(renewed.certificate));
    let [change] = &plan.changes[..] else { panic!("{:?}", plan.changes) };
    assert_eq!((&*change.what, change.effect), ("http: certificate", Effect::NextConnection));
    assert!(format!("{:?}", change.kind).contains("2099-01-01"), "{:?}", change.kind);
    // Without the files nothing is read: that is for whoever loads.
    assert_eq!(parse("identity.key_file = \"a\"\ntransport.listen = [\"127.0.0.1:1\"]\n").certificate, None);
}

/// `der` in PEM form (RFC 7468).
fn pem(label: &str, der: &[u8]) -> String {
    let text = data_encoding::BASE64.encode(der);
    format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
}
