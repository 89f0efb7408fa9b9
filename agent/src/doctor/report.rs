//! How findings are printed.

use std::fmt;

use serde_json::{Value, json};

use super::{Finding, Group, Severity, facts::Facts};

/// The version of the JSON; it changes when a reader of the old one would be misled.
const VERSION: u64 = 1;

/// All findings, with what was looked at and by whom.
#[derive(Clone, Debug)]
pub struct Report {
    /// The configuration file; `None`: only the host was looked at.
    pub config: Option<String>,
    /// Number of the user that has looked: permissions are his.
    pub user: u32,
    /// The findings in the order of [`super::Check::ALL`].
    pub findings: Vec<Finding>,
}

impl Report {
    /// Makes a report of the findings on these facts.
    #[must_use]
    pub fn new(facts: &Facts, findings: Vec<Finding>) -> Self {
        let config = facts.file.path.as_ref().map(|path| path.display().to_string());
        Self { config, user: facts.limits.user, findings }
    }

    /// Returns the severity of the worst finding; `Ok` if there is none.
    #[must_use]
    pub fn severity(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// Returns the report as JSON for programs, as `docs/doctor.md` describes it.
    #[must_use]
    pub fn json(&self) -> Value {
        let findings = self.findings.iter().map(|finding| {
            let or_null = |text: &String| (!text.is_empty()).then(|| text.clone());
            json!({
                "check": finding.check.id(),
                "group": finding.check.group().label(),
                "subject": finding.subject,
                "value": finding.value,
                "severity": finding.severity.label(),
                "problem": or_null(&finding.problem),
                "remedy": or_null(&finding.remedy),
            })
        });
        json!({
            "version": VERSION,
            "config": self.config,
            "user": self.user,
            "severity": self.severity().label(),
            "findings": findings.collect::<Vec<_>>(),
        })
    }
}

/// Severities that are told again at the end, the worst first.
const TOLD_AGAIN: [Severity; 3] = [Severity::Error, Severity::Warning, Severity::Note];

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.config.as_deref().unwrap_or("this host, without a configuration");
        writeln!(formatter, "culvert doctor: {config}, looked at by user {}", self.user)?;
        let mut group: Option<Group> = None;
        for finding in &self.findings {
            let of = finding.check.group();
            if group != Some(of) {
                writeln!(formatter, "\n{}", of.label())?;
                group = Some(of);
            }
            writeln!(formatter, "  {:<7}  {finding}", finding.severity.label())?;
        }
        for severity in TOLD_AGAIN {
            for finding in self.findings.iter().filter(|finding| finding.severity == severity) {
                writeln!(formatter, "\n{}: {finding}", severity.label())?;
                writeln!(formatter, "  {}", finding.problem)?;
                writeln!(formatter, "  remedy: {}", finding.remedy)?;
            }
        }
        let counts = TOLD_AGAIN.map(|severity| {
            let (count, label) = (self.count(severity), severity.label());
            format!("{count} {label}{}", if count == 1 { "" } else { "s" })
        });
        write!(formatter, "\n{}, {} ok", counts.join(", "), self.count(Severity::Ok))
    }
}
