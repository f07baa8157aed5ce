//! Every parser of uccl-wire in one place, for tests that throw bytes at them.
//!
//! A parser that is added to that crate is added here.

use std::sync::OnceLock;

use uccl_wire::{
    ack::Ack,
    advert::Advert,
    checked,
    descs::{XferDesc, decode_descs, encode_descs},
    frame::{self, Desc, HEADER_LEN, Header, Kind, Status, Trailer},
    gpu_offer::{GpuOffer, Means},
    handshake::{
        CmaProbe, Handshake, HandshakeError, Hello, HelloKind, Progress, Psk, Refusal, RefuseCode,
        Role,
    },
    ipc_info::IpcInfo,
    libfabric::{FabricAddress, FabricKey},
    message::{self, Answer, AskPiece, Direction, Message, Place, Source, Verdict},
    metadata::{Device, Metadata},
    named::Named,
    rails::{Grant, Note, PathId, PathKey, RailOffer, RegionId, StagedPiece},
    record::{Opener, Sealer},
    signal::{Change, SIGNAL_LEN},
    verbs::{LinkLayer, QueuePair, VerbsAddress},
};

/// A parser under test.
#[derive(Clone, Copy, Debug)]
pub struct Parser {
    /// The name of its layout.
    pub name: &'static str,
    /// Reads the bytes; whether it took them for valid. Panics where encoding the result does not
    /// give the same bytes.
    pub takes: fn(&[u8]) -> bool,
}

/// Every parser of uccl-wire.
pub const PARSERS: &[Parser] = &[
    Parser { name: "ack", takes: ack },
    Parser { name: "advert", takes: advert },
    Parser { name: "checked header", takes: checked_header },
    Parser { name: "descs", takes: descs },
    Parser { name: "fabric address", takes: fabric_address },
    Parser { name: "fabric key", takes: fabric_key },
    Parser { name: "frame", takes: frame },
    Parser { name: "gpu offer", takes: gpu_offer },
    Parser { name: "handshake", takes: handshake },
    Parser { name: "hello", takes: hello },
    Parser { name: "ipc info", takes: ipc_info },
    Parser { name: "message", takes: message },
    Parser { name: "metadata", takes: metadata },
    Parser { name: "metadata text", takes: metadata_text },
    Parser { name: "named notification", takes: named },
    Parser { name: "rail note", takes: rail_note },
    Parser { name: "record", takes: a_record },
    Parser { name: "verbs address", takes: verbs_address },
];

/// Throws bytes at every parser; how many took them for valid.
pub fn all_parsers(bytes: &[u8]) -> usize {
    PARSERS.iter().filter(|parser| (parser.takes)(bytes)).count()
}

/// Valid bytes of every layout, to be mutated.
pub fn samples() -> Vec<Vec<u8>> {
    let advert = sample_advert();
    let info = IpcInfo::of_host(&advert, 1);
    let ipc_desc = XferDesc { ipc: info.encode().to_vec(), ..XferDesc::of_advert(&advert) };
    let by_index = Metadata { ip: [10, 0, 0, 1].into(), port: 28100, device: Device::Gpu(3) };
    let device = Device::Bdf("0000:4a:00.0".into());
    let by_bdf = Metadata { ip: [0xfe80u16, 0, 0, 0, 0, 0, 0, 1].into(), port: 28100, device };
    let mut samples = vec![
        Ack { largest: 7, delay_ns: 1000, before: [0b101, 0, 0, 1 << 63] }.encode().to_vec(),
        advert.encode().to_vec(),
        info.encode().to_vec(),
        info.encode_c().to_vec(),
        by_index.to_string().into_bytes(),
        by_bdf.to_string().into_bytes(),
    ];
    samples.extend(
        [Means::Handle([3; 64]), Means::Descriptors(vec![1, 2])].map(|means| {
            GpuOffer { id: 1, gpu: [5; 16], base: 0x7000_0000, len: 3, means }.encode()
        }),
    );
    samples.extend(encode_descs(&[XferDesc::of_advert(&advert), ipc_desc]));
    samples.extend(sample_fabric());
    samples.extend(Named { name: b"name", message: b"message" }.encode());
    samples.push(sample_verbs_address().encode());
    samples.extend(by_index.encode());
    samples.extend(by_bdf.encode());
    samples.extend(sample_hello().encode());
    samples.extend(sample_frames());
    samples.extend(sample_messages());
    samples.extend(sample_notes());
    samples.push(Sealer::new(RECORD_KEY).sealed(b"some content"));
    for transcript in transcripts() {
        for messages in [&transcript.to_acceptor, &transcript.to_connector] {
            samples.extend(messages.iter().cloned());
        }
    }
    let mut refuser = Handshake::acceptor(None, [9; 32]);
    refuser.refuse(Refusal::new(RefuseCode::Busy, "too many connections"));
    samples.push(refuser.pending_output());
    samples
}

fn sample_verbs_address() -> VerbsAddress {
    let pair = QueuePair { number: 17, first_packet: 0xabcdef };
    VerbsAddress {
        link_layer: LinkLayer::Ethernet,
        mtu: 5,
        lid: 0,
        gid: [0xfe; 16],
        reads_answered: 16,
        receives: 64,
        reliable: vec![pair; 4],
        unreliable: vec![pair],
    }
}

/// One frame of each shape: header, descriptors, payload, trailer.
fn sample_frames() -> Vec<Vec<u8>> {
    let mut write =
        Header { descs: 1, len: 3, ..Header::bare(Kind::Write, 7, 0) }.encode().to_vec();
    Desc { addr: 0x1000, len: 3, key: 9, slot: 2 }.encode_to(&mut write);
    write.extend_from_slice(b"abc");
    write.extend_from_slice(&Trailer { crc: 1, status: Status::Ok }.encode());
    let signal = Some(Change::Add(1));
    let mut signalled =
        Header { descs: 1, len: 3, signal, ..Header::bare(Kind::Write, 7, 0) }.encode().to_vec();
    Desc { addr: 0x1000, len: 3, key: 9, slot: 2 }.encode_to(&mut signalled);
    Desc { addr: 0x1008, len: SIGNAL_LEN, key: 9, slot: 2 }.encode_to(&mut signalled);
    signalled.extend_from_slice(b"abc");
    signalled.extend_from_slice(&Trailer { crc: 1, status: Status::Ok }.encode());
    let mut read = Header { descs: 1, ..Header::bare(Kind::Read, 8, 3) }.encode().to_vec();
    Desc { addr: 0x1000, len: 3, key: 9, slot: 2 }.encode_to(&mut read);
    let fence = Header { checked: true, ..Header::bare(Kind::Fence, 9, 0) };
    let ack = Header::bare(Kind::Ack, 7, 0).encode().to_vec();
    vec![write, signalled, read, ack, checked::seal(&fence).to_vec()]
}

fn sample_messages() -> Vec<Vec<u8>> {
    let source = Source { addr: 0x1000, len: 3, key: 9, slot: 2 };
    let mut samples = vec![Vec::new(); 14];
    message::eager_head(1, [3].into_iter(), &mut samples[0]);
    samples[0].extend_from_slice(b"abc");
    message::rts(2, [source].into_iter(), &mut samples[1]);
    message::fin(3, Verdict::Truncated { capacity: 5 }, &mut samples[2]);
    message::send_cancel(4, &mut samples[3]);
    message::notif_head(5, &mut samples[4]);
    message::notif_rts(6, source, &mut samples[5]);
    message::notif_ack(7, true, &mut samples[6]);
    message::lane_down(8, &mut samples[7]);
    let place = Place { addr: 0x1000, key: 9, slot: 2 };
    let piece = AskPiece { owner: place, asker: Place { slot: 3, ..place }, len: 3 };
    message::ask(9, Direction::ToOwner, [piece].into_iter(), &mut samples[8]);
    message::answer(10, Answer::Refused(Status::Denied), &mut samples[9]);
    message::ask_cancel(11, &mut samples[10]);
    message::link_head(1, &mut samples[11]);
    samples[11].extend_from_slice(b"note");
    message::signal(1, place, Change::Add(1), &mut samples[12]);
    message::signal_ack(1, Status::Denied, &mut samples[13]);
    samples
}

fn sample_notes() -> Vec<Vec<u8>> {
    let (id, region) = (PathId { path: 1, attempt: 2 }, RegionId { slot: 3, key: 4 });
    let text = str::to_owned;
    let rail =
        RailOffer { name: text("mlx5_0:1"), link: text("verbs"), network: text("10.0.0.0/24") };
    let paths = vec![PathKey { id, base: 0x1000, key: vec![5; 4] }];
    let grant = Grant { addr: 0x1000, len: 9, read: true, write: false, staged: false, paths };
    let notes = [
        Note::Offer(vec![rail]),
        Note::Open { id, rail: 0, address: vec![6; 8] },
        Note::Opened { id, address: vec![7; 8] },
        Note::Refused { id, why: text("no room") },
        Note::Down(id),
        Note::Grant(region, grant),
        Note::Deny(region, Status::UnknownKey),
        Note::Revoke(region),
        Note::Stage {
            chunk: 1,
            write: true,
            pieces: vec![StagedPiece { region, addr: 8, len: 9 }],
        },
        Note::Staged { chunk: 1, status: Status::Ok },
    ];
    let bytes = |note: &Note| {
        let mut bytes = Vec::new();
        note.encode_to(&mut bytes);
        bytes
    };
    notes.iter().map(bytes).collect()
}

fn rail_note(bytes: &[u8]) -> bool {
    let Ok(note) = Note::decode(bytes) else { return false };
    let mut again = Vec::new();
    note.encode_to(&mut again);
    assert_eq!(again, bytes, "it is written as it was read");
    true
}

/// Both kinds of key, and an address that carries one.
fn sample_fabric() -> Vec<Vec<u8>> {
    let keys = [FabricKey::Plain(9), FabricKey::Raw { base: 0x1000, bytes: &[7; 20] }];
    let mut samples: Vec<_> = keys.iter().map(fabric_key_bytes).collect();
    let address = FabricAddress {
        provider: "tcp;ofi_rxm",
        format: 2,
        name: &[2, 0, 0x6d, 0xc4, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        probe_addr: 8,
        probe_key: &samples[0],
    };
    samples.extend(address.encode());
    samples
}

fn fabric_key_bytes(key: &FabricKey<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    let written = key.encode_to(&mut out);
    assert_eq!(written, Ok(()), "a key of that length can be sent");
    out
}

fn fabric_address(bytes: &[u8]) -> bool {
    let Ok(address) = FabricAddress::decode(bytes) else { return false };
    assert_eq!(address.encode().as_deref(), Ok(bytes), "it is written as it was read");
    true
}

fn fabric_key(bytes: &[u8]) -> bool {
    let Ok(key) = FabricKey::decode(bytes) else { return false };
    assert_eq!(fabric_key_bytes(&key), bytes, "it is written as it was read");
    true
}

/// The header of a lane that may have checksums.
fn checked_header(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk::<HEADER_LEN>() else { return false };
    let Ok(header) = checked::unseal(bytes) else { return false };
    assert_eq!(checked::unseal(&checked::seal(&header)), Ok(header), "it is sealed as it was");
    true
}

fn gpu_offer(bytes: &[u8]) -> bool {
    let Ok(offer) = GpuOffer::decode(bytes) else { return false };
    assert!(GpuOffer::decode(&offer.encode()) == Ok(offer), "it is written as it was read");
    true
}

/// A header, then its descriptors and its trailer where the bytes reach that far.
fn frame(bytes: &[u8]) -> bool {
    let Some((head, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else { return false };
    let Ok(header) = Header::decode(head) else { return false };
    assert_eq!(Header::decode(&header.encode()), Ok(header), "it is written as it was read");
    let mut descs = Vec::new();
    if let Some((bytes, rest)) = rest.split_at_checked(header.descs_len())
        && matches!(header.kind, Kind::Read | Kind::Write)
    {
        let word = frame::decode_descs(&header, bytes, &mut descs);
        let sums = word.is_ok();
        let is_word = |word: Desc| header.signal.is_some() && word.len == SIGNAL_LEN;
        assert!(word.ok().flatten().is_none_or(is_word), "a signal, and nothing else, has a word");
        let named: u64 = descs.iter().map(|desc| desc.len).sum();
        let wanted = if header.kind == Kind::Read { header.aux } else { header.len };
        assert!(!sums || named == wanted, "the descriptors name what the header says");
        let trailer = rest.get(header.len as usize..).and_then(<[u8]>::first_chunk);
        let sound = trailer.is_none_or(|bytes| Trailer::decode(bytes).is_ok());
        return sums && sound;
    }
    true
}

fn message(bytes: &[u8]) -> bool {
    match Message::decode(bytes) {
        Ok(Message::Eager { lens, data, .. }) => {
            assert!(lens.iter().len() <= message::MAX_IOVS, "as many lengths as there may be");
            let sum: u64 = lens.iter().map(u64::from).sum();
            assert_eq!(sum, data.len() as u64, "the lengths are the data's");
            true
        }
        Ok(Message::Ask { id, direction, pieces }) => {
            let mut again = bytes[..message::PREFIX_LEN].to_vec();
            let mut written = Vec::new();
            message::ask(id, direction, pieces.iter(), &mut written);
            again.extend_from_slice(&written[message::PREFIX_LEN..]);
            assert_eq!(again, bytes, "it is written as it was read");
            assert!(pieces.iter().len() <= message::MAX_ASK_PIECES, "as many as there may be");
            true
        }
        Ok(Message::Rts { sources, .. }) => {
            assert!(sources.iter().len() <= message::MAX_IOVS, "as many as there may be");
            true
        }
        Ok(_) => true,
        Err(_) => false,
    }
}

fn verbs_address(bytes: &[u8]) -> bool {
    let Ok(address) = VerbsAddress::decode(bytes) else { return false };
    assert_eq!(address.encode(), bytes, "it is written as it was read");
    true
}

fn ack(bytes: &[u8]) -> bool {
    let Ok(ack) = Ack::decode(bytes) else { return false };
    assert_eq!(ack.encode(), bytes, "it is written as it was read");
    assert!(ack.has(ack.reach()));
    true
}

fn advert(bytes: &[u8]) -> bool {
    let read = Advert::decode(bytes);
    if let Ok(advert) = read {
        assert_eq!(Advert::decode(&advert.encode()), Ok(advert));
        let rkeys = advert.to_rkeys();
        assert_eq!(Advert::from_rkeys(advert.addr, advert.len, &rkeys), Ok(advert));
    }
    read.is_ok()
}

fn descs(bytes: &[u8]) -> bool {
    let read = decode_descs(bytes);
    if let Ok(descs) = &read {
        assert_eq!(encode_descs(descs).as_deref(), Ok(bytes));
        for desc in descs {
            let _ = desc.advert();
        }
    }
    read.is_ok()
}

fn hello(bytes: &[u8]) -> bool {
    let read = Hello::decode(bytes);
    if let Ok(hello) = &read {
        let again = hello.encode().and_then(|bytes| Hello::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(hello));
    }
    read.is_ok()
}

fn ipc_info(bytes: &[u8]) -> bool {
    let read = IpcInfo::decode(bytes);
    if let Ok(info) = read {
        assert_eq!(IpcInfo::decode(&info.encode()), Ok(info));
        let _ = info.advert();
    }
    read.is_ok()
}

fn metadata(bytes: &[u8]) -> bool {
    let read = Metadata::decode(bytes);
    if let Ok(metadata) = &read {
        assert_eq!(metadata.encode().as_deref(), Ok(bytes));
        assert_eq!(metadata.to_string().parse().as_ref(), Ok(metadata));
    }
    read.is_ok()
}

fn metadata_text(bytes: &[u8]) -> bool {
    let Ok(read) = String::from_utf8_lossy(bytes).parse::<Metadata>() else { return false };
    assert_eq!(read.to_string().parse().as_ref(), Ok(&read));
    true
}

/// A payload without a header is all message; then the test makes no other claim.
fn named(bytes: &[u8]) -> bool {
    let read = Named::decode(bytes);
    let has_header = read.name.len() + read.message.len() < bytes.len();
    assert!(has_header || read == Named { name: &[], message: bytes });
    if has_header {
        assert_eq!(read.encode().as_deref(), Some(bytes));
    }
    has_header
}

/// The key of the records under test.
const RECORD_KEY: &[u8; 32] = &[7; 32];

/// Sealing the content of a valid record gives that record.
fn a_record(bytes: &[u8]) -> bool {
    let (mut sealer, mut opener) = (Sealer::new(RECORD_KEY), Opener::new(RECORD_KEY));
    let Ok(content) = opener.open(bytes) else { return false };
    assert_eq!(sealer.sealed(content), bytes);
    true
}

/// Both ends, with and without a key, at every point of the handshake.
fn handshake(bytes: &[u8]) -> bool {
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
struct Transcript {
    psk: Option<Psk>,
    to_acceptor: Vec<Vec<u8>>,
    to_connector: Vec<Vec<u8>>,
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

fn transcripts() -> &'static [Transcript; 2] {
    static TRANSCRIPTS: OnceLock<[Transcript; 2]> = OnceLock::new();
    TRANSCRIPTS.get_or_init(|| [None, Psk::new(b"secret").ok()].map(Transcript::record))
}

fn sample_advert() -> Advert {
    Advert {
        addr: 0x7f00_0000_1000,
        len: 1 << 20,
        key: 0x0123_4567_89ab_cdef,
        slot: 5,
        instance: 6,
    }
}

fn sample_hello() -> Hello {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples that no parser takes would make every mutation of them shallow.
    #[test]
    fn every_parser_takes_a_sample() {
        let samples = samples();
        for parser in PARSERS {
            let taken = samples.iter().filter(|bytes| (parser.takes)(bytes)).count();
            assert!(taken > 0, "{} takes no sample", parser.name);
        }
    }
}
