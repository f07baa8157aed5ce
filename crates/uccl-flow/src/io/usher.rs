//! The place of a stream that has greeted: a listener, a flow, or a thread for chunks.

use std::{
    net::{SocketAddr, TcpStream},
    ops::RangeInclusive,
    sync::Arc,
    time::Instant,
};

use uccl_wire::flow::{
    FlowHello, FlowWelcome, Purpose, Status,
    greeting::{Callee, MOST_GREETING},
};

use crate::{
    error::Peer,
    local_ring::LocalRing,
    port::Mail,
    shared::FlowsState,
    sink::Sink,
    socket::{self, Span},
};

/// The longest chunk of a peer, and all lengths that they may have.
pub(super) const MOST_CHUNK_LEN: u64 = 4 << 20;
const CHUNK_LENS: RangeInclusive<u64> = 4 << 10..=MOST_CHUNK_LEN;

/// A stream that has not greeted yet.
pub(super) struct Stranger {
    pub(super) stream: TcpStream,
    pub(super) addr: SocketAddr,
    pub(super) callee: Callee,
    pub(super) bytes: [u8; MOST_GREETING],
    pub(super) filled: usize,
    pub(super) since: Instant,
}

/// Gives streams their places.
pub(super) struct Usher(pub(super) Arc<FlowsState>);

impl Usher {
    /// Gives a stream that has greeted to its flow or listener.
    pub(super) fn place(&self, stranger: Stranger, hello: &FlowHello) -> Result<(), String> {
        match hello.purpose {
            Purpose::Flow => self.place_flow(stranger, hello),
            Purpose::Bulk if hello.key == self.0.key => {
                self.answer(&stranger, Status::Taken)?;
                self.place_bulk(stranger, hello);
                Ok(())
            }
            Purpose::Resume if hello.key == self.0.key => self.place_resumed(stranger, hello),
            Purpose::Bulk | Purpose::Resume => {
                self.answer(&stranger, Status::UnknownKey)?;
                Err("its key is not this process's".into())
            }
        }
    }

    fn place_flow(&self, stranger: Stranger, hello: &FlowHello) -> Result<(), String> {
        // A listener that closes meanwhile would not see the flow: it waits for this.
        let listeners = self.0.listeners.lock();
        let Some(arrivals) = listeners.get(&hello.key) else {
            self.answer(&stranger, Status::UnknownKey)?;
            return Err("its key is unknown: another job's handle, or a closed listener's".into());
        };
        if arrivals.is_full() || !CHUNK_LENS.contains(&hello.chunk_len) {
            self.answer(&stranger, Status::Full)?;
            return Err("too many connections wait for accept, or its chunks are too long".into());
        }
        let device = arrivals.device().to_owned();
        let peer = Peer { instance: hello.instance, addr: Some(stranger.addr), device };
        let mut sinks = self.0.sinks.write();
        if let Some(sink) = sinks.get(&hello.flow) {
            // The peer has not heard the answer, and asks again.
            if sink.peer.instance != hello.instance {
                return Err("another process has a flow of that name".into());
            }
            let mut state = sink.state.lock();
            if state.received > 0 {
                return Err("its flow has another stream".into());
            }
            self.answer(&stranger, Status::Taken)?;
            state.stream = Some(stranger.stream);
            return Ok(());
        }
        self.answer(&stranger, Status::Taken)?;
        self.0.visitors.lock().add(hello.instance);
        let ring = LocalRing::new(self.0.settings.local);
        let sink = Sink::new(stranger.stream, peer, (hello.flow, hello.chunk_len), ring);
        sinks.insert(hello.flow, Arc::clone(&sink));
        drop(sinks);
        arrivals.push(sink);
        Ok(())
    }

    /// Gives a flow another own stream.
    fn place_resumed(&self, stranger: Stranger, hello: &FlowHello) -> Result<(), String> {
        let sink = self.0.sinks.read().get(&hello.flow).cloned();
        let sink = sink.filter(|sink| sink.peer.instance == hello.instance);
        let Some(sink) = sink else {
            self.answer(&stranger, Status::UnknownFlow)?;
            return Err("its flow is not known, or has ended".into());
        };
        let mut state = sink.state.lock();
        if state.failure.is_some() {
            return self.answer(&stranger, Status::UnknownFlow);
        }
        if hello.chunk_len <= state.round {
            return Err("a later stream has taken its place".into());
        }
        self.welcome(&stranger, Status::Taken, state.received)?;
        self.0.visitors.lock().hear(hello.instance);
        state.round = hello.chunk_len;
        state.stream = Some(stranger.stream);
        Ok(())
    }

    fn place_bulk(&self, stranger: Stranger, hello: &FlowHello) {
        self.0.visitors.lock().hear(hello.instance);
        let workers = &self.0.workers;
        // Streams that different threads of the peer drive are different threads' here, too.
        let at = hello.flow.wrapping_add(hello.instance) % workers.len() as u64;
        let worker = &workers[at as usize];
        worker.send(Mail::InboundStream { stream: stranger.stream, instance: hello.instance });
    }

    fn answer(&self, stranger: &Stranger, status: Status) -> Result<(), String> {
        self.welcome(stranger, status, 0)
    }

    fn welcome(&self, stranger: &Stranger, status: Status, received: u64) -> Result<(), String> {
        let (key, instance) = (self.0.key, self.0.instance);
        let key = if status == Status::Taken { key } else { [0; 16] };
        let welcome = FlowWelcome { status, key, instance, received };
        send(&stranger.stream, &stranger.callee.answer(&welcome))
    }
}

/// A fresh socket has room for a part of a greeting.
pub(super) fn send(stream: &TcpStream, bytes: &[u8]) -> Result<(), String> {
    // SAFETY: the bytes live through the call.
    match unsafe { socket::send(stream, &[Span::of(bytes)]) } {
        Ok(Some(count)) if count == bytes.len() => Ok(()),
        Ok(_) => Err("it does not take the answer".into()),
        Err(error) => Err(error.to_string()),
    }
}
