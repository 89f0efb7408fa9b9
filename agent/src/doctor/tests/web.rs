//! When the checks of the web server fire, and when they do not.

use super::*;

/// The names of the web server in the configuration.
const NAMES: &str = "names = [\"gw.example.net\"]";

pub(super) fn fires(check: Check) -> Vec<(Severity, Edit, Change)> {
    use Severity::{Error, Note, Warning};
    if check == Check::WebServer {
        vec![
            (Warning, (NAMES, "names = [\"gw.example.net\"]\nlisten = [\"0.0.0.0:443\"]"), |_| {}),
            (Note, (NAMES, "names = [\"gw.example.net\"]\nlisten = [\"0.0.0.0:4433\"]"), |_| {}),
            (Note, (NAMES, "listen = [\"0.0.0.0:4433\"]"), |_| {}),
        ]
    } else if check == Check::WebCertificate {
        vec![
            (Warning, AS_IT_IS, |f| f.web.certificate_days = Some(13)),
            (Error, AS_IT_IS, |f| f.web.certificate_days = Some(0)),
        ]
    } else {
        vec![(Warning, AS_IT_IS, |f| f.web.site = Some(Err("does not answer: refused".to_owned())))]
    }
}

pub(super) fn quiet(check: Check) -> Vec<(Edit, Change)> {
    if check == Check::WebServer {
        vec![
            (AS_IT_IS, |_| {}),
            // Behind a server that ends TLS.
            ((NAMES, "listen = [\"127.0.0.1:8443\"]\ntls = false"), |_| {}),
            ((NAMES, "names = [\"gw.example.net\"]\nlisten = [\"127.0.0.1:4433\"]"), |_| {}),
        ]
    } else if check == Check::WebCertificate {
        vec![(AS_IT_IS, |f| f.web.certificate_days = Some(14))]
    } else {
        vec![(AS_IT_IS, |f| f.web.site = Some(Ok(404)))]
    }
}
