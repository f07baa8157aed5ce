//! The parameters of the kernels: `kernels/ep.cuh` in Rust. Addresses are those that the GPU uses.

use std::mem::{align_of, offset_of, size_of};

use crate::{
    far::{command, fifo},
    shared::{
        header,
        places::{ROUND, SLOTS},
        routing::MAX_EXPERTS,
        routing::MAX_TOP_K,
    },
};

/// The most ranks of a group on GPUs: each has a bit of a word.
pub const MAX_RANKS: usize = 64;
/// The most tokens of a rank in a call on a GPU.
pub const MAX_TOKENS: usize = 65_535;

/// The most tokens and choices that each block of the send kernel reads. With more, a kernel before
/// it computes the routing.
pub(super) const FEW_TOKENS: usize = 512;
pub(super) const FEW_CHOICES: usize = 4096;
pub(super) const THREADS: u32 = 512;
/// Threads of the kernel that packs rows.
pub(super) const PACKING_THREADS: u32 = 1024;
/// Threads of the kernel that sums packed rows.
pub(super) const UNPACKING_THREADS: u32 = 896;
pub(super) const LAYOUT_THREADS: u32 = 512;
/// Parts of a call, from each rank, that have marks of their own.
pub(super) const PARTS: usize = 2048;
/// Notes from each rank in a call of a small batch.
pub(super) const NOTES: usize = 1 + 8192;
/// Tokens that a block of `layout` counts.
pub(super) const CHUNK: usize = 128;

/// `UcclEpOwn`: words that only a rank's own kernels use.
#[repr(C)]
pub(super) struct Own {
    pub(super) has_failed: u32,
    pub(super) laid_out: u32,
    pub(super) zero: [u32; 14],
    pub(super) ended: [[u32; SLOTS]; 2],
    pub(super) claimed: [u32; SLOTS],
    pub(super) calls: u64,
    pub(super) next: u64,
    pub(super) begins: [u64; SLOTS],
    pub(super) ends: [u64; SLOTS],
    pub(super) masked: u64,
    pub(super) verdicts: [[u32; MAX_RANKS]; SLOTS],
    pub(super) pushed: u64,
    pub(super) popped: u64,
    pub(super) room: u64,
    pub(super) owed: u64,
}

/// `UcclEpMask`.
#[repr(C)]
pub(super) struct Mask {
    pub(super) own: u64,
    pub(super) set: u64,
    pub(super) clear: u64,
    pub(super) status: u64,
    pub(super) ranks: u32,
    pub(super) zero: u32,
}

/// `UcclEpStatus`: words between kernels and the host.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Status {
    pub(super) poison: u32,
    pub(super) state: u32,
    pub(super) phase: u32,
    pub(super) what: u32,
    pub(super) call: u64,
    pub(super) late: u64,
    pub(super) waited_ns: u64,
    pub(super) lost: u64,
    pub(super) expected: [u64; MAX_RANKS],
    pub(super) seen: [u64; MAX_RANKS],
}

/// Values of `Status::state`.
pub(super) mod state {
    pub(in crate::cuda) const OVERDUE: u32 = 1;
    pub(in crate::cuda) const GAVE_UP: u32 = 2;
    pub(in crate::cuda) const POISONED: u32 = 3;
    pub(in crate::cuda) const DISAGREE: u32 = 4;
    pub(in crate::cuda) const WRONG_CHOICE: u32 = 5;
    pub(in crate::cuda) const NO_ROOM: u32 = 6;
    pub(in crate::cuda) const LOST: u32 = 7;
}

/// The value, in a failed call's report, for a lack of room in a rank's window.
pub(super) const ROOM: u32 = 1;
/// The value for commands that the proxy does not take. Otherwise the call lacks data.
pub(super) const PUSH: u32 = 2;

/// `UcclEpGroup`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GroupParams {
    pub(super) windows: [u64; MAX_RANKS],
    pub(super) home: u64,
    pub(super) far: u64,
    pub(super) mirrors: u64,
    pub(super) ring: u64,
    pub(super) own: u64,
    pub(super) status: u64,
    pub(super) timeout_ns: u64,
    pub(super) pool_at: u64,
    pub(super) pool: u64,
    pub(super) marks_at: u64,
    pub(super) notes_at: u64,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) masks_late: u32,
    pub(super) ring_slots: u32,
    pub(super) by_host: u32,
    pub(super) zero: u32,
}

/// `UcclEpCall`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CallParams {
    pub(super) placed: u64,
    pub(super) len: u64,
    pub(super) sent: u64,
    pub(super) header: header::Words,
    pub(super) agreed: u32,
    pub(super) phase: u32,
    pub(super) stays: u32,
    pub(super) zero: u32,
}

/// `UcclEpPlaced`: GPU memory that a call's first launch fills.
#[repr(C)]
pub(super) struct Placed {
    pub(super) number: u64,
    pub(super) place: u64,
    pub(super) after: u64,
    pub(super) masked: u64,
}

/// `UcclEpRoutes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Routes {
    pub(super) choices: u64,
    pub(super) masks: u64,
    pub(super) slots: u64,
    pub(super) places: u64,
    pub(super) experts: u64,
    pub(super) counts: u64,
    pub(super) chunks: u64,
    pub(super) tokens: u32,
    pub(super) top_k: u32,
    pub(super) local_experts: u32,
    pub(super) is_64: u32,
}

/// `UcclEpLayout`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) routes: Routes,
    pub(super) goes: u64,
    pub(super) goes_told: u64,
    pub(super) per_expert: u64,
    pub(super) ended: u64,
}

/// `UcclEpArea`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) len: u64,
    pub(super) first: u32,
    pub(super) stride: u32,
    pub(super) payload: u32,
    pub(super) scales: u32,
    pub(super) scales_at: u32,
    pub(super) choices_at: u32,
    pub(super) places_at: u32,
    pub(super) token_at: u32,
}

/// Values of `Send::how`.
pub(super) mod how {
    pub(in crate::cuda) const COPIED: u32 = 0;
    pub(in crate::cuda) const EXACT: u32 = 1;
    pub(in crate::cuda) const POWER: u32 = 2;
    pub(in crate::cuda) const EXPONENT: u32 = 3;
    pub(in crate::cuda) const NVFP4: u32 = 4;
}

/// `UcclEpSend`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Send {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) routes: Routes,
    pub(super) area: Area,
    pub(super) rows: u64,
    pub(super) row_stride: u64,
    pub(super) global_scale_at: u64,
    pub(super) global_scale: f32,
    pub(super) how: u32,
    pub(super) is_few: u32,
    pub(super) in_parts: u32,
}

/// `UcclEpReceive`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Receive {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) area: Area,
    pub(super) rows: u64,
    pub(super) row_stride: u64,
    pub(super) scales: u64,
    pub(super) scales_row: u64,
    pub(super) scales_expert: u64,
    pub(super) scales_word: u64,
    pub(super) count: u64,
    pub(super) stats: u64,
    pub(super) waits: u64,
    pub(super) src_info: u64,
    pub(super) records: u64,
    pub(super) layout_range: u64,
    pub(super) expert_rows: u32,
    pub(super) slots: u32,
    pub(super) top_k: u32,
    pub(super) local_experts: u32,
    pub(super) tile_rows: u32,
    pub(super) in_parts: u32,
}

/// `UcclEpReturn`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Return {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) rows: u64,
    pub(super) row_stride: u64,
    pub(super) records: u64,
    pub(super) slot_stride: u64,
    pub(super) row_len: u32,
    pub(super) len: u32,
    pub(super) slots: u32,
    pub(super) top_k: u32,
    pub(super) pieces: u32,
    pub(super) sums: u32,
}

/// `UcclEpSum`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Sum {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) routes: Routes,
    pub(super) weights: u64,
    pub(super) waits: u64,
    pub(super) out: u64,
    pub(super) slot_stride: u64,
    pub(super) row_len: u32,
    pub(super) slots: u32,
    pub(super) pieces: u32,
    pub(super) zero: u32,
}

/// `UcclEpDispatch`.
#[repr(C)]
pub(super) struct WholeDispatch {
    pub(super) send: Send,
    pub(super) receive: Receive,
}

/// `UcclEpCombine`.
#[repr(C)]
pub(super) struct WholeCombine {
    pub(super) give_back: Return,
    pub(super) sum: Sum,
}

/// `UcclEpNormalSend`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NormalSend {
    pub(super) send: Send,
    pub(super) scales: u64,
    pub(super) scales_token: u64,
    pub(super) scales_word: u64,
    pub(super) weights: u64,
}

/// `UcclEpCount`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Count {
    pub(super) send: Send,
    pub(super) told: u64,
    pub(super) ticket: u64,
    pub(super) slots: u32,
    pub(super) begins: u32,
}

/// `UcclEpTold`: host memory.
#[repr(C)]
pub(super) struct Told {
    pub(super) ticket: u64,
    pub(super) is_taken: u32,
    pub(super) zero: u32,
    pub(super) from: [u32; MAX_RANKS],
    pub(super) per_expert: [u32; MAX_EXPERTS],
}

/// `UcclEpNormalReceive`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NormalReceive {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) area: Area,
    pub(super) rows: u64,
    pub(super) row_stride: u64,
    pub(super) scales: u64,
    pub(super) scales_row: u64,
    pub(super) scales_word: u64,
    pub(super) choices: u64,
    pub(super) weights: u64,
    pub(super) src_info: u64,
    pub(super) origin: u64,
    pub(super) starts: u64,
    pub(super) per_expert: u64,
    pub(super) ends: u64,
    pub(super) metadata: u64,
    pub(super) len: u32,
    pub(super) tokens: u32,
    pub(super) slots: u32,
    pub(super) top_k: u32,
    pub(super) local_experts: u32,
    pub(super) is_64: u32,
    pub(super) zeroes_foreign: u32,
    pub(super) alignment: u32,
    pub(super) zeroes_gaps: u32,
    pub(super) spread: u32,
}

/// `UcclEpNormalDispatch`.
#[repr(C)]
pub(super) struct WholeNormalDispatch {
    pub(super) send: NormalSend,
    pub(super) receive: NormalReceive,
    pub(super) told: u64,
    pub(super) ticket: u64,
    pub(super) does: u32,
    pub(super) zero: u32,
}

/// Values of `WholeNormalDispatch::does`.
pub(super) mod does {
    pub(in crate::cuda) const WHOLE: u32 = 0;
    pub(in crate::cuda) const BEGUN: u32 = 1;
    pub(in crate::cuda) const TAKEN: u32 = 2;
}

/// `UcclEpNormalReturn`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NormalReturn {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) rows: u64,
    pub(super) row_stride: u64,
    pub(super) weights: u64,
    pub(super) src_info: u64,
    pub(super) origin: u64,
    pub(super) starts: u64,
    pub(super) ends: u64,
    pub(super) metadata: u64,
    pub(super) slot_stride: u64,
    pub(super) row_len: u32,
    pub(super) weights_at: u32,
    pub(super) len: u32,
    pub(super) slots: u32,
    pub(super) token_rows: u32,
    pub(super) top_k: u32,
    pub(super) local_experts: u32,
    pub(super) sends_each: u32,
    pub(super) spread: u32,
    pub(super) zero: u32,
}

/// Values of `NormalSum::order`.
pub(super) mod order {
    pub(in crate::cuda) const BY_RANK: u32 = 0;
    pub(in crate::cuda) const BY_CHOICE: u32 = 1;
    pub(in crate::cuda) const EACH_CHOICE: u32 = 2;
}

/// `UcclEpNormalSum`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NormalSum {
    pub(super) group: GroupParams,
    pub(super) call: CallParams,
    pub(super) routes: Routes,
    pub(super) bias: [u64; 2],
    pub(super) weights: u64,
    pub(super) out: u64,
    pub(super) slot_stride: u64,
    pub(super) row_len: u32,
    pub(super) weights_at: u32,
    pub(super) slots: u32,
    pub(super) order: u32,
}

/// `UcclEpNormalCombine`.
#[repr(C)]
pub(super) struct WholeNormalCombine {
    pub(super) give_back: NormalReturn,
    pub(super) sum: NormalSum,
}

/// C++ that compiles only if the kernels' structs and constants match those of this build.
#[must_use]
pub fn layout_assertions() -> String {
    let mut text = String::from("#include \"ep_wait.cuh\"\n#include <stddef.h>\n");
    let mut same = |cuda: &str, rust: usize| {
        text += &format!("static_assert({cuda} == {rust}u, \"{cuda} is {rust} in Rust\");\n");
    };
    macro_rules! layout {
        ($c:literal, $rust:ty, [$($field:ident),*]) => {
            same(concat!("sizeof(", $c, ")"), size_of::<$rust>());
            same(concat!("alignof(", $c, ")"), align_of::<$rust>());
            $(
                let offset = concat!("offsetof(", $c, ", ", stringify!($field), ")");
                same(offset, offset_of!($rust, $field));
            )*
        };
    }
    layout!(
        "UcclEpOwn",
        Own,
        [
            has_failed, laid_out, zero, ended, claimed, calls, next, begins, ends, masked,
            verdicts, pushed, popped, room, owed
        ]
    );
    layout!("UcclEpMask", Mask, [own, set, clear, status, ranks, zero]);
    layout!(
        "UcclEpStatus",
        Status,
        [poison, state, phase, what, call, late, waited_ns, lost, expected, seen]
    );
    layout!(
        "UcclEpGroup",
        GroupParams,
        [
            windows, home, far, mirrors, ring, own, status, timeout_ns, pool_at, pool, marks_at,
            notes_at, rank, ranks, masks_late, ring_slots, by_host, zero
        ]
    );
    layout!("UcclEpCall", CallParams, [placed, len, sent, header, agreed, phase, stays, zero]);
    layout!("UcclEpPlaced", Placed, [number, place, after, masked]);
    layout!(
        "UcclEpRoutes",
        Routes,
        [
            choices,
            masks,
            slots,
            places,
            experts,
            counts,
            chunks,
            tokens,
            top_k,
            local_experts,
            is_64
        ]
    );
    layout!("UcclEpLayout", Layout, [group, call, routes, goes, goes_told, per_expert, ended]);
    layout!(
        "UcclEpArea",
        Area,
        [len, first, stride, payload, scales, scales_at, choices_at, places_at, token_at]
    );
    layout!(
        "UcclEpSend",
        Send,
        [
            group,
            call,
            routes,
            area,
            rows,
            row_stride,
            global_scale_at,
            global_scale,
            how,
            is_few,
            in_parts
        ]
    );
    layout!(
        "UcclEpReceive",
        Receive,
        [
            group,
            call,
            area,
            rows,
            row_stride,
            scales,
            scales_row,
            scales_expert,
            scales_word,
            count,
            stats,
            waits,
            src_info,
            records,
            layout_range,
            expert_rows,
            slots,
            top_k,
            local_experts,
            tile_rows,
            in_parts
        ]
    );
    layout!(
        "UcclEpReturn",
        Return,
        [
            group,
            call,
            rows,
            row_stride,
            records,
            slot_stride,
            row_len,
            len,
            slots,
            top_k,
            pieces,
            sums
        ]
    );
    layout!(
        "UcclEpSum",
        Sum,
        [group, call, routes, weights, waits, out, slot_stride, row_len, slots, pieces, zero]
    );
    layout!("UcclEpDispatch", WholeDispatch, [send, receive]);
    layout!("UcclEpCombine", WholeCombine, [give_back, sum]);
    layout!("UcclEpNormalSend", NormalSend, [send, scales, scales_token, scales_word, weights]);
    layout!("UcclEpCount", Count, [send, told, ticket, slots, begins]);
    layout!("UcclEpTold", Told, [ticket, is_taken, zero, from, per_expert]);
    layout!(
        "UcclEpNormalReceive",
        NormalReceive,
        [
            group,
            call,
            area,
            rows,
            row_stride,
            scales,
            scales_row,
            scales_word,
            choices,
            weights,
            src_info,
            origin,
            starts,
            per_expert,
            ends,
            metadata,
            len,
            tokens,
            slots,
            top_k,
            local_experts,
            is_64,
            zeroes_foreign,
            alignment,
            zeroes_gaps,
            spread
        ]
    );
    layout!(
        "UcclEpNormalReturn",
        NormalReturn,
        [
            group,
            call,
            rows,
            row_stride,
            weights,
            src_info,
            origin,
            starts,
            ends,
            metadata,
            slot_stride,
            row_len,
            weights_at,
            len,
            slots,
            token_rows,
            top_k,
            local_experts,
            sends_each,
            spread,
            zero
        ]
    );
    layout!(
        "UcclEpNormalSum",
        NormalSum,
        [group, call, routes, bias, weights, out, slot_stride, row_len, weights_at, slots, order]
    );
    layout!("UcclEpNormalDispatch", WholeNormalDispatch, [send, receive, told, ticket, does, zero]);
    layout!("UcclEpNormalCombine", WholeNormalCombine, [give_back, sum]);
    for (cuda, rust) in [
        ("UCCL_EP_MOST_RANKS", MAX_RANKS),
        ("UCCL_EP_MOST_EXPERTS", MAX_EXPERTS),
        ("UCCL_EP_MOST_TOP_K", MAX_TOP_K),
        ("UCCL_EP_FEW_TOKENS", FEW_TOKENS),
        ("UCCL_EP_FEW_CHOICES", FEW_CHOICES),
        ("UCCL_EP_MOST_TOKENS", MAX_TOKENS),
        ("UCCL_EP_SLOTS", SLOTS),
        ("UCCL_EP_ROUND", ROUND),
        ("UCCL_EP_HEADER", header::WORDS),
        ("UCCL_EP_THREADS", THREADS as usize),
        ("UCCL_EP_PACKING_THREADS", PACKING_THREADS as usize),
        ("UCCL_EP_UNPACKING_THREADS", UNPACKING_THREADS as usize),
        ("UCCL_EP_LAYOUT_THREADS", LAYOUT_THREADS as usize),
        ("UCCL_EP_CHUNK", CHUNK),
        ("UCCL_EP_PARTS", PARTS),
        ("UCCL_EP_NOTES", NOTES),
        ("UCCL_EP_OVERDUE", state::OVERDUE as usize),
        ("UCCL_EP_GAVE_UP", state::GAVE_UP as usize),
        ("UCCL_EP_POISONED", state::POISONED as usize),
        ("UCCL_EP_DISAGREE", state::DISAGREE as usize),
        ("UCCL_EP_WRONG_CHOICE", state::WRONG_CHOICE as usize),
        ("UCCL_EP_NO_ROOM", state::NO_ROOM as usize),
        ("UCCL_EP_LOST", state::LOST as usize),
        ("UCCL_EP_ROOM", ROOM as usize),
        ("UCCL_EP_PUSH", PUSH as usize),
        ("RING_TAIL", fifo::TAIL),
        ("RING_SLOTS", fifo::SLOTS_AT),
        ("COMMAND_UNIT", command::UNIT),
        ("COMMAND_LAP", command::LAP as usize),
        ("COMMAND_SIGNALS", command::IS_SIGNAL as usize),
        ("COMMAND_PEER_AT", command::PEER_AT as usize),
        ("COMMAND_TARGET_AT", command::TARGET_AT as usize),
        ("UCCL_EP_COPIED", how::COPIED as usize),
        ("UCCL_EP_EXACT", how::EXACT as usize),
        ("UCCL_EP_POWER", how::POWER as usize),
        ("UCCL_EP_EXPONENT", how::EXPONENT as usize),
        ("UCCL_EP_NVFP4", how::NVFP4 as usize),
        ("UCCL_EP_WHOLE", does::WHOLE as usize),
        ("UCCL_EP_BEGUN", does::BEGUN as usize),
        ("UCCL_EP_TAKEN", does::TAKEN as usize),
        ("UCCL_EP_BY_RANK", order::BY_RANK as usize),
        ("UCCL_EP_BY_CHOICE", order::BY_CHOICE as usize),
        ("UCCL_EP_EACH_CHOICE", order::EACH_CHOICE as usize),
        ("LINE", crate::shared::view::LINE),
        ("LINES", crate::shared::view::LINES),
    ] {
        same(cuda, rust);
    }
    text
}
