//! What an operator is told of a file that is not TOML: the parser's words name the grammar, not what to do.

use std::ops::Range;

/// What is wrong with the syntax at `span` of `text`, of which the parser says `message`, and the remedy.
pub(super) fn explain(text: &str, span: Option<Range<usize>>, message: &str) -> (String, String) {
    let general = || {
        (
            message.to_owned(),
            "write key = value, with texts in quotes; https://toml.io has all forms".to_owned(),
        )
    };
    let Some(span) = span else { return general() };
    if message.starts_with("duplicate key") {
        let key = text.get(span).unwrap_or_default();
        return (format!("{key:?} is there twice"), "remove one, or put their keys together".to_owned());
    }
    let begin = text.get(..span.start).and_then(|before| before.rfind('\n')).map_or(0, |end| end + 1);
    let line = text.get(begin..).and_then(|rest| rest.lines().next()).unwrap_or_default().trim();
    let said = |remedy: String| (message.to_owned(), remedy);
    if message.starts_with("unclosed table") || message.starts_with("unclosed array table") {
        return said(format!(
            "close the header with the brackets that it begins with, as in {}",
            closed(line)
        ));
    }
    if message.starts_with("unclosed array") {
        return said("close the list with ]".to_owned());
    }
    if message.starts_with("unclosed inline table") {
        return said("close the table with }".to_owned());
    }
    let Some((key, value)) = line.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
        return match line.split_once(':') {
            Some((key, value)) => said(format!("write {} = {}", key.trim(), value.trim())),
            None => said("write key = value; a line for readers only begins with #".to_owned()),
        };
    };
    if value.is_empty() || value.starts_with('#') {
        return (format!("{key:?} has no value"), format!("write one behind the =, or put a # before {key}"));
    }
    if let Some(quote) = value.chars().next().filter(|first| matches!(first, '"' | '\''))
        && !value[1..].contains(quote)
    {
        return (
            "a text is not closed".to_owned(),
            format!("write {quote} behind it, too, in the same line"),
        );
    }
    let word = value.split(['#', ' ', '\t']).next().unwrap_or_default();
    let digits: String = word.chars().filter(|c| *c != ',').collect();
    if word.contains(',') && !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return (format!("{word} is not a number"), format!("write {digits}, or a list in brackets"));
    }
    if is_bare(word) {
        let problem = format!("{word} is neither a number nor a text in quotes");
        return (problem, format!("a text needs quotes, as in {key} = {word:?}"));
    }
    general()
}

/// Whether this is a value that lacks its quotes.
fn is_bare(word: &str) -> bool {
    let begins = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '-');
    word.starts_with(begins)
        && !word.contains(['"', '\'', '[', ']', '{', '}'])
        && format!("v = {word}").parse::<toml::Table>().is_err()
}

/// The header of a table with its brackets closed.
fn closed(line: &str) -> String {
    let name = line.trim_start_matches('[').split([']', '#', ' ']).next().unwrap_or_default();
    if line.starts_with("[[") { format!("[[{name}]]") } else { format!("[{name}]") }
}

#[cfg(test)]
mod tests {
    use crate::{Config, tests::BASE};

    /// What is said of the base with this line at its end.
    fn said(line: &str) -> String {
        Config::parse(&format!("{BASE}{line}\n"), std::path::Path::new("/etc/culvert"))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn each_slip_is_named_with_what_to_write() {
        for (line, problem, remedy) in [
            ("keepalive = 25s", "25s is neither a number nor a text in quotes", "keepalive = \"25s\""),
            ("level = info", "info is neither", "level = \"info\""),
            ("allowed = 10.9.0.1/24", "10.9.0.1/24 is neither", "allowed = \"10.9.0.1/24\""),
            ("file = /etc/x # there", "/etc/x is neither", "file = \"/etc/x\""),
            ("lanes = yes", "yes is neither", "lanes = \"yes\""),
            ("lanes = 1,500", "1,500 is not a number", "write 1500"),
            ("lanes: 3", "key with no value", "write lanes = 3"),
            ("lanes", "key with no value", "write key = value"),
            ("lanes =", "\"lanes\" has no value", "put a # before lanes"),
            ("lanes = # 3", "\"lanes\" has no value", "behind the ="),
            ("name = \"x", "a text is not closed", "write \" behind it"),
            ("endpoints = [\"a:1\"", "unclosed array", "close the list with ]"),
            ("[transport", "unclosed table", "as in [transport]"),
            ("[[peer]", "unclosed array table", "as in [[peer]]"),
            ("[log]\n[log]", "\"log\" is there twice", "remove one"),
        ] {
            let said = said(line);
            assert!(
                said.contains(&format!("not TOML: {problem}")) && said.contains(remedy),
                "{line}: {said}"
            );
        }
    }
}
