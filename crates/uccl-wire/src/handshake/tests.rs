use proptest::{collection::vec, prelude::*};

use super::*;

const SECRET: &[u8] = b"a secret of some length";
const OTHER: &[u8] = b"another secret";

fn connector(psk: Option<&[u8]>) -> Handshake {
    connector_with(psk, &hello(1), [1; 32])
}

fn connector_with(psk: Option<&[u8]>, hello: &Hello, nonce: [u8; 32]) -> Handshake {
    Handshake::connector(psk.map(|s| Psk::new(s).unwrap()), hello, nonce).unwrap()
}

fn acceptor(psk: Option<&[u8]>) -> Handshake {
    acceptor_with(psk, [2; 32])
}

fn acceptor_with(psk: Option<&[u8]>, nonce: [u8; 32]) -> Handshake {
    Handshake::acceptor(psk.map(|s| Psk::new(s).unwrap()), nonce)
}

fn hello(instance: u64) -> Hello {
    Hello { instance, hostname: "node".into(), ..Hello::default() }
}

/// The state of an end after the bytes it was given.
#[derive(Clone, PartialEq, Debug)]
enum Fate {
    Waiting,
    Met(Box<Hello>),
    Failed(HandshakeError),
}

/// Delivers `bytes` in pieces of the lengths given (then all the rest); the acceptor answers with
/// `hello(2)`. Returns the state of the end, and the bytes that were not the handshake's.
fn deliver<'a>(end: &mut Handshake, mut bytes: &'a [u8], pieces: &[usize]) -> (Fate, &'a [u8]) {
    let mut pieces = pieces.iter().copied();
    loop {
        let (piece, rest) = bytes.split_at(pieces.next().unwrap_or(bytes.len()).min(bytes.len()));
        match end.feed(piece) {
            Ok(Progress::NeedMore) if rest.is_empty() => return (Fate::Waiting, rest),
            Ok(Progress::NeedMore) => bytes = rest,
            Ok(Progress::PeerHello { peer, consumed }) => {
                end.reply(&hello(2)).unwrap();
                return (Fate::Met(peer), &bytes[consumed..]);
            }
            Ok(Progress::Done { peer, consumed }) => {
                return (Fate::Met(peer), &bytes[consumed..]);
            }
            Err(e) => return (Fate::Failed(e), &[]),
        }
    }
}

/// Lets two ends talk until neither has more to send. Returns the connector's and the acceptor's
/// state.
fn run(c: &mut Handshake, a: &mut Handshake, pieces: &[usize]) -> (Fate, Fate) {
    run_tampered(c, a, pieces, |_, _, _| {})
}

/// The same, with an attacker on the path that may change the bytes of each step: `tamper(step,
/// whether they go to the acceptor, bytes)`.
fn run_tampered(
    c: &mut Handshake,
    a: &mut Handshake,
    pieces: &[usize],
    mut tamper: impl FnMut(usize, bool, &mut Vec<u8>),
) -> (Fate, Fate) {
    let (mut at_c, mut at_a) = (Fate::Waiting, Fate::Waiting);
    for step in 0..8 {
        for to_acceptor in [true, false] {
            let (from, to, fate) = match to_acceptor {
                true => (&mut *c, &mut *a, &mut at_a),
                false => (&mut *a, &mut *c, &mut at_c),
            };
            let mut bytes = from.pending_output();
            if bytes.is_empty() || *fate != Fate::Waiting {
                continue;
            }
            tamper(step, to_acceptor, &mut bytes);
            let (now, rest) = deliver(to, &bytes, pieces);
            assert!(rest.is_empty());
            *fate = now;
        }
    }
    (at_c, at_a)
}

fn refused(code: RefuseCode, fate: &Fate) -> bool {
    matches!(fate, Fate::Failed(HandshakeError::Refused { code: got, .. }) if *got == code)
}

/// A whole handshake's messages: (to the acceptor, to the connector).
fn transcript(psk: Option<&[u8]>) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (mut c, mut a) = (connector(psk), acceptor(psk));
    let (mut to_a, mut to_c) = (Vec::new(), Vec::new());
    while !c.is_done() {
        let bytes = c.pending_output();
        deliver(&mut a, &bytes, &[]);
        to_a.push(bytes);
        let bytes = a.pending_output();
        deliver(&mut c, &bytes, &[]);
        to_c.push(bytes);
    }
    (to_a, to_c)
}

/// The two ends before message `step`, which comes next.
fn ends_at(psk: Option<&[u8]>, step: usize) -> (Handshake, Handshake) {
    let (to_a, to_c) = transcript(psk);
    let (mut c, mut a) = (connector(psk), acceptor(psk));
    for step in 0..step {
        deliver(&mut a, &to_a[step], &[]);
        deliver(&mut c, &to_c[step], &[]);
    }
    c.pending_output();
    a.pending_output();
    (c, a)
}

fn psks() -> impl Strategy<Value = Option<&'static [u8]>> {
    prop_oneof![Just(None), Just(Some(SECRET))]
}

prop_compose! {
    fn hosts()(boot_id: [u8; 16], pid_ns: u64, net_ns: u64, user_ns: u64, mnt_ns: u64) -> HostIdentity {
        HostIdentity { boot_id, pid_ns, net_ns, user_ns, mnt_ns }
    }
}

prop_compose! {
    fn numbers()(
        kind in prop_oneof![
            Just(HelloKind::NewConnection),
            any::<(u128, u16)>()
                .prop_map(|(token, lane_index)| HelloKind::JoinLane { token, lane_index }),
        ],
        checksum in prop_oneof![
            Just(ChecksumPref::Auto), Just(ChecksumPref::On), Just(ChecksumPref::Off),
        ],
        (instance, token, features, meant) in any::<(u64, u128, u64, u64)>(),
        host in hosts(),
        (pid, gpu_index) in any::<(u32, u32)>(),
        (wanted_lanes, listen_port, requested_port) in any::<(u16, u16, u16)>(),
        probe in any::<Option<(u64, [u8; 16])>>(),
    ) -> Hello {
        Hello {
            kind, instance, token, meant, features: Features(features), host, pid, gpu_index, wanted_lanes,
            listen_port, requested_port, checksum,
            cma_probe: probe.map(|(addr, nonce)| CmaProbe { addr, nonce }),
            ..Hello::default()
        }
    }
}

prop_compose! {
    fn hellos()(
        numbers in numbers(),
        device in "[ -~]{0,32}", uds_name in "[ -~]{0,64}", hostname in "[é-ž]{0,32}",
    ) -> Hello {
        Hello { device, uds_name, hostname, ..numbers }
    }
}

proptest! {
    #[test]
    fn hellos_round_trip(hello in hellos()) {
        prop_assert_eq!(Hello::decode(&hello.encode().unwrap()), Ok(hello));
    }

    #[test]
    fn later_fields_are_skipped(hello in hellos(), tag in 5u16.., value in vec(any::<u8>(), 0..100)) {
        let mut bytes = hello.encode().unwrap();
        bytes.extend(tag.to_le_bytes());
        bytes.extend((value.len() as u16).to_le_bytes());
        bytes.extend(value);
        prop_assert_eq!(Hello::decode(&bytes), Ok(hello));
    }

    /// A cut hello is refused, or has lost whole fields.
    #[test]
    fn cut_hellos_are_refused(hello in hellos(), cut: prop::sample::Index) {
        let bytes = hello.encode().unwrap();
        let short = &bytes[..cut.index(bytes.len())];
        if let Ok(read) = Hello::decode(short) {
            prop_assert_eq!(read.encode().unwrap(), short);
        }
    }

    #[test]
    fn any_split_meets(
        psk in psks(),
        ours in hellos(),
        nonces in any::<([u8; 32], [u8; 32])>().prop_filter("they differ", |(a, b)| a != b),
        pieces in vec(0usize..70, 0..40),
    ) {
        let mut c = connector_with(psk, &ours, nonces.0);
        let mut a = acceptor_with(psk, nonces.1);
        let (at_c, at_a) = run(&mut c, &mut a, &pieces);
        prop_assert_eq!(at_a, Fate::Met(Box::new(ours)));
        prop_assert_eq!(at_c, Fate::Met(Box::new(hello(2))));
        prop_assert!(c.is_done() && a.is_done());
    }

    /// Bytes that follow the handshake on the stream are left alone, wherever the pieces end.
    #[test]
    fn bytes_behind_the_handshake_are_left(
        psk in psks(), tail in vec(any::<u8>(), 1..50), pieces in vec(0usize..70, 0..20),
    ) {
        let (to_a, to_c) = transcript(psk);
        let last = to_a.len() - 1;
        let (mut c, mut a) = ends_at(psk, last);
        // A connector need not wait for the answer to its hello.
        let bytes = [&to_a[last][..], &tail].concat();
        let (fate, rest) = deliver(&mut a, &bytes, &pieces);
        prop_assert!(matches!(fate, Fate::Met(_)));
        prop_assert_eq!(rest, &tail);
        let bytes = [&to_c[last][..], &tail].concat();
        let (fate, rest) = deliver(&mut c, &bytes, &pieces);
        prop_assert!(matches!(fate, Fate::Met(_)));
        prop_assert_eq!(rest, &tail);
        for end in [&mut c, &mut a] {
            let again = end.feed(&tail);
            prop_assert!(matches!(again, Err(HandshakeError::WrongState { .. })), "{:?}", again);
        }
    }

    /// Mutated messages at every point: however they are split, both ends reach the same state and
    /// send the same bytes, and an end keeps no more than one message.
    #[test]
    fn splits_do_not_matter(
        psk in psks(),
        step in 0usize..3,
        flips in vec((any::<prop::sample::Index>(), 1u8..), 0..3),
        cut: prop::sample::Index,
        pieces in vec(0usize..20, 0..40),
    ) {
        let (to_a, to_c) = transcript(psk);
        let step = step.min(to_a.len() - 1);
        let (whole, split) = (ends_at(psk, step), ends_at(psk, step));
        for (mut whole, mut split, message) in
            [(whole.0, split.0, &to_c[step]), (whole.1, split.1, &to_a[step])]
        {
            let mut bytes = message.clone();
            for (at, mask) in &flips {
                let at = at.index(bytes.len());
                bytes[at] ^= mask;
            }
            bytes.truncate(bytes.len() - cut.index(bytes.len()) / 2);
            let fates = (deliver(&mut whole, &bytes, &[]), deliver(&mut split, &bytes, &pieces));
            prop_assert_eq!(&fates.0, &fates.1);
            prop_assert_eq!(whole.pending_output(), split.pending_output());
            prop_assert!(whole.input.len() <= HEADER_LEN + envelope::MAX_BODY_LEN);
        }
    }

    /// Under a key, a changed message is refused.
    #[test]
    fn changed_messages_fail(
        to_acceptor: bool, step in 0usize..3, at: prop::sample::Index, bit in 0u8..8,
    ) {
        let (mut c, mut a) = (connector(Some(SECRET)), acceptor(Some(SECRET)));
        let mut changed = false;
        let fates = run_tampered(&mut c, &mut a, &[], |now, toward_acceptor, bytes| {
            if (now, toward_acceptor) == (step, to_acceptor) {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
                changed = true;
            }
        });
        prop_assert!(changed);
        prop_assert!(!matches!(fates.0, Fate::Met(_)), "the connector met {:?}", fates.0);
        // The last message is the acceptor's answer: by then it has met the connector.
        let knows = (step, to_acceptor) == (2, false);
        prop_assert!(knows == matches!(fates.1, Fate::Met(_)), "the acceptor met {:?}", fates.1);
    }

    #[test]
    fn any_bytes_never_panic(
        psk in psks(), step in 0usize..3, kind in 0u8..6, bytes in vec(any::<u8>(), 0..300), raw: bool,
    ) {
        let mut message = bytes.clone();
        if !raw {
            let len = (bytes.len() as u16).to_le_bytes();
            message = [b"UCCL", &[kind, PROTOCOL_VERSION][..], &len, &bytes].concat();
        }
        let (mut c, mut a) = ends_at(psk, step.min(transcript(psk).0.len() - 1));
        for end in [&mut c, &mut a] {
            if let Fate::Failed(error) = deliver(end, &message, &[]).0 {
                prop_assert_eq!(end.feed(&bytes), Err(error));
            }
        }
        let _ = Hello::decode(&bytes);
    }

    #[test]
    fn refusals_reach_the_peer(code: u16, text in "\\PC{0,700}") {
        let mut a = acceptor(None);
        a.refuse(Refusal::new(RefuseCode::from_wire(code), text.clone()));
        let bytes = a.pending_output();
        let Fate::Failed(HandshakeError::Refused { code: got, text: read }) =
            deliver(&mut connector(None), &bytes, &[]).0
        else {
            return Err(TestCaseError::fail("not refused"));
        };
        prop_assert_eq!(got.to_wire(), code);
        prop_assert!(text.starts_with(&read));
        prop_assert!(read.len() == text.len() || read.len() > 508);
    }
}

#[test]
fn both_ends_learn_of_each_other() {
    for psk in [None, Some(SECRET)] {
        let fates = run(&mut connector(psk), &mut acceptor(psk), &[]);
        assert_eq!(fates, (Fate::Met(Box::new(hello(2))), Fate::Met(Box::new(hello(1)))));
    }
}

#[test]
fn another_key_is_refused_before_the_acceptor_shows_anything() {
    let (mut c, mut a) = (connector(Some(OTHER)), acceptor(Some(SECRET)));
    deliver(&mut a, &c.pending_output(), &[]);
    deliver(&mut c, &a.pending_output(), &[]);
    let (fate, _) = deliver(&mut a, &c.pending_output(), &[]);
    assert_eq!(fate, Fate::Failed(HandshakeError::PskMismatch));
    // One message, a REFUSE: no proof, no hello.
    let said = a.pending_output();
    assert_eq!(said[4], 4);
    assert_eq!(said.len(), 8 + usize::from(u16::from_le_bytes([said[6], said[7]])));
    let (fate, _) = deliver(&mut c, &said, &[]);
    assert!(refused(RefuseCode::PskMismatch, &fate), "{fate:?}");
    assert!(c.pending_output().is_empty());
}

#[test]
fn a_key_on_one_side_is_refused() {
    let fates = run(&mut connector(None), &mut acceptor(Some(SECRET)), &[]);
    assert_eq!(fates.1, Fate::Failed(HandshakeError::PskRequired));
    assert!(refused(RefuseCode::PskRequired, &fates.0), "{fates:?}");
    let fates = run(&mut connector(Some(SECRET)), &mut acceptor(None), &[]);
    assert_eq!(fates.1, Fate::Failed(HandshakeError::PskUnexpected));
    assert!(refused(RefuseCode::PskUnexpected, &fates.0), "{fates:?}");
}

/// An acceptor that claims to need no key gets nothing out of a connector that has one.
#[test]
fn a_connector_with_a_key_does_not_go_without() {
    let mut c = connector(Some(SECRET));
    let prelude = Prelude { nonce: [7; 32], has_psk: false, role: Role::Acceptor };
    c.pending_output();
    let (fate, _) = deliver(&mut c, &message(Kind::Prelude, &prelude.encode()), &[]);
    assert_eq!(fate, Fate::Failed(HandshakeError::PskRequired));
    assert_eq!(c.pending_output()[4], 4);
}

#[test]
fn a_web_browser_is_refused_by_its_first_bytes() {
    for psk in [None, Some(SECRET)] {
        let mut a = acceptor(psk);
        assert_eq!(a.feed(b"GET"), Ok(Progress::NeedMore));
        assert_eq!(a.feed(b" "), Err(HandshakeError::Foreign { first: *b"GET " }));
        assert!(a.pending_output().starts_with(b"UCCL\x04"));
        let (fate, _) = deliver(&mut acceptor(psk), b"GET / HTTP/1.1\r\n\r\n", &[]);
        let Fate::Failed(error) = fate else { panic!("{fate:?}") };
        assert!(error.to_string().ends_with("\"GET \""), "{error}");
    }
}

#[test]
fn versions_are_told_apart_by_both_ends() {
    let (mut c, mut a) = (connector(None), acceptor(None));
    let mut bytes = c.pending_output();
    bytes[5] = 9;
    let (fate, _) = deliver(&mut a, &bytes, &[]);
    let error = HandshakeError::Version { ours: PROTOCOL_VERSION, theirs: 9 };
    assert_eq!(fate, Fate::Failed(error));
    // The other end is of another version too: it must understand the refusal all the same.
    let mut bytes = a.pending_output();
    bytes[5] = 9;
    let (fate, _) = deliver(&mut c, &bytes, &[]);
    let Fate::Failed(HandshakeError::Refused { code, text }) = fate else { panic!("{fate:?}") };
    assert_eq!(code, RefuseCode::Version);
    let told = format!("this endpoint speaks protocol version {PROTOCOL_VERSION}, not 9");
    assert_eq!(text, told);
}

/// The release before has no codes behind hellos: it gets the versions as a reason, and does not
/// count as a forger.
#[test]
fn the_version_before_is_refused_with_words() {
    for psk in [None, Some(SECRET)] {
        let mut a = acceptor(psk);
        let mut bytes = connector(psk).pending_output();
        bytes[5] = 2;
        let (fate, _) = deliver(&mut a, &bytes, &[]);
        let error = HandshakeError::Version { ours: PROTOCOL_VERSION, theirs: 2 };
        assert_eq!(fate, Fate::Failed(error));
        let (fate, _) = deliver(&mut connector(psk), &a.pending_output(), &[]);
        let Fate::Failed(error) = fate else { panic!("{fate:?}") };
        assert!(error.to_string().contains("speaks protocol version 3, not 2"), "{error}");
    }
}

/// A relay between two ends with the key cannot insert messages of its own, also behind the proofs.
#[test]
fn a_hello_of_another_handshake_is_forged() {
    let (to_a, to_c) = transcript(Some(SECRET));
    let (mut c, mut a) =
        (connector_with(Some(SECRET), &hello(1), [5; 32]), acceptor_with(Some(SECRET), [6; 32]));
    for _ in 0..2 {
        deliver(&mut a, &c.pending_output(), &[]);
        deliver(&mut c, &a.pending_output(), &[]);
    }
    // In place of the hello that the connector has already sent.
    assert_eq!(deliver(&mut a, &to_a[2], &[]).0, Fate::Failed(HandshakeError::Forged));
    assert_eq!(deliver(&mut c, &to_c[2], &[]).0, Fate::Failed(HandshakeError::Forged));
    let plain = message(Kind::Hello, &hello(2).encode().unwrap());
    let (mut c, _) = ends_at(Some(SECRET), 2);
    let (fate, _) = deliver(&mut c, &plain, &[]);
    assert_eq!(fate, Fate::Failed(HandshakeError::Forged), "a hello without a code");
    let (fate, _) = deliver(&mut acceptor(Some(SECRET)), &c.pending_output(), &[]);
    assert!(refused(RefuseCode::Forged, &fate), "{fate:?}");
}

/// The code behind an acceptor's hello is over both hellos, and over where one ends.
#[test]
fn an_answer_is_to_one_hello() {
    let session = Psk::new(SECRET).unwrap().session(b"1", b"2");
    let tag = |connector: &[u8], acceptor| session.hello_tag(Role::Acceptor, connector, acceptor);
    assert_ne!(tag(b"a hello", b"x"), tag(b"another", b"x"));
    assert_ne!(tag(b"ab", b"c"), tag(b"a", b"bc"));
    assert_ne!(tag(b"a", b""), session.hello_tag(Role::Connector, b"a", b""));
}

/// Both ends have the same keys in the end, those of other streams are others, and there are none
/// without a secret.
#[test]
fn both_ends_have_keys_that_nobody_else_has() {
    let keys = |secret, nonce| {
        let mut ends = (connector_with(secret, &hello(1), nonce), acceptor(secret));
        assert!(ends.0.take_keys().is_none(), "before the end");
        run(&mut ends.0, &mut ends.1, &[]);
        let keys = (ends.0.take_keys(), ends.1.take_keys());
        assert!(ends.0.take_keys().is_none(), "they are given out once");
        keys.0.zip(keys.1)
    };
    assert!(keys(None, [1; 32]).is_none());
    let (mut c, mut a) = keys(Some(SECRET), [1; 32]).unwrap();
    let (mut other, _) = keys(Some(SECRET), [9; 32]).unwrap();
    assert_eq!(c.secret, a.secret);
    assert_ne!(c.secret, other.secret);
    let (from_c, from_a) = (c.sealer.sealed(b"c"), a.sealer.sealed(b"a"));
    assert!(c.opener.open(&from_c).is_err(), "sent back");
    assert!(other.opener.open(&from_a).is_err(), "of another stream");
    assert_eq!(c.opener.open(&from_a).unwrap(), b"a");
    assert_eq!(a.opener.open(&from_c).unwrap(), b"c");
}

/// An attacker without the key lets both ends of it, or one end twice, answer each other's
/// challenge.
#[test]
fn a_reflected_proof_proves_nothing() {
    let mut c = connector(Some(SECRET));
    c.pending_output();
    let prelude = Prelude { nonce: [7; 32], has_psk: true, role: Role::Acceptor };
    deliver(&mut c, &message(Kind::Prelude, &prelude.encode()), &[]);
    let proof = c.pending_output();
    assert_eq!(proof[4], 2);
    let (fate, _) = deliver(&mut c, &proof, &[]);
    assert_eq!(fate, Fate::Failed(HandshakeError::PskMismatch));
    // No hello came out of it.
    assert_eq!(c.pending_output()[4], 4);
}

#[test]
fn a_replayed_connection_is_refused() {
    let (to_a, _) = transcript(Some(SECRET));
    let mut a = acceptor_with(Some(SECRET), [3; 32]);
    assert_eq!(deliver(&mut a, &to_a[0], &[]).0, Fate::Waiting);
    let (fate, _) = deliver(&mut a, &to_a[1], &[]);
    assert_eq!(fate, Fate::Failed(HandshakeError::PskMismatch));
}

#[test]
fn a_mirror_is_recognised() {
    for psk in [None, Some(SECRET)] {
        // A stream that is connected to itself.
        let mut c = connector(psk);
        let (fate, _) = deliver(&mut connector(psk), &c.pending_output(), &[]);
        assert_eq!(fate, Fate::Failed(HandshakeError::Mirror));
        // A peer that repeats the nonce but plays the other role.
        let prelude = Prelude { nonce: [1; 32], has_psk: psk.is_some(), role: Role::Acceptor };
        let (fate, _) = deliver(&mut c, &message(Kind::Prelude, &prelude.encode()), &[]);
        assert_eq!(fate, Fate::Failed(HandshakeError::Mirror));
    }
}

/// A hello's contents do not matter, and are not read, before the key is proven.
#[test]
fn no_hello_is_read_before_the_proof() {
    let (_, mut a) = ends_at(Some(SECRET), 1);
    let garbage = message(Kind::Hello, &[0xff; 100]);
    let (fate, _) = deliver(&mut a, &garbage[..HEADER_LEN], &[]);
    let error = HandshakeError::UnexpectedMessage { got: 3, want: "PROOF" };
    assert_eq!(fate, Fate::Failed(error));
}

#[test]
fn a_body_that_is_too_long_is_refused_by_its_header() {
    let (_, mut a) = ends_at(None, 1);
    let header = [b"UCCL", &[3, PROTOCOL_VERSION, 0x01, 0x08][..]].concat();
    let (fate, _) = deliver(&mut a, &header, &[]);
    assert_eq!(fate, Fate::Failed(HandshakeError::WrongLength { kind: "HELLO", len: 2049 }));
}

#[test]
fn the_longest_hello_fits_its_message() {
    let longest = Hello {
        device: "d".repeat(MAX_DEVICE_LEN),
        uds_name: "u".repeat(MAX_UDS_NAME_LEN),
        hostname: "h".repeat(MAX_HOSTNAME_LEN),
        cma_probe: Some(CmaProbe { addr: u64::MAX, nonce: [0xff; 16] }),
        meant: u64::MAX,
        ..hello(1)
    };
    for psk in [None, Some(SECRET)] {
        let (mut c, mut a) = (connector_with(psk, &longest, [1; 32]), acceptor(psk));
        assert_eq!(run(&mut c, &mut a, &[]).1, Fate::Met(Box::new(longest.clone())));
    }
}

#[test]
fn hellos_that_break_the_rules_are_neither_sent_nor_read() {
    let long = Hello { hostname: "h".repeat(65), ..Hello::default() };
    let error = HelloError::TooLong { field: "hostname", len: 65, max: 64 };
    assert_eq!(long.encode(), Err(error.clone()));
    assert!(Handshake::connector(None, &long, [0; 32]).is_err());
    let shown = Hello { device: "\x1b[2J".into(), ..Hello::default() };
    assert_eq!(shown.encode(), Err(HelloError::NotText { field: "device" }));

    let plain = Hello::default().encode().unwrap();
    let with = |fields: &[(u16, &[u8])]| {
        let mut bytes = plain.clone();
        for (tag, value) in fields {
            bytes.extend(tag.to_le_bytes());
            bytes.extend((value.len() as u16).to_le_bytes());
            bytes.extend(*value);
        }
        Hello::decode(&bytes)
    };
    assert_eq!(with(&[(3, &[b'h'; 65])]), Err(error));
    assert_eq!(with(&[(3, b"\x1b[2J")]), Err(HelloError::NotText { field: "hostname" }));
    assert_eq!(with(&[(3, b"\xff")]), Err(HelloError::NotText { field: "hostname" }));
    assert_eq!(with(&[(2, b"a"), (2, b"b")]), Err(HelloError::Duplicate { field: "socket name" }));
    let error = HelloError::WrongLength { field: "probe", len: 23, want: 24 };
    assert_eq!(with(&[(4, &[0; 23])]), Err(error));
    let error = HelloError::WrongLength { field: "meant endpoint", len: 7, want: 8 };
    assert_eq!(with(&[(5, &[0; 7])]), Err(error));
    for (at, field) in [(0, "kind"), (1, "checksum")] {
        let mut bytes = plain.clone();
        bytes[at] = 3;
        assert_eq!(Hello::decode(&bytes), Err(HelloError::UnknownValue { field, value: 3 }));
    }
}

#[test]
fn an_answer_that_cannot_be_sent_can_be_replaced() {
    let (to_a, _) = transcript(None);
    let (_, mut a) = ends_at(None, 1);
    assert!(matches!(a.reply(&hello(2)), Err(HandshakeError::WrongState { .. })));
    assert!(matches!(a.feed(&to_a[1]), Ok(Progress::PeerHello { .. })));
    let long = Hello { hostname: "h".repeat(65), ..Hello::default() };
    assert!(matches!(a.reply(&long), Err(HandshakeError::Hello(HelloError::TooLong { .. }))));
    assert!(!a.is_done() && a.pending_output().is_empty());
    a.reply(&hello(2)).unwrap();
    assert!(a.is_done());
}

#[test]
fn an_acceptor_can_refuse_the_request_of_a_hello() {
    let (to_a, _) = transcript(None);
    let (mut c, mut a) = ends_at(None, 1);
    assert!(matches!(a.feed(&to_a[1]), Ok(Progress::PeerHello { .. })));
    let refusal = Refusal::new(RefuseCode::UnknownToken, "no connection has this token");
    a.refuse(refusal.clone());
    let refused_by_us = HandshakeError::RefusedByUs(refusal);
    assert_eq!(a.reply(&hello(2)), Err(refused_by_us.clone()));
    assert_eq!(a.feed(b""), Err(refused_by_us));
    let (fate, _) = deliver(&mut c, &a.pending_output(), &[]);
    assert!(refused(RefuseCode::UnknownToken, &fate), "{fate:?}");
}

#[test]
fn a_refusal_cannot_write_to_a_terminal() {
    let body = [&7u16.to_le_bytes()[..], b"\x1b[2J\xff\n"].concat();
    let (fate, _) = deliver(&mut connector(None), &message(Kind::Refuse, &body), &[]);
    let Fate::Failed(HandshakeError::Refused { text, .. }) = fate else { panic!("{fate:?}") };
    assert_eq!(text, "\u{fffd}[2J\u{fffd}\u{fffd}");
}

#[test]
fn refuse_codes_round_trip() {
    for code in 0..=u16::MAX {
        assert_eq!(RefuseCode::from_wire(code).to_wire(), code);
    }
}

/// RFC 4231, test case 2, through the same key schedule: a proof is HMAC-SHA256 of label and
/// messages, nothing else.
#[test]
fn proofs_are_hmac_sha256() {
    use hmac::{Hmac, KeyInit, Mac};
    let mac = Hmac::<sha2::Sha256>::new_from_slice(b"Jefe").unwrap();
    let tag = mac.chain_update(b"what do ya want for nothing?").finalize().into_bytes();
    assert_eq!(tag[..4], [0x5b, 0xdc, 0xc1, 0x46]);
    let psk = Psk::new(b"Jefe").unwrap();
    let mac = Hmac::<sha2::Sha256>::new_from_slice(b"Jefe").unwrap();
    let tag = mac.chain_update(b"uccl connector proof12").finalize().into_bytes();
    assert_eq!(psk.proof(Role::Connector, b"1", b"2")[..], tag[..]);
    assert_ne!(psk.proof(Role::Acceptor, b"1", b"2")[..], tag[..]);
}

#[test]
fn an_empty_key_is_none() {
    assert_eq!(Psk::new(b"").map(drop), Err(EmptyPsk));
    assert_eq!(format!("{:?}", Psk::new(SECRET)), "Ok(Psk(..))");
}
