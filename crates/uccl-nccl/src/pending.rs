//! Connects that are not done: NCCL calls `connect` again and again with the same handle.

use std::collections::HashMap;

use parking_lot::Mutex;
use uccl_flow::{Connect, Flows, HANDLE_LEN, Handle, SendFlow};
use uccl_nccl_abi::HANDLE_BYTES;

use crate::fault::Fault;

/// Bytes of NCCL's handle behind the flow's own: the number of a connect, zero before the first
/// call.
const NUMBER: std::ops::Range<usize> = HANDLE_LEN..HANDLE_LEN + 8;
const _: () = assert!(NUMBER.end <= HANDLE_BYTES);

/// The connects of a process, by number.
#[derive(Default)]
pub(crate) struct PendingConnects(Mutex<Table>);

#[derive(Default)]
struct Table {
    last: u64,
    connects: HashMap<u64, PendingConnect>,
}

struct PendingConnect {
    /// The listener's handle. A number alone could be another connect's.
    handle: [u8; HANDLE_LEN],
    attempt: Connect,
}

/// The bytes of a listener's handle, for NCCL.
pub(crate) fn encode(handle: &Handle) -> Result<[u8; HANDLE_BYTES], Fault> {
    let own = handle.encode().map_err(uccl_flow::FlowError::from)?;
    let mut bytes = [0; HANDLE_BYTES];
    bytes[..HANDLE_LEN].copy_from_slice(&own);
    Ok(bytes)
}

impl PendingConnects {
    /// Begins a connect, or goes on with it; a flow when it is done.
    pub(crate) fn connect(
        &self,
        flows: &Flows,
        device: usize,
        bytes: &mut [u8; HANDLE_BYTES],
    ) -> Result<Option<SendFlow>, Fault> {
        let (own, number) = parts(bytes);
        let mut connect = match self.take(number, own) {
            Some(connect) => connect,
            None => PendingConnect {
                handle: own,
                attempt: Connect::begin(flows, &decode(&own)?, device)?,
            },
        };
        // Not under the lock: other communicators connect meanwhile.
        let polled = connect.attempt.poll();
        let number = match &polled {
            Ok(None) => self.put(number, connect),
            Ok(Some(_)) | Err(_) => 0,
        };
        bytes[NUMBER].copy_from_slice(&number.to_ne_bytes());
        Ok(polled?)
    }

    /// Ends all connects.
    pub(crate) fn clear(&self) {
        self.0.lock().connects.clear();
    }

    fn take(&self, number: u64, handle: [u8; HANDLE_LEN]) -> Option<PendingConnect> {
        let mut table = self.0.lock();
        let is_known = table.connects.get(&number).is_some_and(|known| known.handle == handle);
        if is_known { table.connects.remove(&number) } else { None }
    }

    /// Keeps a connect under its number, or a new one.
    fn put(&self, number: u64, connect: PendingConnect) -> u64 {
        let mut table = self.0.lock();
        let number = match number {
            known if known > 0 && known <= table.last && !table.connects.contains_key(&known) => {
                known
            }
            _ => {
                table.last += 1;
                table.last
            }
        };
        table.connects.insert(number, connect);
        number
    }
}

fn parts(bytes: &[u8; HANDLE_BYTES]) -> ([u8; HANDLE_LEN], u64) {
    let (mut own, mut number) = ([0; HANDLE_LEN], [0; 8]);
    own.copy_from_slice(&bytes[..HANDLE_LEN]);
    number.copy_from_slice(&bytes[NUMBER]);
    (own, u64::from_ne_bytes(number))
}

fn decode(bytes: &[u8; HANDLE_LEN]) -> Result<Handle, Fault> {
    Ok(Handle::decode(bytes).map_err(uccl_flow::FlowError::from)?)
}

#[cfg(test)]
mod tests {
    use uccl_flow::{Listener, Settings};

    use super::*;

    #[test]
    fn a_number_of_another_connect_finds_nothing() {
        let flows = Flows::new(Settings::default()).expect("flows");
        let listener = Listener::listen(&flows, 0).expect("a listener");
        let (own, _) = parts(&encode(listener.handle()).expect("bytes"));
        let pending = PendingConnects::default();
        let attempt = Connect::begin(&flows, listener.handle(), 0).expect("a connect");
        let number = pending.put(0, PendingConnect { handle: own, attempt });
        assert!(pending.take(number, [7; HANDLE_LEN]).is_none(), "another handle's");
        assert!(pending.take(number + 1, own).is_none(), "a number that was not given");
        let kept = pending.take(number, own).expect("its own");
        // Its number stays the same from call to call.
        assert_eq!(pending.put(number, kept), number);
        pending.clear();
        assert!(pending.take(number, own).is_none());
    }

    #[test]
    fn bytes_that_are_no_handle_are_refused() {
        assert!(decode(&[0; HANDLE_LEN]).is_err());
    }
}
