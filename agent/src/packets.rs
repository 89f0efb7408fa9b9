//! CONNECT-IP: opens a session, and sends what it has to say until it is over. Packets do not come by here.

use std::{net::SocketAddr, task::Poll};

use base::clock::{Clock, SystemClock};
use engine::control::web::{Datagrams, Exchange, refused};
use h3::message::Response;
use users::{
    Grant, Session,
    account::Refusal,
    ip::{IpSession, Next, scope::Scope},
    session::{SessionEnd, SessionKind},
};

/// Serves a session to its end.
pub(crate) async fn serve(
    grant: &Grant,
    place: &Session,
    scope: Scope,
    client: SocketAddr,
    exchange: &Exchange,
    datagrams: Option<&Datagrams>,
) {
    let account = place.account();
    let asked = scope.to_string();
    let opened = async {
        let datagrams = datagrams.ok_or(Refusal::Protocol)?;
        let link = datagrams.link().ok_or(Refusal::Protocol)?;
        grant.open_ip(scope, link).await
    };
    let opened = tokio::select! {
        opened = opened => opened,
        _ = std::future::poll_fn(|cx| exchange.poll_abandoned(cx)) => return,
    };
    match opened {
        Err(refusal) => {
            account.refused(refusal);
            tracing::debug!(user = account.name(), %client, reason = refusal.label(), "a user's request for IP packets is refused");
            exchange.answer(refused(refusal));
        }
        Ok((session, capsules)) => {
            tracing::debug!(user = account.name(), %client, "a user has inner addresses");
            place.opens(SessionKind::Packets, client, &asked, None);
            let mut response = Response::new(200);
            // RFC 9484 §4.5.
            response.fields.push("capsule-protocol", "?1".as_bytes()).expect("a field of ours");
            exchange.answer(response);
            exchange.answer_content(capsules.into());
            let end = until_over(session, exchange).await;
            place.ends(end);
            if end == SessionEnd::Revoked {
                // Who may not go on is told so by a reset.
                if let Some(datagrams) = datagrams {
                    datagrams.close();
                }
                return exchange.fail();
            }
            if let SessionEnd::Ended(refusal) = end {
                account.refused(refusal);
                tracing::debug!(user = account.name(), %client, reason = refusal.label(), "a user's session of IP packets is ended");
            }
        }
    }
    if let Some(datagrams) = datagrams {
        datagrams.close();
    }
    exchange.answer_end();
}

/// Sends what a session has to say; why it is over.
async fn until_over(mut session: IpSession, exchange: &Exchange) -> SessionEnd {
    loop {
        let next = tokio::select! {
            next = session.next(|| SystemClock.unix_seconds()) => next,
            content = std::future::poll_fn(|cx| exchange.poll_content(cx)) => match content {
                // Capsules do not come by here.
                Ok(Some(_)) => continue,
                Ok(None) => return SessionEnd::Finished,
                Err(_) => return SessionEnd::Reset,
            },
        };
        match next {
            Next::Send(capsules) => {
                let room = std::future::poll_fn(|cx| Poll::Ready(exchange.poll_room(cx))).await;
                match room {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(_)) => return SessionEnd::Reset,
                    // Who asks and does not read.
                    Poll::Pending => return SessionEnd::Ended(Refusal::Capsules),
                }
                exchange.answer_content(capsules.into());
            }
            Next::End(reason) => return reason.map_or(SessionEnd::Revoked, SessionEnd::Ended),
        }
    }
}
