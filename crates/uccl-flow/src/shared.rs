//! State that a process's flows and threads share.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
};

use parking_lot::{Mutex, RwLock};

use crate::{
    arrivals::Arrivals,
    bell::Waker,
    bundle::{Bundle, Outbox, Target},
    counters::Totals,
    error::{FlowError, Peer},
    keep::KeeperPort,
    pairs::Pairs,
    port::{Mail, Port},
    settings::Settings,
    sink::Sink,
    visitors::Visitors,
};

/// State that threads share.
pub(crate) struct FlowsState {
    pub(crate) settings: Settings,
    /// Names this process among its peers.
    pub(crate) instance: u64,
    /// Peers show it to open more streams.
    pub(crate) key: [u8; 16],
    pub(crate) network: [u8; 16],
    pub(crate) port: u16,
    pub(crate) listeners: Mutex<HashMap<[u8; 16], Arc<Arrivals>>>,
    /// The processes that send to this one.
    pub(crate) visitors: Mutex<Visitors>,
    pub(crate) is_stopped: AtomicBool,
    pub(crate) greeter: Waker,
    pub(crate) keeping: KeeperPort,
    pub(crate) workers: Vec<Arc<Port>>,
    /// Bundles of streams to other processes, by instance.
    pub(crate) bundles: Mutex<HashMap<u64, Arc<Bundle>>>,
    /// Messages of flows that have been closed.
    pub(crate) totals: Mutex<Totals>,
    /// The greatest rate of large messages to a process in bytes per second; 0 before any.
    pub(crate) greatest_rate: Arc<AtomicU64>,
    /// Receiving ends, by flow.
    pub(crate) sinks: RwLock<HashMap<u64, Arc<Sink>>>,
}

impl FlowsState {
    /// Ends all flows.
    pub(crate) fn fail(&self, failure: &FlowError) {
        tracing::error!("{failure}");
        let bundles: Vec<_> = self.bundles.lock().values().cloned().collect();
        bundles.iter().for_each(|bundle| bundle.fail(failure));
        let sinks: Vec<_> = self.sinks.read().values().cloned().collect();
        for sink in sinks {
            sink.state.lock().end(failure.clone());
        }
    }

    /// Has threads that sleep look for work, since some is about to come: they look for a moment,
    /// and it does not wait for them. Without such a moment they would only fall asleep again.
    pub(crate) fn rouse(&self) {
        if !self.settings.spin.is_zero() {
            self.workers.iter().for_each(|worker| worker.bell().rouse());
        }
    }

    /// Ends the flows that wait for a process that is gone or without a sign of life, and forgets
    /// processes that have no flow.
    pub(crate) fn check_peers(&self) {
        let sinks: Vec<_> = self.sinks.read().values().cloned().collect();
        let limit = self.settings.limit;
        let mut visitors = self.visitors.lock();
        visitors.retain(|instance| sinks.iter().any(|sink| sink.peer.instance == instance));
        let (silent, gone) = (visitors.silent(limit), visitors.gone());
        drop(visitors);
        for (instance, time) in silent {
            for sink in sinks.iter().filter(|sink| sink.peer.instance == instance) {
                sink.give_up(time, limit);
            }
        }
        for sink in sinks.iter().filter(|sink| gone.contains(&sink.peer.instance)) {
            sink.give_up_closed();
        }
    }

    /// The bundle to a process, which a flow joins. Makes it, and has its streams opened, if there
    /// is none.
    pub(crate) fn join(
        &self,
        peer: &Peer,
        key: [u8; 16],
        pairs: impl FnOnce() -> Pairs,
    ) -> Arc<Bundle> {
        let mut bundles = self.bundles.lock();
        if let Some(bundle) = bundles.get(&peer.instance) {
            bundle.add_user();
            return Arc::clone(bundle);
        }
        let bells = self.workers.iter().map(|worker| Arc::clone(worker.bell())).collect();
        let target = Target { peer: peer.clone(), key, pairs: pairs() };
        let greatest_rate = Arc::clone(&self.greatest_rate);
        let bundle = Arc::new(Bundle::new(target, &self.settings, bells, greatest_rate));
        bundle.add_user();
        bundles.insert(peer.instance, Arc::clone(&bundle));
        for index in 0..self.settings.streams {
            let worker = &self.workers[index % self.workers.len()];
            worker.send(Mail::Open { bundle: Arc::clone(&bundle), index });
        }
        bundle
    }

    /// A flow leaves its bundle; its large messages are no longer read.
    pub(crate) fn leave(&self, bundle: &Bundle, flow: u64, outbox: &Outbox) {
        let mut bundles = self.bundles.lock();
        let is_last = bundle.remove_user();
        if is_last {
            bundles.remove(&bundle.target.peer.instance);
        }
        drop(bundles);
        if is_last {
            tracing::info!("{}", bundle.counters());
        }
        bundle.forget(flow, outbox);
    }
}
