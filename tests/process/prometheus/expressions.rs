//! The metrics and labels that an expression of PromQL names. No parser: promtool is that.

/// A name with what is asked of its labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Selector {
    pub(crate) name: String,
    pub(crate) matchers: Vec<Matcher>,
}

/// `label="value"`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Matcher {
    pub(crate) label: String,
    pub(crate) operator: String,
    pub(crate) value: String,
}

/// What an expression names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) selectors: Vec<Selector>,
    /// The labels of `by`, `on` and the like.
    pub(crate) groups: Vec<String>,
}

impl Selector {
    /// Whether it is a metric, and not the result of a recording rule.
    pub(crate) fn is_metric(&self) -> bool {
        !self.name.contains(':')
    }

    /// The name of the family: a histogram's series have suffixes.
    pub(crate) fn family(&self) -> &str {
        let suffixes = ["_bucket", "_sum", "_count"];
        suffixes.iter().find_map(|suffix| self.name.strip_suffix(suffix)).unwrap_or(&self.name)
    }
}

/// What `expression` names of ours; Grafana's variables stand for something.
pub(crate) fn named(expression: &str) -> Named {
    let text = expression.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$peer", ".*");
    let mut rest = Rest(&text);
    let mut named = Named::default();
    while let Some(token) = rest.token() {
        match token {
            "by" | "without" | "on" | "ignoring" | "group_left" | "group_right" => {
                if let Some(inside) = rest.enclosed('(', ')') {
                    let labels = inside.split(',').map(|label| label.trim().to_owned());
                    named.groups.extend(labels.filter(|label| !label.is_empty()));
                }
            }
            name if name.starts_with("culvert_") || name.contains(":culvert_") => {
                let name = name.to_owned();
                let matchers = rest.enclosed('{', '}').map(matchers).unwrap_or_default();
                named.selectors.push(Selector { name, matchers });
            }
            _ => {}
        }
    }
    named
}

fn matchers(inside: &str) -> Vec<Matcher> {
    let mut found = Vec::new();
    let mut rest = inside;
    while let Some((label, tail)) = rest.split_once('"') {
        let (value, tail) = tail.split_once('"').expect("a value ends");
        let label = label.trim_start_matches([',', ' ']);
        let name = label.trim_end_matches(['=', '!', '~']);
        let operator = label[name.len()..].to_owned();
        found.push(Matcher { label: name.trim().to_owned(), operator, value: value.to_owned() });
        rest = tail;
    }
    found
}

struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    /// The next word; what is between words, strings included, is skipped.
    fn token(&mut self) -> Option<&'a str> {
        loop {
            let start = self.0.find(|c: char| is_word(c) || c == '"')?;
            self.0 = &self.0[start..];
            if let Some(string) = self.0.strip_prefix('"') {
                self.0 = string.split_once('"').map_or("", |(_, tail)| tail);
                continue;
            }
            let end = self.0.find(|c| !is_word(c)).unwrap_or(self.0.len());
            let (word, tail) = self.0.split_at(end);
            self.0 = tail;
            return Some(word);
        }
    }

    /// What is between `open` and `close`, if `open` comes next.
    fn enclosed(&mut self, open: char, close: char) -> Option<&'a str> {
        let (inside, tail) = self.0.trim_start().strip_prefix(open)?.split_once(close)?;
        self.0 = tail;
        Some(inside)
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

#[test]
fn names_matchers_and_groups_are_found() {
    let found = named(
        r#"sum by (job, le) (rate(culvert_x_total{a="1", b!~"2|3"}[$__rate_interval])) / on (peer) y:culvert_z:r > 5 or "culvert_no""#,
    );
    let matcher = |label: &str, operator: &str, value: &str| Matcher {
        label: label.to_owned(),
        operator: operator.to_owned(),
        value: value.to_owned(),
    };
    let x = Selector {
        name: "culvert_x_total".to_owned(),
        matchers: vec![matcher("a", "=", "1"), matcher("b", "!~", "2|3")],
    };
    let z = Selector { name: "y:culvert_z:r".to_owned(), matchers: Vec::new() };
    assert_eq!(found.selectors, [x, z]);
    assert_eq!(found.groups, ["job", "le", "peer"]);
}
