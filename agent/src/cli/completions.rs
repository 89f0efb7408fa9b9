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
    script
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
}
