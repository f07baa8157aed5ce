//! Two channels joined in one process, and memory that both sides check.

use std::{
    env, thread,
    time::{Duration, Instant},
};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::OpKind,
    mem::Span,
    rail::{Channel, Rail, RailError, Registration, Request, RequestEnd, RequestError},
    region::Rights,
};
use uccl_verbs as verbs;
use uccl_verbs::{VerbsRail, VerbsSettings};

/// A time that no test takes unless it hangs.
const FAR: Duration = Duration::from_secs(120);

/// The pair of devices that a test uses. Tests of faults have one to themselves where there are
/// two.
#[derive(Clone, Copy)]
pub(crate) enum Cable {
    Shared,
    ToBeCut,
}

/// A port and the one at the other end; the same one where only one is there.
pub(crate) struct Rails {
    pub(crate) a: VerbsRail,
    pub(crate) b: VerbsRail,
}

impl Rails {
    /// Opens them; prints the reason where there are none.
    pub(crate) fn open(cable: Cable, settings: &VerbsSettings) -> Option<Self> {
        let named = |variable: &str| {
            let names = env::var(variable).ok()?;
            let names: Vec<_> = names.split(',').collect();
            let name = match cable {
                Cable::Shared => names.first(),
                Cable::ToBeCut => names.get(1),
            };
            name?.parse().ok()
        };
        let open = |name: Option<_>| {
            let settings =
                VerbsSettings { devices: name.into_iter().collect(), ..settings.clone() };
            let rails = verbs::open(&settings).map_err(|error| eprintln!("skipped: {error}"));
            rails.ok()?.into_iter().next()
        };
        Some(Self { a: open(named("RDMA_VM_DEVS"))?, b: open(named("RDMA_VM_PEER_DEVS"))? })
    }

    /// The usual ones.
    pub(crate) fn shared() -> Option<Self> {
        Self::open(Cable::Shared, &VerbsSettings::default())
    }

    /// Two ends that know of each other, and can be posted to.
    pub(crate) fn joined(&self) -> Pair {
        let mut a = self.a.open().expect("a channel");
        let mut b = self.b.open().expect("a channel");
        // As a lane does it: the other end gets our address and answers with its own.
        b.connect(a.address()).expect("joined");
        a.connect(b.address()).expect("joined");
        Pair { a, b }
    }
}

/// The kinds of channels: number and service of queue pairs.
pub(crate) fn all_kinds_of_channels() -> Vec<(&'static str, VerbsSettings)> {
    let of = |queue_pairs, rc_mode| VerbsSettings {
        queue_pairs: Some(queue_pairs),
        rc_mode,
        ..VerbsSettings::default()
    };
    vec![
        ("RC, 1 queue pair", of(1, true)),
        ("RC, 4 queue pairs", of(4, true)),
        ("UC, 1 queue pair", of(1, false)),
        ("UC, 3 queue pairs", of(3, false)),
    ]
}

/// Settings with which a lost peer is noticed soon.
pub(crate) fn impatient() -> VerbsSettings {
    VerbsSettings { timeout: 10, retries: 3, ..VerbsSettings::default() }
}

/// Memory that is registered with a device.
pub(crate) struct Memory {
    // Declared before the bytes, so that it ends before they are freed.
    pub(crate) registration: Box<dyn Registration>,
    pub(crate) bytes: Vec<u8>,
}

impl Memory {
    pub(crate) fn new(rail: &VerbsRail, bytes: Vec<u8>) -> Self {
        let span = span_of(&bytes);
        let registration = rail.register(span, MemoryKind::Host, Rights::ALL).expect("registered");
        Self { registration, bytes }
    }

    pub(crate) fn random(rail: &VerbsRail, len: usize, seed: u64) -> Self {
        let mut bytes = vec![0; len];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        Self::new(rail, bytes)
    }

    pub(crate) fn zeros(rail: &VerbsRail, len: usize) -> Self {
        Self::new(rail, vec![0; len])
    }
}

pub(crate) fn span_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr().expose_provenance(), len: bytes.len() }
}

/// A piece of both sides' memory, at the same place.
pub(crate) fn request(
    kind: OpKind,
    channel: &mut dyn Channel,
    (ours, theirs): (&Memory, &Memory),
    range: std::ops::Range<usize>,
    tag: u64,
) -> Request {
    let remote = theirs.registration.remote_key();
    Request {
        kind,
        local: Span { addr: span_of(&ours.bytes).addr + range.start, len: range.len() },
        local_key: ours.registration.local_key(),
        remote_addr: remote.base + range.start as u64,
        remote_key: channel.import(&remote.key).expect("a key"),
        tag,
    }
}

/// Both ends of a channel.
pub(crate) struct Pair {
    pub(crate) a: Box<dyn Channel>,
    pub(crate) b: Box<dyn Channel>,
}

impl Pair {
    /// Posts all of these at `a`, and polls both ends until they have ended. Requests without a
    /// result when the channel died are left out.
    pub(crate) fn run(&mut self, requests: &[Request]) -> (Vec<RequestEnd>, Result<(), RailError>) {
        let (mut ended, mut posted) = (Vec::new(), 0);
        let began = Instant::now();
        while ended.len() < requests.len() {
            // SAFETY: the callers keep the memory until they have dropped the channels or all has
            // ended.
            match unsafe { self.a.post(&requests[posted..]) } {
                Ok(count) => posted += count,
                Err(error) => return (ended, Err(error)),
            }
            if let Err(error) = self.poll(&mut ended) {
                return (ended, Err(error));
            }
            let (done, of, first) = (ended.len(), requests.len(), &requests[0]);
            assert!(began.elapsed() < FAR, "{done} of {of} ended: {:?}", first.kind);
            // In a user-mode kernel, threads of a process take turns with the kernel's work for
            // them.
            thread::yield_now();
        }
        (ended, Ok(()))
    }

    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        let mut of_b = Vec::new();
        // The other end may be dead as well; only the result of this one counts.
        let _ = self.b.poll(&mut of_b);
        self.a.poll(ended)
    }

    /// The same, where all must succeed, once each.
    pub(crate) fn run_well(&mut self, requests: &[Request]) {
        let (ended, result) = self.run(requests);
        result.expect("the channel lives");
        let mut tags: Vec<_> = ended.iter().map(|ended| ended.tag).collect();
        tags.sort_unstable();
        let mut expected: Vec<_> = requests.iter().map(|request| request.tag).collect();
        expected.sort_unstable();
        assert_eq!(tags, expected);
        for ended in ended {
            assert_eq!(ended.result, Ok(()), "request {}", ended.tag);
        }
    }

    /// Polls `a` until it dies. Returns the requests that ended before, and the error.
    pub(crate) fn until_dead(&mut self) -> (Vec<RequestEnd>, RailError) {
        let (mut ended, began) = (Vec::new(), Instant::now());
        loop {
            if let Err(error) = self.a.poll(&mut ended) {
                return (ended, error);
            }
            assert!(began.elapsed() < FAR, "it does not die");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether a probe gets through.
    pub(crate) fn probes(&mut self) -> Result<(), RailError> {
        self.a.probe(77)?;
        let (mut ended, began) = (Vec::new(), Instant::now());
        while ended.is_empty() {
            self.poll(&mut ended)?;
            assert!(began.elapsed() < FAR, "the probe does not end");
            thread::yield_now();
        }
        assert_eq!((ended[0].tag, &ended[0].result), (77, &Ok::<_, RequestError>(())));
        Ok(())
    }
}
