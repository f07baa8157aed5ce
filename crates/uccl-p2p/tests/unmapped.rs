//! Memory that is not mapped any more though it is registered: a transfer of it fails, and everything else goes on.

use std::time::Duration;

use uccl_p2p::{
    Change, Checksum, Config, ConnId, Endpoint, Error, Iov, Op, Request, Signal, Transport,
    Uninterrupted,
};

const LEN: usize = 1 << 20;

/// Memory that can be made to look unmapped: nobody else gets its addresses meanwhile.
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

    /// What is from there on is not mapped any more.
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
    ours: (Pages, Iov),
    theirs: (Pages, Iov),
}

fn registered(ep: &Endpoint) -> (Pages, Iov) {
    let pages = Pages::new();
    // SAFETY: the pages stay for good.
    let mr = unsafe { ep.register(pages.0, LEN) }.expect("registered");
    let iov = Iov { mr, ptr: pages.0, len: LEN };
    (pages, iov)
}

fn pair(transport: Transport, checksum: bool) -> Pair {
    let [a, b] = [(); 2].map(|()| {
        let config = Config {
            bind: Some([127, 0, 0, 1].into()),
            port: Some(0),
            transport,
            checksum: if checksum { Checksum::On } else { Checksum::Off },
            ..Config::default()
        };
        Endpoint::new(config).expect("an endpoint")
    });
    let conn = a.connect(b.addr(), None, &mut Uninterrupted).expect("connected");
    let (ours, theirs) = (registered(&a), registered(&b));
    Pair { a, b, conn, ours, theirs }
}

impl Pair {
    fn run(&self, op: Op, len: usize) -> Result<(), Error> {
        let ours = [Iov { len, ..self.ours.1 }];
        let advert = self.b.advertise(self.theirs.1.mr, self.theirs.1.ptr, len).expect("inside");
        let adverts = [advert];
        let timeout = Some(Duration::from_secs(30));
        let request = Request { timeout, ..Request::new(self.conn, op, &ours, &adverts) };
        self.a.run(&request, &mut Uninterrupted).map(drop)
    }

    /// Everything goes on: the connection is there, and moves what is there.
    fn goes_on(&self) {
        self.a.check_connection(self.conn).expect("it lives");
        for pages in [&self.ours.0, &self.theirs.0] {
            pages.find_again();
        }
        for op in [Op::Write, Op::Read] {
            self.run(op, LEN).expect("it is there again");
        }
    }
}

fn refused(result: Result<(), Error>, what: &str) {
    let e = result.expect_err(what);
    let told = e.to_string();
    assert!(!matches!(e, Error::ConnectionLost { .. }), "{what}: {told}");
    assert!(told.contains("could not be touched") || told.contains("mapped"), "{what}: {told}");
}

const LINKS: [(Transport, bool); 3] =
    [(Transport::Local, false), (Transport::Tcp, false), (Transport::Tcp, true)];
/// Short ones are copied when they are posted, and the beginnings of long ones where they arrive.
const LENGTHS: [usize; 6] = [8, 2 << 10, 3000, 20_000, 100_000, LEN];

#[test]
fn a_peers_memory_that_is_gone_costs_a_transfer() {
    for (transport, checksum) in LINKS {
        let p = pair(transport, checksum);
        for op in [Op::Write, Op::Read] {
            for len in LENGTHS {
                p.theirs.0.lose(0);
                refused(p.run(op, len), &format!("{transport} {checksum} {op:?} {len}"));
                p.goes_on();
            }
            // A part of it is there.
            p.theirs.0.lose(LEN / 2);
            refused(p.run(op, LEN), &format!("{transport} {checksum} {op:?}, half"));
            p.goes_on();
        }
    }
}

#[test]
fn our_own_memory_that_is_gone_costs_a_transfer() {
    for (transport, checksum) in LINKS {
        let p = pair(transport, checksum);
        for op in [Op::Write, Op::Read] {
            for len in LENGTHS {
                p.ours.0.lose(0);
                refused(p.run(op, len), &format!("{transport} {checksum} {op:?} {len}"));
                p.goes_on();
            }
            p.ours.0.lose(LEN / 2);
            refused(p.run(op, LEN), &format!("{transport} {checksum} {op:?}, half"));
            p.goes_on();
        }
    }
}

#[test]
fn a_word_that_is_gone_costs_its_signal() {
    for (transport, checksum) in LINKS {
        let p = pair(transport, checksum);
        let word = p.b.advertise(p.theirs.1.mr, p.theirs.1.ptr, 8).expect("inside");
        let signal = Signal { advert: word, change: Change::Add(1), strong: false };
        let signalled = || {
            let timeout = Some(Duration::from_secs(30));
            let request = Request {
                signal: Some(signal),
                timeout,
                ..Request::new(p.conn, Op::Write, &[], &[])
            };
            p.a.run(&request, &mut Uninterrupted).map(drop)
        };
        p.theirs.0.lose(0);
        signalled().expect_err("there is no word");
        p.goes_on();
        signalled().expect("it is there again");
    }
}
