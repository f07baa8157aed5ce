//! Rails within this process: devices that are slow, out of order, full, cut and unplugged on
//! demand.
//!
//! The devices treat their users as real ones do: a request lands at any time between its post and
//! its end. A write on a dropped channel may still land until the other end is dropped as well.

use std::{
    collections::HashMap,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use fastrand::Rng;
use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{OpKind, access_of},
    mem::Span,
    rail::{
        Channel, Export, Limits, Rail, RailError, RailInfo, Registration, RemoteKey, Request,
        RequestEnd, RequestError,
    },
    region::Rights,
};

use super::gate::{Gate, GateHold};

/// Faults of a rail. The default has none.
#[derive(Clone, Debug)]
pub struct RailFaults {
    /// A request ends after a random number of polls, at most this.
    pub delay_polls: u32,
    /// Most requests under way on a channel.
    pub depth: usize,
    /// Size in bytes of the chunks that the lane cuts longer requests into.
    pub chunk_bytes: u64,
    /// Requests end in any order.
    pub reorder: bool,
    /// Probability in thousandths that the channel breaks at a request.
    pub break_permille: u32,
    /// Probability in per cent that memory is refused, unless it is pinned.
    pub refuse_memory_percent: u32,
    /// Peers reach memory over a channel by a key that is made for that channel, is of use there
    /// only, and ends with it. Libfabric calls that `FI_MR_ENDPOINT` (fi_mr(3)); its provider `cxi`
    /// demands it.
    pub keys_of_channels: bool,
}

impl Default for RailFaults {
    fn default() -> Self {
        Self {
            delay_polls: 0,
            depth: 64,
            chunk_bytes: 64 << 10,
            reorder: false,
            break_permille: 0,
            refuse_memory_percent: 0,
            keys_of_channels: false,
        }
    }
}

/// A network of rails, each of which reaches every other.
#[derive(Clone, Default)]
pub struct RailNetwork(Arc<Mutex<Network>>);

#[derive(Default)]
struct Network {
    next: u64,
    ends: HashMap<u64, End>,
    memory: HashMap<u64, RegisteredMemory>,
    carried: u64,
}

/// Memory that is registered with a device.
#[derive(Clone, Copy)]
struct RegisteredMemory {
    span: Span,
    rights: Rights,
    peers: Peers,
}

/// Which peers reach memory by a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peers {
    All,
    /// None: the key is our own.
    No,
    /// The peer of this end. The key was made of this other one.
    Of {
        end: u64,
        key: u64,
    },
}

/// One end of a channel.
struct End {
    peer: Option<u64>,
    pending: Vec<PendingRequest>,
    /// Writes of a peer that has dropped its end, which have not landed yet.
    late_writes: Vec<LateWrite>,
}

struct PendingRequest {
    request: Request,
    polls: u32,
}

struct LateWrite {
    key: u64,
    addr: u64,
    bytes: Vec<u8>,
    polls: u32,
}

/// A device of a [`RailNetwork`].
pub struct ChaosRail {
    info: RailInfo,
    network: RailNetwork,
    faults: RailFaults,
    refuse_memory_percent: AtomicU32,
    device: Arc<Mutex<DeviceState>>,
    rng: Mutex<Rng>,
    registrations: Arc<Gate>,
    opens: Arc<Gate>,
    looks: Arc<Gate>,
    exports: Arc<Gate>,
    failed: AtomicU32,
    /// The keys of the device's registrations.
    keys: Mutex<Vec<u64>>,
}

/// The state of a device.
#[derive(Default)]
struct DeviceState {
    is_in: bool,
    /// The device has failed for good and must be reopened; `is_back` says whether it can be.
    is_lost: bool,
    is_back: bool,
    /// Number of pulls and cuts: channels from before the latest are lost.
    pulled: u64,
    broken: u64,
    /// No request moves.
    is_stuck: bool,
    /// The device does not release memory.
    is_holding: bool,
    /// The drop of a channel waits.
    is_slow_to_end: bool,
}

struct Memory {
    network: RailNetwork,
    device: Arc<Mutex<DeviceState>>,
    key: u64,
    base: u64,
}

struct ChaosChannel {
    id: u64,
    address: [u8; 8],
    network: RailNetwork,
    faults: RailFaults,
    device: Arc<Mutex<DeviceState>>,
    born: u64,
    rng: Rng,
    exports: Arc<Gate>,
    broken: bool,
}

impl RailNetwork {
    /// A device that is plugged in.
    pub fn rail(&self, name: &str, seed: u64, faults: RailFaults) -> Arc<ChaosRail> {
        let info = RailInfo {
            name: name.to_owned(),
            link: "chaos".into(),
            network: String::new(),
            pci: None,
            speed_mbps: None,
            is_software: true,
        };
        let device = Arc::new(Mutex::new(DeviceState { is_in: true, ..DeviceState::default() }));
        let rng = Mutex::new(Rng::with_seed(seed));
        let refuse_memory_percent = faults.refuse_memory_percent.into();
        let network = self.clone();
        let (registrations, opens, looks, exports) = Default::default();
        Arc::new(ChaosRail {
            info,
            network,
            faults,
            refuse_memory_percent,
            device,
            rng,
            registrations,
            opens,
            looks,
            exports,
            failed: AtomicU32::new(0),
            keys: Mutex::default(),
        })
    }

    /// Number of bytes that the rails have carried.
    pub fn carried(&self) -> u64 {
        self.0.lock().carried
    }

    /// Number of ends, and number of registrations.
    pub fn count(&self) -> (usize, usize) {
        let network = self.0.lock();
        (network.ends.len(), network.memory.len())
    }
}

impl ChaosRail {
    /// Pulls the device out: all its channels are lost, and there are no new ones.
    pub fn pull(&self) {
        let mut device = self.device.lock();
        device.is_in = false;
        device.pulled += 1;
    }

    pub fn plug(&self) {
        self.device.lock().is_in = true;
    }

    /// Fails the device for good: its channels and registrations are lost.
    pub fn lose(&self) {
        self.pull();
        self.device.lock().is_lost = true;
        let keys = std::mem::take(&mut *self.keys.lock());
        let mut network = self.network.0.lock();
        keys.iter().for_each(|key| network.forget(*key));
    }

    /// Brings a lost device back, so that it can be reopened.
    pub fn bring_back(&self) {
        self.device.lock().is_back = true;
    }

    /// Loses all channels of the device.
    pub fn cut(&self) {
        self.device.lock().pulled += 1;
    }

    /// Sets the probability in per cent that memory is refused.
    pub fn refuse_memory(&self, percent: u32) {
        self.refuse_memory_percent.store(percent, Relaxed);
    }

    /// From now on no request of the device moves or ends, though its channels are not lost.
    pub fn stick(&self) {
        self.device.lock().is_stuck = true;
    }

    /// Undoes [`Self::stick`].
    pub fn unstick(&self) {
        self.device.lock().is_stuck = false;
    }

    /// Sets whether the drop of a channel waits.
    pub fn hold_ends(&self, holds: bool) {
        self.device.lock().is_slow_to_end = holds;
    }

    /// Makes every registration of memory wait.
    pub fn hold_registrations(&self) -> GateHold {
        self.registrations.hold()
    }

    /// Makes every opening of a channel wait.
    pub fn hold_opens(&self) -> GateHold {
        self.opens.hold()
    }

    /// Makes every key of a channel wait before it is made.
    pub fn hold_exports(&self) -> GateHold {
        self.exports.hold()
    }

    /// Makes every [`Rail::is_up`] wait.
    pub fn hold_looks(&self) -> GateHold {
        self.looks.hold()
    }

    /// Takes the cable out: the port is down and nothing moves, but no channel reports an error.
    pub fn unplug_silently(&self) {
        let mut device = self.device.lock();
        (device.is_in, device.is_stuck) = (false, true);
    }

    /// Number of failed attempts at the latest [`Rail::open_first`].
    pub fn failed_before(&self) -> u32 {
        self.failed.load(Relaxed)
    }

    /// Sets whether the end of a registration fails and keeps the memory.
    pub fn hold_memory(&self, holds: bool) {
        self.device.lock().is_holding = holds;
    }

    /// The device's network.
    pub fn network(&self) -> &RailNetwork {
        &self.network
    }

    /// Number of channels that broke by themselves.
    pub fn broken(&self) -> u64 {
        self.device.lock().broken
    }
}

static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

impl Rail for ChaosRail {
    fn info(&self) -> &RailInfo {
        &self.info
    }

    fn is_up(&self) -> bool {
        self.looks.pass();
        self.device.lock().is_in
    }

    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError> {
        self.registrations.pass();
        if self.device.lock().is_lost {
            return Err(RailError::Gone("it has failed".into()));
        }
        let refuses = self.rng.lock().u32(0..100) < self.refuse_memory_percent.load(Relaxed);
        if refuses && kind != MemoryKind::Pinned {
            return Err(RailError::Unavailable("it does not like this memory".into()));
        }
        // No two regions have the same key or the same base, so that mixing them up shows.
        let key = NEXT_KEY.fetch_add(1, Relaxed);
        let peers = if self.faults.keys_of_channels { Peers::No } else { Peers::All };
        self.network.0.lock().memory.insert(key, RegisteredMemory { span, rights, peers });
        self.keys.lock().push(key);
        let (network, device) = (self.network.clone(), Arc::clone(&self.device));
        Ok(Box::new(Memory { network, device, key, base: key << 40 }))
    }

    fn reopen(&self) -> bool {
        let mut device = self.device.lock();
        let reopens = device.is_lost && device.is_back;
        if reopens {
            (device.is_lost, device.is_back, device.is_in) = (false, false, true);
        }
        reopens
    }

    fn open_first(&self, failed: u32) -> Result<Box<dyn Channel>, RailError> {
        self.failed.store(failed, Relaxed);
        self.open()
    }

    fn open(&self) -> Result<Box<dyn Channel>, RailError> {
        self.opens.pass();
        // Holders of the network's lock may take the device's, so the device's is released first.
        let (is_in, born) = {
            let device = self.device.lock();
            (device.is_in, device.pulled)
        };
        if !is_in {
            return Err(RailError::Gone("it was pulled".into()));
        }
        let mut network = self.network.0.lock();
        network.next += 1;
        let id = network.next;
        let end = End { peer: None, pending: Vec::new(), late_writes: Vec::new() };
        network.ends.insert(id, end);
        Ok(Box::new(ChaosChannel {
            id,
            address: id.to_le_bytes(),
            network: self.network.clone(),
            faults: self.faults.clone(),
            device: Arc::clone(&self.device),
            born,
            rng: Rng::with_seed(self.rng.lock().u64(..)),
            exports: Arc::clone(&self.exports),
            broken: false,
        }))
    }
}

impl Registration for Memory {
    fn end(&self) -> Result<(), RailError> {
        if self.device.lock().is_holding {
            return Err(RailError::Unavailable("it does not let go".into()));
        }
        self.network.0.lock().forget(self.key);
        Ok(())
    }

    fn local_key(&self) -> u64 {
        self.key
    }

    fn remote_key(&self) -> RemoteKey {
        RemoteKey { base: self.base, key: SmallVec::from_slice(&self.key.to_le_bytes()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.network.0.lock().forget(self.key);
    }
}

impl Network {
    /// Forgets memory by its key, and the keys that were made of that one.
    fn forget(&mut self, key: u64) {
        self.memory.remove(&key);
        let is_of = |known: &RegisteredMemory| match known.peers {
            Peers::Of { key: of, .. } => of == key,
            _ => false,
        };
        self.memory.retain(|_, known| !is_of(known));
    }

    /// The key that was made of this one for a channel's end.
    fn exported(&self, end: u64, key: u64) -> Option<u64> {
        let is_it = |known: &RegisteredMemory| known.peers == Peers::Of { end, key };
        self.memory.iter().find_map(|(made, known)| is_it(known).then_some(*made))
    }

    /// Makes a key of this one for a channel's end.
    fn export(&mut self, end: u64, key: u64) -> Result<(), RailError> {
        if !self.ends.contains_key(&end) {
            return Err(RailError::Gone("the channel was dropped".into()));
        }
        let known = self.memory.get(&key).copied();
        let known = known.ok_or_else(|| RailError::Gone("the registration has ended".into()))?;
        let made = NEXT_KEY.fetch_add(1, Relaxed);
        self.memory.insert(made, RegisteredMemory { peers: Peers::Of { end, key }, ..known });
        Ok(())
    }

    /// The address that a key and an address of this network name, if a peer may access it so over
    /// this end.
    fn locate(&self, end: u64, kind: OpKind, key: u64, addr: u64, len: usize) -> Option<u64> {
        let RegisteredMemory { span, rights, peers } = self.memory.get(&key)?;
        match peers {
            Peers::No => return None,
            Peers::Of { end: only, .. } if *only != end => return None,
            Peers::Of { .. } | Peers::All => {}
        }
        rights.admit(access_of(kind)).ok()?;
        let offset = addr.checked_sub(key << 40)?;
        let fits = offset.checked_add(len as u64).is_some_and(|end| end <= span.len as u64);
        fits.then_some(span.addr as u64 + offset)
    }

    /// Carries out a request that came over this end of the peer's.
    fn carry_out(&mut self, end: u64, request: &Request) -> Result<(), RequestError> {
        let Request { kind, local, local_key, remote_addr, remote_key, .. } = *request;
        if local.len == 0 {
            return Ok(());
        }
        let RegisteredMemory { span: ours, .. } =
            self.memory.get(&local_key).ok_or(RequestError::Local)?;
        let inside = local.addr >= ours.addr && local.addr + local.len <= ours.addr + ours.len;
        if !inside {
            return Err(RequestError::Local);
        }
        let there = self.locate(end, kind, remote_key, remote_addr, local.len);
        let there = there.ok_or(RequestError::Access)?;
        match kind {
            OpKind::Write => copy(local.addr as u64, there, local.len),
            OpKind::Read => copy(there, local.addr as u64, local.len),
        }
        self.carried += local.len as u64;
        Ok(())
    }

    fn land(&mut self, id: u64) {
        let Some(end) = self.ends.get_mut(&id) else { return };
        let mut late_writes = std::mem::take(&mut end.late_writes);
        late_writes.retain_mut(|late_write| {
            let lands = late_write.polls == 0;
            late_write.polls = late_write.polls.saturating_sub(1);
            if lands
                && let Some(at) = self.locate(
                    id,
                    OpKind::Write,
                    late_write.key,
                    late_write.addr,
                    late_write.bytes.len(),
                )
            {
                copy(late_write.bytes.as_ptr() as u64, at, late_write.bytes.len());
            }
            !lands
        });
        if let Some(end) = self.ends.get_mut(&id) {
            end.late_writes = late_writes;
        }
    }
}

fn copy(from: u64, to: u64, len: usize) {
    // SAFETY: both sides lie in registered memory, or one is a buffer of this module. The owner
    // keeps registered memory valid until the registration ends, and that takes the network's lock,
    // under which this is called. The two may overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) }
}

impl ChaosChannel {
    fn check(&mut self) -> Result<(), RailError> {
        if self.device.lock().pulled != self.born {
            return Err(RailError::Lost("it was cut".into()));
        }
        if self.broken { Err(RailError::Lost("it broke".into())) } else { Ok(()) }
    }
}

impl Channel for ChaosChannel {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError> {
        let peer: [u8; 8] =
            peer.try_into().map_err(|_| RailError::Peer("no address of a channel".into()))?;
        let mut network = self.network.0.lock();
        let Some(end) = network.ends.get_mut(&self.id) else { return Ok(()) };
        end.peer = Some(u64::from_le_bytes(peer));
        Ok(())
    }

    fn limits(&self) -> Limits {
        let RailFaults { chunk_bytes, depth, .. } = self.faults;
        Limits { max_bytes: 1 << 30, chunk_bytes, depth, window_bytes: 4 * chunk_bytes }
    }

    fn probe(&mut self, tag: u64) -> Result<(), RailError> {
        let request = Request::of_nothing(tag);
        self.check()?;
        let mut network = self.network.0.lock();
        if let Some(end) = network.ends.get_mut(&self.id) {
            end.pending.push(PendingRequest { request, polls: self.faults.delay_polls });
        }
        Ok(())
    }

    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError> {
        self.check()?;
        let (network, faults) = (Arc::clone(&self.network.0), &self.faults);
        let mut network = network.lock();
        let Some(end) = network.ends.get_mut(&self.id) else { return Ok(0) };
        let room = faults.depth.saturating_sub(end.pending.len()).min(requests.len());
        let most = if faults.reorder { self.rng.usize(0..=room) } else { room };
        for request in &requests[..most] {
            let polls = self.rng.u32(0..=faults.delay_polls);
            end.pending.push(PendingRequest { request: *request, polls });
            self.broken |= self.rng.u32(0..1000) < faults.break_permille;
        }
        if self.broken {
            self.device.lock().broken += 1;
        }
        Ok(most)
    }

    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        let checked = self.check();
        let network = Arc::clone(&self.network.0);
        let mut network = network.lock();
        network.land(self.id);
        checked?;
        if self.device.lock().is_stuck {
            return Ok(());
        }
        let Some(end) = network.ends.get_mut(&self.id) else { return Ok(()) };
        let Some(peer) = end.peer else { return Ok(()) };
        let mut pending = std::mem::take(&mut end.pending);
        if !pending.is_empty() && !network.ends.contains_key(&peer) {
            return Err(RailError::Lost("the other end was dropped".into()));
        }
        if self.faults.reorder {
            self.rng.shuffle(&mut pending);
        }
        let mut waits = false;
        pending.retain_mut(|one| {
            waits = one.polls > 0 || waits && !self.faults.reorder;
            one.polls = one.polls.saturating_sub(1);
            if waits {
                return true;
            }
            let result = network.carry_out(peer, &one.request);
            ended.push(RequestEnd { tag: one.request.tag, result });
            false
        });
        if let Some(end) = network.ends.get_mut(&self.id) {
            end.pending = pending;
        }
        Ok(())
    }

    fn import(&mut self, key: &[u8]) -> Result<u64, RailError> {
        let key: [u8; 8] =
            key.try_into().map_err(|_| RailError::Peer("no key of a region".into()))?;
        Ok(u64::from_le_bytes(key))
    }

    fn export(&mut self, registration: &dyn Registration) -> Export {
        if !self.faults.keys_of_channels {
            return Export::Known(registration.remote_key());
        }
        let (id, key) = (self.id, registration.local_key());
        if let Some(made) = self.network.0.lock().exported(id, key) {
            let bytes = SmallVec::from_slice(&made.to_le_bytes());
            return Export::Known(RemoteKey { base: made << 40, key: bytes });
        }
        let (network, exports) = (self.network.clone(), Arc::clone(&self.exports));
        Export::ToMake(Box::new(move || {
            exports.pass();
            network.0.lock().export(id, key)
        }))
    }

    fn arm(&mut self) -> Result<bool, RailError> {
        Ok(true)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn wake_in(&self, _: Instant) -> Option<Duration> {
        Some(Duration::from_micros(200))
    }
}

impl Drop for ChaosChannel {
    fn drop(&mut self) {
        while self.device.lock().is_slow_to_end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut network = self.network.0.lock();
        let Some(end) = network.ends.remove(&self.id) else { return };
        let is_of = |known: &RegisteredMemory| match known.peers {
            Peers::Of { end, .. } => end == self.id,
            _ => false,
        };
        network.memory.retain(|_, known| !is_of(known));
        let late_write = |one: PendingRequest| {
            let Request { kind, local, remote_addr: addr, remote_key: key, .. } = one.request;
            let mut bytes = vec![0; local.len];
            copy(local.addr as u64, bytes.as_mut_ptr() as u64, local.len);
            let polls = one.polls + self.rng.u32(0..20);
            (kind == OpKind::Write && local.len > 0).then_some(LateWrite {
                key,
                addr,
                bytes,
                polls,
            })
        };
        let late_writes: Vec<_> = end.pending.into_iter().filter_map(late_write).collect();
        if let Some(peer) = end.peer.and_then(|peer| network.ends.get_mut(&peer)) {
            peer.late_writes.extend(late_writes);
        }
    }
}
