//! Every parser of uccl-wire in one place, for tests that throw bytes at them.
//!
//! A parser that is added to that crate is added here.

mod datagrams;
mod flows;
mod handshakes;
mod samples;

use uccl_wire::{
    ack::Ack,
    advert::Advert,
    checked,
    descs::{decode_descs, encode_descs},
    frame::{self, Desc, HEADER_LEN, Header, Kind, Trailer},
    gpu_offer::GpuOffer,
    handshake::Hello,
    ipc_info::IpcInfo,
    libfabric::{FabricAddress, FabricKey},
    message::{self, Message},
    metadata::Metadata,
    named::NamedMessage,
    rails::Note,
    record::{Opener, Sealer},
    signal::SIGNAL_LEN,
    verbs::VerbsAddress,
};

use self::datagrams::{datagram, udp_address};
use self::flows::{flow_handle, flow_head, flow_hello, flow_welcome};
use self::handshakes::handshake;
pub use self::samples::samples;

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
    Parser { name: "datagram", takes: datagram },
    Parser { name: "descs", takes: descs },
    Parser { name: "fabric address", takes: fabric_address },
    Parser { name: "fabric key", takes: fabric_key },
    Parser { name: "flow handle", takes: flow_handle },
    Parser { name: "flow head", takes: flow_head },
    Parser { name: "flow hello", takes: flow_hello },
    Parser { name: "flow welcome", takes: flow_welcome },
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
    Parser { name: "udp address", takes: udp_address },
    Parser { name: "verbs address", takes: verbs_address },
];

/// Throws bytes at every parser; how many took them for valid.
pub fn all_parsers(bytes: &[u8]) -> usize {
    PARSERS.iter().filter(|parser| (parser.takes)(bytes)).count()
}

fn rail_note(bytes: &[u8]) -> bool {
    let Ok(note) = Note::decode(bytes) else { return false };
    let mut again = Vec::new();
    note.encode_to(&mut again);
    assert_eq!(again, bytes, "it is written as it was read");
    true
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
        Ok(Message::LookUp { id, ranges }) => {
            let mut again = bytes[..message::PREFIX_LEN].to_vec();
            let mut written = Vec::new();
            message::look_up(id, ranges.iter(), &mut written);
            again.extend_from_slice(&written[message::PREFIX_LEN..]);
            assert_eq!(again, bytes, "it is written as it was read");
            assert!(ranges.iter().len() <= message::MAX_RANGES, "as many as there may be");
            true
        }
        Ok(Message::LookUpAnswer { id, status, regions }) => {
            let mut again = bytes[..message::PREFIX_LEN].to_vec();
            let mut written = Vec::new();
            message::look_up_answer(id, status, regions.iter(), &mut written);
            again.extend_from_slice(&written[message::PREFIX_LEN..]);
            assert_eq!(again, bytes, "it is written as it was read");
            assert!(regions.iter().len() <= message::MAX_FOUND, "as many as there may be");
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
    let read = NamedMessage::decode(bytes);
    let has_header = read.name.len() + read.message.len() < bytes.len();
    assert!(has_header || read == NamedMessage { name: &[], message: bytes });
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
