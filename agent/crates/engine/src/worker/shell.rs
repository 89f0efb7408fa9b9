//! The loop that runs a worker on a tokio runtime: it waits for events and passes the time.

use std::{future::poll_fn, task::Poll};

use wire::clock::Clock;

use crate::worker::Worker;

/// Runs a worker on the current runtime until it has shut down.
pub async fn run(mut worker: Worker, clock: &dyn Clock) {
    loop {
        let now = clock.now();
        // A turn has budgets of its own. tokio's budget would make sockets look empty after 128 operations.
        let turn = tokio::task::unconstrained(poll_fn(|_| Poll::Ready(worker.turn(now)))).await;
        if turn.ended {
            worker.publish_last(now);
            return;
        }
        if turn.busy {
            // Lets the runtime poll its sockets, so that no source starves.
            tokio::task::yield_now().await;
            continue;
        }
        let woken = worker.ready().marked();
        match turn.deadline {
            Some(deadline) => {
                // A turn follows in either case.
                let _elapsed = tokio::time::timeout_at(deadline.into(), woken).await.is_err();
            }
            None => woken.await,
        }
    }
}
