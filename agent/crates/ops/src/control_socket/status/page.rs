//! Pages of text: lines, tables, units, and strings of others that must not reach the operator's terminal as they are.

use std::{borrow::Cow, time::Duration};

/// Lines for a terminal or a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    lines: Vec<(Kind, String)>,
}

/// What a line of a page stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text, or a row of a table.
    Plain,
    /// The line is the head of a table.
    Heading,
    /// The line reports something that must not be.
    Alarm,
}

impl Page {
    #[must_use]
    pub fn lines(&self) -> &[(Kind, String)] {
        &self.lines
    }

    /// All lines, each with its end.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.lines.iter().flat_map(|(_, line)| [line.as_str(), "\n"]).collect()
    }

    /// At most `height` lines of at most `width` characters; the last one says how many do not fit.
    #[must_use]
    pub fn cut(mut self, height: usize, width: usize) -> Self {
        if self.lines.len() > height {
            let kept = height.saturating_sub(1);
            let more = self.lines.len() - kept;
            self.lines.truncate(kept);
            self.lines.push((Kind::Heading, format!("… {more} more lines")));
            self.lines.truncate(height);
        }
        for (_, line) in &mut self.lines {
            if let Some((end, _)) = line.char_indices().nth(width) {
                line.truncate(end);
            }
        }
        self
    }

    pub(super) fn line(&mut self, line: impl Into<String>) {
        self.lines.push((Kind::Plain, line.into()));
    }

    pub(super) fn alarm(&mut self, line: impl Into<String>) {
        self.lines.push((Kind::Alarm, line.into()));
    }

    /// An empty line, but none at the top nor after another.
    pub(super) fn gap(&mut self) {
        if self.lines.last().is_some_and(|(_, last)| !last.is_empty()) {
            self.line("");
        }
    }

    /// A table, whose first row is its head.
    pub(super) fn table<const COLUMNS: usize>(&mut self, rows: &[[String; COLUMNS]]) {
        self.gap();
        let mut kind = Kind::Heading;
        for line in table(rows).lines() {
            self.lines.push((kind, line.to_owned()));
            kind = Kind::Plain;
        }
    }

    /// A table with a row for each of `items`; nothing if there are none.
    pub(super) fn table_of<T, const COLUMNS: usize>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        columns: [Column<'_, T>; COLUMNS],
    ) {
        let rows = rows(items, columns);
        if rows.len() > 1 {
            self.table(&rows);
        }
    }

    /// Adds the facts, below each other.
    pub(super) fn facts(&mut self, Facts(facts): &Facts) {
        let width = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, fact) in facts {
            self.line(format!("  {name:width$}  {}", plain(fact)));
        }
    }
}

/// The rows of a part of the page: a name, and what is said of it.
#[derive(Default)]
pub(super) struct Facts(Vec<(&'static str, String)>);

impl Facts {
    pub(super) fn add(&mut self, name: &'static str, fact: impl ToString) {
        self.0.push((name, fact.to_string()));
    }
}

/// A column of a table: its head, and what it shows of the item of a row.
pub type Column<'a, T> = (&'a str, fn(&T) -> String);

/// The rows of a table: the head, then one for each of `items`.
pub fn rows<T, const COLUMNS: usize>(
    items: impl IntoIterator<Item = T>,
    columns: [Column<'_, T>; COLUMNS],
) -> Vec<[String; COLUMNS]> {
    let head = columns.map(|(head, _)| head.to_owned());
    let row = |item| columns.map(|(_, cell)| cell(&item));
    std::iter::once(head).chain(items.into_iter().map(row)).collect()
}

/// Columns as wide as their widest cell; the last one ends where its text does. Cells are made [`plain`].
#[must_use]
pub fn table<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let rows: Vec<_> = rows.iter().map(|row| row.each_ref().map(|cell| plain(cell))).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// A text with what could move the cursor, change colours, or hide and turn other text written out: a peer chooses what it calls
/// itself, and why it ends a connection.
#[must_use]
pub fn plain(text: &str) -> Cow<'_, str> {
    // Marks that reorder or join text (Unicode's Bidi_Control, zero-width characters and line separators) are no controls.
    let steers = |char: char| {
        char.is_control()
            || matches!(char, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut written = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        if steers(char) {
            written.extend(char.escape_default());
        } else {
            written.push(char);
        }
    }
    Cow::Owned(written)
}

/// The two largest units: "3h 12m", not "3h 12m 7s".
#[must_use]
pub fn age(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default().as_secs();
    let text = humantime::format_duration(Duration::from_secs(whole)).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// "20.0 Mbit/s" of bits per second.
#[must_use]
pub fn bit_rate(bits_per_second: u64) -> String {
    scaled(bits_per_second as f64, "bit/s")
}

/// "1.2 Gbit/s" of bytes per second.
pub(super) fn bits(bytes_per_second: f64) -> String {
    scaled(bytes_per_second * 8.0, "bit/s")
}

/// Formats a rate per second, as in "3.4 k/s".
pub(super) fn per_second(rate: f64) -> String {
    scaled(rate, "/s")
}

/// Formats a number of bytes, as in "1.5 MB".
pub(super) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, "B")
}

/// Three digits or so, with the prefix of a power of 1,000.
fn scaled(value: f64, unit: &str) -> String {
    let mut value = value;
    let mut prefixes = ["", "k", "M", "G", "T"].into_iter().peekable();
    let mut prefix = "";
    while let Some(next) = prefixes.next() {
        prefix = next;
        // What is just below would be written as 1000.
        let most = if prefix.is_empty() { 999.5 } else { 999.95 };
        if value < most || prefixes.peek().is_none() {
            break;
        }
        value /= 1_000.0;
    }
    if prefix.is_empty() && (value.fract() == 0.0 || value >= 99.95) {
        format!("{value:.0} {unit}")
    } else {
        format!("{value:.1} {prefix}{unit}")
    }
}

/// Formats a share as a percentage, as in "0.02 %".
pub(super) fn share(share: f64) -> String {
    let percent = share * 100.0;
    if percent == 0.0 { "0 %".to_owned() } else { format!("{percent:.2} %") }
}

/// Formats a short time, given in seconds, as in "12.3 ms" or "85 µs".
pub(super) fn short_time(seconds: f64) -> String {
    let micros = seconds * 1e6;
    if micros < 999.5 {
        format!("{micros:.0} µs")
    } else if micros < 1e6 {
        format!("{:.1} ms", seconds * 1e3)
    } else {
        format!("{seconds:.1} s")
    }
}

/// What there is as text, or "-" for none.
pub(super) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
