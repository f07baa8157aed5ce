//! Frames of writes and of replies, cut to a length.

use uccl_fabric::{
    mem::{RemoteSpan, Span},
    pieces::Pieces as _,
    pipe::PipeTx,
};
use uccl_wire::checked::{Crc, seal};
use uccl_wire::frame::{Desc, Header, Kind, MAX_DESCS, Status};

use super::Tx;
use crate::{
    queue::{Frame, Turn},
    remote_of,
};

impl<P: PipeTx> Tx<P> {
    /// Cuts a frame of at most `most` bytes from the first of our operations: writes its start, and
    /// lists the memory of its data.
    pub(super) fn cut_write(&mut self, most: u64) -> Option<Frame> {
        let own = self.own.front_mut()?;
        self.head.clear();
        self.pieces.clear();
        self.pieces.extend(own.theirs.take_parts(&own.remote[..], most as usize).take(MAX_DESCS));
        let len = self.pieces.as_slice().len_bytes();
        self.payload.clear();
        let ours = own.ours.take_parts(&own.local[..], len as usize);
        self.payload.extend(ours.filter(|span| span.len > 0));
        own.left -= len;
        let last = own.left == 0;
        // Only the last frame carries the signal: the owner has all bytes when that has come.
        let word = own.word.filter(|_| last);
        let header = Header {
            last,
            checked: self.checked,
            descs: self.pieces.len() as u16,
            len,
            signal: word.map(|word| word.change),
            ..Header::bare(Kind::Write, own.name.0, 0)
        };
        let turn = Turn::Own { name: own.name, last };
        let pieces = self.pieces.iter().copied().chain(word.map(|word| word.span));
        let crc = push_head(&mut self.head, &header, pieces);
        if last {
            self.own.pop_front();
        }
        Some(Frame { len: len as usize, crc, turn })
    }

    /// Cuts a frame of at most `most` bytes from the first of the peer's reads: writes its start,
    /// and lists the memory of its data.
    pub(super) fn cut_reply(&mut self, most: u64) -> Option<Frame> {
        let reply = self.replies.front_mut()?;
        let len = reply.left.min(most) as usize;
        self.pieces.clear();
        let pieces = reply.rest.take_parts(&reply.pieces[..], len);
        self.pieces.extend(pieces.filter(|piece| piece.len > 0).map(|piece| remote_of(&piece)));
        reply.left -= len as u64;
        let last = reply.left == 0;
        let header = Header {
            last,
            checked: self.checked,
            len: len as u64,
            ..Header::bare(Kind::Data, reply.op, 0)
        };
        self.head.clear();
        let crc = push_head(&mut self.head, &header, []);
        self.payload.clear();
        self.payload.extend(
            self.pieces.iter().map(|p| Span { addr: p.addr as usize, len: p.len as usize }),
        );
        if last {
            self.replies.pop_front();
        }
        Some(Frame { len, crc, turn: Turn::Reply })
    }
}

/// Appends a header and its descriptors: those of the data, and that of the signal's word. The
/// caller must add all bytes after them to the returned checksum.
pub(super) fn push_head(
    out: &mut Vec<u8>,
    header: &Header,
    pieces: impl IntoIterator<Item = RemoteSpan>,
) -> Option<Crc> {
    let start = out.len();
    out.extend_from_slice(&seal(header));
    pieces.into_iter().for_each(|piece| desc_of(&piece).encode_to(out));
    let mut crc = header.checked.then(Crc::new)?;
    crc.add(&out[start..]);
    if header.descs_len() > 0 {
        out.extend_from_slice(&Crc::trailer(Some(&crc), Status::Ok).encode());
    }
    Some(crc)
}

fn desc_of(piece: &RemoteSpan) -> Desc {
    Desc { addr: piece.addr, len: piece.len, key: piece.key, slot: piece.slot }
}
