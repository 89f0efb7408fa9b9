//! What becomes of a request on a connection: who has sent it, and whom it is for. A password that a person has chosen takes a while to look
//! at, and the request waits for that.

use std::{
    future::Future as _,
    pin::Pin,
    sync::Arc,
    task::{Context, Wake, Waker},
};

use bytes::Bytes;
use h3::{error::Code, message::Request};
use quinn_proto::{ConnectionHandle, StreamId};
use users::{Verdict, checks::Check};

use super::{
    super::{
        Outcome,
        exchange::{Answers, Ask, Exchange},
        tunnel,
    },
    Around, Guest, http,
};

/// A request whose sender is not known yet, and what has come behind it.
pub(super) struct Waiting {
    head: Box<Request>,
    check: Check,
    rest: Bytes,
    /// Whether `rest` is the last of the stream.
    is_last: bool,
}

/// Tells the worker to look at a stream.
struct Tell {
    answers: Arc<Answers>,
    connection: ConnectionHandle,
    stream: StreamId,
}

impl Wake for Tell {
    fn wake(self: Arc<Self>) {
        self.answers.put(self.connection, self.stream);
    }
}

impl Guest {
    /// Reads bytes of a stream, which nothing follows if they are the last; whether more of it is to be read now.
    pub(super) fn take_in(
        &mut self,
        id: StreamId,
        mut bytes: Bytes,
        is_last: bool,
        around: &mut Around<'_>,
    ) -> bool {
        loop {
            match self.http.read(http(id), &mut bytes, is_last) {
                Ok(Some(event)) => self.http_event(id, event, around),
                Ok(None) => break,
                Err(error) => {
                    self.end(id, error, around);
                    return false;
                }
            }
            if let Some(waiting) = self.streams.get_mut(&id).and_then(|stream| stream.waiting.as_mut()) {
                (waiting.rest, waiting.is_last) = (bytes, is_last);
                return false;
            }
        }
        if is_last {
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.receives = false;
            }
            self.forget_if_over(id);
        }
        !is_last
    }

    pub(super) fn request(&mut self, id: StreamId, head: Box<Request>, around: &mut Around<'_>) {
        self.first_request_by = None;
        self.decide(id, head, None, around);
    }

    /// Goes on with the request of a stream if its sender is known now, or was; false if it waits, or is over.
    pub(super) fn is_decided(&mut self, id: StreamId, around: &mut Around<'_>) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        let Some(mut waiting) = stream.waiting.take() else { return true };
        if !self.is_ready(id, &mut waiting.check, around) {
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.waiting = Some(waiting);
            }
            return false;
        }
        let Waiting { head, check, rest, is_last } = waiting;
        if self.streams.get(&id).is_some_and(|stream| !stream.sends) {
            // The client wants no answer any more.
            self.abandon(id, Code::RequestCancelled);
            return false;
        }
        self.decide(id, head, Some(&check), around);
        if self.streams.get(&id).is_some_and(|stream| stream.receives) {
            self.take_in(id, rest, is_last, around);
        }
        true
    }

    fn is_ready(&self, id: StreamId, check: &mut Check, around: &Around<'_>) -> bool {
        let tell = Tell { answers: Arc::clone(around.answers), connection: self.handle, stream: id };
        let waker = Waker::from(Arc::new(tell));
        Pin::new(check).poll(&mut Context::from_waker(&waker)).is_ready()
    }

    fn decide(
        &mut self,
        id: StreamId,
        mut head: Box<Request>,
        checked: Option<&Check>,
        around: &mut Around<'_>,
    ) {
        // Of every request, so that its time does not tell which of them are looked at.
        let source = self.quinn.remote_address().ip();
        let presents = tunnel::presents(&head.fields, self.key, source);
        let sender = match around.users.verify(&presents, checked, around.unix_seconds, around.now) {
            Verdict::Known(sender) => sender,
            Verdict::Checks(check) => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.waiting = Some(Waiting { head, check, rest: Bytes::new(), is_last: false });
                }
                return self.answers_wake(id, around);
            }
        };
        if let Some(grant) = sender.grant.filter(|_| head.is_connect()) {
            return self.tunnel(id, &head, grant, around);
        }
        if sender.hides_authorization {
            // The password is not the site's.
            head.fields.remove("authorization");
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.has_content = head.method != "HEAD";
            stream.takes_content = head.has_content();
        }
        if head.is_connect() || head.method == "TRACE" {
            return self.refuse(id, 405, Outcome::Method, around);
        }
        let Some(site) = around.site else { return self.refuse(id, 404, Outcome::NoSite, around) };
        let exchange = Exchange::new(Arc::clone(around.answers), self.handle, id);
        let ask = Ask {
            site: site.clone(),
            client: self.quinn.remote_address(),
            head,
            exchange: Arc::clone(&exchange),
        };
        if around.asks.is_none_or(|asks| asks(ask).is_err()) {
            return self.refuse(id, 503, Outcome::Busy, around);
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.exchange = Some(exchange);
        }
    }

    /// Has the worker told when the sender of a waiting request is known.
    fn answers_wake(&mut self, id: StreamId, around: &Around<'_>) {
        let Some(mut waiting) = self.streams.get_mut(&id).and_then(|stream| stream.waiting.take()) else {
            return;
        };
        if self.is_ready(id, &mut waiting.check, around) {
            around.answers.put(self.handle, id);
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.waiting = Some(waiting);
        }
    }
}
