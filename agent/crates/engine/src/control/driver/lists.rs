//! The connections that something is to be done with, each at most once in a list.

use quinn_proto::ConnectionHandle;

#[derive(Debug, Default)]
pub(super) struct Lists {
    dirty: Vec<ConnectionHandle>,
    fed: Vec<ConnectionHandle>,
    unread: Vec<ConnectionHandle>,
    overflowing: Vec<ConnectionHandle>,
}

/// The lists in which a connection is.
#[derive(Debug, Default)]
pub(super) struct Listed {
    dirty: bool,
    fed: bool,
    unread: bool,
}

impl Lists {
    /// Something happened to a connection, so that it is to be polled.
    pub(super) fn touch(&mut self, handle: ConnectionHandle, listed: &mut Listed) {
        add(&mut self.dirty, handle, &mut listed.dirty);
    }

    /// A session has received packets, so that it may have datagrams.
    pub(super) fn feed(&mut self, handle: ConnectionHandle, listed: &mut Listed) {
        add(&mut self.fed, handle, &mut listed.fed);
    }

    /// A connection has more messages, or more packets that are in order by now, than one turn takes.
    pub(super) fn defer(&mut self, handle: ConnectionHandle, listed: &mut Listed) {
        add(&mut self.unread, handle, &mut listed.unread);
    }

    /// The far end of a connection does not read our messages.
    pub(super) fn overflow(&mut self, handle: ConnectionHandle) {
        self.overflowing.push(handle);
    }

    pub(super) fn next_dirty(&mut self) -> Option<ConnectionHandle> {
        self.dirty.pop()
    }

    pub(super) fn next_fed(&mut self) -> Option<ConnectionHandle> {
        self.fed.pop()
    }

    pub(super) fn take_unread(&mut self) -> Vec<ConnectionHandle> {
        std::mem::take(&mut self.unread)
    }

    pub(super) fn take_overflowing(&mut self) -> Vec<ConnectionHandle> {
        std::mem::take(&mut self.overflowing)
    }

    pub(super) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }
}

impl Listed {
    /// It was taken from the list of those to be polled.
    pub(super) fn polled(&mut self) {
        self.dirty = false;
    }

    /// Its datagrams are read.
    pub(super) fn read(&mut self) {
        self.fed = false;
    }

    /// Its turn has come again.
    pub(super) fn resumed(&mut self) {
        self.unread = false;
    }
}

fn add(list: &mut Vec<ConnectionHandle>, handle: ConnectionHandle, is_listed: &mut bool) {
    if !std::mem::replace(is_listed, true) {
        list.push(handle);
    }
}
