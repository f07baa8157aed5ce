//! Messages that come by a ring.

use std::{io, time::Instant};

use uccl_wire::flow::FlowHead;

use super::begin;
use crate::{
    error::FlowError,
    local_ring::{InboundRing, LocalRing},
    ring::RingReceiver,
    sink::{Sink, SinkState},
};

/// Opens the ring of a note. Where that fails, messages go on over the stream.
pub(super) fn open(sink: &Sink, state: &mut SinkState, note: &FlowHead) {
    if !state.ring.is_expected() {
        return;
    }
    state.ring = match RingReceiver::open(note) {
        Ok(ring) => {
            tracing::debug!("small messages of {} come by a ring", sink.peer);
            LocalRing::Open(InboundRing::new(ring))
        }
        Err(error) => {
            tracing::info!("{}: its ring cannot be opened, TCP goes on: {error}", sink.peer);
            LocalRing::None
        }
    };
}

/// Takes messages. True if the stream has its turn.
pub(super) fn progress(sink: &Sink, state: &mut SinkState) -> Result<bool, FlowError> {
    take(sink, state)?;
    let LocalRing::Open(local) = &mut state.ring else { return Ok(true) };
    Ok(local.end_look())
}

/// Takes messages until the ring is empty, or the next one has no receive.
pub(super) fn take(sink: &Sink, state: &mut SinkState) -> Result<(), FlowError> {
    take_all(sink, state).map_err(|error| state.end(error))
}

fn take_all(sink: &Sink, state: &mut SinkState) -> Result<(), FlowError> {
    while let Some(index) = begun(sink, state)? {
        let (LocalRing::Open(local), Some(receive)) = (&mut state.ring, state.slots.at(index))
        else {
            return Ok(());
        };
        let rest = receive.rest();
        if rest.len > 0 {
            // SAFETY: the caller of `post` keeps the memory writable while the receive has not
            // ended.
            let taken = unsafe { local.ring.recv(rest) };
            let Some(count) = taken.map_err(|error| broken(sink, &error))? else { return Ok(()) };
            receive.received += count;
            state.last_progress = Instant::now();
        }
        if receive.received == receive.total {
            receive.is_done = true;
            local.begun = None;
            state.traffic.add_small(receive.total);
            state.was_large = false;
        }
    }
    Ok(())
}

/// The message that has begun: the place of its slot.
fn begun(sink: &Sink, state: &mut SinkState) -> Result<Option<usize>, FlowError> {
    let LocalRing::Open(local) = &mut state.ring else { return Ok(None) };
    if local.begun.is_some() {
        return Ok(local.begun);
    }
    let Some(head) = local.head().map_err(|error| broken(sink, &error))? else { return Ok(None) };
    let head = FlowHead::decode(&head).map_err(|error| sink.protocol(error.to_string()))?;
    if head.message >= state.inbox.posted() {
        return Ok(None);
    }
    let index = begin(sink, state, &head)?;
    if let LocalRing::Open(local) = &mut state.ring {
        local.begin(index);
    }
    Ok(Some(index))
}

fn broken(sink: &Sink, error: &io::Error) -> FlowError {
    sink.protocol(format!("its ring: {error}"))
}
