//! What other commands need of `init`: they write a configuration as it does, and print commands for it.

use std::{
    fs::OpenOptions,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use gate::identity::PublicKey;

use super::{
    Failure, Init,
    files::{self, New, share},
    host::Facts,
    options::Role,
    plan::Plan,
};
pub(in crate::cli) use super::{files::folder_of, next::shell_word, plan::neighbour};
use crate::{cli::reach::DEFAULT_CONFIG, out};

/// Where the dialling ends find a host that listens at `listen`, and what the operator should know about that.
pub(in crate::cli) fn advertised(
    listen: &[String],
    advertise: Option<&str>,
) -> Result<(String, Vec<String>), String> {
    let config = Path::new(DEFAULT_CONFIG);
    let options = Init {
        listen: listen.to_vec(),
        advertise: advertise.map(str::to_owned),
        tun: vec![String::new()],
        ..Init::empty(Role::Exit, config)
    };
    let plan = Plan::new(&options, &Facts::gather(config)).map_err(|problem| problem.to_string())?;
    Ok((plan.advertise.unwrap_or_default(), plan.notes))
}

/// The name of this host, as a peer may be called.
pub(in crate::cli) fn host_name() -> String {
    Facts::gather(Path::new(DEFAULT_CONFIG)).name
}

/// Writes the configuration `text` to `config`, and a key beside it unless one is there; returns its public half.
pub(in crate::cli) fn write(config: &Path, text: &str) -> Result<PublicKey, Failure> {
    files::is_free(config).map_err(anyhow::Error::from)?;
    let key_file: PathBuf = folder_of(config).join(super::KEY_FILE);
    let (identity, made) = super::identity(&key_file)?;
    let key = made.then_some((key_file.as_path(), &identity));
    files::write(&New { config, text, key, group: Facts::gather(config).group })
        .map_err(anyhow::Error::from)?;
    let key_what = if made { "wrote" } else { "kept " };
    out::say(&format_args!(
        "{key_what} {}: the private key; keep a copy, show it to nobody",
        key_file.display()
    ))?;
    out::say(&format_args!("wrote {}: the configuration", config.display()))?;
    Ok(identity.public_key())
}

/// Writes a secret of one line, for root and the group of the service.
pub(in crate::cli) fn write_secret(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{text}")?;
    share(&file, Facts::gather(path).group, 0o640)?;
    file.sync_all()
}
