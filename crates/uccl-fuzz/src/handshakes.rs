//! Both ends of handshakes, at every point of them.

use std::sync::OnceLock;

use uccl_wire::handshake::{
    CmaProbe, Handshake, HandshakeError, Hello, HelloKind, Progress, Psk, Role,
};

/// Both ends, with and without a key, at every point of the handshake.
pub(super) fn handshake(bytes: &[u8]) -> bool {
    // Every point refuses bytes of another protocol alike, and to come to a point takes long.
    let mut fresh = Handshake::acceptor(None, [9; 32]);
    if matches!(fresh.feed(bytes), Err(HandshakeError::Foreign { .. })) {
        return feed(&mut fresh, bytes);
    }
    let ends = transcripts().iter().flat_map(Transcript::ends);
    ends.map(|mut end| feed(&mut end, bytes)).filter(|takes| *takes).count() > 0
}

fn feed(end: &mut Handshake, bytes: &[u8]) -> bool {
    let result = end.feed(bytes);
    match &result {
        Ok(Progress::NeedMore) => {}
        Ok(Progress::PeerHello { peer, consumed }) => {
            assert!(*consumed <= bytes.len());
            let _ = end.reply(peer);
        }
        Ok(Progress::Done { consumed, .. }) => assert!(*consumed <= bytes.len() && end.is_done()),
        Err(error) => assert_eq!(end.feed(bytes).as_ref(), Err(error)),
    }
    let _ = end.pending_output();
    matches!(result, Ok(Progress::PeerHello { .. } | Progress::Done { .. }))
}

/// The messages of a handshake that went well.
pub(super) struct Transcript {
    psk: Option<Psk>,
    pub(super) to_acceptor: Vec<Vec<u8>>,
    pub(super) to_connector: Vec<Vec<u8>>,
}

impl Transcript {
    fn record(psk: Option<Psk>) -> Self {
        let mut this = Self { psk, to_acceptor: Vec::new(), to_connector: Vec::new() };
        let (mut connector, mut acceptor) = (this.end(Role::Connector), this.end(Role::Acceptor));
        while !connector.is_done() {
            let bytes = connector.pending_output();
            if let Ok(Progress::PeerHello { .. }) = acceptor.feed(&bytes) {
                let _ = acceptor.reply(&sample_hello());
            }
            this.to_acceptor.push(bytes);
            let bytes = acceptor.pending_output();
            assert!(connector.feed(&bytes).is_ok(), "the sample handshake goes well");
            this.to_connector.push(bytes);
        }
        this
    }

    fn end(&self, role: Role) -> Handshake {
        match role {
            Role::Acceptor => Handshake::acceptor(self.psk.clone(), [2; 32]),
            Role::Connector => Handshake::connector(self.psk.clone(), &sample_hello(), [1; 32])
                .expect("the sample hello can be sent"),
        }
    }

    /// Both ends before each message that comes to them, after they have taken the earlier ones.
    fn ends(&self) -> impl Iterator<Item = Handshake> {
        let roles = [(Role::Acceptor, &self.to_acceptor), (Role::Connector, &self.to_connector)];
        roles.into_iter().flat_map(move |(role, messages)| {
            (0..messages.len()).map(move |count| self.end_after(role, &messages[..count]))
        })
    }

    fn end_after(&self, role: Role, messages: &[Vec<u8>]) -> Handshake {
        let mut end = self.end(role);
        for message in messages {
            let _ = end.feed(message);
            end.pending_output();
        }
        end
    }
}

pub(super) fn transcripts() -> &'static [Transcript; 2] {
    static TRANSCRIPTS: OnceLock<[Transcript; 2]> = OnceLock::new();
    TRANSCRIPTS.get_or_init(|| [None, Psk::new(b"secret").ok()].map(Transcript::record))
}

pub(super) fn sample_hello() -> Hello {
    Hello {
        kind: HelloKind::JoinLane { token: 77, lane_index: 2 },
        instance: 0x1122_3344,
        token: 78,
        pid: 4242,
        wanted_lanes: 4,
        listen_port: 28100,
        device: "0000:4a:00.0".into(),
        uds_name: "uccl-p2p-28100".into(),
        meant: 0x5566_7788,
        hostname: "node-1".into(),
        cma_probe: Some(CmaProbe { addr: 0x7f00_0000_2000, nonce: [3; 16] }),
        ..Hello::default()
    }
}
