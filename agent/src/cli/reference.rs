//! The manual page culvert.toml(5): `docs/configuration.md`, which has headings, paragraphs, lists, tables and blocks of code.

use std::{iter::Peekable, str::Lines};

use clap_mangen::roff::{Inline, Roff, bold, roman};

/// The reference of all keys of the configuration, in Markdown.
const TEXT: &str = include_str!("../../../docs/configuration.md");

/// The sections of the page, from DESCRIPTION on.
pub(super) fn sections(roff: &mut Roff) {
    convert(TEXT, roff);
}

fn convert(text: &str, roff: &mut Roff) {
    let mut lines = text.lines().peekable();
    // A paragraph macro right after a heading is one too many.
    let mut fresh = true;
    while let Some(line) = lines.next() {
        if line.is_empty() {
            continue;
        }
        if let Some(title) = line.strip_prefix("## ") {
            let title = title.replace('`', "");
            // The name of a section of the file stays as it is written there.
            let title = if title.starts_with('[') { title } else { title.to_uppercase() };
            roff.control("SH", [title.as_str()]);
            fresh = true;
            continue;
        }
        if line.starts_with("# ") {
            roff.control("SH", ["DESCRIPTION"]);
            continue;
        }
        if line.starts_with("```") {
            let code = lines.by_ref().take_while(|line| !line.starts_with("```"));
            let code: Vec<&str> = code.collect();
            roff.control("PP", []).control("RS", ["4"]).control("nf", []);
            for line in code {
                roff.text([bold(line)]);
            }
            roff.control("fi", []).control("RE", []);
        } else if line.starts_with('|') {
            // The head of the table says no more than the page does; the line below it is made of dashes.
            table(&mut lines, roff);
        } else if let Some(item) = line.strip_prefix("* ") {
            let item = item.to_owned() + &rest(&mut lines, |line| line.starts_with("  "));
            roff.control("IP", ["\\(bu", "2"]).text(inlines(&item));
        } else {
            let paragraph = line.to_owned()
                + &rest(&mut lines, |line| {
                    !(line.is_empty() || line.starts_with(['|', '#', '*']) || line.starts_with("```"))
                });
            if !fresh {
                roff.control("PP", []);
            }
            roff.text(inlines(&paragraph));
        }
        fresh = false;
    }
}

/// The following lines that belong to what has begun, each after a space.
fn rest(lines: &mut Peekable<Lines<'_>>, belongs: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    while let Some(line) = lines.next_if(|line| belongs(line)) {
        text.push(' ');
        text += line.trim();
    }
    text
}

/// The rows of a table, without its head: what it is about, and what is said of it.
fn table(lines: &mut Peekable<Lines<'_>>, roff: &mut Roff) {
    while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
        if row.starts_with("|---") {
            continue;
        }
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        roff.control("TP", []);
        match cells[..] {
            [key, kind, default, effect, consequence] => {
                let default = match default {
                    "\u{2014}" => String::new(),
                    "required" => "; required".to_owned(),
                    value => format!("; default {value}"),
                };
                let mut head = inlines(key);
                head.extend(inlines(&format!(" ({kind}{default}; in effect with the {effect})")));
                roff.text(head);
                roff.text(inlines(consequence));
            }
            [name, meaning] => {
                roff.text([bold(name.replace('`', ""))]);
                roff.text(inlines(meaning));
            }
            _ => {
                roff.text(inlines(row));
            }
        }
    }
}

/// Code and emphasis in bold; links as their texts.
fn inlines(text: &str) -> Vec<Inline> {
    let mut found = Vec::new();
    for (index, part) in text.split('`').enumerate() {
        if index % 2 == 1 {
            found.push(bold(part));
            continue;
        }
        let mut left = part;
        while let Some([before, link, after]) = first_link(left) {
            found.extend([roman(before), roman(link)]);
            left = after;
        }
        found.push(roman(left.replace("**", "")));
    }
    found
}

/// What stands before the first link, its text, and what comes after it.
fn first_link(text: &str) -> Option<[&str; 3]> {
    let (before, rest) = text.split_once("](")?;
    let (before, link) = before.rsplit_once('[')?;
    let (_, after) = rest.split_once(')')?;
    Some([before, link, after])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str) -> String {
        let mut roff = Roff::new();
        convert(text, &mut roff);
        // What every document begins with.
        roff.to_roff()
    }

    #[test]
    fn every_kind_of_block_is_converted() {
        let text = "# T\n\nOne\ntwo `x`.\n\n## `[a]` and b\n\nSee [the end](#end) **now**.\n\n* first\n  more\n* second\n\n\
                    | key | type | default | in effect with | consequence |\n|---|---|---|---|---|\n| `a.b` | 0 to 3 | `1` | reload | Says. |\n\
                    | `a.c` | path | \u{2014} | next start | None. |\n| `a.d` | name | required | reload | Must. |\n\n```\ncode \\\n```\nlast\n";
        let page = converted(text);
        for part in [
            ".SH DESCRIPTION\nOne two \\fBx\\fR.\n",
            ".SH \"[a] and b\"\nSee the end now.\n",
            ".IP \\(bu 2\nfirst more\n.IP \\(bu 2\nsecond\n",
            ".TP\n\\fBa.b\\fR (0 to 3; default \\fB1\\fR; in effect with the reload)\nSays.\n",
            ".TP\n\\fBa.c\\fR (path; in effect with the next start)\nNone.\n",
            ".TP\n\\fBa.d\\fR (name; required; in effect with the reload)\nMust.\n",
            ".nf\n\\fBcode \\\\\\fR\n.fi\n",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
    }

    #[test]
    fn the_reference_has_nothing_that_is_not_converted() {
        let page = converted(TEXT);
        for left in ["`", "](", "**", "|---"] {
            assert!(!page.contains(left), "{left} is left");
        }
        let rows = TEXT.lines().filter(|line| line.starts_with('|'));
        let odd: Vec<&str> = rows.filter(|row| ![2, 5].contains(&(row.matches('|').count() - 1))).collect();
        assert_eq!(odd, [""; 0], "rows with another number of cells, or with a '|' in one");
        for key in ["identity.key_file", "peer.allowed_ips", "limits.handshakes"] {
            assert!(page.contains(&format!(".TP\n\\fB{key}\\fR (")), "{key}");
        }
    }
}
