//! Memory that is registered, but not mapped any more: its transfers fail, and everything else
//! works.

#[path = "support/loopback.rs"]
mod loopback;

use std::time::{Duration, Instant};

use uccl_p2p::{
    Change, Checksum, Config, ConnId, Endpoint, Error, Iov, NoInterrupt, Op, Request, Signal,
    Status, Transport,
};

use self::loopback::on_loopback;

const LEN: usize = 1 << 20;

/// Memory that can be made inaccessible, as if unmapped: no other mapping gets its addresses
/// meanwhile.
struct Pages(usize);

impl Pages {
    fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), LEN, rw, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at as usize)
    }

    fn protect(&self, from: usize, how: i32) {
        // SAFETY: a part of these pages.
        let done = unsafe { libc::mprotect((self.0 + from) as *mut _, LEN - from, how) };
        assert_eq!(done, 0);
    }

    /// Makes the pages from `from` on inaccessible.
    fn lose(&self, from: usize) {
        self.protect(from, libc::PROT_NONE);
    }

    fn find_again(&self) {
        self.protect(0, libc::PROT_READ | libc::PROT_WRITE);
    }
}

struct Pair {
    a: Endpoint,
    b: Endpoint,
    conn: ConnId,
    /// The connection at the other end.
    theirs_conn: ConnId,
    ours: (Pages, Iov),
    theirs: (Pages, Iov),
}

/// How two endpoints are connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    /// The kernel copies.
    Cma,
    /// Rings in shared memory carry the data of unmapped memory.
    Rings,
    Tcp,
    Checked,
    Sealed,
}

const LINKS: [Link; 5] = [Link::Cma, Link::Rings, Link::Tcp, Link::Checked, Link::Sealed];

impl Link {
    fn config(self) -> Config {
        let is_local = matches!(self, Self::Cma | Self::Rings);
        let psk = (self == Self::Sealed).then(|| b"a secret of sixteen".to_vec());
        Config {
            transport: if is_local { Transport::Local } else { Transport::Tcp },
            checksum: if self == Self::Checked { Checksum::On } else { Checksum::Off },
            cma: self != Self::Rings,
            psk,
            ..on_loopback()
        }
    }
}

fn registered(ep: &Endpoint) -> (Pages, Iov) {
    let pages = Pages::new();
    // SAFETY: the pages stay for good.
    let mr = unsafe { ep.register(pages.0, LEN) }.expect("registered");
    let iov = Iov { mr, ptr: pages.0, len: LEN };
    (pages, iov)
}

fn pair(link: Link) -> Pair {
    let [a, b] = [(); 2].map(|()| Endpoint::new(link.config()).expect("an endpoint"));
    let conn = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    let theirs_conn = b.accept(None, &mut NoInterrupt).expect("accepted").conn;
    let (ours, theirs) = (registered(&a), registered(&b));
    Pair { a, b, conn, theirs_conn, ours, theirs }
}

impl Pair {
    fn run(&self, op: Op, len: usize) -> Result<(), Error> {
        let ours = [Iov { len, ..self.ours.1 }];
        let advert = self.b.advertise(self.theirs.1.mr, self.theirs.1.ptr, len).expect("inside");
        let adverts = [advert];
        let timeout = Some(Duration::from_secs(30));
        let request = Request { timeout, ..Request::new(self.conn, op, &ours, &adverts) };
        self.a.run(&request, &mut NoInterrupt).map(drop)
    }

    /// A send of ours that meets a receive of theirs, and how each of the two ended.
    fn send(&self, len: usize) -> [Result<(), Error>; 2] {
        let timeout = Some(Duration::from_secs(30));
        let receiving = {
            let iovs = [Iov { len, ..self.theirs.1 }];
            let request =
                Request { timeout, ..Request::new(self.theirs_conn, Op::Recv, &iovs, &[]) };
            self.b.post(&request).expect("posted")
        };
        let sent = {
            let iovs = [Iov { len, ..self.ours.1 }];
            let request = Request { timeout, ..Request::new(self.conn, Op::Send, &iovs, &[]) };
            self.a.run(&request, &mut NoInterrupt).map(drop)
        };
        if sent.as_ref().is_err_and(|e| matches!(e, Error::LocalMemory(_))) {
            // Nothing may have been sent, and then nothing comes.
            let _ = self.b.cancel(receiving).expect("it is known");
        }
        let received = self.b.wait(receiving, timeout, &mut NoInterrupt).expect("it is known");
        let received = match received {
            Status::Done(_) => Ok(()),
            Status::Failed(e) => Err(e),
            Status::Pending => panic!("a receive that does not end"),
        };
        [sent, received]
    }

    /// Everything goes on: the connection lives, and moves the memory that is mapped again.
    fn goes_on(&self) {
        self.a.check_connection(self.conn).expect("it lives");
        for pages in [&self.ours.0, &self.theirs.0] {
            pages.find_again();
        }
        for op in [Op::Write, Op::Read] {
            self.run(op, LEN).expect("it is there again");
        }
        for len in [8, LEN] {
            self.send(len).into_iter().for_each(|end| end.expect("it is there again"));
        }
    }
}

fn refused(result: Result<(), Error>, what: &str) {
    let e = result.expect_err(what);
    let told = e.to_string();
    assert!(!matches!(e, Error::ConnectionLost { .. }), "{what}: {told}");
    assert!(told.contains("could not be touched") || told.contains("mapped"), "{what}: {told}");
}

/// Short ones are copied when they are posted, and the beginnings of long ones where they arrive.
const LENGTHS: [usize; 6] = [8, 2 << 10, 3000, 20_000, 100_000, LEN];

/// Bytes. The data of such a send is in its message.
const EAGER: usize = 32 << 10;

#[test]
fn a_peers_memory_that_is_gone_costs_a_transfer() {
    for link in LINKS {
        let p = pair(link);
        for op in [Op::Write, Op::Read] {
            for len in LENGTHS {
                p.theirs.0.lose(0);
                refused(p.run(op, len), &format!("{link:?} {op:?} {len}"));
                p.goes_on();
            }
            // Half of the memory is accessible.
            p.theirs.0.lose(LEN / 2);
            refused(p.run(op, LEN), &format!("{link:?} {op:?}, half"));
            p.goes_on();
        }
    }
}

#[test]
fn our_own_memory_that_is_gone_costs_a_transfer() {
    for link in LINKS {
        let p = pair(link);
        for op in [Op::Write, Op::Read] {
            for len in LENGTHS {
                p.ours.0.lose(0);
                refused(p.run(op, len), &format!("{link:?} {op:?} {len}"));
                p.goes_on();
            }
            p.ours.0.lose(LEN / 2);
            refused(p.run(op, LEN), &format!("{link:?} {op:?}, half"));
            p.goes_on();
        }
    }
}

#[test]
fn memory_of_a_send_that_is_gone_costs_the_send() {
    for link in LINKS {
        let p = pair(link);
        for len in LENGTHS {
            p.ours.0.lose(0);
            let [sent, received] = p.send(len);
            if len <= EAGER {
                let told = matches!(&sent, Err(Error::LocalMemory(_)));
                assert!(told, "{link:?} {len}, sent: {sent:?}");
            } else {
                // The receiver fetches the data, and its side knows why it could not.
                sent.expect_err("there is nothing to send");
                refused(received, &format!("{link:?} {len}, fetched"));
            }
            p.goes_on();
            p.theirs.0.lose(0);
            let [sent, received] = p.send(len);
            refused(received, &format!("{link:?} {len}, received"));
            sent.expect_err("nobody could take it");
            p.goes_on();
        }
    }
}

/// The peer's memory is mapped here, so that this process copies by itself.
#[test]
fn our_own_memory_that_is_gone_costs_a_copy_to_mapped_memory() {
    let p = pair(Link::Rings);
    let shared = p.b.alloc(LEN).expect("memory");
    let at = shared.as_ptr() as usize;
    // SAFETY: the memory lives as long as the endpoint of this test.
    let mr = unsafe { p.b.register(at, LEN) }.expect("registered");
    let advert = |at, len| p.b.advertise(mr, at, len).expect("inside");
    let run = |op, len, signal| {
        let (ours, adverts) = ([Iov { len, ..p.ours.1 }], [advert(at, len)]);
        let timeout = Some(Duration::from_secs(30));
        let request = Request { timeout, signal, ..Request::new(p.conn, op, &ours, &adverts) };
        p.a.run(&request, &mut NoInterrupt).map(drop)
    };
    let (word, change) = (advert(at + LEN - 8, 8), Change::Add(1));
    let signal = Signal { advert: word, change, strong: false };
    // The peer's offer of its memory comes by itself.
    let until = Instant::now() + Duration::from_secs(30);
    while p.a.path(p.conn, &advert(at, LEN)).expect("connected") != "mapped" {
        assert!(Instant::now() < until, "the memory was never mapped");
        run(Op::Read, 8, None).expect("it is there");
    }
    let known = |e: Error| matches!(e, Error::LocalMemory(_));
    for len in LENGTHS {
        for op in [Op::Write, Op::Read] {
            p.ours.0.lose(0);
            assert!(run(op, len, None).is_err_and(known), "{op:?} {len}");
            p.goes_on();
            run(op, len, None).expect("it is there again");
        }
        p.ours.0.lose(0);
        assert!(run(Op::Write, len / 2, Some(signal)).is_err_and(known), "{len} and a signal");
        p.goes_on();
    }
    p.ours.0.lose(LEN / 2);
    for op in [Op::Write, Op::Read] {
        assert!(run(op, LEN, None).is_err_and(known), "{op:?}, half");
    }
    p.goes_on();
    // SAFETY: memory of this test, which nobody writes any more.
    let seen = unsafe { ((at + LEN - 8) as *const u64).read_volatile() };
    assert_eq!(seen, 0, "a signal of a write that failed");
}

#[test]
fn a_word_that_is_gone_costs_its_signal() {
    for link in LINKS {
        let p = pair(link);
        let word = p.b.advertise(p.theirs.1.mr, p.theirs.1.ptr, 8).expect("inside");
        let signal = Signal { advert: word, change: Change::Add(1), strong: false };
        let signalled = || {
            let timeout = Some(Duration::from_secs(30));
            let request = Request {
                signal: Some(signal),
                timeout,
                ..Request::new(p.conn, Op::Write, &[], &[])
            };
            p.a.run(&request, &mut NoInterrupt).map(drop)
        };
        p.theirs.0.lose(0);
        signalled().expect_err("there is no word");
        p.goes_on();
        signalled().expect("it is there again");
    }
}
