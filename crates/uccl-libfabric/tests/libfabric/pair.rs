//! Two ends of a channel in one process, and memory to move between them.

use std::{
    env,
    fmt::Write as _,
    time::{Duration, Instant},
};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::OpKind,
    mem::Span,
    rail::{Channel, Rail, RailError, Registration, Request, RequestEnd, RequestError},
    region::Rights,
};
use uccl_libfabric::{Devices, LibfabricRail, LibfabricSettings};

/// How long anything may take before the test has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// The settings of the tests: loopback, so that they need no network.
pub(crate) fn settings(provider: &str) -> LibfabricSettings {
    let has_loopback = provider.starts_with("tcp") || provider == "sockets";
    let devices = if has_loopback { Devices::Named(vec!["lo".into()]) } else { Devices::All };
    LibfabricSettings {
        library: env::var_os("UCCL_LIBFABRIC_SO").map(Into::into),
        provider: Some(provider.into()),
        devices,
        // For those that would not notice that a peer is gone.
        silence: Duration::from_secs(if provider == named() { 15 } else { 3 }),
        ..LibfabricSettings::default()
    }
}

/// A provider that is tried as well, with its first device, on a machine that has a special one.
pub(crate) fn named() -> String {
    env::var("UCCL_TEST_LIBFABRIC").unwrap_or_default()
}

/// Opens a provider's rail. Without the library or the provider, prints the missing part.
pub(crate) fn open(provider: &str) -> Option<LibfabricRail> {
    if provider.is_empty() {
        eprintln!("skipped: lacks UCCL_TEST_LIBFABRIC, which names a provider of this machine's");
        return None;
    }
    open_with(&settings(provider))
}

pub(crate) fn open_with(settings: &LibfabricSettings) -> Option<LibfabricRail> {
    match LibfabricRail::open_all(settings) {
        Ok(rails) => rails.into_iter().next(),
        Err(RailError::Unavailable(why)) => {
            eprintln!("skipped: {why}");
            None
        }
        Err(error) => panic!("{settings:?}: {error}"),
    }
}

/// Memory that is registered until it is dropped.
pub(crate) struct Memory {
    pub(crate) registration: Box<dyn Registration>,
    pub(crate) bytes: Vec<u8>,
}

impl Memory {
    pub(crate) fn new(rail: &dyn Rail, len: usize, fill: impl Fn(usize) -> u8) -> Self {
        let bytes: Vec<u8> = (0..len).map(fill).collect();
        let span = Span { addr: bytes.as_ptr() as usize, len };
        let registration =
            rail.register(span, MemoryKind::Host, Rights::ALL).expect("it can be registered");
        Self { registration, bytes }
    }

    pub(crate) fn span(&self, at: usize, len: usize) -> Span {
        Span { addr: self.bytes.as_ptr() as usize + at, len }
    }
}

/// Bytes of which no two stretches are alike.
pub(crate) fn pattern(at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ at as u8
}

pub(crate) struct End {
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) ended: Vec<RequestEnd>,
}

impl End {
    pub(crate) fn poll(&mut self) -> Result<(), RailError> {
        self.channel.poll(&mut self.ended)
    }

    /// How a request of this name ended, if it has.
    pub(crate) fn result_of(&self, tag: u64) -> Option<&Result<(), RequestError>> {
        self.ended.iter().find(|ended| ended.tag == tag).map(|ended| &ended.result)
    }
}

/// Two ends of a channel over one rail.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
}

impl Pair {
    pub(crate) fn new(rail: &dyn Rail) -> Self {
        Self::over(rail, rail)
    }

    pub(crate) fn over(rail_a: &dyn Rail, rail_b: &dyn Rail) -> Self {
        let mut a = rail_a.open().expect("an end");
        let mut b = rail_b.open().expect("an end");
        a.connect(b.address()).expect("a joins b");
        b.connect(a.address()).expect("b joins a");
        let end = |channel| End { channel, ended: Vec::new() };
        Self { a: end(a), b: end(b) }
    }

    /// A request from `a` for memory of `b`'s side.
    pub(crate) fn request(&mut self, kind: OpKind, ours: &Memory, theirs: &Memory) -> Request {
        let key = self.b.channel.export_now(&*theirs.registration).expect("a key");
        Request {
            kind,
            local: ours.span(0, ours.bytes.len().min(theirs.bytes.len())),
            local_key: ours.registration.local_key(),
            remote_addr: key.base,
            remote_key: self.a.channel.import(&key.key).expect("our own key"),
            tag: 1,
        }
    }

    /// Posts all of these from `a` and polls both ends until they have ended.
    pub(crate) fn run(&mut self, requests: &[Request]) -> Result<(), RailError> {
        let before = self.a.ended.len();
        let mut posted = 0;
        let whole = format!("{} requests", requests.len());
        self.until(&whole, |pair| {
            if posted < requests.len() {
                // SAFETY: the callers keep their memory until this has returned, or the channel is
                // dropped.
                posted += unsafe { pair.a.channel.post(&requests[posted..]) }?;
            }
            Ok(pair.a.ended.len() - before == requests.len())
        })
    }

    /// Polls both ends until this is so. A death of `b` is ignored: only the errors of `a` count.
    pub(crate) fn until(
        &mut self,
        what: &str,
        mut is_so: impl FnMut(&mut Self) -> Result<bool, RailError>,
    ) -> Result<(), RailError> {
        let start = Instant::now();
        while !is_so(self)? {
            self.a.poll()?;
            let _ = self.b.poll();
            if start.elapsed() > PATIENCE {
                let mut state = String::new();
                let _ = write!(state, "{} ended", self.a.ended.len());
                panic!("waited {PATIENCE:?} for {what}; {state}");
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// A test for each provider, of a function that takes the provider's name.
macro_rules! for_each_provider {
    ($($test:ident),* $(,)?) => {
        $crate::pair::for_each_provider!(@ tcp_ofi_rxm "tcp;ofi_rxm"; $($test)*);
        $crate::pair::for_each_provider!(@ tcp "tcp"; $($test)*);
        $crate::pair::for_each_provider!(@ sockets "sockets"; $($test)*);
        $crate::pair::for_each_provider!(@ shm "shm"; $($test)*);
        $crate::pair::for_each_provider!(@ named &$crate::pair::named(); $($test)*);
    };
    (@ $module:ident $provider:expr; $($test:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    super::$test($provider);
                }
            )*
        }
    };
}
pub(crate) use for_each_provider;
