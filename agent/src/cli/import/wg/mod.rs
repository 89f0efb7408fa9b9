//! `culvert import wg`: the configuration that a wg0.conf describes, and what the hosts of its peers need.
//!
//! | question | file |
//! |---|---|
//! | what is written, and where | this one |
//! | what stands in the file | `file.rs` |
//! | what follows from it: the configuration, notes, what each peer is | `plan.rs` |
//! | which commands the hosts need | `hosts.rs` |

use std::{fs, path::PathBuf};

use clap::Args;
use config::Config;

use super::super::{Failure, init::beside};
use crate::out;

mod file;
mod hosts;
mod plan;
#[cfg(test)]
mod tests;

use file::WireGuard;
use hosts::Names;
use plan::Plan;

/// Print the configuration that a wg0.conf describes, and what the hosts of its peers need
///
/// Keys do not carry over: each host gets one of its own. Preshared keys do. With --out the configuration is written, with a key
/// and the preshared keys beside it, and the commands for the other hosts are complete. Nothing that exists is overwritten.
#[derive(Debug, Args)]
pub(super) struct Wg {
    /// The file of wg-quick, as in /etc/wireguard/wg0.conf
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Where to write the configuration [default: standard output, and what is said about it to standard error]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where the peers find this host, if they dial it [default: the address from which it sends to the Internet]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
}

impl Wg {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let shown = self.file.display();
        let text = fs::read_to_string(&self.file).map_err(|error| {
            Failure::Input(format!(
                "{shown}: {error} (remedy: name the file of wg-quick, and read it as root)"
            ))
        })?;
        let read = WireGuard::parse(&text).map_err(|wrong| Failure::Input(format!("{shown}:{wrong}")))?;
        let mut plan = Plan::new(&read, self.out.as_deref());
        if !plan.listen.is_empty() {
            match beside::advertised(&plan.listen, self.advertise.as_deref()) {
                Ok((advertise, notes)) => {
                    plan.advertise = Some(advertise);
                    plan.notes.extend(notes);
                }
                Err(problem) => return Err(Failure::Input(problem)),
            }
        }
        let toml = plan.to_toml(&shown.to_string());
        let folder = self.out.as_deref().map(beside::folder_of);
        Config::parse(&toml, folder.unwrap_or_else(|| std::path::Path::new("/etc/culvert"))).map_err(
            |problems| {
                let lines: Vec<String> = problems.problems.iter().map(ToString::to_string).collect();
                Failure::Input(format!(
                    "{shown} makes no configuration; nothing was written: {}",
                    lines.join("; ")
                ))
            },
        )?;
        let Some(out) = &self.out else {
            out::print(&toml)?;
            let names = Names { key: None, config: None, host: beside::host_name() };
            out::complain(&format_args!("{}", hosts::commands(&plan, &names).trim_end()));
            return Ok(());
        };
        let secrets = plan.preshared_files();
        for (path, _) in &secrets {
            if fs::symlink_metadata(path).is_ok() {
                let remedy = "move it away, or import into another folder";
                return Err(Failure::Input(format!("{} exists (remedy: {remedy})", path.display())));
            }
        }
        let key = beside::write(out, &toml)?;
        for (path, text) in &secrets {
            beside::write_secret(path, text)
                .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
            out::say(&format_args!("wrote {}: a preshared key", path.display()))?;
        }
        let names = Names { key: Some(key), config: Some(out), host: beside::host_name() };
        Ok(out::say(&hosts::commands(&plan, &names).trim_end())?)
    }
}
