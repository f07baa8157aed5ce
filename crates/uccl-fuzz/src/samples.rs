//! Valid bytes of every layout.

use uccl_wire::{
    ack::Ack,
    advert::Advert,
    checked,
    descs::{XferDesc, encode_descs},
    frame::{Desc, Header, Kind, Status, Trailer},
    gpu_offer::{GpuOffer, Means},
    handshake::{Handshake, Refusal, RefuseCode},
    ipc_info::IpcInfo,
    libfabric::{FabricAddress, FabricKey},
    message::{self, Answer, AskPiece, Direction, Place, Range, Source, Verdict},
    metadata::{Device, Metadata},
    named::NamedMessage,
    rails::{Grant, Note, PathId, PathKey, RailOffer, RegionId, StagedPiece},
    record::Sealer,
    signal::{Change, SIGNAL_LEN},
    verbs::{LinkLayer, QueuePair, VerbsAddress},
};

use super::{
    RECORD_KEY,
    datagrams::datagram_samples,
    fabric_key_bytes,
    flows::flow_samples,
    handshakes::{sample_hello, transcripts},
};

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
    samples.extend(datagram_samples());
    samples.extend(flow_samples());
    samples.extend(NamedMessage { name: b"name", message: b"message" }.encode());
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
    let mut samples = vec![Vec::new(); 16];
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
    let range = Range { addr: 0x1000, len: 3 };
    message::look_up(1, [range].into_iter(), &mut samples[14]);
    message::look_up_answer(1, Status::Ok, [source].into_iter(), &mut samples[15]);
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

fn sample_advert() -> Advert {
    Advert {
        addr: 0x7f00_0000_1000,
        len: 1 << 20,
        key: 0x0123_4567_89ab_cdef,
        slot: 5,
        instance: 6,
    }
}
