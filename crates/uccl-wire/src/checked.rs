//! Checksums of a lane's frames: CRC-32C over header, descriptors and payload, in the trailer.
//!
//! A byte that is wrong must do no harm before it is noticed, so the checksum at the end of a frame
//! is not enough. The magic of a checked header is mixed with the header's own checksum: one that
//! is damaged is no header. Descriptors of a checked frame are followed by a trailer of their own,
//! with the checksum up to there: nothing is read or written where a damaged descriptor points.

use crate::frame::{FrameError, HEADER_LEN, Header, Status, Trailer};
use crc_fast::{CrcAlgorithm, Digest};

/// Where a header's magic is.
const MAGIC: std::ops::Range<usize> = 4..8;

/// The bytes of a header, sealed if its frame is checked.
pub fn seal(header: &Header) -> [u8; HEADER_LEN] {
    let bytes = header.encode();
    if header.checked { mix(bytes) } else { bytes }
}

/// The header of these bytes, if they are one and undamaged.
pub fn unseal(bytes: &[u8; HEADER_LEN]) -> Result<Header, FrameError> {
    let plain = Header::decode(bytes);
    if plain.is_ok_and(|header| !header.checked) {
        return plain;
    }
    match Header::decode(&mix(*bytes)) {
        Ok(header) if header.checked => Ok(header),
        _ => Err(plain.err().unwrap_or(FrameError::Magic(0))),
    }
}

/// Mixes the magic with the checksum of the other bytes; a second mix restores it.
fn mix(mut bytes: [u8; HEADER_LEN]) -> [u8; HEADER_LEN] {
    let mut rest = bytes;
    rest[MAGIC].fill(0);
    let crc = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, &rest) as u32;
    bytes[MAGIC].iter_mut().zip(crc.to_le_bytes()).for_each(|(byte, crc)| *byte ^= crc);
    bytes
}

/// The checksum of a frame, being computed.
#[derive(Clone)]
pub struct Crc(Digest);

impl Default for Crc {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc {
    /// The checksum of no bytes.
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The trailer to send at this point.
    pub fn trailer(this: Option<&Self>, status: Status) -> Trailer {
        let value = this.map_or(0, |crc| crc.0.finalize() as u32);
        // Filler must not pass for data if only its status is damaged.
        Trailer { crc: if status == Status::Ok { value } else { !value }, status }
    }

    /// Whether this trailer is right at this point.
    pub fn admits(this: Option<&Self>, trailer: &Trailer) -> bool {
        this.is_none() || *trailer == Self::trailer(this, trailer.status)
    }
}

#[cfg(test)]
mod tests {
    use crate::{frame::Kind, signal::Change};

    use super::*;

    /// The status in a trailer marks filler; it differs by one bit from the status of data.
    #[test]
    fn filler_with_a_damaged_status_is_no_data() {
        let mut crc = Crc::new();
        crc.add(b"some payload");
        let data = Crc::trailer(Some(&crc), Status::Ok);
        for status in [Status::UnknownKey, Status::OutOfBounds, Status::Checksum, Status::Cut] {
            let filler = Crc::trailer(Some(&crc), status);
            assert!(Crc::admits(Some(&crc), &filler));
            assert!(!Crc::admits(Some(&crc), &Trailer { status: Status::Ok, ..filler }));
            assert!(!Crc::admits(Some(&crc), &Trailer { status, ..data }));
        }
    }

    #[test]
    fn a_damaged_header_is_no_header() {
        let kinds = [Kind::Ack, Kind::Fence, Kind::Read, Kind::Write, Kind::Message];
        let bare = |kind| Header::bare(kind, 0x1234_5678_9ABC, 7);
        let signalled = Header { signal: Some(Change::Add(7)), ..bare(Kind::Write) };
        for header in kinds.map(bare).into_iter().chain([Header { aux: 0, ..signalled }]) {
            let (kind, header) = (header.kind, Header { checked: true, ..header });
            let bytes = seal(&header);
            assert_eq!(unseal(&bytes), Ok(header));
            for place in 0..HEADER_LEN {
                for change in 1..=255 {
                    let mut bytes = bytes;
                    bytes[place] ^= change;
                    assert!(unseal(&bytes).is_err(), "{kind:?}: byte {place} ^ {change}");
                }
            }
        }
    }
}
