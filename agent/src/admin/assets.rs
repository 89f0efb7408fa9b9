//! The files of the status page, which are in the program.

use hyper::header::{CONTENT_SECURITY_POLICY, HeaderValue, REFERRER_POLICY};

use super::answers::{Answer, ok};

#[derive(Clone, Copy, Debug)]
pub(super) struct Asset {
    content_type: &'static str,
    text: &'static str,
}

/// The page loads its own files and nothing else, sends no form, stands in no frame, and makes no markup of a text: a browser
/// that knows Trusted Types refuses that, whatever the script does.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

impl Asset {
    pub(super) fn of(path: &str) -> Option<Self> {
        let (content_type, text) = match path {
            "/" => ("text/html; charset=utf-8", include_str!("page/index.html")),
            "/page.css" => ("text/css; charset=utf-8", include_str!("page/page.css")),
            "/page.js" => ("text/javascript; charset=utf-8", include_str!("page/page.js")),
            "/details.js" => ("text/javascript; charset=utf-8", include_str!("page/details.js")),
            "/view.js" => ("text/javascript; charset=utf-8", include_str!("page/view.js")),
            _ => return None,
        };
        Some(Self { content_type, text })
    }

    pub(super) fn answer(self) -> Answer {
        let mut answer = ok(self.content_type, self.text);
        let headers = answer.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        answer
    }
}
