//! The rules, their unit tests, the example configuration and the dashboard, as files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use culvert_tests::{
    needs::{self, Need},
    process::{run, text},
};
use ops::metrics::Metrics;
use serde_json::Value;

use super::expressions::named;

/// Prometheus' own checker, which comes with the server.
pub(crate) const PROMTOOL: Need = Need::Tool("promtool", "prometheus");

/// Labels that Prometheus adds, and that of a histogram's buckets.
pub(crate) const ADDED_LABELS: [&str; 3] = ["job", "instance", "le"];

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// A file of `deploy/prometheus`.
pub(crate) fn prometheus_file(name: &str) -> PathBuf {
    root().join("deploy/prometheus").join(name)
}

/// A rule.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rule {
    /// `alert` or `record`.
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) expression: String,
    /// The other keys, of all depths.
    pub(crate) keys: BTreeMap<String, String>,
}

/// The rules of `culvert.rules.yml`, read by its layout: a rule begins with `- alert:` or `- record:`, an expression is what
/// follows `expr:` in its line, or what is indented further.
pub(crate) fn rules() -> Vec<Rule> {
    let file = fs::read_to_string(prometheus_file("culvert.rules.yml")).unwrap();
    let mut rules: Vec<Rule> = Vec::new();
    let mut in_expression = None;
    for line in file.lines().filter(|line| !line.trim_start().starts_with('#')) {
        let indent = line.len() - line.trim_start().len();
        if in_expression.is_some_and(|outer| indent > outer) {
            writeln!(rules.last_mut().unwrap().expression, "{line}").unwrap();
            continue;
        }
        in_expression = None;
        let Some((key, value)) = line.trim_start().split_once(": ") else { continue };
        let value = value.trim();
        match key {
            "- alert" | "- record" => {
                let kind = key.trim_start_matches("- ").to_owned();
                rules.push(Rule { kind, name: value.to_owned(), ..Rule::default() });
            }
            "expr" if value == "|" => in_expression = Some(indent),
            "expr" => value.clone_into(&mut rules.last_mut().unwrap().expression),
            _ => {
                if let Some(rule) = rules.last_mut() {
                    rule.keys.insert(key.to_owned(), value.trim_matches('"').to_owned());
                }
            }
        }
    }
    rules
}

/// The dashboard.
fn dashboard() -> Value {
    let file = fs::read_to_string(root().join("deploy/grafana/culvert.json")).unwrap();
    serde_json::from_str(&file).unwrap()
}

/// Every `expr` of the dashboard, and the metrics of its variables.
pub(crate) fn dashboard_expressions() -> Vec<String> {
    let mut found = Vec::new();
    collect(&dashboard(), &mut found);
    found
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                match (key.as_str(), value.as_str()) {
                    ("expr", Some(expression)) => found.push(expression.to_owned()),
                    ("definition", Some(definition)) => {
                        let inside =
                            definition.strip_prefix("label_values(").unwrap().strip_suffix(')').unwrap();
                        found.push(inside.rsplit_once(',').unwrap().0.to_owned());
                    }
                    _ => collect(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// All expressions: the rules', then the dashboard's.
pub(crate) fn expressions() -> Vec<String> {
    let rules = rules().into_iter().map(|rule| rule.expression);
    rules.chain(dashboard_expressions()).collect()
}

/// The registry: the labels of each family.
pub(crate) fn families() -> BTreeMap<String, Vec<String>> {
    let owned = |labels: &[&str]| labels.iter().map(ToString::to_string).collect();
    Metrics::info().map(|family| (family.name.to_owned(), owned(family.labels))).collect()
}

fn promtool(args: &[&str], file: &Path) {
    let mut command = Command::new(needs::tool("promtool").expect("the test has asked for it"));
    let output = run(command.args(args).arg(file), Duration::from_secs(60));
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "promtool {args:?}: {said}");
}

#[test]
fn every_metric_and_label_that_is_asked_for_exists() {
    let families = families();
    let records: BTreeSet<String> =
        rules().into_iter().filter(|rule| rule.kind == "record").map(|rule| rule.name).collect();
    let expressions = expressions();
    assert!(expressions.len() > 150, "{} were found", expressions.len());
    for expression in &expressions {
        // Prometheus' own series of alerts has labels of its own.
        if expression.contains("ALERTS{") {
            continue;
        }
        let named = named(expression);
        let mut labels: BTreeSet<String> = ADDED_LABELS.iter().map(ToString::to_string).collect();
        for selector in &named.selectors {
            let own: Vec<String> = if selector.is_metric() {
                let family = families.get(selector.family());
                family.unwrap_or_else(|| panic!("there is no {}: {expression}", selector.name)).clone()
            } else {
                assert!(records.contains(&selector.name), "{} is not recorded: {expression}", selector.name);
                let (prefix, _) = selector.name.split_once(':').unwrap();
                prefix.split('_').map(str::to_owned).collect()
            };
            for matcher in &selector.matchers {
                let known = own.contains(&matcher.label) || ADDED_LABELS.contains(&matcher.label.as_str());
                assert!(known, "{} has no label {}: {expression}", selector.name, matcher.label);
            }
            labels.extend(own);
        }
        for group in named.groups {
            assert!(labels.contains(&group), "nothing here has the label {group}: {expression}");
        }
    }
}

#[test]
fn every_alert_says_how_bad_it_is_and_what_to_do() {
    let guide = fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let anchors: BTreeSet<String> = guide.lines().filter_map(|line| slug(line.strip_prefix('#')?)).collect();
    let tests = fs::read_to_string(prometheus_file("culvert.rules.test.yml")).unwrap();
    let (mut count, mut names) = (0, BTreeSet::new());
    for alert in rules().iter().filter(|rule| rule.kind == "alert") {
        count += 1;
        assert!(names.insert(alert.name.clone()), "{} stands twice", alert.name);
        for key in ["for", "severity", "summary", "description", "runbook_url"] {
            assert!(alert.keys.contains_key(key), "{} has no {key}", alert.name);
        }
        assert!(["critical", "warning"].contains(&alert.keys["severity"].as_str()), "{alert:?}");
        let url = alert.keys["runbook_url"].strip_prefix("file:///usr/share/doc/culvert/operations.md#");
        let anchor = url.expect("the guide is there");
        assert!(anchors.contains(anchor), "{}: no heading for #{anchor}", alert.name);
        let tested = format!("alertname: {}\n", alert.name);
        assert!(tests.contains(&tested), "{} has no unit test", alert.name);
        assert!(guide.contains(&format!("`{}`", alert.name)), "the guide does not name {}", alert.name);
    }
    assert!(count > 30, "{count} alerts were found");
}

/// The anchor of a heading, as GitHub makes it; of the text after the first `#`.
pub(crate) fn slug(heading: &str) -> Option<String> {
    let heading = heading.trim_start_matches('#').strip_prefix(' ')?;
    let kept = heading.to_lowercase().replace(' ', "-");
    Some(kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect())
}

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() {
    if !needs::met("the rules", &[PROMTOOL]) {
        return;
    }
    promtool(&["check", "rules"], &prometheus_file("culvert.rules.yml"));
    promtool(&["check", "config"], &prometheus_file("prometheus.example.yml"));
    promtool(&["test", "rules"], &prometheus_file("culvert.rules.test.yml"));
}

#[test]
fn promtool_parses_every_expression_of_the_dashboard() {
    if !needs::met("the dashboard's expressions", &[PROMTOOL]) {
        return;
    }
    let mut file = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (place, expression) in dashboard_expressions().iter().enumerate() {
        let expression = expression.replace("$__rate_interval", "5m").replace(['$'], "");
        let quoted = Value::String(expression);
        writeln!(file, "      - record: e{place}\n        expr: {quoted}").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dashboard.yml");
    fs::write(&path, file).unwrap();
    promtool(&["check", "rules"], &path);
}

#[test]
fn a_graph_of_peers_shows_some_of_many_and_no_share_is_of_nothing() {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().unwrap();
    let inner = panels.iter().flat_map(|panel| panel["panels"].as_array().into_iter().flatten());
    let targets =
        panels.iter().chain(inner).flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let (mut of_peers, mut shares) = (0, 0);
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        if target["legendFormat"].as_str().is_some_and(|legend| legend.contains("{{peer}}")) {
            of_peers += 1;
            let some = expression.contains("topk(20, ") || expression.contains("bottomk(20, ");
            assert!(some, "a thousand peers are a thousand lines: {expression}");
        }
        if let Some((_, divisor)) = expression.split_once(" / ") {
            shares += 1;
            assert!(divisor.contains(" > 0"), "0 / 0 is not a number: {expression}");
        }
    }
    assert!(of_peers > 25 && shares > 3, "{of_peers}, {shares}");
}

#[test]
fn panels_are_told_apart_and_ask_the_chosen_source() {
    let dashboard = dashboard();
    let mut panels: Vec<&Value> = dashboard["panels"].as_array().unwrap().iter().collect();
    let inner = panels.iter().flat_map(|panel| panel["panels"].as_array().into_iter().flatten());
    let inner: Vec<&Value> = inner.collect();
    panels.extend(inner);
    let mut ids = BTreeSet::new();
    let mut rows = Vec::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "an id stands twice: {panel}");
        if panel["type"] == "row" {
            rows.push(panel["title"].as_str().unwrap());
            continue;
        }
        assert!(panel["gridPos"]["x"].as_u64().unwrap() + panel["gridPos"]["w"].as_u64().unwrap() <= 24);
        for target in panel["targets"].as_array().unwrap() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{panel}");
        }
    }
    let expected = [
        "Overview",
        "Traffic",
        "Accounting and drops",
        "Lanes",
        "Flows",
        "Gate",
        "TUN",
        "Process",
        "Rate",
        "Repair",
    ];
    rows.sort_unstable();
    let mut sorted = expected;
    sorted.sort_unstable();
    assert_eq!(rows, sorted);
}
