//! A queue pair.

use std::{
    mem::MaybeUninit,
    ptr::{self, NonNull},
    sync::Arc,
};

use uccl_fabric::rail::RailError;
use uccl_wire::verbs::{LinkLayer, QueuePair, VerbsAddress};

use super::{
    context::complain,
    cq::Cq,
    ffi::{
        abi::{
            self, PostRecv, PostSend, QpAttr, RecvWr, SendWr, access, qp_mask, qp_state, qp_type,
        },
        check, errno,
    },
    pd::Pd,
};

/// Sizes of inline data to ask for, in bytes. The first that the device takes is used.
const INLINE_BYTES: [u32; 5] = [220, 128, 64, 32, 0];

/// A queue pair. Only one thread at a time posts to it.
pub(super) struct Qp {
    raw: NonNull<abi::Qp>,
    post_send: PostSend,
    post_recv: PostRecv,
    service: Service,
    first_packet: u32,
    max_inline: u32,
    pd: Arc<Pd>,
    _cq: Arc<Cq>,
}

// SAFETY: verbs may be called from any thread; the library does its own locking.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

/// The service of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Service {
    /// RC: the device retransmits.
    Reliable,
    /// UC: lost packets are not sent again, and neither end learns of it.
    Unreliable,
}

/// How many requests a queue pair has room for.
#[derive(Clone, Copy)]
pub(super) struct QueueCapacity {
    pub(super) sends: u32,
    pub(super) receives: u32,
}

/// The parameters that join a queue pair to its port and to the network.
#[derive(Clone, Copy)]
pub(super) struct Path {
    pub(super) port: u8,
    pub(super) pkey_index: u16,
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    pub(super) link_layer: LinkLayer,
    pub(super) lid: u16,
    /// Whether the port sends nothing without the global header: that of a virtual function on
    /// InfiniBand.
    pub(super) needs_global: bool,
    /// The longest packet, as verbs number it: from 1 for 256 bytes to 5 for 4096.
    pub(super) mtu: u8,
    pub(super) service_level: u8,
    pub(super) traffic_class: u8,
    /// RDMA reads that a queue pair may have under way.
    pub(super) reads_asked: u8,
    /// RDMA reads that a queue pair answers at a time.
    pub(super) reads_answered: u8,
    /// How long to wait for an acknowledgement: 4.096 us times 2 to the power of this.
    pub(super) timeout: u8,
    pub(super) retries: u8,
}

/// Most routers on the way to the peer.
const HOP_LIMIT: u8 = 64;
/// The value of `rnr_retry` that means forever. It does not matter: nothing that we post to an RC
/// queue pair needs a receive at the peer.
const RNR_RETRY_FOR_EVER: u8 = 7;
/// The value of `min_rnr_timer` for 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;

impl Qp {
    /// Makes a queue pair, with as much inline data as the device takes.
    pub(super) fn new(
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        service: Service,
        room: QueueCapacity,
    ) -> Result<Self, RailError> {
        let mut refused = libc::EINVAL;
        for max_inline in INLINE_BYTES {
            match Self::with_inline(pd, cq, (service, room), max_inline) {
                Ok(qp) => return Ok(qp),
                Err(errno) => refused = errno,
            }
        }
        Err(match refused {
            libc::ENOMEM => RailError::os(
                "making a queue pair (ibv_create_qp; is the limit for locked memory too low? see \
                 ulimit -l)",
                refused,
            ),
            _ => pd.context().error("ibv_create_qp", refused),
        })
    }

    fn with_inline(
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        (service, room): (Service, QueueCapacity),
        max_inline: u32,
    ) -> Result<Self, i32> {
        let cap = abi::QpCap {
            max_send_wr: room.sends,
            max_recv_wr: room.receives,
            max_send_sge: 1,
            max_recv_sge: room.receives.min(1),
            max_inline_data: max_inline,
        };
        let mut attr = abi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            srq: ptr::null_mut(),
            cap,
            qp_type: match service {
                Service::Reliable => qp_type::RC,
                Service::Unreliable => qp_type::UC,
            },
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue live, and the struct has the library's layout.
        let raw = unsafe { (pd.verbs().create_qp)(pd.raw(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(errno)?;
        // SAFETY: the context lives, and was filled in by the device's driver when it was opened.
        let ops = unsafe { &(*pd.context().raw()).ops };
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: just made, and used by nothing.
            complain("ibv_destroy_qp", unsafe { (pd.verbs().destroy_qp)(raw.as_ptr()) });
            return Err(libc::EOPNOTSUPP);
        };
        Ok(Self {
            raw,
            post_send,
            post_recv,
            service,
            first_packet: fastrand::u32(..1 << 24),
            max_inline: attr.cap.max_inline_data,
            pd: Arc::clone(pd),
            _cq: Arc::clone(cq),
        })
    }

    /// The number and the first packet number, which the peer needs to join it.
    pub(super) fn name(&self) -> QueuePair {
        // SAFETY: the queue pair lives, and its number does not change.
        let number = unsafe { (*self.raw.as_ptr()).qp_num };
        QueuePair { number, first_packet: self.first_packet }
    }

    /// The longest write, in bytes, that can be copied into the request itself.
    pub(super) fn max_inline(&self) -> usize {
        self.max_inline as usize
    }

    /// Takes it to INIT, the first of three states: binds it to its port.
    pub(super) fn to_init(&self, path: &Path) -> Result<(), RailError> {
        let mut attr = empty_attr(qp_state::INIT);
        attr.pkey_index = path.pkey_index;
        attr.port_num = path.port;
        attr.qp_access_flags = match self.service {
            Service::Reliable => access::REMOTE_WRITE | access::REMOTE_READ,
            Service::Unreliable => access::REMOTE_WRITE,
        };
        let mask = qp_mask::STATE | qp_mask::PKEY_INDEX | qp_mask::PORT | qp_mask::ACCESS_FLAGS;
        self.modify(&mut attr, mask, "to INIT")
    }

    /// Joins it with the peer's queue pair, in two steps: it first takes the peer's packets (RTR),
    /// then also sends (RTS).
    pub(super) fn join(
        &self,
        path: &Path,
        peer: &VerbsAddress,
        qp: QueuePair,
    ) -> Result<(), RailError> {
        self.to_rtr(path, peer, qp)?;
        let mut attr = empty_attr(qp_state::RTS);
        attr.sq_psn = self.first_packet;
        if self.service == Service::Unreliable {
            return self.modify(&mut attr, qp_mask::STATE | qp_mask::SQ_PSN, "to RTS");
        }
        attr.timeout = path.timeout;
        attr.retry_cnt = path.retries;
        attr.rnr_retry = RNR_RETRY_FOR_EVER;
        attr.max_rd_atomic = path.reads_asked.min(peer.reads_answered);
        let mask = qp_mask::STATE
            | qp_mask::TIMEOUT
            | qp_mask::RETRY_CNT
            | qp_mask::RNR_RETRY
            | qp_mask::SQ_PSN
            | qp_mask::MAX_RD_ATOMIC;
        self.modify(&mut attr, mask, "to RTS")
    }

    /// Takes it to ERR, so that it sends nothing more.
    pub(super) fn stop(&self) -> Result<(), RailError> {
        self.modify(&mut empty_attr(qp_state::ERR), qp_mask::STATE, "to ERR")
    }

    fn to_rtr(&self, path: &Path, peer: &VerbsAddress, qp: QueuePair) -> Result<(), RailError> {
        let mut attr = empty_attr(qp_state::RTR);
        attr.path_mtu = path.mtu.min(peer.mtu).into();
        attr.dest_qp_num = qp.number;
        attr.rq_psn = qp.first_packet;
        attr.max_dest_rd_atomic = path.reads_answered;
        attr.min_rnr_timer = MIN_RNR_TIMER;
        attr.ah_attr = route(path, peer);
        let mut mask =
            qp_mask::STATE | qp_mask::AV | qp_mask::PATH_MTU | qp_mask::DEST_QPN | qp_mask::RQ_PSN;
        if self.service == Service::Reliable {
            mask |= qp_mask::MAX_DEST_RD_ATOMIC | qp_mask::MIN_RNR_TIMER;
        }
        self.modify(&mut attr, mask, "to RTR")
    }

    fn modify(&self, attr: &mut QpAttr, mask: i32, step: &str) -> Result<(), RailError> {
        // SAFETY: the queue pair lives, and the struct has the library's layout.
        let returned = unsafe { (self.pd.verbs().modify_qp)(self.raw.as_ptr(), attr, mask) };
        check(returned)
            .map_err(|errno| self.pd.context().error(&format!("ibv_modify_qp {step}"), errno))
    }

    /// Posts a chain of requests with one doorbell.
    ///
    /// # Safety
    /// `first` must point to a chain of valid requests that ends with a null pointer. Their memory
    /// must stay valid and registered until they have ended or this is dropped.
    #[inline]
    pub(super) unsafe fn post(&self, first: *mut SendWr) -> Result<(), RailError> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; the requests are the caller's promise.
        let returned = unsafe { (self.post_send)(self.raw.as_ptr(), first, &raw mut bad) };
        check(returned).map_err(|errno| self.pd.context().error("ibv_post_send", errno))
    }

    /// Posts a chain of receives.
    ///
    /// # Safety
    /// `first` must point to a chain of valid requests that ends with a null pointer. Their memory
    /// must be used for nothing else until they have ended or this is dropped.
    pub(super) unsafe fn receive(&self, first: *mut RecvWr) -> Result<(), RailError> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; the requests are the caller's promise.
        let returned = unsafe { (self.post_recv)(self.raw.as_ptr(), first, &raw mut bad) };
        check(returned).map_err(|errno| self.pd.context().error("ibv_post_recv", errno))
    }
}

fn empty_attr(state: u32) -> QpAttr {
    // SAFETY: all its fields are numbers, for which zero is a value.
    let mut attr: QpAttr = unsafe { MaybeUninit::zeroed().assume_init() };
    attr.qp_state = state;
    attr
}

/// The route of packets to the peer. InfiniBand needs the global header only to leave the subnet,
/// or where the port requires it.
fn route(path: &Path, peer: &VerbsAddress) -> abi::AhAttr {
    let global = match path.link_layer {
        LinkLayer::Ethernet => true,
        LinkLayer::InfiniBand => {
            path.needs_global || peer.lid == 0 || path.gid[..8] != peer.gid[..8]
        }
    };
    let mut route = empty_attr(0).ah_attr;
    route.port_num = path.port;
    route.sl = path.service_level;
    route.dlid = peer.lid;
    if global {
        route.is_global = 1;
        route.grh.dgid.raw = peer.gid;
        route.grh.sgid_index = path.gid_index;
        route.grh.hop_limit = HOP_LIMIT;
        route.grh.traffic_class = path.traffic_class;
    }
    route
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: destroyed once; its completions may still lie in the completion queue, which
        // `_cq` holds.
        let returned = unsafe { (self.pd.verbs().destroy_qp)(self.raw.as_ptr()) };
        complain("ibv_destroy_qp", returned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_have_the_global_header_where_it_is_needed() {
        let gid = |last: u8| {
            let mut gid = [0; 16];
            (gid[0], gid[15]) = (0xfe, last);
            gid
        };
        let path = |link_layer, needs_global| Path {
            port: 2,
            pkey_index: 0,
            gid_index: 3,
            gid: gid(1),
            link_layer,
            lid: 7,
            needs_global,
            mtu: 5,
            service_level: 4,
            traffic_class: 104,
            reads_asked: 16,
            reads_answered: 16,
            timeout: 14,
            retries: 7,
        };
        let peer = |link_layer, lid, gid| VerbsAddress {
            link_layer,
            mtu: 5,
            lid,
            gid,
            reads_answered: 16,
            receives: 0,
            reliable: Vec::new(),
            unreliable: Vec::new(),
        };
        let near = |needs_global, lid| {
            let layer = LinkLayer::InfiniBand;
            route(&path(layer, needs_global), &peer(layer, lid, gid(2)))
        };
        assert_eq!(
            [near(false, 9), near(true, 9), near(false, 0)].map(|to| to.is_global),
            [0, 1, 1]
        );
        let mut far = gid(2);
        far[7] = 1;
        let far = peer(LinkLayer::InfiniBand, 9, far);
        assert_eq!(route(&path(LinkLayer::InfiniBand, false), &far).is_global, 1, "another subnet");
        let needed = near(true, 9);
        assert_eq!((needed.grh.sgid_index, needed.dlid, needed.sl, needed.port_num), (3, 9, 4, 2));
        assert_eq!((needed.grh.dgid.raw, needed.grh.traffic_class), (gid(2), 104));
        let ethernet = LinkLayer::Ethernet;
        assert_eq!(route(&path(ethernet, false), &peer(ethernet, 0, gid(2))).is_global, 1);
    }
}
