//! The manager: a thread that makes connections, closes endpoints and takes notifications.

use std::{
    sync::{Arc, atomic::Ordering::SeqCst, mpsc::Sender},
    time::Duration,
};

use uccl_p2p::{ConnId, Error, NoInterrupt};

use super::{
    EndArgs, notifs,
    world::{SharedState, World},
};
use crate::{control::ControlMessage, history, watch};

const NAP: Duration = Duration::from_millis(5);
/// Time that the manager waits for the peer to connect before it turns to its other duties.
const PATIENCE: Duration = Duration::from_millis(30);
/// One turn in this many closes the endpoint.
const CLOSES: u32 = 800;

pub(crate) struct Manager {
    shared: Arc<SharedState>,
    rng: fastrand::Rng,
    senders: Vec<Sender<ControlMessage>>,
    /// Number of connections that the manager wants.
    conns: usize,
    workers: u64,
    closes: bool,
}

impl Manager {
    pub(crate) fn new(
        shared: &Arc<SharedState>,
        args: &EndArgs,
        senders: Vec<Sender<ControlMessage>>,
        seed: u64,
    ) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let conns = rng.usize(1..=2);
        let (workers, closes) = (args.workers as u64, args.does("close"));
        Self { shared: Arc::clone(shared), rng, senders, conns, workers, closes }
    }

    pub(crate) fn run(mut self) {
        self.say_up();
        while self.shared.workers_ended.load(SeqCst) < self.workers {
            let world = self.shared.world();
            self.prune(&world);
            self.connect(&world);
            // No error needs handling: only this thread closes the endpoint, and forked children do
            // not run this loop.
            for notif in world.ep.take_notifs().unwrap_or_default() {
                notifs::deliver(&notif.payload, &self.senders);
            }
            if self.closes && !self.shared.is_ending() && self.rng.u32(0..CLOSES) == 0 {
                self.close(&world);
                self.renew();
            }
            std::thread::sleep(NAP);
        }
        self.close(&self.shared.world());
    }

    fn say_up(&self) {
        let world = self.shared.world();
        let (addr, instance) = (world.ep.addr(), world.ep.instance());
        history::note(format!("up: at {addr}, instance {instance:x}, {:?}", world.ep.config()));
        history::say(&ControlMessage::Up { addr, instance });
    }

    fn close(&self, world: &World) {
        history::note("close ...".into());
        let limit = world.ep.config().timeout;
        let closed = watch::call("close", limit, || world.ep.close());
        history::note(format!("closed: {closed:?}"));
        match closed {
            Ok(()) => {}
            Err(Error::StillTouched { regions, .. }) => world.kept.lock().extend(regions.iter()),
            Err(e) => history::broken(format!("an endpoint was not closed: {e}")),
        }
        world.closed.store(true, SeqCst);
    }

    fn renew(&mut self) {
        match World::new(self.shared.link, &mut self.rng) {
            Ok(world) => *self.shared.world.write() = world,
            Err(e) => history::broken(format!("no endpoint after one was closed: {e:#}")),
        }
        self.say_up();
    }

    /// Disconnects connections that were lost.
    fn prune(&self, world: &World) {
        let lost = |conn: &ConnId| match world.ep.check_connection(*conn) {
            Ok(()) => None,
            Err(e) => Some((*conn, e)),
        };
        let lost: Vec<_> = world.conns.lock().iter().filter_map(lost).collect();
        for (conn, e) in lost {
            history::note(format!("{conn} is lost: {e}"));
            if let Error::Protocol { .. } | Error::Panicked(_) = e {
                history::broken(format!("a connection ended badly: {e}"));
            }
            world.conns.lock().retain(|known| *known != conn);
            let _ =
                watch::call("disconnect", world.ep.config().timeout, || world.ep.disconnect(conn));
        }
    }

    fn connect(&self, world: &World) {
        if world.conns.lock().len() >= self.conns {
            return;
        }
        let made = if self.shared.number == 0 {
            let Some(peer) = *self.shared.peer.lock() else { return };
            let connect = || world.ep.connect(peer.addr, None, &mut NoInterrupt);
            watch::call("connect", world.ep.config().timeout, connect)
        } else {
            let accept = || world.ep.accept(Some(PATIENCE), &mut NoInterrupt);
            watch::call("accept", PATIENCE, accept).map(|accepted| accepted.conn)
        };
        match made {
            Ok(conn) => {
                history::note(format!("{conn} is made"));
                world.conns.lock().push(conn);
            }
            Err(Error::Timeout(_)) => {}
            Err(e) => history::note(format!("no connection: {e}")),
        }
    }
}
