//! `culvert manual`

use std::{
    collections::HashSet,
    fs, io,
    path::PathBuf,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::Context as _;
use clap::{Arg, ArgAction, Args, Command, CommandFactory};
use clap_mangen::{
    Man,
    roff::{Inline, Roff, bold, italic, roman},
};

use super::{
    Cli, Failure,
    examples::{self, Example},
    reference,
};
use crate::out;

/// Write the manual pages, for packages
#[derive(Debug, Args)]
pub(super) struct Manual {
    /// The folder; it is made where it is missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// A manual page and the name of its file.
struct Page {
    /// The name of the file, as in `culvert-peer-add.1`.
    file_name: String,
    text: String,
}

impl Manual {
    pub(super) fn execute(self) -> Result<(), Failure> {
        fs::create_dir_all(&self.out).with_context(|| format!("cannot make {}", self.out.display()))?;
        for page in pages().context("a page cannot be written into memory")? {
            let path = self.out.join(&page.file_name);
            fs::write(&path, &page.text).with_context(|| format!("cannot write {}", path.display()))?;
            out::say(&path.display())?;
        }
        Ok(())
    }
}

/// The page of `culvert` and one for every subcommand that the help shows.
fn pages() -> io::Result<Vec<Page>> {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let mut pages = Vec::new();
    add(&mut pages, &root, None)?;
    pages.push(Page { file_name: "culvert.toml.5".to_owned(), text: reference_page()? });
    Ok(pages)
}

fn add(pages: &mut Vec<Page>, command: &Command, parent: Option<&str>) -> io::Result<()> {
    let name = full_name(command);
    pages.push(Page { file_name: format!("{name}.1"), text: page(command, parent)? });
    shown(command).try_for_each(|inner| add(pages, inner, Some(&name)))
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

/// Returns the command's name with those of its parents, as in "culvert-peer-add".
fn full_name(command: &Command) -> String {
    command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()
}

fn page(command: &Command, parent: Option<&str>) -> io::Result<String> {
    let about = command.get_long_about().or_else(|| command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let (description, exit_codes) = split_description(&about);
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    man.render_name_section(&mut text)?;
    sections(&mut text, |roff| {
        synopsis(roff, command);
        describe(roff, &description, parent);
    })?;
    man.render_options_section(&mut text)?;
    if shown(command).next().is_some() {
        man.render_subcommands_section(&mut text)?;
    }
    sections(&mut text, |roff| {
        exit_status(roff, exit_codes);
        files(roff, command, parent.is_none());
        match parent {
            None => all_examples(roff, examples::FIRST_STEPS.iter().collect()),
            Some(ROOT) => all_examples(roff, examples::of(command.get_name())),
            Some(parent) => {
                let parent = parent.strip_prefix("culvert-").unwrap_or(parent);
                all_examples(roff, examples::of_inner(parent, command.get_name()));
            }
        }
        see_also(roff, command, parent);
    })?;
    finished(&full_name(command).to_uppercase(), 1, text)
}

/// Renders the manual page of the configuration.
fn reference_page() -> io::Result<String> {
    let mut text = Vec::new();
    sections(&mut text, |roff| {
        heading(roff, "NAME");
        roff.text([roman("culvert.toml - the configuration of culvert")]);
        reference::sections(roff);
        heading(roff, "SEE ALSO");
        let [comma, end] = ["(1), ", "(1)"].map(roman);
        roff.text([bold("culvert"), comma.clone(), bold("culvert-init"), comma, bold("culvert-check"), end]);
    })?;
    finished("CULVERT.TOML", 5, text)
}

/// The command that all others belong to.
const ROOT: &str = "culvert";

/// A page with its head. Lines are neither justified nor hyphenated, because they are full of names.
fn finished(name: &str, section: u8, body: Vec<u8>) -> io::Result<String> {
    let (date, version) = (date(), env!("CARGO_PKG_VERSION"));
    let body = tidy(&String::from_utf8(body).map_err(io::Error::other)?);
    Ok(format!(".TH {name} {section} \"{date}\" \"culvert {version}\" \"Culvert\"\n.nh\n.ad l\n{body}"))
}

/// The date of the page: what builds a package says it (<https://reproducible-builds.org/specs/source-date-epoch/>); else none.
fn date() -> String {
    let epoch = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok());
    let time = epoch.and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    let text = time.map(|time| humantime::format_rfc3339_seconds(time).to_string());
    text.and_then(|text| text.split('T').next().map(str::to_owned)).unwrap_or_default()
}

/// One document out of several: the definitions at the head of each are needed once, no line ends with spaces, and an empty
/// line between two breaks is said in the macro for it.
fn tidy(text: &str) -> String {
    let mut seen = HashSet::new();
    let needed = |line: &&str| {
        let definition = line.starts_with(".ie ") || line.starts_with(".el ");
        !definition || seen.insert((*line).to_owned())
    };
    let text: String = text.lines().filter(needed).map(|line| format!("{}\n", line.trim_end())).collect();
    text.replace("\n.br\n\n.br\n", "\n.sp\n")
}

fn synopsis(roff: &mut Roff, command: &Command) {
    heading(roff, "SYNOPSIS");
    let mut line = vec![bold(command.get_bin_name().unwrap_or_else(|| command.get_name()))];
    // Every command has those two.
    let own = |argument: &&Arg| !matches!(argument.get_id().as_str(), "help" | "version");
    let shown = |argument: &&Arg| !argument.is_hide_set() && own(argument);
    let (last, first): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(shown).partition(|argument| argument.is_positional());
    for argument in first.into_iter().chain(last) {
        let required = argument.is_required_set();
        line.push(roman(if required { " " } else { " [" }));
        if let Some(long) = argument.get_long() {
            line.push(bold(format!("--{long}")));
        }
        if argument.get_action().takes_values() {
            let optional = argument.get_num_args().is_some_and(|count| count.min_values() == 0);
            let names = argument.get_value_names().unwrap_or_default().join(" ");
            let space = if argument.is_positional() { "" } else { " " };
            line.push(roman(if optional { format!("{space}[") } else { space.to_owned() }));
            line.push(italic(names));
            line.push(roman(if optional { "]" } else { "" }));
        }
        line.push(roman(if required { "" } else { "]" }));
        line.push(roman(if matches!(argument.get_action(), ArgAction::Append) { "..." } else { "" }));
    }
    if command.has_subcommands() {
        line.push(roman(" "));
        line.push(italic("COMMAND"));
    }
    roff.text(line);
}

fn describe(roff: &mut Roff, paragraphs: &[&str], parent: Option<&str>) {
    heading(roff, "DESCRIPTION");
    // The first one stands under NAME already, without a full stop.
    let overview = parent.is_none().then_some(OVERVIEW);
    let all: Vec<String> = match paragraphs {
        [only] if overview.is_none() => vec![format!("{only}.")],
        [_, rest @ ..] => rest.iter().copied().chain(overview).map(str::to_owned).collect(),
        [] => Vec::new(),
    };
    for (index, paragraph) in all.into_iter().enumerate() {
        if index > 0 {
            roff.control("PP", []);
        }
        roff.text([roman(paragraph)]);
    }
}

const OVERVIEW: &str = "One agent runs on each host. It has an Ed25519 key, by whose public half the others know it, and one \
     configuration file. An exit listens and offers services or a network; an entry dials it. Every subcommand has a page \
     of its own, listed below.";

/// The paragraphs of a description, and what it says of exit codes, which has a section of its own.
fn split_description(about: &str) -> (Vec<&str>, Option<&str>) {
    let (codes, rest): (Vec<&str>, Vec<&str>) = about
        .split("\n\n")
        .map(str::trim)
        .filter(|paragraph| !paragraph.is_empty())
        .partition(|paragraph| paragraph.starts_with(EXIT_CODES));
    (rest, codes.first().map(|codes| codes.trim_start_matches(EXIT_CODES)))
}

/// How a paragraph on exit codes begins.
const EXIT_CODES: &str = "Exit codes: ";

/// Appends what `write` adds to an empty document.
fn sections(text: &mut Vec<u8>, write: impl FnOnce(&mut Roff)) -> io::Result<()> {
    let mut roff = Roff::new();
    write(&mut roff);
    roff.to_writer(text)
}

fn heading(roff: &mut Roff, title: &str) {
    roff.control("SH", [title]);
}

fn exit_status(roff: &mut Roff, own: Option<&str>) {
    heading(roff, "EXIT STATUS");
    if let Some(own) = own {
        roff.text([roman(own)]);
        return;
    }
    let codes = [
        ("0", "Done."),
        ("1", "It failed while working; standard error says why."),
        ("2", "The command line or the configuration is wrong; standard error says where, and the remedy."),
    ];
    tagged(roff, codes.map(|(code, meaning)| (bold(code), meaning)));
}

/// Paragraphs, each below what it is about.
fn tagged<const COUNT: usize>(roff: &mut Roff, paragraphs: [(Inline, &str); COUNT]) {
    for (tag, text) in paragraphs {
        roff.control("TP", []);
        roff.text([tag]);
        roff.text([roman(text)]);
    }
}

/// The files of those commands that take a configuration; of all on the page of `culvert` itself.
fn files(roff: &mut Roff, command: &Command, all: bool) {
    let takes_configuration = command.get_arguments().any(|argument| argument.get_id() == "config");
    if !(all || takes_configuration) {
        return;
    }
    heading(roff, "FILES");
    let files = [
        ("/etc/culvert/agent.toml", "The configuration; culvert.toml(5) has all its keys."),
        (
            "/etc/culvert/identity.key",
            "The private key. Keep a copy: who loses it is somebody else to all peers.",
        ),
        (
            "/var/lib/culvert",
            "What must survive a restart: the peers that culvert peer added, and the proofs that were used.",
        ),
        ("/run/culvert/culvert.sock", "The socket at which the daemon takes commands."),
    ];
    tagged(roff, files.map(|(path, what)| (italic(path), what)));
}

fn all_examples(roff: &mut Roff, examples: Vec<&Example>) {
    if examples.is_empty() {
        return;
    }
    heading(roff, "EXAMPLES");
    for (index, Example { purpose, line }) in examples.into_iter().enumerate() {
        if index > 0 {
            roff.control("PP", []);
        }
        roff.text([roman(format!("{}:", capitalised(purpose)))]);
        roff.control("PP", []).control("RS", ["4"]).control("nf", []);
        roff.text([bold(*line)]).control("fi", []).control("RE", []);
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

fn see_also(roff: &mut Roff, command: &Command, parent: Option<&str>) {
    heading(roff, "SEE ALSO");
    let inner = shown(command).map(full_name).filter(|_| parent.is_some());
    let pages: Vec<String> = parent.map(str::to_owned).into_iter().chain(inner).collect();
    for page in &pages {
        roff.text([bold(page.as_str()), roman("(1),")]);
    }
    roff.text([bold("culvert.toml"), roman("(5)")]);
    roff.control("PP", []);
    roff.text([roman("The documents in "), italic("/usr/share/doc/culvert"), roman(".")]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(name: &str) -> String {
        let page = pages().unwrap().into_iter().find(|page| page.file_name == name);
        page.unwrap_or_else(|| panic!("no page {name}")).text
    }

    #[test]
    fn every_command_that_the_help_shows_has_a_page_with_all_sections() {
        for page in pages().unwrap().into_iter().filter(|page| page.file_name.ends_with(".1")) {
            let text = page.text;
            let parts = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "\"EXIT STATUS\"", "\"SEE ALSO\""];
            let places: Vec<Option<usize>> =
                parts.iter().map(|part| text.find(&format!("\n.SH {part}\n"))).collect();
            assert!(places.iter().all(Option::is_some), "{}: {places:?}", page.file_name);
            assert!(places.is_sorted(), "{}: {places:?}", page.file_name);
            assert!(!page.file_name.contains("manual"), "a hidden command has a page");
        }
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let text = text_of(&format!("culvert-{}.1", command.get_name()));
            assert!(text.contains("\n.SH EXAMPLES\n"), "{}", command.get_name());
        }
        assert!(text_of("culvert-peer-add.1").contains("\n.SH FILES\n"));
    }

    #[test]
    fn a_synopsis_says_what_is_required_and_what_may_be_repeated() {
        let text = text_of("culvert-peer-add.1").replace("\\fB", "").replace("\\fI", "").replace("\\fR", "");
        let synopsis = text.replace("\\-", "-");
        let line = synopsis.lines().skip_while(|line| *line != ".SH SYNOPSIS").nth(1);
        let said = "culvert peer add [--service NAME]... [--allowed-ip PREFIX]... [--map HERE=THERE]... [--address ADDRESS]... \
                    [--priority N] [--weight N] [--preshared-key-file FILE]... [--lanes N] \
                    [--endpoint HOST:PORT]... [--rate RATE] [--replace] [--config FILE] [--socket PATH] [--json] NAME LINK|KEY";
        assert_eq!(line, Some(said));
    }

    #[test]
    fn exit_codes_of_a_description_have_a_section_of_their_own() {
        let (rest, codes) = split_description("One\n\nTwo\n\nExit codes: 0 good, 1 bad.");
        assert_eq!((rest, codes), (vec!["One", "Two"], Some("0 good, 1 bad.")));
        assert_eq!(split_description("One").1, None);
    }
}
