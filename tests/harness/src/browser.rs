//! A headless Chromium, driven through its WebDriver (JSON over HTTP).

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    ports,
    process::{Running, run, text},
    venv,
};

/// What a test in a browser needs.
pub const BROWSER: &[Need] =
    &[Need::Tool("chromium", "chromium"), Need::Tool("chromedriver", "chromium-driver")];

/// A browser with one window and a profile of its own; dropping it ends it.
#[derive(Debug)]
pub struct Browser {
    driver: Running,
    address: SocketAddr,
    session: String,
    profile: TempDir,
}

impl Browser {
    /// Starts one.
    ///
    /// # Panics
    /// When Chromium or its driver does not start; the test must have asked [`needs::met`].
    #[must_use]
    pub fn new() -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
        let profile = tempfile::tempdir().expect("the disk has room");
        let mut command = Command::new(needs::tool("chromedriver").expect("needs::met was asked"));
        command.arg(format!("--port={}", address.port()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let driver = Running::start("chromedriver", &mut command);
        let mut browser = Self { driver, address, session: String::new(), profile };
        clock::until("chromedriver is ready", PATIENCE, || browser.exchange("GET", "/status", &Value::Null));
        let profile = format!("--user-data-dir={}", browser.profile.path().display());
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-lcd-text",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            &profile,
        ];
        let capabilities = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": { "browser": "ALL" },
            "goog:chromeOptions": { "binary": needs::tool("chromium"), "args": arguments },
        } } });
        let made = browser.exchange("POST", "/session", &capabilities).expect("Chromium starts");
        browser.session = made["sessionId"].as_str().expect("a session has a name").to_owned();
        browser.size(1280, 960);
        browser
    }

    /// The size of the window's content, in CSS pixels.
    pub fn size(&self, width: u32, height: u32) {
        let screen =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.cdp("Emulation.setDeviceMetricsOverride", &screen);
    }

    /// What the reader's system prefers: "light" or "dark".
    pub fn colours(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.cdp("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    /// A command of the DevTools protocol.
    pub fn cdp(&self, command: &str, parameters: &Value) -> Value {
        self.ask("goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    /// Loads a page, anew where only its fragment differs.
    pub fn open(&self, url: &str) {
        self.ask("url", &json!({ "url": "about:blank" }));
        self.ask("url", &json!({ "url": url }));
    }

    /// Runs the body of a function in the page; its value.
    pub fn run(&self, script: &str) -> Value {
        self.ask("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// The same with a function `done` that is to be called with the value.
    pub fn run_async(&self, script: &str) -> Value {
        let script = format!("const done = arguments[arguments.length - 1];\n{script}");
        self.ask("execute/async", &json!({ "script": script, "args": [] }))
    }

    /// The text that a reader sees of the first element that `css` selects; empty if it is not shown.
    #[must_use]
    pub fn text(&self, css: &str) -> String {
        let text = self.run(&format!("return {}", shown(css)));
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an expression is true in the page.
    ///
    /// # Panics
    /// When it does not become so, with the whole text of the page.
    #[track_caller]
    pub fn wait_for(&self, expression: &str) {
        let is_true = || self.run(&format!("return Boolean({expression})")) == Value::Bool(true);
        clock::until(expression, PATIENCE, || if is_true() { Ok(()) } else { Err(self.text("body")) });
    }

    /// Waits until the first element that `css` selects has a text with `words` in it.
    ///
    /// # Panics
    /// When it does not get it.
    #[track_caller]
    pub fn wait_for_text(&self, css: &str, words: &str) {
        self.wait_for(&format!("{}.includes({words:?})", shown(css)));
    }

    /// Clicks on the first element that `css` selects, as a mouse does.
    #[track_caller]
    pub fn click(&self, css: &str) {
        let element = self.element(&json!({ "using": "css selector", "value": css }));
        self.ask(&format!("element/{element}/click"), &json!({}));
    }

    /// Types into whatever has the focus; `\u{e004}` is Tab, `\u{e007}` Enter.
    pub fn keys(&self, keys: &str) {
        let strokes = keys.chars().flat_map(|key| {
            ["keyDown", "keyUp"].map(|action| json!({ "type": action, "value": key.to_string() }))
        });
        let strokes: Vec<Value> = strokes.collect();
        self.ask("actions", &json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": strokes }] }));
    }

    /// What the browser complained about since it was last asked: errors of scripts, violations of the policy. Requests
    /// that failed are not among it: how a page takes that is its own.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let log = self.ask("se/log", &json!({ "type": "browser" }));
        let lines = log.as_array().into_iter().flatten();
        let serious = lines.filter(|line| {
            line["source"] != "network"
                && ["SEVERE", "WARNING"].contains(&line["level"].as_str().unwrap_or(""))
        });
        serious.map(|line| line["message"].to_string()).collect()
    }

    /// What is shown, as a PNG in base64.
    #[must_use]
    pub fn screenshot(&self) -> String {
        let shot = self.cdp("Page.captureScreenshot", &json!({ "format": "png" }));
        shot["data"].as_str().expect("a screenshot is text").to_owned()
    }

    #[track_caller]
    fn element(&self, how: &Value) -> String {
        let element = self.ask("element", how);
        let id = element.as_object().and_then(|element| element.values().next()?.as_str());
        id.unwrap_or_else(|| panic!("no element: {how}")).to_owned()
    }

    #[track_caller]
    fn ask(&self, path: &str, body: &Value) -> Value {
        let path = format!("/session/{}/{path}", self.session);
        self.exchange("POST", &path, body).unwrap_or_else(|error| panic!("{path} {body:.200}: {error}"))
    }

    fn exchange(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        let answer = http(self.address, &request).map_err(|error| error.to_string())?;
        let mut answer: Value =
            serde_json::from_str(&answer).map_err(|error| format!("{error}: {answer:.500}"))?;
        match answer.pointer("/value/error") {
            Some(_) => Err(answer["value"]["message"].to_string()),
            None => Ok(answer["value"].take()),
        }
    }
}

impl Default for Browser {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium ends with its session; the driver is killed with its guard.
        self.exchange("DELETE", &format!("/session/{}", self.session), &Value::Null).ok();
        self.driver.terminate();
    }
}

/// The text that a reader sees of the first element that `css` selects, as an expression.
fn shown(css: &str) -> String {
    format!("[document.querySelector({css:?})].map((it) => it?.checkVisibility() ? it.innerText : '')[0]")
}

/// Sends a request and reads the body of the answer.
fn http(address: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(request.as_bytes())?;
    let (mut answer, mut chunk) = (Vec::new(), [0; 65_536]);
    loop {
        let count = stream.read(&mut chunk)?;
        answer.extend_from_slice(&chunk[..count]);
        let text = String::from_utf8_lossy(&answer);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            if count == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            continue;
        };
        let head = head.to_ascii_lowercase();
        let length =
            head.split("content-length:").nth(1).and_then(|rest| rest.lines().next()?.trim().parse().ok());
        if count == 0 || length.is_some_and(|length: usize| body.len() >= length) {
            return Ok(body.to_owned());
        }
    }
}

/// The package of PyPI that carries axe-core; of its files only `axe.min.js` is used, in the browser under test.
const AXE: &str = "axe-playwright-python==0.1.8";

/// The source of axe-core, which finds violations of WCAG in a page; where it cannot be had, `test` is listed as skipped and
/// shall return.
///
/// # Panics
/// Instead of skipping, for root and in CI.
#[must_use]
#[track_caller]
pub fn axe(test: &str) -> Option<String> {
    // It has pip, which Debian's Python need not have.
    let python = venv::python(test)?;
    let unpacked = || {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        // target/<profile>/deps/<test>
        let target = program.ancestors().nth(3).ok_or("not in cargo's layout")?;
        let folder = target.join("axe");
        let file: PathBuf = folder.join("axe_playwright_python/axe.min.js");
        if !file.exists() {
            let mut pip = Command::new(python);
            pip.args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--target",
            ]);
            let output = run(pip.arg(&folder).arg(AXE), Duration::from_secs(120));
            if !output.status.success() {
                return Err(text(&output.stderr));
            }
        }
        std::fs::read_to_string(&file).map_err(|error| error.to_string())
    };
    match unpacked() {
        Ok(source) => Some(source),
        Err(why) => {
            needs::missing(test, &format!("{AXE} from PyPI: {why}"));
            None
        }
    }
}
