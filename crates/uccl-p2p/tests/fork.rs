//! Endpoints and `fork`: a child has its parent's memory and descriptors and none of its threads,
//! and must not use the parent's endpoints.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    io::Read,
    os::fd::FromRawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use uccl_p2p::{Config, ConnId, Endpoint, Error, Iov, MrId, NoInterrupt, Op, Request, Transport};

use self::loopback::on_loopback;

/// The limit of each step, after which the test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// A child of this process; killed when dropped.
struct Child(libc::pid_t);

impl Child {
    /// Runs `work` in a child, which then exits without a process's cleanup.
    fn fork(work: impl FnOnce()) -> Self {
        // SAFETY: the child runs the closure and exits.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", std::io::Error::last_os_error());
        if pid == 0 {
            let ran = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: the child exits here, without the handlers that the parent has registered for
            // its own exit.
            unsafe { libc::_exit(i32::from(ran.is_err())) };
        }
        Self(pid)
    }

    /// Waits for the child's end; returns whether its work succeeded.
    fn ends_well(mut self) -> bool {
        let begun = Instant::now();
        let mut status = 0;
        loop {
            // SAFETY: our child, and a place for its status.
            let pid = unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) };
            if pid == self.0 {
                self.0 = 0;
                return status == 0;
            }
            assert!(begun.elapsed() < PATIENCE, "a child hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        if self.0 > 0 {
            // SAFETY: our child, which has not been waited for yet.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
            self.0 = 0;
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Pair {
    a: Endpoint,
    b: Endpoint,
    to_b: ConnId,
}

fn config(transport: Transport) -> Config {
    Config { transport, transfer_timeout: PATIENCE, ..on_loopback() }
}

fn pair(transport: Transport) -> Pair {
    let end = || Endpoint::new(config(transport)).expect("an endpoint");
    let (a, b) = (end(), end());
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    b.accept(None, &mut NoInterrupt).expect("accepted");
    Pair { a, b, to_b }
}

fn register(ep: &Endpoint, memory: &mut [u8]) -> MrId {
    // SAFETY: the tests keep their memory until their endpoints are closed.
    unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) }.expect("registered")
}

fn iov(mr: MrId, memory: &[u8]) -> Iov {
    Iov { mr, ptr: memory.as_ptr() as usize, len: memory.len() }
}

/// Writes to the peer, and sends it a notification.
fn is_in_use(p: &Pair) {
    for len in [64, 100_000] {
        let (mut from, mut to) = (vec![3; len], vec![0; len]);
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let adverts = [p.b.advertise(there, to.as_ptr() as usize, len).expect("advertised")];
        let iovs = [iov(here, &from)];
        let write = Request::new(p.to_b, Op::Write, &iovs, &adverts);
        p.a.run(&write, &mut NoInterrupt).expect("written");
        assert!(from == to);
        p.a.deregister(here).expect("registered");
        p.b.deregister(there).expect("registered");
    }
    p.a.run_notif(p.to_b, b"still here", None, &mut NoInterrupt).expect("delivered");
    let told = p.b.wait_notifs(Some(PATIENCE), &mut NoInterrupt).expect("an endpoint");
    assert_eq!(told[0].payload, b"still here");
}

const TRANSPORTS: [Transport; 2] = [Transport::Local, Transport::Tcp];

#[test]
fn a_child_that_drops_or_closes_an_endpoint_ends_nothing() {
    for transport in TRANSPORTS {
        let p = pair(transport);
        let drops: [fn(Endpoint); 3] = [
            drop,
            |ep| ep.close().expect("nothing to do"),
            |ep| {
                ep.close().expect("nothing to do");
                drop(ep);
            },
        ];
        for end in drops {
            // SAFETY: the child takes its copy of the endpoint, the parent keeps its own.
            let taken = unsafe { std::ptr::read(&raw const p.a) };
            let taken = std::mem::ManuallyDrop::new(taken);
            let child = Child::fork(|| end(std::mem::ManuallyDrop::into_inner(taken)));
            assert!(child.ends_well());
            is_in_use(&p);
        }
    }
}

#[test]
fn an_endpoint_that_was_closed_before_is_dropped_by_a_child_too() {
    let p = pair(Transport::Local);
    p.a.close().expect("closed");
    // SAFETY: as above.
    let taken = std::mem::ManuallyDrop::new(unsafe { std::ptr::read(&raw const p.a) });
    assert!(Child::fork(|| drop(std::mem::ManuallyDrop::into_inner(taken))).ends_well());
}

#[test]
fn every_call_of_a_child_names_the_owner_of_the_endpoint() {
    for transport in TRANSPORTS {
        let p = pair(transport);
        let mut memory = vec![1; 100];
        let mr = register(&p.a, &mut memory);
        let adverts = [p.a.advertise(mr, memory.as_ptr() as usize, 100).expect("advertised")];
        let posted = p.a.send_notif(p.to_b, b"", None).expect("posted");
        let parent = std::process::id();
        let child = Child::fork(|| {
            let refused = |what: &str, answer: Result<(), Error>| {
                let Err(Error::Forked { owner }) = answer else { panic!("{what}: {answer:?}") };
                assert_eq!(owner, parent, "{what}");
                let text = Error::Forked { owner }.to_string();
                assert!(text.contains(&format!("belongs to process {parent}")), "{text}");
            };
            let (ep, soon) = (&p.a, Some(Duration::from_millis(10)));
            let iovs = [iov(mr, &memory)];
            let write = Request::new(p.to_b, Op::Write, &iovs, &adverts);
            let send = Request::new(p.to_b, Op::Send, &iovs, &[]);
            let go_on = &mut NoInterrupt;
            refused("connect", ep.connect(p.b.addr(), soon, go_on).map(drop));
            refused("accept", ep.accept(soon, go_on).map(drop));
            refused("start_passive_accept", ep.start_passive_accept());
            refused("disconnect", ep.disconnect(p.to_b));
            refused("connection", ep.connection(p.to_b).map(drop));
            refused("check_connection", ep.check_connection(p.to_b));
            refused("path", ep.path(p.to_b, &adverts[0]).map(drop));
            refused("path_from", ep.path_from(p.to_b, mr, &adverts[0]).map(drop));
            // SAFETY: it is refused.
            refused("register", unsafe { ep.register(4096, 4096) }.map(drop));
            refused("deregister", ep.deregister(mr));
            refused("region", ep.region(mr).map(drop));
            refused("region_info", ep.region_info(mr).map(drop));
            refused("advertise", ep.advertise(mr, iovs[0].ptr, 1).map(drop));
            refused("advertise_all", ep.advertise_all(&iovs).map(drop));
            refused("send_notif", ep.send_notif(p.to_b, b"", None).map(drop));
            refused("run_notif", ep.run_notif(p.to_b, b"", soon, go_on).map(drop));
            refused("take_notifs", ep.take_notifs().map(drop));
            refused("wait_notifs", ep.wait_notifs(soon, go_on).map(drop));
            refused("alloc", ep.alloc(1).map(drop));
            refused("stats", ep.stats().map(drop));
            refused("post", ep.post(&write).map(drop));
            refused("run", ep.run(&write, go_on).map(drop));
            refused("run", ep.run(&send, go_on).map(drop));
            refused("try_run", ep.try_run(&write).map(drop));
            refused("poll", ep.poll(posted).map(drop));
            refused("wait", ep.wait(posted, soon, go_on).map(drop));
            refused("cancel", ep.cancel(posted).map(drop));
            refused("cancel_all_using", ep.cancel_all_using(mr).map(drop));
            assert_eq!(ep.region_holding(iovs[0].ptr, 1), None);
            assert_eq!((ep.addr(), ep.config().port), (p.a.addr(), Some(0)));
        });
        assert!(child.ends_well());
    }
}

#[test]
fn a_child_makes_an_endpoint_of_its_own() {
    for transport in TRANSPORTS {
        let p = pair(transport);
        // This thread has an eventfd to sleep on already: the child needs its own.
        assert!(p.b.wait_notifs(Some(Duration::from_millis(1)), &mut NoInterrupt).is_ok());
        is_in_use(&p);
        let child = Child::fork(|| {
            let own = Endpoint::new(config(transport)).expect("an endpoint");
            let to_b = own.connect(p.b.addr(), None, &mut NoInterrupt).expect("connected");
            own.run_notif(to_b, b"from the child", None, &mut NoInterrupt).expect("delivered");
            // The peer does not accept a connection that has ended, so the child waits until it is
            // accepted.
            own.wait_notifs(Some(PATIENCE), &mut NoInterrupt).expect("it is accepted");
            drop(own);
        });
        let told = p.b.wait_notifs(Some(PATIENCE), &mut NoInterrupt).expect("an endpoint");
        assert_eq!(told[0].payload, b"from the child");
        let to_child = p.b.accept(None, &mut NoInterrupt).expect("the child's").conn;
        p.b.run_notif(to_child, b"accepted", None, &mut NoInterrupt).expect("delivered");
        assert!(child.ends_well());
        is_in_use(&p);
    }
}

/// A child's copies of its parent's descriptors keep the parent's sockets open.
#[test]
fn a_parent_that_dies_is_missed_while_its_child_lives() {
    // A waiting caller notices the loss, and so does a worker if no call is made.
    for waits in [true, false] {
        let b = Endpoint::new(config(Transport::Local)).expect("an endpoint");
        let addr = b.addr();
        let (mut told, tell) = pipe();
        let mut parent = Child::fork(|| {
            let a = Endpoint::new(config(Transport::Local)).expect("an endpoint");
            a.connect(addr, None, &mut NoInterrupt).expect("connected");
            let child = Child::fork(|| std::thread::sleep(2 * PATIENCE));
            // SAFETY: the bytes of a number.
            unsafe { libc::write(tell, (&raw const child.0).cast(), 4) };
            std::thread::sleep(2 * PATIENCE);
        });
        let conn = b.accept(Some(PATIENCE), &mut NoInterrupt).expect("accepted").conn;
        let mut pid = [0; 4];
        told.read_exact(&mut pid).expect("its number");
        let pid = libc::pid_t::from_ne_bytes(pid);
        parent.kill();
        let begun = Instant::now();
        if waits {
            let mut memory = vec![0; 10];
            let mr = register(&b, &mut memory);
            let iovs = [iov(mr, &memory)];
            let lost = b.run(&Request::new(conn, Op::Recv, &iovs, &[]), &mut NoInterrupt);
            assert!(matches!(lost, Err(Error::ConnectionLost { .. })), "{lost:?}");
        }
        while b.check_connection(conn).is_ok() {
            assert!(begun.elapsed() < PATIENCE, "it is not missed");
            std::thread::sleep(Duration::from_millis(1));
        }
        let Err(Error::ConnectionLost { reason, .. }) = b.check_connection(conn) else { panic!() };
        assert!(reason.contains("process"), "seen by its end, not by its silence: {reason}");
        // SAFETY: a child of our child.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

fn pipe() -> (std::fs::File, i32) {
    let mut ends = [0; 2];
    // SAFETY: a place for two descriptors, the first of which is then ours alone.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        (std::fs::File::from_raw_fd(ends[0]), ends[1])
    }
}
