//! Two endpoints in one process, and helpers for tests.

mod loopback;
pub(crate) mod place;
pub(crate) mod suite;

use std::{sync::atomic::AtomicU64, time::Duration};

use uccl_p2p::{
    Config, ConnId, Endpoint, Error, Iov, MrId, NoInterrupt, Op, Request, Status, TransferId,
    Transport, wire::advert::Advert,
};

use self::{loopback::on_loopback, place::Place};

pub(crate) struct Pair {
    pub(crate) a: Endpoint,
    pub(crate) b: Endpoint,
    pub(crate) to_b: ConnId,
    pub(crate) to_a: ConnId,
}

pub(crate) fn config(transport: Transport) -> Config {
    Config {
        transport,
        num_cpus: 2,
        timeout: place::patience(),
        transfer_timeout: Duration::from_secs(20),
        ..on_loopback()
    }
}

/// Two endpoints, each with settings of its own. The second may be in another network namespace: it
/// is made and connected there, and so are its workers.
pub(crate) fn pair_of(change: [&dyn Fn(&mut Config); 2]) -> Pair {
    let places = Place::both();
    let end = |at: usize| {
        let mut config = Config { bind: Some(places[at].ip), ..config(Transport::Auto) };
        change[at](&mut config);
        places[at].run(|| Endpoint::new(config).expect("an endpoint"))
    };
    let (a, b) = (end(0), end(1));
    let connect = || a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    let accept = || b.accept(None, &mut NoInterrupt).expect("accepted").conn;
    let (to_b, to_a) = (places[0].run(connect), places[1].run(accept));
    Pair { a, b, to_b, to_a }
}

pub(crate) fn register(ep: &Endpoint, memory: &mut [u8]) -> MrId {
    // SAFETY: the tests keep their memory until their endpoints are closed.
    unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) }.expect("registered")
}

pub(crate) fn iov(mr: MrId, memory: &[u8]) -> Iov {
    Iov { mr, ptr: memory.as_ptr() as usize, len: memory.len() }
}

pub(crate) fn advert(ep: &Endpoint, mr: MrId, memory: &[u8]) -> Advert {
    ep.advertise(mr, memory.as_ptr() as usize, memory.len()).expect("advertised")
}

/// Registers words that peers' signals change.
pub(crate) fn register_words(ep: &Endpoint, words: &[AtomicU64]) -> MrId {
    // SAFETY: as in `register`; atomics may be changed by anyone.
    unsafe { ep.register(words.as_ptr() as usize, size_of_val(words)) }.expect("registered")
}

pub(crate) fn advert_word(ep: &Endpoint, mr: MrId, word: &AtomicU64) -> Advert {
    ep.advertise(mr, word.as_ptr() as usize, size_of_val(word)).expect("advertised")
}

/// The path of bytes from one endpoint to the other's memory.
pub(crate) fn path(from: &Endpoint, conn: ConnId, to: &Endpoint) -> &'static str {
    let mut memory = vec![0; 64];
    let mr = register(to, &mut memory);
    let path = from.path(conn, &advert(to, mr, &memory)).expect("a connection");
    to.deregister(mr).expect("unused");
    path
}

pub(crate) fn request<'a>(
    conn: ConnId,
    op: Op,
    iovs: &'a [Iov],
    adverts: &'a [Advert],
) -> Request<'a> {
    Request::new(conn, op, iovs, adverts)
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(167) >> 4) as u8 ^ i as u8 ^ seed).collect()
}

pub(crate) fn finish(ep: &Endpoint, transfer: TransferId) -> Result<u64, Error> {
    match ep.wait(transfer, None, &mut NoInterrupt)? {
        Status::Done(outcome) => Ok(outcome.bytes),
        Status::Failed(e) => Err(e),
        Status::Pending => panic!("{transfer} hangs"),
    }
}
