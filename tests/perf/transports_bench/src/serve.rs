//! The receiving end: counts what arrives, and says so for each line of its standard input.

use std::{
    io::{self, BufRead as _, Write as _},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    account::Account,
    clock::now_ns,
    transport::{Listener as _, Receiver, Transport},
};

type Accounts = Arc<Mutex<Vec<Arc<Mutex<Account>>>>>;

/// Receives until standard input ends.
pub(crate) async fn run<T: Transport>(transport: T, at: SocketAddr) -> anyhow::Result<()> {
    let accounts = Accounts::default();
    let mut listener = transport.listen(at).await?;
    answer(Arc::clone(&accounts));
    let mut connections = JoinSet::new();
    loop {
        let receiver = listener.accept().await?;
        let account = Arc::new(Mutex::new(Account::new()));
        locked(&accounts).push(Arc::clone(&account));
        connections.spawn(count(receiver, account));
        while connections.try_join_next().is_some() {}
    }
}

/// Counts the messages of a connection until it ends, however that is.
async fn count(mut receiver: impl Receiver, account: Arc<Mutex<Account>>) {
    while let Ok(Some(message)) = receiver.receive().await {
        locked(&account).arrived(message, now_ns());
    }
}

/// Says that it listens, then answers each line with the account so far, from a thread of its own.
fn answer(accounts: Accounts) {
    println!("{}", json!({ "listens": true }));
    thread::spawn(move || {
        for _ in io::stdin().lock().lines() {
            let accounts = locked(&accounts).clone();
            let mut all = Account::new();
            for account in &accounts {
                all.add(&locked(account));
            }
            println!("{}", all.to_json(accounts.len()));
            // Whoever asked may have gone.
            io::stdout().flush().ok();
        }
        std::process::exit(0);
    });
}

/// A panic elsewhere leaves counts that are still true.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
