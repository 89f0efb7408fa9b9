//! `culvert run`: the daemon, with the signals that it follows and the service manager that it tells.
//!
//! | signal | what happens |
//! |---|---|
//! | SIGTERM, SIGINT | the daemon stops, also while it starts: what waits is sent, the peers are told; a second one ends the process at once |
//! | SIGHUP | the configuration is read again, on a thread of its own, one reload at a time |
//! | SIGUSR1, SIGUSR2 | nothing: scripts that rotate logs send them, and they would end the process |
//! | none, a change of `identity.peers_dir` | the same |
//! | SIGPIPE | nothing, as in every Rust program: a log that nobody reads any more ends no tunnel |

use std::{
    pin::pin,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use base::{
    clock::{Clock, SystemClock},
    files,
    panics::{self, Panicked, Part},
};
use config::{Config, directory::fingerprint_in_time};
use gate::identity::Identity;
use net::process::FreedMemory;
use ops::{
    control_socket::{Peers, Reloaded},
    operator::Running,
};
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::{Interval, MissedTickBehavior, interval, timeout},
};

use crate::{
    daemon::Daemon,
    hook::Hooks,
    service::{ReloadEnd, Service},
};

/// The signals of this process, caught.
#[derive(Debug)]
pub struct Signals {
    runtime: Runtime,
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// Whether a stop was asked for before the daemon ran.
    stop: bool,
}

impl Signals {
    /// Catches them from now on; what comes before [`run`] waits for it. Call it first: an uncaught SIGHUP ends the process.
    ///
    /// # Errors
    /// The kernel's.
    pub fn catch() -> anyhow::Result<Self> {
        let runtime =
            runtime::Builder::new_current_thread().enable_all().build().context("cannot make a runtime")?;
        let caught = {
            let _guard = runtime.enter();
            // Once caught, a signal does nothing else for the rest of the process's life, whether or not a task waits for it.
            for unused in [SignalKind::user_defined1(), SignalKind::user_defined2()] {
                drop(signal(unused).context("cannot catch a signal")?);
            }
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal)
        };
        let [terminate, interrupt, hang_up] = caught.map(|caught| caught.context("cannot catch a signal"));
        Ok(Self { runtime, terminate: terminate?, interrupt: interrupt?, hang_up: hang_up?, stop: false })
    }

    /// Runs `work` on a thread of its own, so that a stop is followed meanwhile; `None` if there was one and the work did not end
    /// within [`START_LEFT_OVER`].
    ///
    /// # Errors
    /// The thread cannot be made, or panicked.
    pub fn during<T: Send + 'static>(
        &mut self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> anyhow::Result<Option<T>> {
        let mut result = on_a_thread(name, work)?;
        let Self { runtime, terminate, interrupt, stop, .. } = self;
        let done = runtime.block_on(async {
            if !*stop {
                tokio::select! {
                    done = &mut result => return Some(done),
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                *stop = true;
            }
            timeout(START_LEFT_OVER, result).await.ok()
        });
        done.transpose().map_err(|_| anyhow!("the start panicked"))
    }
}

/// How long a start may go on after a stop was asked for: if it is done then, the daemon is stopped in order.
const START_LEFT_OVER: Duration = Duration::from_millis(200);

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// What kept it from starting, that a thread of it died, or that a second signal did not let it stop in order.
pub fn run(mut signals: Signals, config: Config, identity: Identity) -> anyhow::Result<()> {
    FreedMemory::keep_little();
    let mut service = Service::from_env();
    let hooks = Arc::new(Hooks::new(&config));
    let Some(started) = signals.during("culvert-start", move || Daemon::start(config, &identity))? else {
        tracing::warn!(
            "stopped before it had started (remedy: none is needed; a file or a name that does not answer may be why)"
        );
        return Ok(());
    };
    let mut daemon = started?;
    watch_peers(Arc::clone(&daemon.running))?;
    let Signals { runtime, mut terminate, mut interrupt, mut hang_up, stop } = signals;
    runtime.block_on(async {
        let ended = daemon.worker_ended.take();
        let upper = Arc::clone(&hooks);
        let up = hooks.has_up().then(|| on_a_thread("culvert-hook", move || upper.up())).transpose()?;
        tokio::select! {
            biased;
            () = until(stop.then(|| std::future::ready(()))) => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = look_after(&daemon, &mut service, &mut hang_up, up) => {}
            _ = until(ended) => return Err(anyhow!("a worker ended by itself; see the log")),
        }
        service.stopping(now());
        let stopped = on_a_thread("culvert-stop", move || {
            hooks.down();
            daemon.stop()
        })?;
        tokio::select! {
            stopped = stopped => {
                stopped.map_err(|_| anyhow!("the stop panicked"))??;
                tracing::info!("stopped");
                Ok(())
            }
            _ = terminate.recv() => Err(anyhow!(CUT_SHORT)),
            _ = interrupt.recv() => Err(anyhow!(CUT_SHORT)),
        }
    })
}

const CUT_SHORT: &str =
    "ended at once by a second signal: the peers may not know, and notice it in half a second";

/// Reloads when the directory of peers has changed, and reads the web server's certificate again when its files have, on a thread of
/// its own: a disk or a network that hangs keeps nobody waiting.
///
/// Looking costs a `stat` for each file and second, and works where inotify does not: on network file systems, and through the
/// links and mounts of a Kubernetes Secret.
fn watch_peers(running: Arc<Running>) -> anyhow::Result<()> {
    let look = move || {
        let (mut watch, mut silent) = (Watch::default(), false);
        let mut certificate = CertificateWatch::default();
        loop {
            thread::sleep(PEERS_INTERVAL);
            certificate.look(&running);
            let config = running.config();
            let Some(path) = &config.directory.path else { continue };
            let found = fingerprint_in_time(path);
            let was_silent = std::mem::replace(&mut silent, found.is_err());
            let found = match found {
                Ok(found) => found,
                Err(error) => {
                    if !was_silent {
                        let remedy = files::remedy(&error);
                        tracing::warn!(
                            path = %path.display(), %error, remedy,
                            "identity.peers_dir cannot be looked at: its peers stay as they are (remedy: look at the file system that it is on)"
                        );
                    }
                    continue;
                }
            };
            if watch.is_due(found, config.directory.seen) {
                // It says in the log how it ended.
                drop(panics::isolate(Part::Reload, || running.reload(false)));
            }
        }
    };
    thread::Builder::new()
        .name("culvert-peers".to_owned())
        .spawn(look)
        .with_context(|| no_thread("culvert-peers"))?;
    Ok(())
}

/// The time between two looks at the directory of peers.
const PEERS_INTERVAL: Duration = Duration::from_secs(1);

/// Decides when a changed directory is read: once it has been the same for two looks, so that whoever writes it is done, and once
/// for each change.
#[derive(Debug, Default)]
struct Watch {
    last: Option<u64>,
    tried: Option<u64>,
}

impl Watch {
    /// Whether to read the directory that looks like `found`; the one that runs looked like `runs`.
    fn is_due(&mut self, found: u64, runs: u64) -> bool {
        let is_quiet = self.last.replace(found) == Some(found);
        if found == runs {
            self.tried = None;
            return false;
        }
        is_quiet && self.tried.replace(found) != Some(found)
    }
}

/// The changes of the web server's certificate.
#[derive(Debug, Default)]
struct CertificateWatch {
    watch: Watch,
    looks: u32,
}

impl CertificateWatch {
    /// Between two looks that touch the files.
    const EVERY: u32 = 5;

    fn look(&mut self, running: &Running) {
        self.looks += 1;
        let config = running.config();
        if config.certificate.is_none() || !self.looks.is_multiple_of(Self::EVERY) {
            return;
        }
        // What cannot be looked at now looks the same once it is back.
        let Ok(found) = config.http.files_in_time() else { return };
        // What runs may have been read before or after a change, so the first look leads to a reading, too.
        if self.watch.is_due(found, !found) {
            // It says in the log how it ended, a panic too.
            let _renewed = panics::isolate(Part::Reload, || running.renew_certificate()).is_ok();
        }
    }
}

/// Tells the service manager that the daemon is ready, once `up` has ended; then follows SIGHUP and tells how it stands, for ever.
async fn look_after(
    daemon: &Daemon,
    service: &mut Service,
    hang_up: &mut Signal,
    up: Option<oneshot::Receiver<()>>,
) {
    if let Some(up) = up {
        // A hook that panicked has ended, too.
        let _ended = up.await.is_ok();
    }
    service.ready(daemon.summary(), now());
    let health = &daemon.running.health;
    let mut ticks = service.tick_interval().map(interval);
    if let Some(ticks) = &mut ticks {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    let mut memory = interval(MEMORY_INTERVAL);
    memory.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut freed = FreedMemory::default();
    let mut reload: Option<oneshot::Receiver<ReloadEnd>> = None;
    let mut wanted = false;
    loop {
        if wanted && reload.is_none() {
            wanted = false;
            service.reloading(now());
            reload = begin_reload(Arc::clone(&daemon.running));
            if reload.is_none() {
                service.reloaded(ReloadEnd::Failed, daemon.summary(), now());
            }
        }
        tokio::select! {
            // Several that come during a reload are one: it may have read the file before it was complete.
            _ = hang_up.recv() => wanted = true,
            end = until(reload.as_mut()) => {
                reload = None;
                let end = end.unwrap_or(ReloadEnd::Failed);
                service.reloaded(end, daemon.summary(), now());
            }
            _ = memory.tick() => {
                freed.give_back();
            }
            _ = until(ticks.as_mut().map(Interval::tick)) => service.tick(health, || daemon.summary(), now()),
        }
    }
}

/// The time between two looks at what was freed. A look takes the locks of the C library's arenas, one after the other.
const MEMORY_INTERVAL: Duration = Duration::from_secs(5);

/// Reloads on a thread of its own, which may have to wait for a disk or for the workers: meanwhile the watchdog is told.
fn begin_reload(running: Arc<impl Peers + 'static>) -> Option<oneshot::Receiver<ReloadEnd>> {
    let work = move || match panics::isolate(Part::Reload, || running.reload(false)) {
        Ok(Ok(Reloaded { changes, .. })) => ReloadEnd::Done { changes: changes.len() },
        Ok(Err(_)) | Err(Panicked) => ReloadEnd::Failed,
    };
    let failed = |error: &anyhow::Error| {
        tracing::error!(error = format!("{error:#}"), "cannot reload; nothing was changed");
    };
    on_a_thread("culvert-reload", work).inspect_err(failed).ok()
}

/// Runs `work` on a new thread; what it returns can be waited for, or an error if it panicked.
fn on_a_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<oneshot::Receiver<T>> {
    let (done, result) = oneshot::channel();
    let run = move || {
        // Nobody waits any more when the process is ending.
        let _told = done.send(work()).is_ok();
    };
    thread::Builder::new().name(name.to_owned()).spawn(run).with_context(|| no_thread(name))?;
    Ok(result)
}

fn no_thread(name: &str) -> String {
    format!(
        "cannot start the thread {name} (remedy: more memory or threads for this process: `ulimit -v`, `ulimit -u`, TasksMax=)"
    )
}

/// Waits for what there is; for ever if there is nothing.
async fn until<F: Future>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => pin!(future).await,
        None => std::future::pending().await,
    }
}

fn now() -> Instant {
    SystemClock.now()
}

#[cfg(test)]
mod tests {
    use std::{process::Command, sync::mpsc};

    use super::*;

    #[test]
    fn a_stop_is_followed_while_the_start_hangs() {
        let mut signals = Signals::catch().unwrap();
        assert_eq!(signals.during("test-start", || 1).unwrap(), Some(1));
        let (hold, held) = mpsc::sync_channel::<()>(1);
        let pid = std::process::id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let hangs = move || held.recv().is_ok();
        assert_eq!(signals.during("test-start", hangs).unwrap(), None);
        // What ends by itself is done in order.
        assert_eq!(signals.during("test-start", || 2).unwrap(), Some(2));
        drop(hold);
    }

    #[test]
    fn a_changed_directory_is_read_once_when_it_is_quiet() {
        let mut watch = Watch::default();
        assert!(!watch.is_due(1, 1) && !watch.is_due(1, 1));
        assert!(!watch.is_due(2, 1), "somebody may be writing");
        assert!(!watch.is_due(3, 1));
        assert!(watch.is_due(3, 1));
        assert!(!watch.is_due(3, 1), "that reload failed: only another change leads to another one");
        assert!(!watch.is_due(4, 1));
        assert!(watch.is_due(4, 1));
        assert!(!watch.is_due(4, 4));
        assert!(!watch.is_due(3, 4), "the same as a failed one before");
        assert!(watch.is_due(3, 4));
    }
}
