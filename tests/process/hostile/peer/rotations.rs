//! Preshared keys (`docs/wire-format.md` §2): proofs of them, and the attack with both.

use std::time::Duration;

use anyhow::Result;
use quinn::Connection;
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use tokio::time::sleep;

use super::{
    attack::{Attacker, Lanes},
    messages::{self, Proof},
    rounds::wait_for_end,
    session::{Session, exported},
};

/// The keys that an agent may have for us, the preferred one first.
pub(crate) const KEYS: [[u8; 32]; 2] = [[0x21; 32], [0x42; 32]];

/// Changes of the keys until the agent is shown none that it has.
const CHANGES: u64 = 20;

/// Our proofs of [`KEYS`] on a connection that we dialled.
pub(crate) fn proofs(connection: &Connection) -> Result<[Proof; 2]> {
    let exported = exported::<32>(connection, b"EXPORTER culvert psk")?;
    Ok(KEYS.map(|key| proof(&key, &exported)))
}

/// The dialler's proof of `key`.
fn proof(key: &[u8; 32], exported: &[u8; 32]) -> Proof {
    let mut proof = [0; 16];
    let extracted = Salt::new(HKDF_SHA256, key).extract(exported);
    let expanded = extracted.expand(&[b"culvert psk proof 1", &[0]], Length);
    expanded.and_then(|expanded| expanded.fill(&mut proof)).expect("shorter than HKDF allows");
    proof
}

struct Length;

impl KeyType for Length {
    fn len(&self) -> usize {
        16
    }
}

/// Changes the keys as often as a session survives, opens lanes with either, and shows keys that nobody has: beside the session to
/// be refused, and then on it.
pub(super) async fn rotate(attacker: &mut Attacker, session: &mut Session) -> Result<()> {
    /// 1,000 units a second are free; a change costs 16, and an opening one.
    const INTERVAL: Duration = Duration::from_millis(40);
    const LANES_AT_ONCE: u64 = 16;
    let [first, second] = proofs(&session.connection)?;
    let orders = [vec![second, first], vec![first, second], vec![second], vec![first]];
    let (mut lanes, mut count) = (Lanes::default(), 0);
    while attacker.goes_on(session) {
        let order = &orders[count as usize % orders.len()];
        session.control.write_all(&messages::preshared_keys(order)).await?;
        for place in 0..LANES_AT_ONCE {
            let index = (count * LANES_AT_ONCE + place) % 64;
            let proof = [first, second, rand::random()][place as usize % 3];
            lanes.ask_with(session, index, Some(&proof)).await?;
        }
        while session.inbox.try_recv().is_ok() {}
        count += 1;
        if count.is_multiple_of(CHANGES) {
            session.control.write_all(&messages::preshared_keys(&[rand::random()])).await?;
            wait_for_end(session).await;
        } else if let Ok(link) = attacker.dialler.connect().await {
            let (mut control, _answers) = link.connection.open_bi().await?;
            let hello = attacker.dialler.hello_with(&link.connection, &[rand::random(), rand::random()])?;
            control.write_all(&hello).await?;
            sleep(INTERVAL).await;
        }
        attacker.rest().await;
    }
    Ok(())
}

#[test]
fn the_proof_of_the_document() {
    let key = std::array::from_fn(|place| u8::try_from(place).unwrap());
    let shown: String = proof(&key, &[0xa5; 32]).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(shown, "ada86af9344f2b709480a614ff652158");
}
