//! Notifications. The receiver can check each one by its payload alone.

use std::sync::mpsc::Sender;

use crate::{control::ControlMessage, history, pattern::Pattern};

/// Bytes of the stamp in front of a noise payload's pattern.
const STAMP: usize = 4;
const FAREWELL: u8 = 0;
const NOISE: u8 = 1;

/// The payload that carries a message.
pub(crate) fn farewell(message: &ControlMessage) -> Vec<u8> {
    [&[FAREWELL], message.line().as_bytes()].concat()
}

/// A payload of random length that holds a pattern.
pub(crate) fn noise(rng: &mut fastrand::Rng, stamp: u32) -> Vec<u8> {
    let most = 1 << rng.u32(0..20);
    let len = rng.usize(0..=most);
    let mut payload = vec![NOISE; 1 + STAMP + len];
    payload[1..1 + STAMP].copy_from_slice(&stamp.to_le_bytes());
    // SAFETY: the payload is a local buffer with `len` bytes behind the stamp.
    unsafe { Pattern::data(stamp).fill(payload[1 + STAMP..].as_ptr() as usize, 0, len) };
    payload
}

/// Takes a received notification: passes its message on, or checks its pattern.
pub(crate) fn deliver(payload: &[u8], senders: &[Sender<ControlMessage>]) {
    match payload.split_first() {
        Some((&FAREWELL, line)) => match ControlMessage::parse(&String::from_utf8_lossy(line)) {
            Some(message @ ControlMessage::Return { worker, .. }) => {
                drop(senders[worker].send(message))
            }
            _ => history::broken("a notification is not what was sent".into()),
        },
        Some((&NOISE, rest)) if rest.len() >= STAMP => {
            let (head, body) = rest.split_at(STAMP);
            let stamp = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
            // SAFETY: the body is a slice of this length.
            let mismatch =
                unsafe { Pattern::data(stamp).compare(body.as_ptr() as usize, 0, body.len()) };
            if let Some(mismatch) = mismatch {
                history::broken(format!("a notification is not what was sent: {mismatch}"));
            }
        }
        _ => history::broken(format!("a notification of {} bytes was never sent", payload.len())),
    }
}
