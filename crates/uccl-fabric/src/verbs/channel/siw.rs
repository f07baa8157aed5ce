//! A fault of siw's, and how requests keep clear of it.
//!
//! Up to 32 bytes go in one packet with their header. Where they lie in two pages, siw copies too few bytes of the first
//! one and then, from the wrong place, too many: it takes the length of the second page's part for that of the first
//! (`siw_try_1seg` in Linux's `drivers/infiniband/sw/siw/siw_qp_tx.c`, since siw is in Linux and at least until 6.18). A peer
//! that reads gets bytes that were never there, and so may one that is written to.

use crate::{lane::OpKind, mem::Span, rma::rail::Request};

/// The longest that it copies so.
const MOST: usize = 32;
/// The smallest page; larger ones begin where some of these do.
const PAGE: u64 = 4096;

/// The two parts of a request, each in one page, if siw would send it wrongly.
pub(super) fn apart(request: &Request) -> Option<[Request; 2]> {
    let Span { addr, len } = request.local;
    let source = match request.kind {
        OpKind::Read => request.remote_addr,
        OpKind::Write => addr as u64,
    };
    let first = (PAGE - source % PAGE) as usize;
    let (head, tail) =
        (Span { addr, len: first }, Span { addr: addr + first, len: len.checked_sub(first)? });
    (len <= MOST && tail.len > 0).then(|| {
        let remote_addr = request.remote_addr + first as u64;
        [Request { local: head, ..*request }, Request { local: tail, remote_addr, ..*request }]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: OpKind, addr: usize, len: usize, remote_addr: u64) -> Request {
        Request { kind, local: Span { addr, len }, remote_addr, ..Request::of_nothing(7) }
    }

    #[test]
    fn short_pieces_in_two_pages_are_taken_apart_where_their_source_is() {
        let page = PAGE as usize;
        let write = request(OpKind::Write, 3 * page - 5, 13, 100);
        let parts = [
            request(OpKind::Write, 3 * page - 5, 5, 100),
            request(OpKind::Write, 3 * page, 8, 105),
        ];
        assert_eq!(apart(&write), Some(parts));
        let read = request(OpKind::Read, 100, MOST, PAGE - 1);
        let parts =
            [request(OpKind::Read, 100, 1, PAGE - 1), request(OpKind::Read, 101, MOST - 1, PAGE)];
        assert_eq!(apart(&read), Some(parts));
    }

    #[test]
    fn others_stay_whole() {
        let page = PAGE as usize;
        for (addr, len) in
            [(page - 5, 5), (page, MOST), (page - 5, MOST + 1), (page - 1, 0), (0, 0)]
        {
            assert_eq!(apart(&request(OpKind::Write, addr, len, PAGE - 1)), None, "{addr} {len}");
        }
        assert_eq!(apart(&request(OpKind::Read, page - 1, 2, PAGE)), None, "it goes to two pages");
    }
}
