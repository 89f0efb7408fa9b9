//! `culvert completions`

use clap::{
    Args, CommandFactory,
    builder::{PossibleValuesParser, TypedValueParser as _},
};
use clap_complete::aot::{Shell, generate};

use super::{Cli, Failure};
use crate::out;

/// Print the completions of a shell
#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell
    // Those that Linux distributions have a folder of completions for.
    #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|name| name.parse::<Shell>()))]
    shell: Shell,
}

impl Completions {
    pub(super) fn execute(self) -> Result<(), Failure> {
        // It ends with a line end of its own.
        Ok(out::say(&String::from_utf8_lossy(&script(self.shell)).trim_end())?)
    }
}

/// The script, as a whole: what writes it panics where it cannot.
fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    generate(shell, &mut public(&Cli::command()), "culvert", &mut script);
    with_peers(shell, &String::from_utf8_lossy(&script)).into_bytes()
}

/// The commands whose argument is the name of a peer that is known.
const OF_A_PEER: [&str; 5] = ["status", "qlog", "peer set", "peer export", "peer remove"];

/// The script with the names of peers where a command takes one: the daemon, or else the files, are asked for them.
fn with_peers(shell: Shell, script: &str) -> String {
    if shell == Shell::Bash {
        with_peers_in_bash(script)
    } else if shell == Shell::Zsh {
        with_peers_in_zsh(script)
    } else {
        format!("{script}{}", of_fish())
    }
}

fn with_peers_in_bash(script: &str) -> String {
    let commands = OF_A_PEER.map(|command| format!("{command:?}*")).join("|");
    let function = format!(
        r#"_culvert_peers() {{
    _culvert "$@"
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} index options=() names
    [[ $word == -* || $before == -* ]] && return 0
    for ((index = 1; index < COMP_CWORD; index++)); do
        [[ ${{COMP_WORDS[index]}} == --config || ${{COMP_WORDS[index]}} == --socket ]] &&
            options=("${{COMP_WORDS[index]}}" "${{COMP_WORDS[index+1]}}")
    done
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
        {commands})
            names=$(culvert peer list --names "${{options[@]}}" 2> /dev/null) || return 0
            COMPREPLY+=($(compgen -W "$names" -- "$word")) ;;
    esac
}}

"#
    );
    let (functions, registration) =
        script.split_at(script.rfind("if [[ \"${BASH_VERSINFO").unwrap_or(script.len()));
    format!(
        "{functions}{function}{}",
        registration.replace("complete -F _culvert ", "complete -F _culvert_peers ")
    )
}

fn with_peers_in_zsh(script: &str) -> String {
    /// How the arguments begin that are such names.
    const ARGUMENTS: [&str; 4] =
        ["'::peer -- ", "':peer -- ", "':name -- What it is called", "'::name -- Which peer"];
    const FUNCTION: &str = "_culvert_peers() {\n    local -a names\n    \
        names=(${(f)\"$(culvert peer list --names 2> /dev/null)\"})\n    compadd -a names\n}\n\n";
    let line = |line: &str| match line.strip_suffix(":_default' \\") {
        Some(argument) if ARGUMENTS.iter().any(|begin| line.starts_with(begin)) => {
            format!("{argument}:_culvert_peers' \\\n")
        }
        Some(_) | None => format!("{line}\n"),
    };
    let script: String = script.lines().map(line).collect();
    script.replacen("_culvert() {", &format!("{FUNCTION}_culvert() {{"), 1)
}

fn of_fish() -> String {
    let of = |command: &str| {
        let condition = match command.split_once(' ') {
            Some((outer, inner)) => {
                format!("__fish_culvert_using_subcommand {outer}; and __fish_seen_subcommand_from {inner}")
            }
            None => format!("__fish_culvert_using_subcommand {command}"),
        };
        format!("complete -c culvert -n \"{condition}\" -f -a \"(culvert peer list --names 2> /dev/null)\"\n")
    };
    OF_A_PEER.map(of).concat()
}

/// The command without the subcommands that the help hides, which the generators would offer.
fn public(command: &clap::Command) -> clap::Command {
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    clap::Command::new("culvert").version(env!("CARGO_PKG_VERSION")).subcommands(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_is_told_of_every_command_that_the_help_shows() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell)).unwrap();
            for command in Cli::command().get_subcommands() {
                let told = script.contains(&format!("{} ", command.get_name()))
                    || script.contains(&format!("\"{}\"", command.get_name()));
                assert_eq!(told, !command.is_hide_set(), "{shell:?}: {}", command.get_name());
            }
            assert!(script.contains("allowed-ip"), "{shell:?}: the options of nested commands");
        }
    }

    #[test]
    fn names_of_peers_are_asked_for_where_a_command_takes_one() {
        let script = |shell| String::from_utf8(script(shell)).unwrap();
        let zsh = script(Shell::Zsh);
        assert_eq!(zsh.matches(":_culvert_peers' ").count(), OF_A_PEER.len(), "{zsh}");
        assert_eq!(zsh.matches("_culvert_peers() {").count(), 1);
        assert_eq!(script(Shell::Fish).matches("(culvert peer list --names").count(), OF_A_PEER.len());
        let bash = script(Shell::Bash);
        assert_eq!(bash.matches("complete -F _culvert_peers ").count(), 2, "for old and new versions");
        assert!(!bash.contains("complete -F _culvert "), "the other function calls it");
    }
}
