//! `culvert status`, once or with `--watch`: the screen, and what ends it.

use std::{
    io::{self, Write as _, stdout},
    pin::pin,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use ops::control_socket::status::{self as shown, Page};
use terminal_size::{Height, Width, terminal_size};
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};

use super::{
    Failure,
    status::{Status, styled},
};
use crate::out::{self, Reader};

/// The alternate screen, without a cursor and without wrapped lines: a character may be wider than it counts.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const TO_END_OF_LINE: &str = "\x1b[K";
const TO_END_OF_SCREEN: &str = "\x1b[J";

/// The size of a terminal that does not tell: that of the oldest.
const USUAL_SIZE: (usize, usize) = (24, 80);

impl Status {
    /// Shows the status once, or again and again until a signal or the end of the daemon.
    pub(super) fn execute(self) -> Result<(), Failure> {
        let Some(seconds) = self.watch else {
            self.print(&self.ask()?)?;
            return Ok(());
        };
        let runtime =
            runtime::Builder::new_current_thread().enable_all().build().context("cannot make a runtime")?;
        let outcome = runtime.block_on(watch(self, Duration::from_secs(seconds.into())));
        // A daemon that does not answer is not waited for.
        runtime.shutdown_background();
        outcome
    }
}

async fn watch(command: Status, every: Duration) -> Result<(), Failure> {
    let listen = |kind| signal(kind).context("cannot listen to signals");
    let mut resized = listen(SignalKind::window_change())?;
    let [interrupt, terminate, hangup] =
        [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(listen);
    let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
    let mut ended = pin!(async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    });
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    // The first is now.
    ticks.tick().await;
    // The first answer comes before the screen, so that what is wrong is said as without --watch.
    let mut last = tokio::select! {
        status = ask(&command) => status?,
        () = &mut ended => return Ok(()),
    };
    let screen = command.is_drawn().then(Screen::enter).transpose()?;
    let mut is_new = true;
    loop {
        match &screen {
            Some(screen) => screen.draw(&command, &last)?,
            None if is_new => match command.print(&last)? {
                Reader::There => {}
                Reader::Gone => return Ok(()),
            },
            None => {}
        }
        let next = async {
            tokio::select! {
                _ = ticks.tick() => ask(&command).await.map(Some),
                _ = resized.recv() => Ok(None),
            }
        };
        let next = tokio::select! {
            next = next => next?,
            () = &mut ended => return Ok(()),
        };
        is_new = next.is_some();
        last = next.unwrap_or(last);
    }
}

/// Asks the daemon on a thread of its own, so that Ctrl-C works meanwhile.
async fn ask(command: &Status) -> Result<shown::Status, Failure> {
    let command = command.clone();
    let asked = tokio::task::spawn_blocking(move || command.ask()).await;
    asked.map_err(|_| anyhow!("asking the daemon failed (remedy: try again)"))?
}

/// The terminal's alternate screen; dropping it brings back what was there.
struct Screen;

impl Screen {
    fn enter() -> anyhow::Result<Self> {
        show(ENTER)?;
        Ok(Self)
    }

    fn draw(&self, command: &Status, status: &shown::Status) -> anyhow::Result<()> {
        let (height, width) = terminal_size().map_or(USUAL_SIZE, |(Width(width), Height(height))| {
            (usize::from(height).max(1), usize::from(width).max(1))
        });
        let mut status = status.clone();
        status.sort_by_traffic();
        show(&frame(command.page(&status).cut(height, width)))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if show(LEAVE).is_err() {
            out::complain(&"the terminal is gone");
        }
    }
}

/// A page over what is on the screen: nothing is cleared that is not written again at once, so that nothing flickers.
fn frame(page: Page) -> String {
    let text = styled(&page, &format!("{TO_END_OF_LINE}\r\n"));
    // No line end behind the last line: it would scroll a full screen.
    let text = text.strip_suffix("\r\n").unwrap_or(&text);
    format!("{HOME}{text}{TO_END_OF_SCREEN}")
}

fn show(text: &str) -> io::Result<()> {
    let mut stdout = stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_fills_the_screen_and_scrolls_nothing() {
        let status = shown::Status { software: "1.2.3".to_owned(), ..shown::Status::default() };
        let page = status.to_page(shown::Show::default()).cut(2, 7);
        assert_eq!(frame(page), "\x1b[Hculvert\x1b[K\r\n\x1b[1m… 3 mor\x1b[0m\x1b[K\x1b[J");
    }
}
