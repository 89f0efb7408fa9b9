//! Writes the agent's sources under test to where `main.rs` includes them: as they are, and each mutant with one change.

use std::{env, error::Error, fs, path::Path};

const SOURCES: [(&str, &str); 2] = [
    ("ready", "../../../agent/crates/net/src/ready.rs"),
    ("mailbox", "../../../agent/crates/engine/src/hub/mailbox.rs"),
];

struct Mutant {
    name: &'static str,
    from: &'static str,
    to: &'static str,
}

/// What `main.rs` must find wrong.
const MUTANTS: [Mutant; 9] = [
    Mutant {
        name: "woken_before_the_message_is_there",
        from: r"        let mut messages = lock(&self.messages);
        messages.push_back(message);
        self.has_messages.store(true, Ordering::Release);
        drop(messages);
        self.wake();",
        to: r"        self.wake();
        let mut messages = lock(&self.messages);
        messages.push_back(message);
        self.has_messages.store(true, Ordering::Release);",
    },
    Mutant {
        name: "flag_before_the_message",
        from: r"        let mut messages = lock(&self.messages);
        messages.push_back(message);
        self.has_messages.store(true, Ordering::Release);",
        to: r"        self.has_messages.store(true, Ordering::Release);
        let mut messages = lock(&self.messages);
        messages.push_back(message);",
    },
    Mutant {
        name: "flag_cleared_after_the_messages_are_taken",
        from: r"        if !self.has_messages.load(Ordering::Relaxed) || !self.has_messages.swap(false, Ordering::Acquire) {
            return VecDeque::new();
        }
        std::mem::take(&mut *lock(&self.messages))",
        to: r"        if !self.has_messages.load(Ordering::Relaxed) {
            return VecDeque::new();
        }
        let messages = std::mem::take(&mut *lock(&self.messages));
        self.has_messages.store(false, Ordering::Release);
        messages",
    },
    Mutant {
        name: "woken_before_the_hand_off_is_there",
        from: r"        self.ring.put(hand_off, size, party)?;
        self.wake();",
        to: r"        self.wake();
        self.ring.put(hand_off, size, party)?;",
    },
    Mutant {
        name: "messages_before_hand_offs",
        from: r"        let seen = self.ring.seen();
        (self.messages(), seen)",
        to: r"        let messages = self.messages();
        let seen = self.ring.seen();
        (messages, seen)",
    },
    Mutant {
        name: "broadcast_one_by_one",
        from: "        let mut locked: Vec<_> = mailboxes.iter().map(|mailbox| lock(&mailbox.messages)).collect();",
        to: r"        if let Some((last, before)) = mailboxes.split_last() {
            before.iter().for_each(|mailbox| mailbox.post(message()));
            last.post(message());
            return;
        }
        let mut locked: Vec<_> = mailboxes.iter().map(|mailbox| lock(&mailbox.messages)).collect();",
    },
    Mutant {
        name: "joined_without_a_look",
        from: r"        if !lock(&self.messages).is_empty() || lock(&self.ring.inside).hand_offs > 0 {
            self.wake();
        }",
        to: "",
    },
    Mutant {
        name: "a_look_before_the_worker_is_registered",
        from: r"            self.register(context.waker());
            if self.is_empty() { Poll::Pending } else { Poll::Ready(()) }",
        to: r"            let empty = self.is_empty();
            self.register(context.waker());
            if empty { Poll::Pending } else { Poll::Ready(()) }",
    },
    Mutant {
        name: "looked_whom_to_wake_before_the_token_is_queued",
        from: r"            let mut state = self.lock();
            if !state.queued.insert(token) {
                return;
            }
            state.queue.push(token);
            state.worker.clone()",
        to: r"            let worker = self.lock().worker.clone();
            let mut state = self.lock();
            if !state.queued.insert(token) {
                return;
            }
            state.queue.push(token);
            worker",
    },
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = env::var("OUT_DIR")?;
    println!("cargo::rerun-if-changed=build.rs");
    let mut found = [0; MUTANTS.len()];
    for (file, path) in SOURCES {
        println!("cargo::rerun-if-changed={path}");
        let text = fs::read_to_string(path)?;
        // What is included inside of a module can have no inner comments, and is no test here.
        let text = text.split_once("\n#[cfg(test)]\n").map_or(&*text, |(code, _tests)| code);
        let text: Vec<_> = text.lines().filter(|line| !line.starts_with("//!")).collect();
        let text = text.join("\n") + "\n";
        write(&out, "genuine", file, &text)?;
        for (mutant, found) in MUTANTS.iter().zip(&mut found) {
            *found += text.matches(mutant.from).count();
            write(&out, mutant.name, file, &text.replace(mutant.from, mutant.to))?;
        }
    }
    for (mutant, found) in MUTANTS.iter().zip(found) {
        if found != 1 {
            println!(
                "cargo::warning={found} places for the mutant {}: change its text as the source did",
                mutant.name
            );
        }
    }
    Ok(())
}

/// Each copy lies in a module named after it, so that what it uses of the agent is found beside it.
fn write(out: &str, variant: &str, file: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(out).join(variant);
    fs::create_dir_all(&folder)?;
    let text = text
        .replace("crate::", &format!("crate::{variant}::"))
        .replace("use std::", "use crate::std::")
        .replace("use base::", "use crate::agent::")
        .replace("use net::", &format!("use crate::{variant}::net::"));
    Ok(fs::write(folder.join(file).with_extension("rs"), text)?)
}
